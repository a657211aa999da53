"""Reward models from rankings: the loop and the evaluation."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from spaniel.algo import agreement, preference
from spaniel.data.collate import collate_rankings
from spaniel.data.preferences import Rendered
from spaniel.data.prompts import PromptStream
from spaniel.errors import BadInput
from spaniel.train.clock import Clock
from spaniel.types import Metrics, Ranked
from spaniel.workers.scoring import RewardLearner


@dataclass(frozen=True)
class Preference:
    """The loss of a reward model.

    bradley_terry: the pairs of each ranking; plackett_luce: the whole order at once. `average` says what weighs
    equally: each ranking (as in InstructGPT) or each pair. Margins are the data's own (Llama 2's are such).
    """

    name: Literal["bradley_terry", "plackett_luce"] = "bradley_terry"
    average: Literal["ranking", "pair"] = "ranking"
    label_smoothing: float = 0.0
    center: float = 0.0
    """Weight of the mean squared score, which keeps scores near 0 (Eisenstein et al. 2023, arXiv:2312.09244)."""

    def __post_init__(self) -> None:
        if not 0 <= self.label_smoothing < 0.5:
            raise BadInput(f"loss.label_smoothing: {self.label_smoothing}; expected a number from 0 to below 0.5")
        if self.center < 0:
            raise BadInput(f"loss.center: {self.center}; expected a number of at least 0")
        if self.name == "plackett_luce" and (self.label_smoothing or self.average == "pair"):
            raise BadInput(
                f"loss: label_smoothing {self.label_smoothing} and average {self.average} are not read by "
                "plackett_luce; expected 0 and ranking"
            )

    def __call__(self, scores: Tensor, batch: Ranked) -> Tensor:
        """This piece's share of the loss: `batch.weights` hold each ranking's share of it, so shares add up."""
        per_head = [self._one(scores[:, head], batch, batch.weights[:, head]) for head in range(scores.shape[1])]
        return torch.stack(per_head).sum()

    def _one(self, scores: Tensor, batch: Ranked, weights: Tensor) -> Tensor:
        responses = torch.bincount(batch.rankings)[batch.rankings]
        held = self.center * (weights / responses * scores.square()).sum()
        if self.name == "plackett_luce":
            return held + (weights * preference.plackett_luce_per_row(scores, batch.rankings, batch.ranks)).sum()
        winners, losers = preference.pairs_of(batch.rankings, batch.ranks)
        loss = preference.bradley_terry_per_pair(
            scores[winners], scores[losers], batch.margins[winners], self.label_smoothing
        )
        share = weights[winners]
        if self.average == "ranking":
            pairs = torch.bincount(batch.rankings[winners], minlength=int(batch.rankings.max()) + 1)
            share = share / pairs[batch.rankings[winners]]
        return held + (share * loss).double().sum().float()  # its last bit does not vary with the place in memory


@dataclass(frozen=True)
class Judging:
    """A finished step."""

    step: int
    metrics: Metrics


@dataclass(frozen=True)
class Training:
    """What `fit` needs."""

    learner: RewardLearner
    stream: PromptStream[Rendered]
    loss: Preference
    pad_id: int
    seed: int
    subsample: float = 1.0
    """The share of the rankings that each head of an ensemble sees."""


def fit(
    parts: Training,
    start: int,
    steps: int,
    save: Callable[[int], None],
    validate: Callable[[], Metrics],
    due: Callable[[int], tuple[bool, bool]],
) -> Iterator[Judging]:
    """Steps `start` .. `steps`-1; `due(step)` says (validate, save) after `step` finished steps."""
    clock = Clock()
    for step in range(start, steps):
        items = parts.stream.batch(step)
        batch = collate_rankings(items, weights_of(parts, items), parts.pad_id)
        with clock.stage("update"):
            learned = parts.learner.learn(batch, parts.loss)
        metrics: Metrics = {"step": float(step + 1), "epoch": float(parts.stream.epoch(step))}
        metrics |= {name: tally.mean for name, tally in learned.items()}
        metrics |= {"rm/responses": float(len(batch)), "rm/tokens": float(batch.lengths.sum())}
        metrics |= {f"timing_s/{name}": value for name, value in clock.take().items()}
        validate_now, save_now = due(step + 1)
        if validate_now:
            metrics |= validate()
        if save_now:
            save(step + 1)
        yield Judging(step + 1, metrics)


def weights_of(parts: Training, items: Sequence[Rendered]) -> Tensor:
    """f32[R, n]: what each ranking weighs in each head's loss, summing to 1 over the update and the heads.

    By its own weight; with `average` pair also by its number of pairs. Which rankings a head sees depends on the
    ranking and the head alone, so it is the same in every epoch and after a resume.
    """
    heads = parts.learner.model.heads
    weight = torch.tensor([item.ranking.weight for item in items], dtype=torch.float64)
    if parts.loss.average == "pair":
        pairs = torch.tensor([len(item.ranking.pairs) for item in items], dtype=torch.float64)
        total = (weight * pairs).sum()
    else:
        total = weight.sum()
    seen = torch.ones(len(items), heads, dtype=torch.float64)
    if parts.subsample < 1 and heads > 1:
        drawn = [[random.Random(f"{parts.seed} {head} {item.ranking.id}").random() for head in range(heads)]
                 for item in items]  # fmt: skip
        seen = (torch.tensor(drawn, dtype=torch.float64) < parts.subsample).double() / parts.subsample
    return (weight[:, None] * seen / (total * heads)).float()


def score_items(
    score: Callable[[Sequence[Sequence[int]]], Tensor], items: Sequence[Rendered]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(raw scores f32[B, n], rankings, ranks, lengths i64[B]) of every response of every ranking."""
    found = score([ids for item in items for ids in item.tokens])
    rankings = torch.tensor([number for number, item in enumerate(items) for _ in item.tokens])
    ranks = torch.tensor([rank for item in items for rank in item.ranking.ranks])
    lengths = torch.tensor([len(ids) for item in items for ids in item.tokens])
    return found, rankings, ranks, lengths


def evaluate_rankings(learner: RewardLearner, items: Sequence[Rendered], prefix: str = "val") -> Metrics:
    """Agreement of the model with the rankings, every ranking once: accuracy with its 95 % interval and, where the data
    says it, the ceiling; rank correlation, length bias, accuracy per source, all of the combined score; loss and
    calibration of the raw one (the mean of the heads), whose differences are the log-odds that were learned."""
    raw, rankings, ranks, lengths = score_items(learner.scores, items)
    scores, logits = learner.model.combined(raw), raw.mean(dim=1)
    winners, losers = preference.pairs_of(rankings, ranks)
    error, _ = agreement.calibration(logits, rankings, ranks)
    out: Metrics = {
        "accuracy": agreement.accuracy(scores, rankings, ranks),
        "accuracy_ci95": agreement.accuracy_interval(scores, rankings, ranks),
        "loss": float(preference.bradley_terry(logits[winners], logits[losers])),
        "spearman": agreement.spearman(scores, rankings, ranks),
        "calibration_error": error,
        "rankings": float(len(items)),
        "pairs": float(len(winners)),
        **agreement.length_bias(scores, rankings, ranks, lengths),
    }
    known = [(item.ranking.ceiling, len(item.ranking.pairs)) for item in items if item.ranking.ceiling is not None]
    if known:
        out["ceiling"] = sum(c * n for c, n in known) / max(1, sum(n for _, n in known))
    sources = sorted({item.ranking.source for item in items if item.ranking.source})
    for source in sources if len(sources) > 1 else []:
        rows = torch.tensor([items[int(number)].ranking.source == source for number in rankings])
        out[f"accuracy/{source}"] = agreement.accuracy(scores[rows], rankings[rows], ranks[rows])
    return {f"{prefix}/{name}": value for name, value in out.items()}


def reference_sample(items: Sequence[Rendered], at_most: int, seed: int) -> list[tuple[int, ...]]:
    """At most so many of the responses, drawn by `seed`: those on which the reward is made 0 on average."""
    every = [ids for item in items for ids in item.tokens]
    return every if len(every) <= at_most else random.Random(f"{seed} reference").sample(every, at_most)
