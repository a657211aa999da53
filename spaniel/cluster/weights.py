"""Learner -> sampler: the weights that the next rollouts are sampled from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from spaniel.cluster.base import Group


class _Loads(Protocol):
    def load(self, weights: Any, version: int) -> None: ...


def sync(policy: Group, weights: Callable[[Any], Mapping[str, Any]], sampler: _Loads, version: int) -> None:
    """Hand the policy's current weights to the sampler, which stamps its spans with `version`.

    `weights` is the worker's method that returns them. Called at the start of every step, so that the first
    step and a resumed one need no special case.
    """
    sampler.load(policy.broadcast(weights)[0], version)
