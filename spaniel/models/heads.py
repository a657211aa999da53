"""Scalar heads on a Hugging Face backbone."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from spaniel.errors import BadInput
from spaniel.models.hf import config_of, load_backbone, save_model
from spaniel.models.logprobs import values_for
from spaniel.models.reward import is_reward_model, load_reward_model

_HEAD_FILE = "value_head.safetensors"


class ValueModel(nn.Module):
    """A critic: V(state) = w . h(state) + b, on its own copy of the policy's backbone.

    A new head starts at zero, so that the first values are 0 rather than noise and the first advantages are
    those of the rewards alone.
    """

    def __init__(self, backbone: nn.Module) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = nn.Linear(config_of(backbone).hidden_size, 1)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    @property
    def config(self) -> object:
        return self.backbone.config

    def forward(self, tokens: Tensor) -> Tensor:
        """Values f32[B, T], aligned with the tokens (see `models/logprobs.py`)."""
        return values_for(self.backbone, self.head, tokens)


def new_value_model(folder: str | Path) -> ValueModel:
    """A value model on the backbone in `folder`: with a fresh head, or, where the folder holds a reward model, with
    that one's (the mean of its heads, less their offset, over their scale), as in InstructGPT."""
    if not is_reward_model(folder):
        return ValueModel(load_backbone(folder)).eval()
    judge = load_reward_model(folder)
    model = ValueModel(judge.backbone)
    weight, bias = judge.as_one_unit()
    with torch.no_grad():
        model.head.weight.copy_(weight)
        model.head.bias.copy_(bias)
    return model.eval()


def save_value_model(model: nn.Module, folder: Path) -> None:
    """The backbone as a Hugging Face folder, the head beside it."""
    assert isinstance(model, ValueModel)
    save_model(model.backbone, folder)
    save_file({k: v.contiguous() for k, v in model.head.state_dict().items()}, str(Path(folder) / _HEAD_FILE))


def load_value_model(folder: str | Path) -> ValueModel:
    """The value model that `save_value_model` wrote; a folder without a head is refused, not given a new one."""
    path = Path(folder) / _HEAD_FILE
    if not path.is_file():
        raise BadInput(f"value model {folder}: holds no {_HEAD_FILE}; expected a folder saved by Spaniel")
    model = ValueModel(load_backbone(folder))
    with torch.no_grad():
        model.head.load_state_dict(load_file(str(path)))
    return model.eval()
