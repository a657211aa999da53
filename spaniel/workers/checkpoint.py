"""A learner's part of a checkpoint: the model as a Hugging Face folder, the optimizer beside it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, Protocol

import torch
from torch import nn

from spaniel.errors import BadInput


class Learns(Protocol):
    """What a checkpoint needs of a learner."""

    model: Any

    def state(self) -> Any: ...

    def load_state(self, state: dict[str, Any]) -> None: ...


def save_learner(learner: Learns, folder: Path, name: str, write_model: Callable[[nn.Module, Path], None]) -> None:
    """Write `folder/name/` (the model) and `folder/name.optimizer.pt` (moments and update count)."""
    write_model(learner.model, folder / name)
    torch.save(learner.state(), folder / f"{name}.optimizer.pt")


def load_optimizer(learner: Learns, folder: Path, name: str) -> None:
    """Give a learner, whose model came from `folder/name/`, the optimizer state saved with it."""
    path = folder / f"{name}.optimizer.pt"
    if not path.is_file():
        raise BadInput(f"checkpoint {folder}: holds no {path.name}; it is not complete")
    try:
        learner.load_state(torch.load(path, weights_only=True))
    except (RuntimeError, ValueError, KeyError, TypeError, EOFError, UnpicklingError) as error:
        first_line = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise BadInput(f"checkpoint {folder}: {path.name} is damaged or of another model: {first_line}") from error
