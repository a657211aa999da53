"""What every algorithm here shares: a policy loss with a KL term, an entropy bonus and global denominators."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from spaniel.algo import advantage, kl, loss, masked
from spaniel.algo.settings import KL, choice, require
from spaniel.algo.signal import Signal, acting, read, spread_of
from spaniel.types import Batch, Counts, Metrics, Tallies, Tally, Targets


@dataclass(frozen=True, kw_only=True)
class PolicyGradient(ABC):
    """The frame of an algorithm; a file beside this one fills in how credit is given and how it is learned from."""

    loss_aggregation: str = "token-mean"
    """How token losses become one number (`loss.aggregate`)."""
    length_budget: int | None = None
    """The fixed length that token-sum-norm divides by: the largest number of actions a rollout may have."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus."""
    kl: KL = field(default_factory=KL)

    def __post_init__(self) -> None:
        choice("loss_aggregation", self.loss_aggregation, loss.AGGREGATIONS)
        if self.loss_aggregation == "token-sum-norm":
            ok = self.length_budget is not None and self.length_budget > 0
            require(ok, "length_budget", self.length_budget, "a whole number above 0 with token-sum-norm")
        require(0 <= self.entropy_coef < float("inf"), "entropy_coef", self.entropy_coef, "a number of at least 0")
        self._check()

    @abstractmethod
    def _check(self) -> None:
        """Refuse settings that cannot work."""

    @abstractmethod
    def _credit(self, signal: Signal, batch: Batch, values: Tensor | None) -> tuple[Targets, Metrics]:
        """Advantages (and returns, values) from one step's signal."""

    @abstractmethod
    def _per_token(
        self, logprobs: Tensor, old: Tensor, advantages: Tensor, actions: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The policy loss at each token, and indicators (bool[B, T] by metric name) whose share is reported."""

    @property
    def needs_critic(self) -> bool:
        return False

    @property
    def needs_reference(self) -> bool:
        return self.kl.needs_reference

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
        if self.needs_reference and ref_logprobs is None:
            raise ValueError(f"kl.place is {self.kl.place!r}, but no log-probabilities of the reference were given")
        if self.needs_critic and values is None:
            raise ValueError(f"{type(self).__name__} needs the critic's values, but none were given")
        signal = read(batch, ref_logprobs, old_logprobs, self.kl, state)
        targets, metrics = self._credit(signal, batch, values)
        targets = Targets(targets.advantages, targets.returns, targets.values, ref_logprobs, old_logprobs)
        metrics |= spread_of("critic/advantages", targets.advantages, signal.actions)
        return targets, signal.state, signal.metrics | metrics

    def policy_loss(
        self, logprobs: Tensor, entropy: Tensor, batch: Batch, targets: Targets, counts: Counts
    ) -> tuple[Tensor, Tallies]:
        """This micro-batch's share of: policy loss - entropy_coef * entropy + beta * KL (if in the loss)."""
        actions = acting(batch)
        behaviour = batch.logprobs if targets.old_logprobs is None else targets.old_logprobs
        current = masked.select(logprobs, actions)
        old = masked.select(behaviour, actions)
        per_token, indicators = self._per_token(current, old, masked.select(targets.advantages, actions), actions)
        policy = self._share(per_token, actions, counts)
        total = policy
        tallies = {
            "actor/pg_loss": weighed(policy, actions, counts),
            "actor/ppo_kl": tally((old - current).detach(), actions),
            "actor/ratio": tally(loss.ratio(current.detach(), old), actions),
            "actor/entropy": tally(entropy.detach(), actions),
            **{name: tally(where, actions) for name, where in indicators.items()},
        }
        if self.entropy_coef:
            total = total - self.entropy_coef * self._share(entropy, actions, counts)
        if self.kl.place == "loss":
            assert targets.ref_logprobs is not None  # `targets` refuses otherwise
            distance = kl.unbiased if self.kl.unbiased else kl.estimate
            reference = masked.select(targets.ref_logprobs, actions)
            held = self._share(distance(current, reference, self.kl.estimator), actions, counts)
            total = total + self.kl.beta * held
            tallies["actor/kl_loss"] = weighed(held, actions, counts)
        return total, tallies

    def value_loss(self, values: Tensor, batch: Batch, targets: Targets, counts: Counts) -> tuple[Tensor, Tallies]:
        raise ValueError(f"{type(self).__name__} has no critic")

    def _share(self, per_token: Tensor, actions: Tensor, counts: Counts) -> Tensor:
        return loss.aggregate(per_token, actions, self.loss_aggregation, counts, self.length_budget)


def tally(x: Tensor, actions: Tensor) -> Tally:
    """Sum over actions, and their number."""
    return Tally(float(masked.sum(x, actions)), float(actions.sum()))


def weighed(share: Tensor, actions: Tensor, counts: Counts) -> Tally:
    """A share of an aggregated loss as a tally: over all micro-batches of a step the mean is the loss itself,
    and over several steps their mean weighed by actions."""
    return Tally(float(share.detach()) * counts.actions, float(actions.sum()))


def ratio_clips(
    logprobs: Tensor, old: Tensor, advantages: Tensor, low: float, high: float, dual: float | None
) -> dict[str, Tensor]:
    """The clip indicators of the clipped loss under their metric names."""
    below, above, dually = loss.clip_active(logprobs, old, advantages, low, high, dual)
    names = {"actor/pg_clipfrac": below | above, "actor/pg_clipfrac_low": below, "actor/pg_clipfrac_high": above}
    return names if dual is None else names | {"actor/pg_clipfrac_dual": dually}


def check_clip(low: float, high: float, dual: float | None) -> None:
    """Refuse bounds of the probability ratio that cannot work."""
    require(0 < low < 1, "clip_low", low, "a number between 0 and 1 (the ratio is held above 1 - clip_low)")
    require(0 < high < float("inf"), "clip_high", high, "a number above 0 (the ratio is held below 1 + clip_high)")
    require(dual is None or 1 < dual < float("inf"), "dual_clip", dual, "a number above 1, or null for none")


def check_group_size(size: int) -> None:
    """Refuse groups that compare a rollout with nothing."""
    require(
        size >= 2,
        "group_size",
        size,
        "2 or more: with one rollout a prompt there is nothing to compare it with, every advantage would be 0",
    )


def group_metrics(signal: Signal, group_size: int) -> Metrics:
    """Share of groups in which no two usable rows differ. Groups of more than `group_size` rows are refused:
    two prompts would share a number."""
    numbers, members = signal.groups.unique(return_counts=True)
    if len(members) and int(members.max()) > group_size:
        raise ValueError(
            f"group {int(numbers[members.argmax()])} has {int(members.max())} rows, but group_size is {group_size}: "
            "two prompts seem to share a group number"
        )
    silent = advantage.without_signal(signal.totals, signal.groups, signal.usable)
    return {"critic/groups/without_signal": float(silent.double().mean()) if len(silent) else 0.0}
