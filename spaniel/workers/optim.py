"""Optimizer and learning-rate schedule; both count optimizer steps, and so does everything that asks."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from spaniel.errors import BadInput
from spaniel.types import Tallies, Tally


@dataclass(frozen=True)
class Optim:
    """AdamW with decoupled weight decay (Loshchilov and Hutter 2019), gradient-norm clipping and a schedule."""

    lr: float = 1e-4
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    warmup_steps: int = 0
    warmup_ratio: float = 0.0
    """Warm-up as a share of all optimizer steps; used where `warmup_steps` is 0."""
    min_lr_ratio: float = 0.0
    """Where cosine and linear end, as a share of `lr`."""

    def __post_init__(self) -> None:
        for name in ("lr", "eps", "max_grad_norm"):
            if getattr(self, name) <= 0:
                raise BadInput(f"optim.{name}: {getattr(self, name)}; expected a number > 0")
        for name in ("warmup_ratio", "min_lr_ratio"):
            if not 0 <= getattr(self, name) <= 1:
                raise BadInput(f"optim.{name}: {getattr(self, name)}; expected a number from 0 to 1")
        if self.warmup_steps < 0:
            raise BadInput(f"optim.warmup_steps: {self.warmup_steps}; expected 0 or more")
        if self.warmup_steps and self.warmup_ratio:
            raise BadInput(
                f"optim: warmup_steps {self.warmup_steps} and warmup_ratio {self.warmup_ratio}; expected one of them"
            )


def learning_rate(optim: Optim, step: int, total: int) -> float:
    """The rate of optimizer step `step` (from 0) of `total`.

    Linear from lr/w to lr over the first w steps; then constant, or down to lr * min_lr_ratio at the last step.
    """
    warmup = optim.warmup_steps or round(optim.warmup_ratio * total)
    if step < warmup:
        return optim.lr * (step + 1) / warmup
    if optim.schedule == "constant":
        return optim.lr
    progress = min(1.0, (step - warmup) / max(1, total - 1 - warmup))
    down = 0.5 * (1 + math.cos(math.pi * progress)) if optim.schedule == "cosine" else 1 - progress
    return optim.lr * (optim.min_lr_ratio + (1 - optim.min_lr_ratio) * down)


def adamw(model: nn.Module, optim: Optim) -> torch.optim.AdamW:
    """Weight decay on matrices only: decaying norms and biases pulls them to 0 for no gain."""
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() >= 2], "weight_decay": optim.weight_decay},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
    ]
    # fused is 3 to 6 times faster than foreach on a CPU
    return torch.optim.AdamW(
        [g for g in groups if g["params"]], lr=optim.lr, betas=optim.betas, eps=optim.eps, fused=True
    )


class Stepper:
    """A model's optimizer, schedule and count of updates: the part of learning that every learner shares.

    `total` is the length of the schedule in optimizer steps.
    """

    def __init__(self, model: nn.Module, optim: Optim, total: int) -> None:
        self.model = model
        self.optim = optim
        self.total = total
        self.updates = 0
        self.optimizer = adamw(model, optim)

    def clear(self) -> None:
        """Forget the gradients before the next update."""
        self.optimizer.zero_grad(set_to_none=True)

    def step(self, name: str, loss: float) -> Tallies:
        """Clip the accumulated gradient and apply it; where it or `loss` is not finite, skip and count instead."""
        rate = learning_rate(self.optim, self.updates, self.total)
        norm = float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.optim.max_grad_norm))
        self.updates += 1
        if not (math.isfinite(norm) and math.isfinite(loss)):
            self.clear()
            return {f"{name}/skipped_updates": Tally(1, 1)}
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        return {
            f"{name}/grad_norm": Tally(norm, 1),
            f"{name}/lr": Tally(rate, 1),
            f"{name}/skipped_updates": Tally(0, 1),
        }

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds beside the weights: optimizer moments and the update count."""
        return {"optimizer": self.optimizer.state_dict(), "updates": self.updates}

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue from `state()`; the weights are loaded by whoever made the model."""
        self.optimizer.load_state_dict(state["optimizer"])
        self.updates = int(state["updates"])
