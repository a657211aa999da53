"""Rollouts as JSON lines, one file a step, whole or not there."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from spaniel.files import write_atomically


def write_rollouts(path: str | Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """One row a rollout (see `train/record.py`)."""
    write_atomically(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
