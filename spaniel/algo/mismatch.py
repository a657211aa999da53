"""The gap between the sampler's probabilities and the learner's (another engine, another precision, older
weights), corrected by importance weights (Yao et al. 2025, "Your efficient RL framework secretly brings you
off-policy RL training"; Liu et al. 2025, "When speed kills stability").
"""

from __future__ import annotations

import torch
from torch import Tensor

from spaniel.algo import kl, masked
from spaniel.types import Metrics

LEVELS = ("token", "sequence", "geometric")
MODES = ("none", "truncate", "mask")


def ratios(old: Tensor, sampler: Tensor, actions: Tensor, level: str = "token") -> Tensor:
    """w = exp(old - sampler) at each action, 0 elsewhere, detached, [B, T].

    `token`: of the token itself; `sequence`: the product over the row's actions (the exact weight of the
    rollout, of high variance); `geometric`: the mean of the logarithms, as GSPO's ratio.
    """
    gap = masked.select(masked.real(old) - masked.real(sampler), actions).detach()
    if level == "sequence":
        gap = gap.sum(1, keepdim=True).expand(gap.shape)
    elif level == "geometric":
        gap = masked.mean(gap, actions, dim=1)[:, None].expand(gap.shape)
    elif level != "token":
        raise ValueError(f"level {level!r}; expected one of {', '.join(LEVELS)}")
    return masked.select(gap.clamp(-kl.EXPONENT_LIMIT, kl.EXPONENT_LIMIT).exp(), actions)


def weights(
    old: Tensor,
    sampler: Tensor,
    actions: Tensor,
    cap: float,
    mode: str,
    level: str = "token",
    floor: float | None = None,
) -> Tensor:
    """What multiplies each action's loss, [B, T], detached, 0 elsewhere.

    `truncate` (TIS): min(w, cap); with `floor`, at least that. `mask` (MIS): w inside [floor, cap], 0 outside;
    `floor` is 1 / cap unless given.
    """
    w = ratios(old, sampler, actions, level)
    if mode == "truncate":
        return masked.select(w.clamp(min=0.0 if floor is None else floor, max=cap), actions)
    if mode == "mask":
        outside = (w < (1 / cap if floor is None else floor)) | (w > cap)
        return masked.select(w, ~outside)  # a NaN is not outside: it is to be seen in the loss
    raise ValueError(f"mode {mode!r}; expected truncate or mask")


def measure(old: Tensor, sampler: Tensor, actions: Tensor, applied: Tensor | None = None) -> Metrics:
    """Diagnostics over all actions of a step.

    kl: mean of sampler - old, the k1 estimate of KL(sampler || learner) per token; k3 the same by k3;
    max_abs_diff: the largest |old - sampler|; of the weights that are applied (w itself if none are):
    weight_mean, and ess = (sum w)^2 / (n sum w^2), the share of the sample that is left.
    """
    w = ratios(old, sampler, actions) if applied is None else applied
    _, largest = masked.extremes((masked.real(old) - masked.real(sampler)).abs(), actions)
    return {
        "mismatch/kl": float(masked.mean(kl.estimate(sampler, old, "k1"), actions)),
        "mismatch/k3": float(masked.mean(kl.estimate(sampler, old, "k3"), actions)),
        "mismatch/max_abs_diff": float(largest),
        "mismatch/weight_mean": float(masked.mean(w, actions)),
        "mismatch/ess": float(effective_sample_size(w, actions)),
    }


def effective_sample_size(weights: Tensor, actions: Tensor) -> Tensor:
    """(sum w)^2 / (n sum w^2) over actions, in [0, 1]; 0 where all weights are 0 (Kong 1992)."""
    weights = masked.select(masked.real(weights), actions).double()
    squares = weights.square().sum() * actions.bool().sum()
    return torch.where(squares > 0, weights.sum().square() / squares.clamp(min=1e-300), 0.0)
