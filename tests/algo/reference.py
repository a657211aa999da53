"""A plain reference: loops over rows and tokens in Python numbers, written from the papers.

It knows no function of `spaniel.algo`. A step is two groups of four rows with tool replies, one of which failed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from spaniel.types import Batch
from tests.workers.test_learner import batch

FAILED = 2


@dataclass(frozen=True)
class Row:
    """One usable row, its actions only: for each its place, log-probabilities, entropy, value, reward."""

    row: int
    group: int
    at: list[int]
    sampler: list[float]
    old: list[float]
    new: list[float]
    ref: list[float]
    entropy: list[float]
    value: list[float]
    reward: list[float]
    advantage: list[float] = field(default_factory=list)

    @property
    def score(self) -> float:
        return sum(self.reward)


@dataclass(frozen=True)
class Step:
    batch: Batch
    values: Tensor
    ref: Tensor
    old: Tensor
    new: Tensor
    entropy: Tensor

    def rows(self) -> list[Row]:
        out = []
        for i in range(8):
            at = self.batch.actions[i].nonzero().flatten().tolist()
            if i != FAILED:
                tensors = (self.batch.logprobs, self.old, self.new, self.ref, self.entropy, self.values)
                taken = [t[i, at].tolist() for t in tensors]
                out.append(Row(i, int(self.batch.groups[i]), at, *taken, self.batch.rewards[i, at].tolist()))
        return out


def step(seed: int = 11) -> Step:
    """Two groups of four with tool replies, one row of which failed; a learner that moved."""
    data = batch()
    generator = torch.Generator().manual_seed(seed)
    noise = [torch.randn(data.tokens.shape, generator=generator, dtype=torch.float64) for _ in range(7)]
    failed = (torch.arange(8) == FAILED)[:, None]
    sampler = -3 + 0.3 * noise[0]
    paid = torch.where(data.actions, data.rewards.double() + 0.3 * noise[6], 0.0)
    # Whatever stands in the failed row or behind the end of one is to count for nothing.
    behind = torch.arange(data.tokens.shape[1]) >= data.lengths[:, None]
    rewards = torch.where(failed, math.nan, torch.where(behind, 5.0, paid))
    data = replace(data, valid=~failed[:, 0], logprobs=sampler, rewards=rewards)
    old = sampler + 0.2 * noise[1]
    return Step(data, noise[2], old + 0.4 * noise[3], old, old + 0.3 * noise[4], noise[5].abs())


def mean(x: list[float]) -> float:
    return sum(x) / len(x)


def by_group(rows: list[Row]) -> list[Row]:
    """GRPO's advantages, at every action."""
    out = []
    for r in rows:
        scores = [o.score for o in rows if o.group == r.group]
        std = math.sqrt(sum((s - mean(scores)) ** 2 for s in scores) / (len(scores) - 1))
        out.append(replace(r, advantage=[(r.score - mean(scores)) / (std + 1e-6)] * len(r.at)))
    return out


def by_gae(rows: list[Row], gamma: float, lam: float) -> tuple[list[Row], list[list[float]]]:
    out, returns = [], []
    for r in rows:
        advantages, running = [0.0] * len(r.at), 0.0
        for k in reversed(range(len(r.at))):
            after = r.value[k + 1] if k + 1 < len(r.at) else 0.0
            running = r.reward[k] + gamma * after - r.value[k] + gamma * lam * running
            advantages[k] = running
        out.append(replace(r, advantage=advantages))
        returns.append([a + v for a, v in zip(advantages, r.value, strict=True)])
    every = [a for r in out for a in r.advantage]
    spread = math.sqrt(sum((a - mean(every)) ** 2 for a in every) / (len(every) - 1) + 1e-8)
    return [replace(r, advantage=[(a - mean(every)) / spread for a in r.advantage]) for r in out], returns


def penalised(rows: list[Row], beta: float) -> list[Row]:
    return [
        replace(r, reward=[x - beta * (o - f) for x, o, f in zip(r.reward, r.old, r.ref, strict=True)]) for r in rows
    ]


def clipped(r: Row, k: int, low: float, high: float) -> float:
    rho, a = math.exp(r.new[k] - r.old[k]), r.advantage[k]
    return -min(rho * a, min(max(rho, 1 - low), 1 + high) * a)


def token_mean(rows: list[Row], loss: Any) -> float:
    return mean([loss(r, k) for r in rows for k in range(len(r.at))])


def row_mean(rows: list[Row], loss: Any) -> float:
    return mean([mean([loss(r, k) for k in range(len(r.at))]) for r in rows])


def row_sum(rows: list[Row], loss: Any) -> float:
    return mean([sum(loss(r, k) for k in range(len(r.at))) for r in rows])
