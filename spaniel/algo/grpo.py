"""GRPO: the group is the baseline. Shao et al. 2024, DeepSeekMath, arXiv:2402.03300."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from spaniel.algo import advantage
from spaniel.algo.policy_gradient import ClippedPolicy, check_group_size, grouped
from spaniel.algo.settings import KL
from spaniel.algo.signal import Signal
from spaniel.types import Batch, Metrics, Targets


@dataclass(frozen=True, kw_only=True)
class GRPO(ClippedPolicy):
    """A_i = (score_i - mean of the group) / (std of the group + 1e-6) at every action of rollout i; clipped loss.

    Defaults are the paper's (clip 0.2, KL in the loss with beta 0.04, mean over sequences of their token
    means), with groups of 8 instead of 64 and the unbiased KL gradient.
    """

    group_size: int = 8
    divide_by_std: bool = True
    loss_aggregation: str = "seq-mean-token-mean"
    kl: KL = field(default_factory=lambda: KL(place="loss", kind="k3", beta=0.04))

    def __post_init__(self) -> None:
        super().__post_init__()
        check_group_size(self.group_size)

    def _credit(self, signal: Signal, batch: Batch, values: Tensor | None) -> tuple[Targets, Metrics]:
        relative = advantage.group_relative(signal.totals, signal.groups, self.divide_by_std, signal.usable)
        return grouped(signal, relative, self.group_size)
