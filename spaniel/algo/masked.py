"""Every reduction in the project: sums and means over a mask.

Masking is selection, never multiplication: what stands under a zero mask, NaN and inf included, reaches
neither a value nor a gradient. A mask without any True gives 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

EPSILON = 1e-8
"""Inside the root of `whiten`, as in Ziegler et al. 2019 (github.com/openai/lm-human-preferences)."""


def real(x: Tensor) -> Tensor:
    """`x` in float32, or as it is in float64: half precision and integers are never summed as such."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def select(x: Tensor, mask: Tensor) -> Tensor:
    """`x` where the mask is True (or 1), 0 elsewhere; the gradient is 0 there too."""
    return torch.where(mask.bool(), x, torch.zeros((), dtype=x.dtype, device=x.device))


def sum(x: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """sum(x m), over everything or along `dim`."""
    return select(real(x), mask).sum(dim)


def mean(x: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """sum(x m) / sum(m), over everything or along `dim`; 0 where the mask is empty."""
    return sum(x, mask, dim) / mask.bool().sum(dim).clamp(min=1)


def extremes(x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """(smallest, largest) of `x` under the mask; (0, 0) where it is empty."""
    chosen = real(x)[mask.bool()]
    if not chosen.numel():
        return chosen.new_zeros(()), chosen.new_zeros(())
    return chosen.amin(), chosen.amax()


def whiten(x: Tensor, mask: Tensor, shift_mean: bool = True) -> Tensor:
    """(x - mean) / sqrt(var + 1e-8) under the mask, 0 elsewhere; var is the unbiased (n-1) variance.

    The result has mean 0. `shift_mean=False` adds the mean back *after* the scaling (it is no plain
    scaling), as PPO implementations do with rewards. One element gives 0 (its own value when not shifted).
    """
    x, mask = real(x), mask.bool()
    centre = mean(x, mask)
    centred = select(x - centre, mask)
    variance = centred.square().sum() / (mask.sum() - 1).clamp(min=1)
    scaled = centred * torch.rsqrt(variance + EPSILON)
    return scaled if shift_mean else select(scaled + centre, mask)
