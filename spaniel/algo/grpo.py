"""GRPO: the group is the baseline. Shao et al. 2024, DeepSeekMath, arXiv:2402.03300."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from spaniel.algo import advantage, loss
from spaniel.algo.policy_gradient import PolicyGradient, check_clip, check_group_size, group_metrics, ratio_clips
from spaniel.algo.settings import KL
from spaniel.algo.signal import Signal
from spaniel.types import Batch, Metrics, Targets


@dataclass(frozen=True, kw_only=True)
class GRPO(PolicyGradient):
    """A_i = (score_i - mean of the group) / (std of the group + 1e-6) at every action of rollout i; clipped loss.

    Defaults are the paper's (clip 0.2, KL in the loss with beta 0.04, mean over sequences of their token
    means), with groups of 8 and the unbiased KL gradient.
    """

    group_size: int = 8
    divide_by_std: bool = True
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    loss_aggregation: str = "seq-mean-token-mean"
    kl: KL = field(default_factory=lambda: KL(place="loss", kind="k3", beta=0.04))

    def _check(self) -> None:
        check_group_size(self.group_size)
        check_clip(self.clip_low, self.clip_high, self.dual_clip)

    def _credit(self, signal: Signal, batch: Batch, values: Tensor | None) -> tuple[Targets, Metrics]:
        relative = advantage.group_relative(signal.totals, signal.groups, self.divide_by_std, signal.usable)
        return Targets(advantage.spread(relative, signal.actions)), group_metrics(signal, self.group_size)

    def _per_token(
        self, logprobs: Tensor, old: Tensor, advantages: Tensor, actions: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        bounds = (self.clip_low, self.clip_high, self.dual_clip)
        return loss.clipped(logprobs, old, advantages, *bounds), ratio_clips(logprobs, old, advantages, *bounds)
