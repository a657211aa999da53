"""One process's share of a model that learns: forward, backward, step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from spaniel.errors import BadInput
from spaniel.models.logprobs import policy_outputs
from spaniel.types import Batch, Counts, Tallies, Tally, Targets, add_tallies
from spaniel.workers.optim import Optim, Stepper

Outputs = Callable[[nn.Module, Batch], tuple[Tensor, ...]]
Loss = Callable[..., tuple[Tensor, Tallies]]


@dataclass(frozen=True)
class Learning:
    """How a batch becomes optimizer steps: `epochs` passes, each cut into mini-batches of `minibatch_rows` rows
    (0: the whole batch), each computed in micro-batches of at most `micro_tokens` tokens, padding included
    (memory only: the result does not depend on it)."""

    epochs: int = 1
    minibatch_rows: int = 0
    micro_tokens: int = 16_384

    def __post_init__(self) -> None:
        for name, least in (("epochs", 1), ("minibatch_rows", 0), ("micro_tokens", 1)):
            if getattr(self, name) < least:
                raise BadInput(f"learning.{name}: {getattr(self, name)}; expected {least} or more")

    def updates(self, rows: int) -> int:
        """Optimizer steps that a batch of `rows` rows gives."""
        return self.epochs * (math.ceil(rows / self.minibatch_rows) if self.minibatch_rows else 1)


@dataclass(frozen=True)
class Beside:
    """A second loss of every update: `coef` times `loss` on the next `rows` rows of `batch` (PPO-ptx; Ouyang et al.
    2022, arXiv:2203.02155, equation 2)."""

    batch: Batch
    loss: Loss
    coef: float
    rows: int

    def of(self, update: int) -> Tensor:
        """The rows, i64[rows], of update number `update` (from 0) of the step."""
        return (torch.arange(self.rows) + update * self.rows) % len(self.batch)


def policy_forward(model: nn.Module, batch: Batch, temperature: float, entropy: bool = True) -> tuple[Tensor, Tensor]:
    """What a policy loss gets: log-probabilities and entropies under the sampling temperature."""
    return policy_outputs(model, batch.tokens, batch.actions, temperature, entropy=entropy)


def value_forward(model: nn.Module, batch: Batch) -> tuple[Tensor]:
    """What a value loss gets: values f32[B, T]."""
    return (model(batch.tokens),)


class Learner:
    """A model with its optimizer, always in evaluation mode: with dropout on, the log-probabilities learned from
    would not be those that were sampled from. `outputs` makes the tensors that the loss gets; `total_updates` is
    the length of the learning-rate schedule in optimizer steps; `seed` orders the mini-batches."""

    def __init__(
        self, model: nn.Module, outputs: Outputs, optim: Optim, learning: Learning, *, total_updates: int, seed: int
    ) -> None:
        self.model = model.eval()
        self.outputs = outputs
        self.learning = learning
        self.seed = seed
        self.stepper = Stepper(model, optim, total_updates)

    @torch.no_grad()
    def infer(self, batch: Batch) -> Tensor:
        """The first output (log-probabilities or values), f32[B, T], before any update."""
        return infer(self.model, self.outputs, batch, self.learning.micro_tokens)

    def learn(self, batch: Batch, targets: Targets, loss: Loss, name: str, beside: Beside | None = None) -> Tallies:
        """All optimizer steps of one batch. `name` prefixes the learner's own metrics (`actor`, `critic`); `beside`
        is a second loss that every one of them learns too."""
        tallies: list[Tallies] = []
        usable = batch.actions.any(dim=1).nonzero().flatten()
        if not len(usable):
            return {f"{name}/skipped_updates": Tally(1, 1)}
        size, update = self.learning.minibatch_rows or len(usable), 0
        for epoch in range(1, self.learning.epochs + 1):
            done = len(tallies)
            # The order is a function of the seed and the update count, so it needs no state of its own.
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.stepper.updates)
            order = usable[torch.randperm(len(usable), generator=generator)]
            for start in range(0, len(order), size):
                rows = order[start : start + size]
                tallies.append(self._update(batch, targets, rows, loss, name, beside, update))
                update += 1
            if self.learning.epochs > 1 and (moved := add_tallies(tallies[done:]).get(f"{name}/ppo_kl")):
                tallies.append({f"{name}/ppo_kl/epoch_{epoch}": moved})
        return add_tallies(tallies)

    def _update(
        self, batch: Batch, targets: Targets, rows: Tensor, loss: Loss, name: str, beside: Beside | None, number: int
    ) -> Tallies:
        self.stepper.clear()
        stats, value = self._backward(batch, targets, rows, loss, 1.0)
        stats[f"{name}/loss"] = Tally(value, 1)
        if beside is not None:
            nothing = Targets(advantages=torch.zeros_like(beside.batch.logprobs))
            _, extra = self._backward(beside.batch, nothing, beside.of(number), beside.loss, beside.coef)
            stats[f"{name}/ptx_loss"] = Tally(extra, 1)
            value += beside.coef * extra
        return stats | self.stepper.step(name, value)

    def _backward(self, batch: Batch, targets: Targets, rows: Tensor, loss: Loss, coef: float) -> tuple[Tallies, float]:
        """Add `coef` times the gradient of the loss of `rows`, micro-batch by micro-batch; its tallies and value."""
        counts = Counts(actions=int(batch.actions[rows].sum()), sequences=len(rows))
        parts: list[Tallies] = []
        value = 0.0
        for micro, width in micro_batches(batch.lengths, rows, self.learning.micro_tokens):
            piece = batch.take(micro, width)
            share, stats = loss(*self.outputs(self.model, piece), piece, targets.take(micro, width), counts)
            (coef * share).backward()
            parts.append(stats)
            # The shares are already divided by the global counts: their sum is the loss of this one update.
            value += share.item()
        return add_tallies(parts), value

    def weights(self) -> Mapping[str, Tensor]:
        """The current weights by name (shared memory, not a copy)."""
        return self.model.state_dict()

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds beside the weights."""
        return self.stepper.state()

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue from `state()`; the weights are loaded by whoever made the model."""
        self.stepper.load_state(state)


def infer(model: nn.Module, outputs: Outputs, batch: Batch, micro_tokens: int) -> Tensor:
    """The first output for every row, computed in micro-batches, in the order of the batch."""
    out = torch.zeros(batch.tokens.shape, dtype=torch.float32)
    for rows, width in micro_batches(batch.lengths, torch.arange(len(batch)), micro_tokens):
        out[rows, :width] = outputs(model, batch.take(rows, width))[0]
    return out


def micro_batches(lengths: Tensor, rows: Tensor, micro_tokens: int) -> Iterator[tuple[Tensor, int]]:
    """`rows` in parts of about equal length and at most `micro_tokens` tokens (never less than one row), each
    with its width: the longest row and one more position, at which the value after the last token stands."""
    ordered = rows[torch.sort(lengths[rows], descending=True, stable=True).indices]
    start = 0
    while start < len(ordered):
        width = int(lengths[ordered[start]]) + 1
        count = max(1, micro_tokens // width)
        yield ordered[start : start + count], width
        start += count


def policy_outputs_at(temperature: float, *, entropy: bool = True) -> Outputs:
    """`policy_forward` at a fixed temperature."""
    return partial(policy_forward, temperature=temperature, entropy=entropy)
