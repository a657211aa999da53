"""How well scores agree with rankings: accuracy and its interval, the ceiling, calibration, correlation, length.

Rows: B responses; `rankings` i64[B] numbers the ranking of each, `ranks` i64[B] its place in it (0 best, equal:
tied), `scores` f32[B] what a model gave it. Pairs: `winners` and `losers` i64[P] (`preference.pairs_of`).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from spaniel.algo.preference import pairs_of


def right(scores: Tensor, winners: Tensor, losers: Tensor) -> Tensor:
    """f64[P]: 1 where the winner scores higher, 1/2 where both score the same, 0 elsewhere."""
    gap = scores[winners].double() - scores[losers].double()
    return (gap > 0).double() + 0.5 * (gap == 0).double()


def accuracy(scores: Tensor, rankings: Tensor, ranks: Tensor) -> float:
    """Share of pairs that the scores order as the ranking does, a tie of scores counting 1/2; 0 without pairs."""
    hits = right(scores, *pairs_of(rankings, ranks))
    return float(hits.mean()) if len(hits) else 0.0


def accuracy_interval(scores: Tensor, rankings: Tensor, ranks: Tensor) -> float:
    """Half the width of the 95 % interval of `accuracy`, with rankings, not pairs, as the independent units.

    1.96 sqrt(G / (G-1) sum_g (c_g - p n_g)^2) / sum_g n_g over the G rankings with pairs, c_g of n_g right (the
    linearised variance of a ratio of sums; Cochran 1977, section 2.11). 0 for fewer than two.
    """
    winners, losers = pairs_of(rankings, ranks)
    hits = right(scores, winners, losers)
    _, slot = torch.unique(rankings[winners], return_inverse=True)
    count = int(slot.max()) + 1 if len(slot) else 0
    if count < 2:
        return 0.0
    pairs = torch.zeros(count, dtype=torch.float64).index_add(0, slot, torch.ones_like(hits))
    rights = torch.zeros(count, dtype=torch.float64).index_add(0, slot, hits)
    spread = (rights - hits.mean() * pairs).square().sum() * count / (count - 1)
    return float(1.96 * spread.sqrt() / pairs.sum())


def noise_ceiling(gaps: Tensor, kappa: float) -> float:
    """The best possible expected accuracy where a labeler prefers the first with p = sigmoid(kappa gap):
    mean of max(p, 1 - p); `gaps` f32[P] are differences of the labeler's own (gold) scores."""
    p = torch.sigmoid(kappa * gaps.double())
    return float(torch.maximum(p, 1 - p).mean()) if len(p) else 0.0


def calibration(scores: Tensor, rankings: Tensor, ranks: Tensor, bins: int = 10) -> tuple[float, list[tuple]]:
    """(expected calibration error, reliability bins).

    A pair's confidence is sigmoid(|r_i - r_j|), from 1/2 to 1; bins of equal width give (pairs, mean confidence,
    share right), those without a pair left out. The error is the mean over pairs of |share right - confidence| of
    the pair's bin (Guo et al. 2017, arXiv:1706.04599).
    """
    winners, losers = pairs_of(rankings, ranks)
    if not len(winners):
        return 0.0, []
    confidence = torch.sigmoid((scores[winners].double() - scores[losers].double()).abs())
    hits = right(scores, winners, losers)
    slot = ((confidence - 0.5) * 2 * bins).long().clamp(max=bins - 1)
    out, error = [], 0.0
    for number in range(bins):
        inside = slot == number
        if count := int(inside.sum()):
            sure, share = float(confidence[inside].mean()), float(hits[inside].mean())
            out.append((count, sure, share))
            error += count / len(hits) * abs(share - sure)
    return error, out


def spearman(scores: Tensor, rankings: Tensor, ranks: Tensor) -> float:
    """Mean over rankings of Spearman's rank correlation of the scores with the order (ties get their mean rank);
    rankings in which either side is all tied have none and are left out."""
    found = []
    for ranking in rankings.unique():
        inside = rankings == ranking
        own = correlation(_mean_ranks(scores[inside].double()), _mean_ranks(-ranks[inside].double()))
        if not math.isnan(own):
            found.append(own)
    return sum(found) / len(found) if found else 0.0


def correlation(x: Tensor, y: Tensor) -> float:
    """Pearson's correlation; NaN where one of the two does not vary."""
    x, y = x.double() - x.double().mean(), y.double() - y.double().mean()
    scale = x.square().sum().sqrt() * y.square().sum().sqrt()
    return float((x * y).sum() / scale) if scale > 0 else math.nan


def length_bias(scores: Tensor, rankings: Tensor, ranks: Tensor, lengths: Tensor) -> dict[str, float]:
    """Whether scores follow length: `length_accuracy` of always taking the longer response, the correlation of score
    with length, and the accuracy where the longer and where the shorter response is the better one."""
    winners, losers = pairs_of(rankings, ranks)
    hits = right(scores, winners, losers)
    longer, shorter = lengths[winners] > lengths[losers], lengths[winners] < lengths[losers]
    related = correlation(scores, lengths) if len(scores) else math.nan
    return {
        "length_accuracy": accuracy(lengths.double(), rankings, ranks),
        "length_correlation": 0.0 if math.isnan(related) else related,
        "accuracy_longer_better": float(hits[longer].mean()) if longer.any() else 0.0,
        "accuracy_shorter_better": float(hits[shorter].mean()) if shorter.any() else 0.0,
    }


def _mean_ranks(values: Tensor) -> Tensor:
    """Ranks from 0 for the lowest; equal values share the mean of their ranks."""
    below = (values[:, None] > values).sum(dim=1)
    same = (values[:, None] == values).sum(dim=1)
    return below + (same - 1) / 2
