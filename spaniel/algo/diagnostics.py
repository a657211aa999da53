"""Numbers that say how learning goes, from tensors the loop has anyway."""

from __future__ import annotations

import torch
from torch import Tensor

from spaniel.algo import masked


def explained_variance(values: Tensor, returns: Tensor, actions: Tensor) -> Tensor:
    """1 - Var(R - V) / Var(R) over all actions at once (never a mean of batches); 0 where R does not vary.

    1 is a perfect critic, 0 one that is as good as a constant, below 0 worse than that.
    """
    actions = actions.bool()
    returns, error = masked.real(returns), masked.real(returns) - masked.real(values)
    total, left = _variance(returns, actions), _variance(error, actions)
    return torch.where(total > 0, 1 - left / total.clamp(min=torch.finfo(total.dtype).tiny), 0.0)


def _variance(x: Tensor, actions: Tensor) -> Tensor:
    return masked.mean((x - masked.mean(x, actions)).square(), actions)
