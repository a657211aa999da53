"""DAPO: clip-higher, dynamic sampling, token mean, overlong penalty. Yu et al. 2025, arXiv:2503.14476."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from spaniel.algo import advantage, masked
from spaniel.algo.policy_gradient import ClippedPolicy, check_group_size, grouped
from spaniel.algo.settings import require
from spaniel.algo.signal import Signal
from spaniel.types import Batch, Metrics, Targets


@dataclass(frozen=True, kw_only=True)
class DAPO(ClippedPolicy):
    """GRPO's advantages; ratio clipped to [1 - 0.2, 1 + 0.28]; mean over all tokens; no KL.

    Groups whose rewards are all equal are replaced before the update, by the loop, at most `resample_tries`
    times. With `length_budget` a score loses up to 1 as its rollout grows over the last `overlong_share` of
    that budget (the paper: the last 4,096 of 20,480 tokens).
    """

    group_size: int = 8
    clip_high: float = 0.28
    resample_tries: int = 3
    overlong_share: float = 0.2

    def __post_init__(self) -> None:
        super().__post_init__()
        check_group_size(self.group_size)
        require(self.resample_tries >= 0, "resample_tries", self.resample_tries, "0 (off) or more")
        if self.length_budget is None:
            expected = "nothing: without length_budget there is no penalty to shape"
            require(self.overlong_share == DAPO.overlong_share, "overlong_share", self.overlong_share, expected)
        require(0 < self.overlong_share <= 1, "overlong_share", self.overlong_share, "a share of length_budget, 0 to 1")

    @property
    def reads_length_budget(self) -> bool:
        return True

    @property
    def resampling(self) -> int:
        return self.resample_tries

    def _credit(self, signal: Signal, batch: Batch, values: Tensor | None) -> tuple[Targets, Metrics]:
        totals, metrics = signal.totals, {}
        if self.length_budget is not None:
            cache = self.overlong_share * self.length_budget
            penalty = advantage.overlong_penalty(signal.actions.sum(1), self.length_budget, cache)
            metrics["critic/overlong_penalty/mean"] = float(masked.mean(penalty, signal.usable))
            totals = totals + penalty
        relative = advantage.group_relative(totals, signal.groups, True, signal.usable)
        targets, shares = grouped(signal, relative, self.group_size)
        return targets, metrics | shares
