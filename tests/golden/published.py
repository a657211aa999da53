"""Values computed with verl 0.9.1, TRL 1.16 and OpenRLHF 0.11.2 (see README.md), as float64 tensors."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

F64 = torch.float64
MASKS = ("mask", "mask_mt")
"""1s then 0s; and the same with holes where a tool spoke."""


@cache
def _file(package: str) -> dict[str, Any]:
    return json.loads((Path(__file__).parent / f"{package}.json").read_text())


def _tensor(value: Any) -> Tensor:
    return torch.tensor(value["data"], dtype=F64).reshape(value["shape"])


X = {name: _tensor(value) for name, value in _file("verl")["inputs"].items()}
"""The inputs, the same for all three packages."""
GROUPS = X["index"].long()


def out(package: str, name: str, place: int = 0) -> Tensor:
    """Output number `place` of a function."""
    return _tensor(_file(package)["outputs"][name][place])


def metrics(package: str, name: str) -> dict[str, float]:
    """The metrics that a function returned second."""
    return _file(package)["outputs"][name][1]


def same(own: Tensor, theirs: Tensor, mask: Tensor | None = None) -> None:
    """Equal to 1e-5; with a mask, equal there, and 0 on our side elsewhere."""
    torch.testing.assert_close(own.to(F64), theirs if mask is None else theirs * mask, atol=1e-5, rtol=1e-5)


def gap(own: Tensor, theirs: Tensor, mask: Tensor) -> float:
    """The largest difference under the mask."""
    return float(((own - theirs) * mask).abs().max())


def with_gradient(loss: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """The loss at the current log-probabilities, and its gradient with respect to them."""
    current = X["log_prob"].clone().requires_grad_()
    value = loss(current)
    value.backward()
    assert current.grad is not None
    return value.detach(), current.grad
