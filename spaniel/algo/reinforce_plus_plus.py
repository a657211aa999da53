"""REINFORCE++: PPO without a critic, normalised over the whole batch. Hu et al. 2025, arXiv:2501.03262."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from spaniel.algo import advantage, masked
from spaniel.algo.policy_gradient import ClippedPolicy, check_group_size, grouped
from spaniel.algo.settings import KL, require
from spaniel.algo.signal import Signal
from spaniel.types import Batch, Metrics, Targets


@dataclass(frozen=True, kw_only=True)
class ReinforcePlusPlus(ClippedPolicy):
    """A_t = reward-to-go of the KL-penalised rewards over actions, whitened over all actions of the step.

    With `baseline`: A = score - mean of the group, whitened likewise (each row weighs as many times as it
    has actions). Clipped loss. Defaults: gamma 1, KL in the reward by k1 with beta 0.01.
    """

    gamma: float = 1.0
    baseline: bool = False
    kl: KL = field(default_factory=lambda: KL(place="reward", kind="k1", beta=0.01))

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 <= self.gamma <= 1, "gamma", self.gamma, "a number from 0 to 1")
        if self.baseline:
            check_group_size(self.group_size)
            require(self.gamma == 1, "gamma", self.gamma, "1 with baseline: a row has one score, nothing is discounted")

    def _credit(self, signal: Signal, batch: Batch, values: Tensor | None) -> tuple[Targets, Metrics]:
        if not self.baseline:
            return Targets(advantage.reinforce_plus_plus(signal.rewards, signal.actions, self.gamma)), {}
        relative = advantage.group_relative(signal.totals, signal.groups, False, signal.usable)
        targets, metrics = grouped(signal, relative, self.group_size)
        return Targets(masked.whiten(targets.advantages, signal.actions)), metrics
