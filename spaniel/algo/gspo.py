"""GSPO: the probability ratio of whole sequences. Zheng et al. 2025, arXiv:2507.18071."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from spaniel.algo import advantage, loss
from spaniel.algo.policy_gradient import PolicyGradient, check_clip, check_group_size, clip_shares, grouped
from spaniel.algo.signal import Signal
from spaniel.types import Batch, Metrics, Targets


@dataclass(frozen=True, kw_only=True)
class GSPO(PolicyGradient):
    """GRPO's advantages; -min(s A, clip(s) A) with s = exp(mean over the row's actions of (log pi - log old)).

    Defaults are the paper's (bounds 3e-4 and 4e-4: a sequence's mean ratio moves far less than a token's; no KL).
    """

    group_size: int = 8
    clip_low: float = 3e-4
    clip_high: float = 4e-4
    loss_aggregation: str = "seq-mean-token-mean"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_group_size(self.group_size)
        check_clip(self.clip_low, self.clip_high)

    def _credit(self, signal: Signal, batch: Batch, values: Tensor | None) -> tuple[Targets, Metrics]:
        relative = advantage.group_relative(signal.totals, signal.groups, True, signal.usable)
        return grouped(signal, relative, self.group_size)

    def _per_token(
        self, logprobs: Tensor, old: Tensor, advantages: Tensor, actions: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        low, high, _ = loss.gspo_clip_active(logprobs, old, advantages, actions, self.clip_low, self.clip_high)
        return loss.gspo(logprobs, old, advantages, actions, self.clip_low, self.clip_high), clip_shares(low, high)
