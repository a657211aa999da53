"""Supervised fine-tuning: the same learner, the likelihood of the demonstrated tokens as the loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from spaniel.algo import masked
from spaniel.cluster.base import Group
from spaniel.data.collate import collate
from spaniel.data.prompts import PromptStream
from spaniel.train.clock import Clock
from spaniel.types import Batch, Counts, Metrics, Rollout, Tallies, Tally, Targets
from spaniel.workers.learner import Learner


def nll(logprobs: Tensor, entropy: Tensor, batch: Batch, targets: Targets, counts: Counts) -> tuple[Tensor, Tallies]:
    """-sum over the demonstrated tokens of log pi(token | before) / number of such tokens in the whole update."""
    total = -masked.sum(logprobs, batch.actions)
    return total / counts.actions, {"sft/nll": Tally(float(total.detach()), float(batch.actions.sum()))}


@dataclass(frozen=True)
class Taught:
    """A finished step."""

    step: int
    metrics: Metrics


def teach(
    policy: Group,
    stream: PromptStream[Rollout],
    validation: Sequence[Rollout],
    start: int,
    steps: int,
    save: Callable[[int], None],
    due: Callable[[int], tuple[bool, bool]],
) -> Iterator[Taught]:
    """Steps `start` .. `steps`-1; `due(step)` says (validate, save) after `step` finished steps."""
    clock = Clock()
    for step in range(start, steps):
        batch = collate(stream.batch(step))
        with clock.stage("update"):
            learned = policy.scatter(Learner.learn, batch, _no_targets(batch), nll, "sft")
        metrics: Metrics = {"step": float(step + 1), "epoch": float(stream.epoch(step))}
        metrics |= {name: tally.mean for name, tally in learned.items()}
        metrics["sft/tokens"] = float(batch.actions.sum())
        metrics |= {f"timing_s/{name}": value for name, value in clock.take().items()}
        validate_now, save_now = due(step + 1)
        if validate_now and validation:
            metrics["val/nll"] = held_out(policy, validation)
        if save_now:
            save(step + 1)
        yield Taught(step + 1, metrics)


def held_out(policy: Group, rollouts: Sequence[Rollout], rows: int = 256) -> float:
    """Mean negative log-likelihood per demonstrated token, over all rows, divided once."""
    total = Tally(0.0, 0.0)
    for start in range(0, len(rollouts), rows):
        batch = collate(rollouts[start : start + rows])
        logprobs = policy.scatter(Learner.infer, batch)
        total += Tally(-float(masked.sum(logprobs, batch.actions)), float(batch.actions.sum()))
    return total.mean


def _no_targets(batch: Batch) -> Targets:
    return Targets(advantages=torch.zeros_like(batch.logprobs))
