"""What the recipe of a reward model holds: the sections and their defaults."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from spaniel.errors import BadInput
from spaniel.models.reward import Combine
from spaniel.recipe import Tracker, check_run
from spaniel.train.reward_model import Preference
from spaniel.types import InputPath
from spaniel.workers.optim import Optim


@dataclass(frozen=True)
class Backbone:
    """The network of a reward model: a Hugging Face folder, with fresh scalar heads."""

    path: InputPath
    layers: int | None = None
    """Keep only the first so many layers."""
    freeze: bool = False
    """Learn the heads only; what they read of each response is computed once."""
    heads: int = 1
    """An ensemble on one backbone."""
    combine: Combine = "mean"
    k: float = 1.0
    """For mean_minus_std: the number of standard deviations."""
    subsample: float = 1.0
    """The share of the rankings that each of several heads sees."""

    def __post_init__(self) -> None:
        if self.heads < 1:
            raise BadInput(f"model.heads: {self.heads}; expected 1 or more")
        if not 0 < self.subsample <= 1:
            raise BadInput(f"model.subsample: {self.subsample}; expected a number above 0, at most 1")
        if self.heads == 1 and (self.combine != "mean" or self.subsample < 1):
            raise BadInput(f"model: combine {self.combine}, subsample {self.subsample} with one head; expected "
                           "heads above 1 for an ensemble")  # fmt: skip


@dataclass(frozen=True)
class Rankings:
    """Human (or other) preferences; see `data/rankings.py` for the formats."""

    train: tuple[InputPath, ...]
    validation: tuple[InputPath, ...] = ()
    held_out: float = 0.1
    """The share of the training prompts that validates where `validation` is empty; 0: none."""
    test: Mapping[str, tuple[InputPath, ...]] = field(default_factory=dict)
    """Named sets on which the finished model is evaluated."""
    batch_size: int = 16
    """Rankings (not responses) per step."""
    max_length: int = 1024
    """Tokens of prompt and response together."""
    too_long: Literal["error", "skip", "truncate"] = "error"
    bad_rows: Literal["error", "skip"] = "error"

    def __post_init__(self) -> None:
        if not 0 <= self.held_out < 1:
            raise BadInput(f"data.held_out: {self.held_out}; expected a number from 0 to below 1")
        if self.max_length < 2:
            raise BadInput(f"data.max_length: {self.max_length}; expected 2 or more")


@dataclass(frozen=True)
class Normalise:
    """What makes the scores comparable; stored with the model."""

    to: Literal["none", "offset", "offset_and_scale"] = "offset"
    """offset: 0 on average over the reference responses; scale: their standard deviation becomes 1."""
    reference: tuple[InputPath, ...] = ()
    """Rows with `prompt` and `responses` of the policy that will be trained; empty: the training responses."""
    responses: int = 1024
    """At most so many of them."""

    def __post_init__(self) -> None:
        if self.responses < 2:
            raise BadInput(f"normalise.responses: {self.responses}; expected 2 or more")


@dataclass(frozen=True)
class RewardRecipe:
    """A reward model from rankings."""

    out: str
    steps: int
    model: Backbone
    data: Rankings
    loss: Preference = field(default_factory=Preference)
    optim: Optim = field(default_factory=lambda: Optim(lr=1e-5))
    micro_tokens: int = 16_384
    """Padded tokens in one forward pass (memory only; a ranking is never split)."""
    normalise: Normalise = field(default_factory=Normalise)
    seed: int = 1
    eval_every: int = 20
    save_every: int = 0
    track: tuple[Tracker, ...] = ("console", "jsonl")
    threads: int = 1

    def __post_init__(self) -> None:
        check_run(self.seed, self.steps, self.eval_every, self.save_every, self.threads)
        if self.micro_tokens < 1:
            raise BadInput(f"micro_tokens: {self.micro_tokens}; expected 1 or more")
