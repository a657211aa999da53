"""An algorithm for tests: the score is the advantage, the loss is REINFORCE's."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from spaniel.algo import advantage, loss, masked
from spaniel.types import Batch, Counts, Metrics, Tallies, Tally, Targets


class ScoreIsAdvantage:
    """Everything that the loop may be asked for can be switched on; what it was given is recorded."""

    def __init__(self, group_size: int = 4, *, greedy: bool = False, resampling: int = 0, old: bool = False) -> None:
        self.group_size = group_size
        self.needs_critic = False
        self.needs_reference = False
        self.needs_old_logprobs = old
        self.needs_greedy = greedy
        self.resampling = resampling
        self.seen: list[tuple[Batch, Tensor | None]] = []

    def initial_state(self) -> dict[str, float]:
        return {"steps": 0.0}

    def targets(
        self,
        batch: Batch,
        values: Tensor | None,
        ref_logprobs: Tensor | None,
        state: dict[str, Any],
        old_logprobs: Tensor | None = None,
    ) -> tuple[Targets, dict[str, Any], Metrics]:
        self.seen.append((batch, old_logprobs))
        scores = masked.sum(batch.rewards, batch.actions, dim=1)
        return Targets(advantage.spread(scores, batch.actions)), {"steps": state["steps"] + 1}, {}

    def policy_loss(
        self, logprobs: Tensor, entropy: Tensor, batch: Batch, targets: Targets, counts: Counts
    ) -> tuple[Tensor, Tallies]:
        per_token = loss.reinforce(logprobs, targets.advantages)
        share = loss.aggregate(per_token, batch.actions, "token-mean", counts)
        return share, {
            "actor/entropy": Tally(float(masked.sum(entropy.detach(), batch.actions)), float(batch.actions.sum()))
        }

    def value_loss(self, values: Tensor, batch: Batch, targets: Targets, counts: Counts) -> tuple[Tensor, Tallies]:
        raise ValueError("no critic")
