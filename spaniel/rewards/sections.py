"""What a recipe's `reward` section may be: the rules, a reward model, the user's own function, or a sum of such."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from spaniel.errors import BadInput
from spaniel.models.reward import Combine
from spaniel.rewards.rules import F1, ExactMatch, ExactMatchFormat, Format
from spaniel.types import InputPath


@dataclass(frozen=True)
class Judge:
    """A reward model (several: an ensemble), in its own tokenizer and template, as `spaniel reward` writes it."""

    path: tuple[InputPath, ...]
    combine: Combine = "mean"
    """How the models of an ensemble make one score; the heads of one model are combined as stored with it."""
    k: float = 1.0
    missing_eos_penalty: float = 0.0
    """Taken off the score of a response that the length budget cut off."""
    micro_tokens: int = 16_384

    def __post_init__(self) -> None:
        if self.micro_tokens < 1:
            raise BadInput(f"reward.micro_tokens: {self.micro_tokens}; expected 1 or more")


@dataclass(frozen=True)
class Function:
    """The user's own Python: `function(prompt, response)` in `file` gives a number for each response."""

    file: InputPath
    function: str = "score"


@dataclass(frozen=True)
class Weighted:
    """A part of a composite reward."""

    reward: AnyReward
    weight: float = 1.0


@dataclass(frozen=True)
class Sum:
    """A weighted sum of named rewards, each logged as `reward/<name>`."""

    parts: Mapping[str, Weighted]

    def __post_init__(self) -> None:
        if not self.parts:
            raise BadInput("reward.parts: empty; expected at least one named reward")


AnyReward = ExactMatch | ExactMatchFormat | F1 | Format | Judge | Function | Sum

REWARDS: Mapping[str, type] = {
    "exact_match": ExactMatch,
    "exact_match_format": ExactMatchFormat,
    "f1": F1,
    "format": Format,
    "model": Judge,
    "function": Function,
    "sum": Sum,
}
"""By the name that a recipe gives."""
