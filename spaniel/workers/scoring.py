"""One process's share of a reward model: scores in micro-batches, and learning from rankings."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from spaniel.algo import agreement, preference
from spaniel.data.collate import padded
from spaniel.models.reward import RewardModel
from spaniel.types import Ranked, Tallies, Tally, add_tallies
from spaniel.workers.optim import Optim, Stepper

RankingLoss = Callable[[Tensor, Ranked], Tensor]
"""(scores f32[B, n], rows) -> these rows' share of the loss, already divided by the global denominators."""


@torch.no_grad()
def scores(model: RewardModel, sequences: Sequence[Sequence[int]], micro_tokens: int) -> Tensor:
    """Raw scores f32[N, n] of sequences of ids, in order, at most `micro_tokens` padded tokens at a time.

    A score does not depend on what else is in the batch.
    """
    return _in_micro_batches(model, sequences, micro_tokens, model.heads)


def _in_micro_batches(
    run: Callable[[Tensor, Tensor], Tensor], sequences: Sequence[Sequence[int]], budget: int, width: int
) -> Tensor:
    out = torch.zeros(len(sequences), width)
    order = sorted(range(len(sequences)), key=lambda i: -len(sequences[i]))
    start = 0
    while start < len(order):
        rows = order[start : start + max(1, budget // len(sequences[order[start]]))]
        lengths = torch.tensor([len(sequences[i]) for i in rows])
        out[rows] = run(padded([sequences[i] for i in rows]), lengths).float()
        start += len(rows)
    return out


class RewardLearner:
    """A reward model with its optimizer, in evaluation mode (the scores learned are those that are given later).

    Each response goes through the network once, whatever the number of pairs it is in: the pairs of a ranking share
    its K forward passes. A ranking is never split over micro-batches. With `frozen` only the head learns, and what
    it reads of a sequence is computed once and kept.
    """

    def __init__(
        self, model: RewardModel, optim: Optim, micro_tokens: int, total_updates: int, *, frozen: bool = False
    ) -> None:
        self.model = model.eval()
        self.micro_tokens = micro_tokens
        self.frozen = frozen
        if frozen:
            model.backbone.requires_grad_(False)
        self.stepper = Stepper(model, optim, total_updates)
        self._features: dict[tuple[int, ...], Tensor] = {}

    def learn(self, batch: Ranked, loss: RankingLoss) -> Tallies:
        """One optimizer step on a batch of rankings."""
        self.stepper.clear()
        parts: list[Tallies] = []
        for rows in whole_rankings(batch, self.micro_tokens):
            piece = batch.take(rows)
            scored = self._forward(piece)
            share = loss(scored, piece)
            share.backward()
            parts.append({"rm/loss": Tally(share.item(), 0), **_diagnostics(scored.detach(), piece)})
        stats = add_tallies(parts)
        total = stats["rm/loss"].total
        return stats | {"rm/loss": Tally(total, 1)} | self.stepper.step("rm", total)

    def scores(self, sequences: Sequence[Sequence[int]]) -> Tensor:
        """Raw scores f32[N, n]."""
        if self.frozen:
            with torch.no_grad():
                return self.model.head(self._read(sequences)).float()
        return scores(self.model, sequences, self.micro_tokens)

    def _forward(self, piece: Ranked) -> Tensor:
        if not self.frozen:
            return self.model(piece.tokens, piece.lengths)
        rows = zip(piece.tokens.tolist(), piece.lengths.tolist(), strict=True)
        return self.model.head(self._read([ids[:length] for ids, length in rows])).float()

    @torch.no_grad()
    def _read(self, sequences: Sequence[Sequence[int]]) -> Tensor:
        """What the head reads, f32[N, H]; computed for those that have not been seen yet."""
        keys = [tuple(ids) for ids in sequences]
        new = list(dict.fromkeys(key for key in keys if key not in self._features))
        if new:
            found = _in_micro_batches(self.model.features, new, self.micro_tokens, self.model.head.in_features)
            self._features |= zip(new, found, strict=True)
        return torch.stack([self._features[key] for key in keys])

    def state(self) -> Mapping[str, Any]:
        """What a checkpoint holds beside the weights."""
        return self.stepper.state()

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue from `state()`."""
        self.stepper.load_state(state)


def whole_rankings(batch: Ranked, micro_tokens: int) -> Iterator[Tensor]:
    """Rows in parts of whole rankings of about equal length, each at most `micro_tokens` padded tokens (never less
    than one ranking)."""
    names, counts = torch.unique(batch.rankings, return_counts=True)
    members = {int(name): (batch.rankings == name).nonzero().flatten() for name in names}
    longest = {name: int(batch.lengths[rows].max()) for name, rows in members.items()}
    part: list[Tensor] = []
    width = 0
    for name in sorted(members, key=lambda n: -longest[n]):
        width = width or longest[name]
        if part and width * (sum(map(len, part)) + len(members[name])) > micro_tokens:
            yield torch.cat(part)
            part, width = [], longest[name]
        part.append(members[name])
    if part:
        yield torch.cat(part)


def _diagnostics(scored: Tensor, batch: Ranked) -> Tallies:
    """Accuracy and margin over pairs, score over responses, of the mean over the heads.

    Sums are exact: torch's depend, in the last bit, on where in memory the numbers lie, and a resumed run must say the
    same as one that was not interrupted.
    """
    mean = scored.mean(dim=1)
    winners, losers = preference.pairs_of(batch.rankings, batch.ranks)
    hits = agreement.right(mean, winners, losers)
    gap = mean[winners] - mean[losers]
    return {
        "rm/accuracy": Tally(float(hits.sum()), len(hits)),
        "rm/margin": Tally(math.fsum(gap.tolist()), len(hits)),
        "rm/score": Tally(math.fsum(mean.tolist()), len(mean)),
    }
