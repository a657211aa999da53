"""PPO with a critic. Schulman et al. 2017, arXiv:1707.06347; for language models Ziegler et al. 2019,
arXiv:1909.08593, and Ouyang et al. 2022 (InstructGPT), arXiv:2203.02155."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from spaniel.algo import advantage, diagnostics, loss, masked
from spaniel.algo.policy_gradient import ClippedPolicy, tally, weighed
from spaniel.algo.settings import KL, require
from spaniel.algo.signal import Signal, acting, spread_of
from spaniel.types import Batch, Counts, Metrics, Tallies, Targets


@dataclass(frozen=True, kw_only=True)
class PPO(ClippedPolicy):
    """GAE over actions, advantages whitened over the batch, clipped policy and value losses.

    Defaults are InstructGPT's (gamma 1, lambda 0.95, both clips 0.2, KL in the reward with beta 0.02).
    """

    gamma: float = 1.0
    lam: float = 0.95
    whiten_advantages: bool = True
    bootstrap_truncated: bool = False
    """A rollout cut off by the length budget ends with the critic's value instead of 0."""
    value_clip: float | None = 0.2
    """How far a value may move from the one before the update; null for no clip."""
    kl: KL = field(default_factory=lambda: KL(place="reward", kind="k1", beta=0.02))

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 <= self.gamma <= 1, "gamma", self.gamma, "a number from 0 to 1")
        require(0 <= self.lam <= 1, "lam", self.lam, "a number from 0 to 1")
        ok = self.value_clip is None or 0 < self.value_clip < float("inf")
        require(ok, "value_clip", self.value_clip, "a number above 0, or null for none")

    @property
    def needs_critic(self) -> bool:
        return True

    def _credit(self, signal: Signal, batch: Batch, values: Tensor | None) -> tuple[Targets, Metrics]:
        assert values is not None  # `targets` refuses otherwise
        tail = _values_after(values, batch) if self.bootstrap_truncated else None
        advantages, returns = advantage.gae(signal.rewards, values, signal.actions, self.gamma, self.lam, tail)
        held = masked.select(masked.real(values.detach()), signal.actions)
        metrics = {
            **spread_of("critic/returns", returns, signal.actions),
            **spread_of("critic/values", held, signal.actions),
            "critic/vf_explained_var": float(diagnostics.explained_variance(held, returns, signal.actions)),
        }
        if self.whiten_advantages:
            advantages = masked.whiten(advantages, signal.actions)
        return Targets(advantages, returns, held), metrics

    def value_loss(self, values: Tensor, batch: Batch, targets: Targets, counts: Counts) -> tuple[Tensor, Tallies]:
        """This micro-batch's share of the (clipped) squared error to the returns, aggregated like the policy loss."""
        if targets.returns is None or targets.values is None:
            raise ValueError("PPO's value loss needs the returns and the values before the update, but got none")
        actions = acting(batch)
        current = masked.select(values, actions)
        returns, before = masked.select(targets.returns, actions), masked.select(targets.values, actions)
        share = self._share(loss.value(current, returns, before, self.value_clip), actions, counts)
        tallies = {"critic/vf_loss": weighed(share, actions, counts), "critic/vpred": tally(current.detach(), actions)}
        if self.value_clip is not None:
            flat = loss.value_clip_active(current, returns, before, self.value_clip)
            tallies["critic/vf_clipfrac"] = tally(flat, actions)
            tallies["critic/vf_moved"] = tally((current.detach() - before).abs() > self.value_clip, actions)
        return share, tallies


def _values_after(values: Tensor, batch: Batch) -> Tensor:
    """f32[B]: the critic's value of the state behind a cut-off row's last token, 0 for a row that ended by itself."""
    if len(batch) and int(batch.lengths.max()) >= values.shape[1]:
        raise ValueError("bootstrap_truncated reads the value behind a row's last token: rows must be shorter than T")
    after = values.gather(1, batch.lengths[:, None])[:, 0]
    return masked.select(after, batch.truncated)
