"""Dr. GRPO: GRPO without its two biases. Liu et al. 2025, "Understanding R1-Zero-like training", arXiv:2503.20783."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from spaniel.algo import advantage
from spaniel.algo.policy_gradient import ClippedPolicy, check_group_size, grouped
from spaniel.algo.signal import Signal
from spaniel.types import Batch, Metrics, Targets


@dataclass(frozen=True, kw_only=True)
class DrGRPO(ClippedPolicy):
    """A_i = score_i - mean of the group; token losses are summed and divided by a constant.

    Dividing by the group's std weighs easy and hard questions more, dividing by a rollout's own length makes
    long wrong answers cheap; both are left out. `length_budget` is only a scale, the same for all terms of
    the loss: it interacts with the learning rate and the gradient clip alone. No KL, as in the paper.
    """

    group_size: int = 8
    loss_aggregation: str = "token-sum-norm"
    length_budget: int | None = 1024

    def __post_init__(self) -> None:
        super().__post_init__()
        check_group_size(self.group_size)

    def _credit(self, signal: Signal, batch: Batch, values: Tensor | None) -> tuple[Targets, Metrics]:
        relative = advantage.group_relative(signal.totals, signal.groups, False, signal.usable)
        return grouped(signal, relative, self.group_size)
