"""What one step's batch says to any algorithm: which tokens are actions, what each was paid, which rows count."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from spaniel.algo import advantage, kl, masked
from spaniel.algo.settings import KL
from spaniel.errors import RunStopped
from spaniel.types import Batch, Metrics


@dataclass(frozen=True)
class Signal:
    """B rows, T positions. A row that is not usable (failed, or without any action) has no action here."""

    actions: Tensor
    """bool[B, T]."""
    usable: Tensor
    """bool[B]: valid, with at least one action."""
    scores: Tensor
    """f32[B]: what the row earned, before any KL penalty; 0 where not usable."""
    rewards: Tensor
    """f32[B, T]: on actions only, KL penalty included."""
    groups: Tensor
    """i64[B]."""
    state: dict[str, float]
    """The KL controller's state for the next step."""
    metrics: Metrics

    @property
    def totals(self) -> Tensor:
        """f32[B]: sum of `rewards`: what the row earned, KL penalty included."""
        return self.rewards.sum(1)


def acting(batch: Batch) -> Tensor:
    """The actions of rows that carry a learning signal, bool[B, T]."""
    return batch.actions & batch.valid[:, None]


def read(
    batch: Batch, ref_logprobs: Tensor | None, old_logprobs: Tensor | None, penalty: KL, state: dict[str, float]
) -> Signal:
    """The signal of a whole step. `old_logprobs` (the learner's own) is what the KL is measured on, if given."""
    actions = acting(batch)
    usable = actions.any(1)
    real = torch.arange(actions.shape[1], device=actions.device) < batch.lengths[:, None]
    rewards = advantage.credit(masked.select(masked.real(batch.rewards), real), actions)
    _refuse_unreal(rewards, batch)
    scores = rewards.sum(1)
    metrics: Metrics = {
        **spread_of("critic/score", scores, usable),
        "critic/rows/failed": float((~batch.valid).sum()),
        "critic/rows/without_action": float((batch.valid & ~usable).sum()),
    }
    next_state = dict(state)
    if ref_logprobs is not None:
        current = batch.logprobs if old_logprobs is None else old_logprobs
        sequence_kl = kl.per_sequence(current, ref_logprobs, actions)
        measured = float(masked.mean(sequence_kl, usable))
        beta = penalty.coefficient(state) if penalty.needs_reference else 0.0
        metrics["critic/kl"] = measured
        metrics["critic/kl_per_token"] = float(sequence_kl.sum() / actions.sum().clamp(min=1))
        metrics["critic/kl_coeff"] = beta
        if penalty.place == "reward":
            rewards = kl.penalised_rewards(rewards, current, ref_logprobs, actions, beta, penalty.estimator)
        next_state = penalty.next_state(state, measured, int(usable.sum()))
    metrics |= spread_of("critic/rewards", rewards.sum(1), usable)
    return Signal(actions, usable, scores, rewards, batch.groups, next_state, metrics)


def spread_of(name: str, x: Tensor, mask: Tensor) -> Metrics:
    """Mean, largest and smallest of `x` under the mask, named `name`/mean, /max, /min."""
    low, high = masked.extremes(x, mask)
    return {f"{name}/mean": float(masked.mean(x, mask)), f"{name}/max": float(high), f"{name}/min": float(low)}


def _refuse_unreal(rewards: Tensor, batch: Batch) -> None:
    bad = (~rewards.isfinite()).any(1).nonzero().flatten()
    if len(bad):
        row = int(bad[0])
        raise RunStopped(
            f"the reward of row {row} (group {int(batch.groups[row])}) is not a finite number; a reward that "
            f"cannot be computed is to be recorded as a failure of that rollout ({len(bad)} such rows)"
        )
