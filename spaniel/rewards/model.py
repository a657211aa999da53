"""A reward model as the judge: alone, as an ensemble, or as a part of a sum with rules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from spaniel.data.template import Template
from spaniel.models.reward import Combine, combine
from spaniel.rewards.base import Transcript
from spaniel.types import Failure, Message, Score, Stop


@dataclass(frozen=True)
class Judging:
    """One trained model with its own template. `score` gives ids -> one normalised score each, f32[N]."""

    template: Template
    score: Callable[[Sequence[Sequence[int]]], Tensor]
    context: int | None = None
    """The longest sequence that the model was made for."""


@dataclass(frozen=True)
class ModelReward:
    """The combined score of the models for prompt and response.

    Text is exchanged, not ids: each model reads the response in its own tokenizer and template, which may differ from
    the policy's. In an episode of several turns it reads all that follows the prompt. A response that is too long for
    a model is a `Failure`, not a low score.
    """

    models: tuple[Judging, ...]
    how: Combine = "mean"
    k: float = 1.0
    missing_eos_penalty: float = 0.0

    def __call__(self, transcripts: Sequence[Transcript]) -> list[Score | Failure]:
        texts = [(t.rollout.prompt.messages, "".join(text for _, text in t.response)) for t in transcripts]
        columns = [scored(model, texts) for model in self.models]
        out: list[Score | Failure] = []
        for row, transcript in enumerate(transcripts):
            found = [column[row] for column in columns]
            failed = [x for x in found if isinstance(x, Failure)]
            out.append(failed[0] if failed else self._score([x for x in found if isinstance(x, float)], transcript))
        return out

    def _score(self, members: list[float], transcript: Transcript) -> Score:
        value = float(combine(torch.tensor([members], dtype=torch.float64), self.how, self.k))
        parts = {"model": value}
        if len(members) > 1:
            parts["model/std"] = float(torch.tensor(members, dtype=torch.float64).std())
        if self.missing_eos_penalty:
            cut = float(transcript.rollout.stop is Stop.OUT_OF_LENGTH)
            parts["missing_eos"] = cut
            value -= self.missing_eos_penalty * cut
        return Score(value, parts)


def scored(model: Judging, texts: Sequence[tuple[Sequence[Message], str]]) -> list[float | Failure]:
    """The model's score of each (prompt, response)."""
    ids = [model.template.judged(messages, response) for messages, response in texts]
    fits = [i for i, one in enumerate(ids) if model.context is None or len(one) <= model.context]
    values = dict(zip(fits, model.score([ids[i] for i in fits]).tolist(), strict=True)) if fits else {}
    return [
        values[i]
        if i in values
        else Failure("reward", f"the response has {len(one)} tokens with its prompt; the reward model takes "
                     f"{model.context}")
        for i, one in enumerate(ids)
    ]  # fmt: skip


@dataclass(frozen=True)
class Measured:
    """`reward`, with the value of `gold` beside it in the parts (`gold`, `gold/<part>`): measured, never learned from.

    Where the gold scorer fails, its value is missing and `gold_failed` is 1; the rollout keeps its score.
    """

    reward: Callable[[Sequence[Transcript]], list[Score | Failure]]
    gold: Callable[[Sequence[Transcript]], list[Score | Failure]]

    def __call__(self, transcripts: Sequence[Transcript]) -> list[Score | Failure]:
        pairs = zip(self.reward(transcripts), self.gold(transcripts), strict=True)
        return [_beside(score, gold) if isinstance(score, Score) else score for score, gold in pairs]


def _beside(score: Score, gold: Score | Failure) -> Score:
    if isinstance(gold, Failure):
        return Score(score.value, {**score.parts, "gold_failed": 1.0})
    named = {f"gold/{name}": value for name, value in gold.parts.items()}
    return Score(score.value, {**score.parts, "gold": gold.value, "gold_failed": 0.0, **named})
