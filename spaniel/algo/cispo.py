"""CISPO: clipped importance weights that keep every token's gradient. MiniMax 2025 (MiniMax-M1), arXiv:2506.13585."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from spaniel.algo import advantage, loss
from spaniel.algo.policy_gradient import PolicyGradient, check_group_size, clip_shares, grouped
from spaniel.algo.settings import require
from spaniel.algo.signal import Signal
from spaniel.types import Batch, Metrics, Targets


@dataclass(frozen=True, kw_only=True)
class CISPO(PolicyGradient):
    """GRPO's advantages; -sg(clip(rho, 1 - clip_low, 1 + clip_high)) A log pi, mean over all tokens.

    No lower bound by default, as in the paper; weights up to 5 (clip_high 4), among the values that Khatri et
    al. 2025 (ScaleRL, arXiv:2510.13786) found to work alike. No KL.
    """

    group_size: int = 8
    clip_low: float | None = None
    """The weight is at least 1 - clip_low; null for no lower bound."""
    clip_high: float = 4.0
    """The weight is at most 1 + clip_high."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_group_size(self.group_size)
        require(self.clip_low is None or 0 < self.clip_low < 1, "clip_low", self.clip_low,
                "a number between 0 and 1, or null")  # fmt: skip
        require(0 < self.clip_high < math.inf, "clip_high", self.clip_high, "a number above 0")

    def _credit(self, signal: Signal, batch: Batch, values: Tensor | None) -> tuple[Targets, Metrics]:
        relative = advantage.group_relative(signal.totals, signal.groups, True, signal.usable)
        return grouped(signal, relative, self.group_size)

    def _per_token(
        self, logprobs: Tensor, old: Tensor, advantages: Tensor, actions: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        rho = loss.ratio(logprobs.detach(), old)
        low = rho < (-math.inf if self.clip_low is None else 1 - self.clip_low)
        shares = clip_shares(low, rho > 1 + self.clip_high)
        return loss.cispo(logprobs, old, advantages, self.clip_low, self.clip_high), shares
