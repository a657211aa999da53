"""Rollouts as JSON lines, one file a step, whole or not there."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from spaniel.files import write_atomically


def write_rollouts(path: str | Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """One row a rollout (see `train/record.py`).

    Always valid JSON in valid UTF-8: a number that is not finite is written as text ("nan", "inf", "-inf"), half of a
    surrogate pair (which no UTF-8 file can hold) as U+FFFD.
    """
    lines = [json.dumps(_plain(row), ensure_ascii=False, allow_nan=False) for row in rows]
    write_atomically(path, "".join(f"{line}\n" for line in lines))


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {_plain(key): _plain(held) for key, held in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(held) for held in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return value
