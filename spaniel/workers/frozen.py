"""One process's share of a model that does not learn (the reference policy)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from spaniel.types import Batch
from spaniel.workers.learner import Outputs, infer


class Frozen:
    """A model that is only read."""

    def __init__(self, model: nn.Module, outputs: Outputs, micro_tokens: int) -> None:
        self.model = model.requires_grad_(False).eval()
        self.outputs = outputs
        self.micro_tokens = micro_tokens

    @torch.no_grad()
    def infer(self, batch: Batch) -> Tensor:
        """The first output (log-probabilities), f32[B, T]."""
        return infer(self.model, self.outputs, batch, self.micro_tokens)
