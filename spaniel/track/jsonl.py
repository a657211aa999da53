"""Metrics as JSON lines: the truth about a run."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from spaniel.files import write_atomically


class JsonlTracker:
    """One object a line, floats at full precision, on disk before `log` returns.

    A number that is not finite becomes null, and the line lists its name under `nonfinite`: the file stays valid
    JSON and nothing is dropped in silence.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file: Any = None

    def truncate_after(self, step: int) -> None:
        """Forget the lines behind `step` (and a torn last line): a resumed run writes those steps again."""
        if not self.path.is_file():
            return
        kept = [
            line for line in self.path.read_text(encoding="utf-8", errors="replace").split("\n") if _up_to(line, step)
        ]
        write_atomically(self.path, "".join(f"{line}\n" for line in kept))

    def log(self, metrics: Mapping[str, float]) -> None:
        if self._file is None:
            self._file = open(self.path, "a", encoding="utf-8")  # noqa: SIM115 - open for the life of the run
        self._file.write(json.dumps(_plain(metrics), allow_nan=False) + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def _plain(metrics: Mapping[str, float]) -> dict[str, Any]:
    row: dict[str, Any] = {}
    broken = [name for name, value in metrics.items() if not math.isfinite(value)]
    for name, value in metrics.items():
        row[name] = None if name in broken else int(value) if name == "step" else value
    return row | ({"nonfinite": broken} if broken else {})


def _up_to(line: str, step: int) -> bool:
    try:
        return int(json.loads(line)["step"]) <= step
    except (ValueError, KeyError, TypeError, OverflowError):
        return False
