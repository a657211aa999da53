"""The seam of an algorithm: what the loop and the learner ask of it."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor

from spaniel.types import Batch, Counts, Metrics, Tallies, Targets


class Algorithm(Protocol):
    """A frozen dataclass of vetted numbers. `state` (the KL controller) is a small dict of numbers that is
    passed in and out and checkpointed.

    The losses get one micro-batch: the current `logprobs` and `entropy` (or `values`), each f32[B, T] with
    gradient, aligned with the tokens; they return the micro-batch's share of the loss (already divided by
    the global `counts`, so that shares add up) and tallies of diagnostics.
    """

    @property
    def needs_critic(self) -> bool: ...

    @property
    def needs_reference(self) -> bool: ...

    @property
    def group_size(self) -> int: ...

    @property
    def needs_old_logprobs(self) -> bool:
        """Whether `targets` wants the learner's own log-probabilities from before the update."""
        ...

    @property
    def needs_greedy(self) -> bool:
        """Whether the batch is to carry the score of a greedy rollout of each prompt (`Batch.baselines`)."""
        ...

    @property
    def resampling(self) -> int:
        """How often the groups of a step that have no signal may be replaced."""
        ...

    def initial_state(self) -> dict[str, float]: ...

    def targets(
        self,
        batch: Batch,
        values: Tensor | None,
        ref_logprobs: Tensor | None,
        state: dict[str, Any],
        old_logprobs: Tensor | None = None,
    ) -> tuple[Targets, dict[str, Any], Metrics]: ...

    def policy_loss(
        self, logprobs: Tensor, entropy: Tensor, batch: Batch, targets: Targets, counts: Counts
    ) -> tuple[Tensor, Tallies]: ...

    def value_loss(self, values: Tensor, batch: Batch, targets: Targets, counts: Counts) -> tuple[Tensor, Tallies]: ...
