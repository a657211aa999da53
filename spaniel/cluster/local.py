"""A group of one worker in this process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


class LocalGroup:
    """All rows go to the one worker: nothing to split, nothing to reorder."""

    def __init__(self, worker: Any) -> None:
        self.worker = worker

    def scatter(self, method: Callable[Concatenate[Any, P], R], *args: P.args, **kwargs: P.kwargs) -> R:
        return method(self.worker, *args, **kwargs)

    def broadcast(self, method: Callable[Concatenate[Any, P], R], *args: P.args, **kwargs: P.kwargs) -> list[R]:
        return [method(self.worker, *args, **kwargs)]
