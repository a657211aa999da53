"""Where questions come from: rows of parquet or jsonl files, and a seeded, resumable stream of them."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

from spaniel.data.rows import read_rows
from spaniel.errors import BadInput
from spaniel.types import Prompt

T = TypeVar("T")
_ROLES = ("system", "user", "assistant", "tool")


@dataclass(frozen=True)
class LoadedPrompts:
    """Checked prompts, and how many were left out because they are too long."""

    prompts: tuple[Prompt, ...]
    skipped_too_long: int = 0


def load_prompts(
    paths: Sequence[str | Path],
    *,
    limit: int | None = None,
    seed: int = 0,
    length: Callable[[Prompt], int] | None = None,
    max_length: int | None = None,
    too_long: Literal["error", "skip"] = "error",
) -> LoadedPrompts:
    """All rows of `paths`, in the verl / Search-R1 schema, each checked.

    `prompt` is a chat (list of role and content) or text (one user message); `reward_model.ground_truth` is a
    text, a list of texts or {"target": [..]}; `data_source` names the data set; `extra_info` becomes `meta`.
    `limit` takes a sample of that many rows that depends on `seed` alone. `length` counts a prompt's tokens:
    those over `max_length` are refused, or skipped and counted.
    """
    rows = [
        to_prompt(row, where, f"{Path(path).name}:{number}")
        for path in paths
        for number, (where, row) in enumerate(read_rows(path, "data file"))
    ]
    if limit is not None:
        if limit < 1:
            raise BadInput(f"data: a sample of {limit} rows was asked for; expected 1 or more")
        chosen = sorted(random.Random(seed).sample(range(len(rows)), min(limit, len(rows))))
        rows = [rows[i] for i in chosen]
    if length is None or max_length is None:
        return LoadedPrompts(tuple(rows))
    counted = [(prompt, length(prompt)) for prompt in rows]
    fitting = tuple(prompt for prompt, n in counted if n <= max_length)
    excess = [(prompt.id, n) for prompt, n in counted if n > max_length]
    if excess and (too_long == "error" or not fitting):
        first = ", ".join(f"{name} has {n}" for name, n in excess[:3])
        raise BadInput(
            f"data: {len(excess)} of {len(rows)} prompts are longer than max_start_length {max_length} tokens "
            f"({first}); raise the limit, or set data.too_long to skip"
            + ("" if fitting else "; with skip none would be left")
        )
    return LoadedPrompts(fitting, len(excess))


def to_prompt(row: Any, where: str, name: str) -> Prompt:
    """One row, checked; `where` names it in messages, `name` becomes the prompt's id."""
    if not isinstance(row, Mapping):
        raise BadInput(f"{where}: is {_shown(row)}; expected an object with prompt and reward_model")
    source = row.get("data_source", "")
    if source is not None and not isinstance(source, str):
        raise BadInput(f"{where}: data_source is {_shown(source)}; expected text")
    extra = row.get("extra_info")
    if extra is not None and not isinstance(extra, Mapping):
        raise BadInput(f"{where}: extra_info is {_shown(extra)}; expected an object")
    meta = dict(extra or {}) | ({"ability": row["ability"]} if row.get("ability") else {})
    return Prompt(name, _messages(row, where), _reference(row, where), source or "", meta)


def _messages(row: Mapping[str, Any], where: str) -> tuple[Mapping[str, str], ...]:
    prompt = row.get("prompt")
    if isinstance(prompt, str) and prompt.strip():
        return ({"role": "user", "content": prompt},)
    if not isinstance(prompt, list) or not prompt:
        raise BadInput(f"{where}: prompt is {_shown(prompt)}; expected text or a list of {{role, content}}")
    for number, message in enumerate(prompt):
        known = isinstance(message, Mapping) and message.get("role") in _ROLES
        if not known or not isinstance(message.get("content"), str):
            raise BadInput(f"{where}: prompt[{number}] is {_shown(message)}; expected role (one of "
                           f"{', '.join(_ROLES)}) and content (text)")  # fmt: skip
    return tuple({"role": m["role"], "content": m["content"]} for m in prompt)


def _reference(row: Mapping[str, Any], where: str) -> tuple[str, ...]:
    judged = row.get("reward_model")
    truth = judged.get("ground_truth") if isinstance(judged, Mapping) else None
    target = truth.get("target") if isinstance(truth, Mapping) else truth
    answers = [target] if isinstance(target, str) else target
    if not isinstance(answers, list) or not answers or not all(isinstance(a, str) and a.strip() for a in answers):
        raise BadInput(
            f"{where}: reward_model is {_shown(judged)}; expected reward_model.ground_truth: a non-empty text, "
            'a list of such, or {"target": [..]}'
        )
    return tuple(answers)


def _shown(value: Any) -> str:
    text = "missing" if value is None else repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


class PromptStream(Generic[T]):
    """Batches of items, shuffled anew each epoch; `batch(step)` depends on (seed, step) alone, so the position
    in a checkpoint is the step's number.

    With `drop_last` the incomplete last batch of an epoch is left out, otherwise it is a shorter batch.
    """

    def __init__(
        self, items: Sequence[T], batch_size: int, seed: int, *, shuffle: bool = True, drop_last: bool = True
    ) -> None:
        if batch_size < 1:
            raise BadInput(f"data.batch_size: {batch_size}; expected 1 or more")
        if batch_size > len(items):
            raise BadInput(f"data.batch_size: {batch_size}; expected at most {len(items)}, the rows there are")
        self.items = items
        self.batch_size = batch_size
        self.seed = seed
        self.shuffle = shuffle
        full, rest = divmod(len(items), batch_size)
        self.batches_per_epoch = full + (1 if rest and not drop_last else 0)
        self._order: tuple[int, list[int]] = (-1, [])

    def __len__(self) -> int:
        return len(self.items)

    def epoch(self, step: int) -> int:
        """The epoch (from 0) that step `step` belongs to."""
        return step // self.batches_per_epoch

    def spare(self, step: int, attempt: int, count: int) -> list[T]:
        """`count` items beside the batch of `step`, from a random stream of their own: no batch changes by it."""
        rng = random.Random(f"{self.seed} spare {step} {attempt}")
        return rng.sample(self.items, count) if count <= len(self.items) else rng.choices(self.items, k=count)

    def batch(self, step: int) -> list[T]:
        """The items of step `step`."""
        epoch, number = divmod(step, self.batches_per_epoch)
        if self._order[0] != epoch:
            order = list(range(len(self.items)))
            if self.shuffle:
                random.Random(f"{self.seed} {epoch}").shuffle(order)
            self._order = (epoch, order)
        part = self._order[1][number * self.batch_size : (number + 1) * self.batch_size]
        return [self.items[i] for i in part]
