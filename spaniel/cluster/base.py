"""The seam of a group of workers: where a model's processes run. It knows nothing of RL."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


class Group(Protocol):
    """Workers of one role. A call names the method itself, `critic.scatter(Learner.infer, batch)`, so that an
    editor can follow it."""

    def scatter(self, method: Callable[Concatenate[Any, P], R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Call `method` with the rows (every `Batch` or `Targets` among the arguments) split over the workers
        and everything else given to each; tensors come back in the order of the rows, tallies added up."""
        ...

    def broadcast(self, method: Callable[Concatenate[Any, P], R], *args: P.args, **kwargs: P.kwargs) -> list[R]:
        """Call `method` with the same arguments on every worker; one result a worker."""
        ...
