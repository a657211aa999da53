"""Supervised examples: episodes written by a teacher, with the same spans as a sampled rollout."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from spaniel.data.rows import read_rows
from spaniel.data.template import Template
from spaniel.errors import BadInput
from spaniel.types import Observed, Prompt, Rollout, Sampled, Score, Stop

_ROLES = ("system", "user", "assistant", "environment")


def load_demonstrations(
    paths: Sequence[str], template: Template, max_length: int, *, every_token: bool = False
) -> list[Rollout]:
    """Rows of jsonl or parquet files, each with `messages`.

    The messages before the first `assistant` are the prompt (rendered by the chat template); after it stand
    `assistant` messages (learned) and `environment` messages (text that the world appends, taken as it is).
    The last assistant message is closed by the end token, which is learned too. `every_token` learns all tokens
    but the first instead (plain language modelling). A row longer than `max_length` tokens is an error.
    """
    out = []
    for where, row in _rows(paths):
        messages = _messages(row, where)
        rollout = _episode(messages, template, where, every_token)
        if rollout.length > max_length:
            raise BadInput(f"{where}: {rollout.length} tokens; expected at most data.max_length = {max_length}")
        out.append(rollout)
    return out


def demonstrated_texts(paths: Sequence[str], at_most: int) -> list[str]:
    """The messages of the first `at_most` rows as plain text, for training a tokenizer."""
    rows = islice(_rows(paths), at_most)
    return ["".join(message["content"] for message in _messages(row, where)) for where, row in rows]


def _rows(paths: Sequence[str]) -> Iterator[tuple[str, Any]]:
    for path in paths:
        yield from read_rows(path, "demonstrations")


def _messages(row: Any, where: str) -> list[Mapping[str, str]]:
    messages = row.get("messages") if isinstance(row, Mapping) else None
    if not isinstance(messages, list) or not messages:
        raise BadInput(f"{where}: messages is {messages!r}; expected a list of {{role, content}}")
    for number, message in enumerate(messages):
        role = message.get("role") if isinstance(message, Mapping) else None
        if role not in _ROLES or not isinstance(message.get("content"), str):
            raise BadInput(f"{where}: messages[{number}] is {message!r}; expected role (one of {', '.join(_ROLES)}) "
                           "and content (text)")  # fmt: skip
    return messages


def _episode(messages: list[Mapping[str, str]], template: Template, where: str, every_token: bool) -> Rollout:
    roles = [message["role"] for message in messages]
    first = roles.index("assistant") if "assistant" in roles else 0
    if first == 0:
        raise BadInput(f"{where}: roles are {roles}; expected a prompt, then at least one assistant message")
    if late := [role for role in roles[first:] if role not in ("assistant", "environment")]:
        raise BadInput(f"{where}: role {late[0]!r} after the first assistant message; expected assistant, environment")
    last = len(roles) - 1 - roles[::-1].index("assistant")
    spans: list[Observed | Sampled] = [Observed(template.render(messages[:first]))]
    for number, message in enumerate(messages[first:], first):
        ids = template.encode(message["content"])
        if message["role"] == "environment":
            spans.append(Observed(ids))
        else:
            spans.append(_learned((*ids, template.eos_id) if number == last else ids))
    if every_token:
        tokens = tuple(token for span in spans for token in span.tokens)
        spans = [Observed(tokens[:1]), _learned(tokens[1:])]
    prompt = Prompt(where, tuple(messages[:first]), ("",))
    return Rollout(prompt, 0, tuple(spans), Stop.ANSWERED, score=Score(0.0))


def _learned(tokens: tuple[int, ...]) -> Sampled:
    return Sampled(tokens, (0.0,) * len(tokens), 0, "eos")
