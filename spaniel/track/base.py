"""The seam of a tracker, and the fan-out to several of which none can stop a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Protocol


class Tracker(Protocol):
    """Takes a step's metrics; `step` is among them."""

    def log(self, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class Trackers:
    """Gives every tracker every step. One that raises is reported (the first time) and counted, never fatal;
    `essential` ones (the metrics file, on which a resume relies) may raise."""

    def __init__(
        self, trackers: Sequence[Tracker], report: Callable[[str], None] = print, essential: Sequence[Tracker] = ()
    ) -> None:
        self._trackers = trackers
        self._essential = essential
        self._report = report
        self.failures: dict[str, int] = {}

    def log(self, metrics: Mapping[str, float]) -> None:
        for tracker in self._essential:
            tracker.log(metrics)
        for tracker in self._trackers:
            self._guard(tracker, lambda t: t.log(metrics))

    def close(self) -> None:
        for tracker in self._trackers:
            self._guard(tracker, lambda t: t.close())
        for tracker in self._essential:
            tracker.close()

    def _guard(self, tracker: Tracker, call: Callable[[Tracker], None]) -> None:
        try:
            call(tracker)
        except Exception as error:  # the tracker boundary
            name = type(tracker).__name__
            first = name not in self.failures
            self.failures[name] = self.failures.get(name, 0) + 1
            if first:
                # What broke the console may have broken the report's way out too (a closed pipe): still not fatal.
                with suppress(Exception):
                    self._report(f"tracker {name} failed; further failures are only counted: "
                                 f"{type(error).__name__}: {error}")  # fmt: skip
