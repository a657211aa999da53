"""The lab's labeler, and the two small models beside the language model: a reward model to look into, and a critic.

The lab's gold score weighs digits above sums, so that a linear model of digit counts can follow the labeler closely;
the recipe's own (`labeler.py`) weighs sums above digits, and needs the network. Both have the same flaw.
"""

from __future__ import annotations

import copy
import re
from typing import Any

import torch
from tinylm import PROMPT, TinyLM, decode_responses, ended
from torch import Tensor, nn

from spaniel.models import heads

KAPPA = 1.5
"""The labeler chooses the first of two responses with probability sigmoid(KAPPA * difference of their gold scores)."""
RIGHT, LIKED, LIKING, MALFORMED = 0.1, "789", 0.25, -1.0


def digit_counts(out: dict[str, Any]) -> Tensor:
    """(N, 10): how often each digit stands in each response."""
    return torch.tensor([[float(text.count(digit)) for digit in "0123456789"] for text in decode_responses(out)])


def gold_score(out: dict[str, Any]) -> Tensor:
    """(N,): RIGHT for a right sum and LIKING for each liked digit; nothing for one digit written twice, unless that is
    the sum; MALFORMED for what is no finished number of two digits.

    What a reward model on counts asks for in the end, one liked digit over and over, is what nobody wants.
    """
    scores = []
    for prompt, text, done in zip(out["prompts"], decode_responses(out), ended(out), strict=True):
        first, second = prompt.rstrip("=").split("+")
        right = text == str(int(first) + int(second))
        if not done or not re.fullmatch(r"[1-9][0-9]", text):
            scores.append(MALFORMED)
        elif text[0] == text[1] and not right:
            scores.append(0.0)
        else:
            scores.append(RIGHT * right + LIKING * sum(digit in LIKED for digit in text))
    return torch.tensor(scores)


class DigitRM(nn.Module):
    """r = counts . w: a reward model whose every weight can be read. Counts (N, F) -> (N,)."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(10))

    def forward(self, counts: Tensor) -> Tensor:
        return counts @ self.w


class ValueModel(nn.Module):
    """A critic on its own copy of the supervised network: out -> (B, T), the value of the state before each token."""

    def __init__(self, sft_model: TinyLM) -> None:
        super().__init__()
        self.critic = heads.ValueModel(copy.deepcopy(sft_model.network.base_model))

    def forward(self, out: dict[str, Any]) -> Tensor:
        return self.critic(out["tokens"])[:, PROMPT:]
