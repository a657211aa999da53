"""A group of several workers in this process, to show that nobody else has to know how rows are split."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from spaniel.types import Batch, Tallies, Targets, add_tallies


class SplitGroup:
    """Rows go to the workers in turn; tensors come back in order, tallies added up."""

    def __init__(self, workers: Sequence[Any]) -> None:
        self.workers = list(workers)

    def scatter(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        count = max(len(a) for a in args if isinstance(a, Batch))
        parts = [torch.arange(i, count, len(self.workers)) for i in range(len(self.workers))]
        done = []
        for worker, rows in zip(self.workers, parts, strict=True):
            own = [a.take(rows) if isinstance(a, Batch | Targets) else a for a in args]
            done.append(method(worker, *own, **kwargs))
        if isinstance(done[0], torch.Tensor):
            out = torch.empty(count, *done[0].shape[1:], dtype=done[0].dtype)
            for rows, result in zip(parts, done, strict=True):
                out[rows] = result
            return out
        tallies: list[Tallies] = done
        return add_tallies(tallies)

    def broadcast(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        return [method(worker, *args, **kwargs) for worker in self.workers]
