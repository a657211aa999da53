"""Trackers for tests."""

from __future__ import annotations

from collections.abc import Mapping


class MemoryTracker:
    """Keeps what it is given; fails at every `every`-th call (0: never)."""

    def __init__(self, every: int = 0) -> None:
        self.every = every
        self.calls = 0
        self.rows: list[dict[str, float]] = []
        self.closed = False

    def log(self, metrics: Mapping[str, float]) -> None:
        self.calls += 1
        if self.every and self.calls % self.every == 0:
            raise ConnectionError("tracker down")
        self.rows.append(dict(metrics))

    def close(self) -> None:
        self.closed = True
