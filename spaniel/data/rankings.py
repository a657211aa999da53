"""One row of preferences -> `Ranking`, checked: rankings of K responses, and pairs as in hh-rlhf and TRL."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from spaniel.errors import BadInput
from spaniel.types import Message, Ranking

_ROLES = ("system", "user", "assistant", "tool")
_TURN = re.compile(r"\n\n(Human|Assistant):")
_SPEAKER = {"Human": "user", "Assistant": "assistant"}
FORMATS = "responses with one of ranking, ranks, scores; or chosen and rejected"


class BadRow(BadInput):
    """A row that cannot be used. `kind` is the short name under which such rows are counted where they are skipped."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


def to_ranking(row: Any, where: str, name: str) -> Ranking:
    """One row, checked; `where` names it in messages, `name` becomes its id unless it has one.

    Either `responses` (at least two texts) with one of `ranking` (numbers of the responses, best first; a list
    among them is a tie), `ranks` (the rank of each response, lower is better) or `scores` (higher is better), and
    `prompt` (text or messages; may be missing); or `chosen` and `rejected` (texts, conversations, or transcripts
    with Human: and Assistant: as in hh-rlhf). `weight`, `margin`, `ceiling` and `data_source` are optional.
    """
    if not isinstance(row, Mapping):
        raise BadRow("not_a_row", f"{where}: is {_shown(row)}; expected an object with {FORMATS}")
    ranks: tuple[int, ...]
    if "chosen" in row or "rejected" in row:
        messages, responses = _pair(row, where)
        ranks, scores = (0, 1), _pair_scores(row, where)
    elif "responses" in row:
        messages, responses = _messages(row.get("prompt"), where, "prompt"), _responses(row["responses"], where)
        ranks, scores = _order(row, len(responses), where)
    else:
        raise BadRow("no_responses", f"{where}: has keys {', '.join(map(str, row)) or 'none'}; expected {FORMATS}")
    source = row.get("data_source") or ""
    if not isinstance(source, str):
        raise BadRow("not_text", f"{where}: data_source is {_shown(source)}; expected text")
    weight = _number(row, "weight", where, 1.0)
    if weight <= 0:
        raise BadRow("bad_number", f"{where}: weight is {weight}; expected a number above 0")
    ceiling = None if row.get("ceiling") is None else _number(row, "ceiling", where, 1.0)
    return Ranking(
        str(row.get("id") or name), messages, responses, ranks, scores, weight, _number(row, "margin", where, 0.0),
        ceiling, source,
    )  # fmt: skip


def _pair(row: Mapping[str, Any], where: str) -> tuple[tuple[Message, ...], tuple[str, ...]]:
    for key in ("chosen", "rejected"):
        if not row.get(key):
            raise BadRow("empty_response", f"{where}: {key} is {_shown(row.get(key))}; expected text or messages")
    both = [_conversation(row[key], where, key) for key in ("chosen", "rejected")]
    given = _messages(row.get("prompt"), where, "prompt")
    befores = [before if given == before[: len(given)] else (*given, *before) for before, _ in both]
    if befores[0] != befores[1]:
        raise BadRow(
            "prompts_differ", f"{where}: chosen and rejected differ before their last message; expected one prompt"
        )
    return befores[0], (_text(both[0][1], where, "chosen"), _text(both[1][1], where, "rejected"))


def _conversation(value: Any, where: str, key: str) -> tuple[tuple[Message, ...], str]:
    """(what comes before the last answer, the last answer)."""
    if isinstance(value, str):
        turns = _transcript(value)
        if turns is None:
            return (), value
        messages: Sequence[Message] = turns
    else:
        messages = _messages(value, where, key)
    if messages[-1]["role"] != "assistant":
        raise BadRow("no_answer", f"{where}: {key} ends with {messages[-1]['role']}; expected an assistant's message")
    return tuple(messages[:-1]), messages[-1]["content"]


def _transcript(text: str) -> list[Message] | None:
    """The turns of a text in the format of hh-rlhf, or None for any other text."""
    if not _TURN.match(text):
        return None
    pieces = _TURN.split(text)[1:]
    return [
        {"role": _SPEAKER[who], "content": said.strip()} for who, said in zip(pieces[::2], pieces[1::2], strict=True)
    ]


def _messages(value: Any, where: str, key: str) -> tuple[Message, ...]:
    if value is None or value == "":
        return ()
    if isinstance(value, str):
        return tuple(_transcript(value) or ({"role": "user", "content": value},))
    if not isinstance(value, list) or not value:
        raise BadRow("not_text", f"{where}: {key} is {_shown(value)}; expected text or a list of {{role, content}}")
    for number, message in enumerate(value):
        known = isinstance(message, Mapping) and message.get("role") in _ROLES
        if not known or not isinstance(message.get("content"), str):
            raise BadRow("not_text", f"{where}: {key}[{number}] is {_shown(message)}; expected role (one of "
                         f"{', '.join(_ROLES)}) and content (text)")  # fmt: skip
    return tuple({"role": m["role"], "content": m["content"]} for m in value)


def _responses(value: Any, where: str) -> tuple[str, ...]:
    if not isinstance(value, list):
        raise BadRow("not_text", f"{where}: responses is {_shown(value)}; expected a list of texts")
    if len(value) < 2:
        raise BadRow("too_few", f"{where}: has {len(value)} response(s); expected at least 2 to rank")
    return tuple(_text(text, where, f"responses[{number}]") for number, text in enumerate(value))


def _text(value: Any, where: str, key: str) -> str:
    if not isinstance(value, str):
        raise BadRow("not_text", f"{where}: {key} is {_shown(value)}; expected text")
    if not value.strip():
        raise BadRow("empty_response", f"{where}: {key} is {_shown(value)}; expected a text that is not empty")
    return value


def _order(row: Mapping[str, Any], count: int, where: str) -> tuple[tuple[int, ...], tuple[float, ...] | None]:
    """(ranks, scores): from `ranking` or `ranks`, or else from `scores`, which may also stand beside them."""
    given = [key for key in ("ranking", "ranks") if row.get(key) is not None]
    scores = None if row.get("scores") is None else _numbers(row["scores"], count, where, "scores")
    if len(given) > 1:
        raise BadRow("bad_ranking", f"{where}: has both ranking and ranks; expected one of them")
    if given == ["ranking"]:
        return _from_ranking(row["ranking"], count, where), scores
    if given == ["ranks"]:
        return dense([-x for x in _numbers(row["ranks"], count, where, "ranks")]), scores
    if scores is None:
        raise BadRow("bad_ranking", f"{where}: has no order; expected one of ranking, ranks, scores")
    return dense(scores), scores


def dense(scores: Sequence[float]) -> tuple[int, ...]:
    """Ranks from scores: 0 for the highest, equal scores share a rank."""
    levels = {score: rank for rank, score in enumerate(sorted(set(scores), reverse=True))}
    return tuple(levels[score] for score in scores)


def _from_ranking(value: Any, count: int, where: str) -> tuple[int, ...]:
    """Ranks from numbers of responses, best first, a list among them for a tie."""
    if not isinstance(value, list):
        raise BadRow("bad_ranking", f"{where}: ranking is {_shown(value)}; expected a list of numbers of responses")
    ranks: dict[int, int] = {}
    for rank, level in enumerate(value):
        for number in level if isinstance(level, list) else [level]:
            if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < count:
                raise BadRow("bad_ranking", f"{where}: ranking names response {_shown(number)}; "
                             f"there are 0 to {count - 1}")  # fmt: skip
            if number in ranks:
                raise BadRow("bad_ranking", f"{where}: ranking names response {number} twice")
            ranks[number] = rank
    if missing := [n for n in range(count) if n not in ranks]:
        raise BadRow("bad_ranking", f"{where}: ranking {_shown(value)} leaves out response {missing[0]}; "
                     f"expected all of 0 to {count - 1}")  # fmt: skip
    return tuple(ranks[n] for n in range(count))


def _numbers(value: Any, count: int, where: str, key: str) -> tuple[float, ...]:
    if not isinstance(value, list) or len(value) != count:
        raise BadRow("bad_number", f"{where}: {key} is {_shown(value)}; expected {count} numbers, one a response")
    return tuple(_finite(x, where, f"{key}[{number}]") for number, x in enumerate(value))


def _number(row: Mapping[str, Any], key: str, where: str, default: float) -> float:
    """An optional number; a parquet file has null where a row has none."""
    return default if row.get(key) is None else _finite(row[key], where, key)


def _finite(value: Any, where: str, key: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise BadRow("bad_number", f"{where}: {key} is {_shown(value)}; expected a finite number")
    return float(value)


def _pair_scores(row: Mapping[str, Any], where: str) -> tuple[float, ...] | None:
    if row.get("score_chosen") is None or row.get("score_rejected") is None:
        return None
    return _number(row, "score_chosen", where, 0.0), _number(row, "score_rejected", where, 0.0)


def _shown(value: Any) -> str:
    text = "missing" if value is None else repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
