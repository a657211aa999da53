"""What every algorithm here shares: a policy loss with a KL term, an entropy bonus and global denominators.

The concrete algorithms, one a file, say how credit is given; they derive from one of the two abstract ways of
learning from it, `ClippedPolicy` and `Reinforce`, or write their own.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from spaniel.algo import advantage, kl, loss, masked, mismatch
from spaniel.algo.settings import KL, Mismatch, choice, require
from spaniel.algo.signal import Signal, acting, read, spread_of
from spaniel.types import Batch, Counts, Metrics, Tallies, Tally, Targets


@dataclass(frozen=True, kw_only=True)
class PolicyGradient(ABC):
    """The frame of an algorithm."""

    group_size: int = 1
    """Rollouts of each prompt in a step."""
    loss_aggregation: str = "token-mean"
    """How token losses become one number (`loss.aggregate`)."""
    length_budget: int | None = None
    """The fixed length that token-sum-norm divides by: the largest number of actions a rollout may have."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus."""
    kl: KL = field(default_factory=KL)
    mismatch: Mismatch = field(default_factory=Mismatch)

    def __post_init__(self) -> None:
        require(self.group_size >= 1, "group_size", self.group_size, "1 or more rollouts of each prompt")
        choice("loss_aggregation", self.loss_aggregation, loss.AGGREGATIONS)
        if self.loss_aggregation == "token-sum-norm":
            ok = self.length_budget is not None and self.length_budget > 0
            require(ok, "length_budget", self.length_budget, "a whole number above 0 with token-sum-norm")
        elif self.reads_length_budget:
            ok = self.length_budget is None or self.length_budget > 0
            require(ok, "length_budget", self.length_budget, "a whole number above 0, or null for no penalty")
        else:
            expected = f"nothing: it is not read with loss_aggregation {self.loss_aggregation}"
            require(self.length_budget is None, "length_budget", self.length_budget, expected)
        require(0 <= self.entropy_coef < math.inf, "entropy_coef", self.entropy_coef, "a number of at least 0")

    @abstractmethod
    def _credit(self, signal: Signal, batch: Batch, values: Tensor | None) -> tuple[Targets, Metrics]:
        """Advantages (and returns, values) from one step's signal."""

    @abstractmethod
    def _per_token(
        self, logprobs: Tensor, old: Tensor, advantages: Tensor, actions: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The policy loss at each token, and indicators (bool[B, T] by metric name) whose share is reported."""

    @property
    def reads_length_budget(self) -> bool:
        return self.loss_aggregation == "token-sum-norm"

    @property
    def needs_critic(self) -> bool:
        return False

    @property
    def needs_reference(self) -> bool:
        return self.kl.needs_reference

    @property
    def needs_old_logprobs(self) -> bool:
        """True where `targets` must be given the learner's own log-probabilities from before the update."""
        return self.mismatch.mode != "none"

    @property
    def needs_greedy(self) -> bool:
        """True where the loop must give the score of a greedy rollout of each prompt in `Batch.baselines`."""
        return False

    @property
    def resampling(self) -> int:
        """How often the loop may replace the groups of a step that have no signal."""
        return 0

    def initial_state(self) -> dict[str, float]:
        return self.kl.initial_state()

    def targets(
        self,
        batch: Batch,
        values: Tensor | None,
        ref_logprobs: Tensor | None,
        state: dict[str, Any],
        old_logprobs: Tensor | None = None,
    ) -> tuple[Targets, dict[str, Any], Metrics]:
        """Advantages of the whole step (see `algo/base.py`)."""
        name = type(self).__name__
        if self.needs_reference and ref_logprobs is None:
            raise ValueError(f"{name}: kl.place is {self.kl.place}, but the reference's log-probabilities are missing")
        if self.needs_critic and values is None:
            raise ValueError(f"{name} needs the critic's values, but got none")
        if self.needs_old_logprobs and old_logprobs is None:
            raise ValueError(f"{name}: mismatch.mode is {self.mismatch.mode}, but the learner's own log-probabilities "
                             "from before the update are missing")  # fmt: skip
        signal = read(batch, ref_logprobs, old_logprobs, self.kl, state)
        targets, metrics = self._credit(signal, batch, values)
        targets = Targets(targets.advantages, targets.returns, targets.values, ref_logprobs, old_logprobs)
        metrics |= spread_of("critic/advantages", targets.advantages, signal.actions)
        if old_logprobs is not None:
            applied = self._weights(old_logprobs, batch.logprobs, signal.actions)
            metrics |= mismatch.measure(old_logprobs, batch.logprobs, signal.actions, applied)
        return targets, signal.state, signal.metrics | metrics

    def policy_loss(
        self, logprobs: Tensor, entropy: Tensor, batch: Batch, targets: Targets, counts: Counts
    ) -> tuple[Tensor, Tallies]:
        """This micro-batch's share of: policy loss - entropy_coef * entropy + beta * KL (if in the loss)."""
        actions = acting(batch)
        current = masked.select(logprobs, actions)
        old = masked.select(batch.logprobs if targets.old_logprobs is None else targets.old_logprobs, actions)
        per_token, indicators = self._per_token(current, old, masked.select(targets.advantages, actions), actions)
        weights = self._weights(old, batch.logprobs, actions)
        if weights is not None:
            per_token = torch.where(weights == 0, 0.0, weights * per_token)
        total = self._share(per_token, actions, counts)
        tallies = {
            "actor/pg_loss": weighed(total, actions, counts),
            "actor/ppo_kl": tally((old - current).detach(), actions),
            "actor/ratio": tally(loss.ratio(current.detach(), old), actions),
            "actor/entropy": tally(entropy.detach(), actions),
            **{name: tally(where, actions) for name, where in indicators.items()},
        }
        if self.entropy_coef:
            total = total - self.entropy_coef * self._share(entropy, actions, counts)
        if self.kl.place == "loss":
            if targets.ref_logprobs is None:
                raise ValueError("kl.place is loss, but the targets hold no log-probabilities of the reference")
            distance = kl.unbiased if self.kl.unbiased else kl.estimate
            held = distance(current, masked.select(targets.ref_logprobs, actions), self.kl.estimator)
            share = self._share(held, actions, counts)
            total = total + self.kl.weight * share
            tallies["actor/kl_loss"] = weighed(share, actions, counts)
        return total, tallies

    def value_loss(self, values: Tensor, batch: Batch, targets: Targets, counts: Counts) -> tuple[Tensor, Tallies]:
        raise ValueError(f"{type(self).__name__} has no critic")

    def _share(self, per_token: Tensor, actions: Tensor, counts: Counts) -> Tensor:
        return loss.aggregate(per_token, actions, self.loss_aggregation, counts, self.length_budget)

    def _weights(self, old: Tensor, sampler: Tensor, actions: Tensor) -> Tensor | None:
        if self.mismatch.mode == "none":
            return None
        return mismatch.weights(old, sampler, actions, self.mismatch.cap, self.mismatch.mode, self.mismatch.level)


@dataclass(frozen=True, kw_only=True)
class ClippedPolicy(PolicyGradient):
    """Learns by PPO's clipped loss (`loss.clipped`)."""

    clip_low: float = 0.2
    """The ratio is held above 1 - clip_low ..."""
    clip_high: float = 0.2
    """... and below 1 + clip_high."""
    dual_clip: float | None = None
    """c > 1: a token with a negative advantage A has a loss of at most -c A; null for no such bound."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_clip(self.clip_low, self.clip_high)
        require(self.dual_clip is None or 1 < self.dual_clip < math.inf, "dual_clip", self.dual_clip,
                "a number above 1, or null")  # fmt: skip

    def _per_token(
        self, logprobs: Tensor, old: Tensor, advantages: Tensor, actions: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        bounds = (self.clip_low, self.clip_high, self.dual_clip)
        low, high, dual = loss.clip_active(logprobs, old, advantages, *bounds)
        shares = clip_shares(low, high) | ({} if self.dual_clip is None else {"actor/pg_clipfrac_dual": dual})
        return loss.clipped(logprobs, old, advantages, *bounds), shares


@dataclass(frozen=True, kw_only=True)
class Reinforce(PolicyGradient):
    """Learns by the policy gradient itself, -A log pi: exact for one update a step. With several updates from
    one batch nothing bounds the drift; actor/ppo_kl and actor/ratio show it."""

    def _per_token(
        self, logprobs: Tensor, old: Tensor, advantages: Tensor, actions: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        return loss.reinforce(logprobs, advantages), {}


def tally(x: Tensor, actions: Tensor) -> Tally:
    """Sum over actions, and their number."""
    return Tally(float(masked.sum(x, actions)), float(actions.sum()))


def weighed(share: Tensor, actions: Tensor, counts: Counts) -> Tally:
    """A share of an aggregated loss as a tally: over all micro-batches of a step the mean is the loss itself,
    and over several steps their mean weighed by actions."""
    return Tally(float(share.detach()) * counts.actions, float(actions.sum()))


def clip_shares(low: Tensor, high: Tensor) -> dict[str, Tensor]:
    """Clip indicators under their metric names."""
    return {"actor/pg_clipfrac": low | high, "actor/pg_clipfrac_low": low, "actor/pg_clipfrac_high": high}


def check_clip(low: float, high: float) -> None:
    """Refuse bounds of the probability ratio that cannot work."""
    require(0 < low < 1, "clip_low", low, "a number between 0 and 1 (the ratio is held above 1 - clip_low)")
    require(0 < high < math.inf, "clip_high", high, "a number above 0 (the ratio is held below 1 + clip_high)")


def check_group_size(size: int) -> None:
    """Refuse groups that compare a rollout with nothing."""
    expected = (
        "2 or more: with one rollout of a prompt there is nothing to compare it with, and every advantage would be 0"
    )
    require(size >= 2, "group_size", size, expected)


def grouped(signal: Signal, per_row: Tensor, group_size: int) -> tuple[Targets, Metrics]:
    """Targets from one advantage a row, and the share of groups in which it is the same (0) for all usable rows.

    Groups of more than `group_size` rows are refused: two prompts would share a number.
    """
    numbers, members = signal.groups.unique(return_counts=True)
    if len(members) and int(members.max()) > group_size:
        raise ValueError(
            f"group {int(numbers[members.argmax()])} has {int(members.max())} rows, but group_size is {group_size}: "
            "two prompts seem to share a group number"
        )
    silent = advantage.without_signal(per_row, signal.groups, signal.usable)
    share = float(silent.double().mean()) if len(silent) else 0.0
    return Targets(advantage.spread(per_row, signal.actions)), {"critic/groups/without_signal": share}
