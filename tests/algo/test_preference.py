"""Losses and agreement on rankings: by hand, in float64, and as identities."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from spaniel.algo import agreement, preference

numbers = st.floats(-6, 6, allow_nan=False).map(lambda x: round(x, 3))
ranked = st.lists(st.lists(st.tuples(numbers, st.integers(0, 3)), min_size=1, max_size=5), min_size=1, max_size=4)


def tensors(rows: list) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    flat = [(score, number, rank) for number, group in enumerate(rows) for score, rank in group]
    scores, rankings, ranks = zip(*flat, strict=True)
    return torch.tensor(scores), torch.tensor(rankings), torch.tensor(ranks)


def pairs(rows: list) -> list[tuple[float, float]]:
    """(winner's score, loser's score) of every pair, by plain loops."""
    return [(a[0], b[0]) for group in rows for a, b in itertools.permutations(group, 2) if a[1] < b[1]]


@given(ranked)
def test_pairs_and_accuracy_are_those_of_plain_loops(rows: list) -> None:
    scores, rankings, ranks = tensors(rows)
    winners, losers = preference.pairs_of(rankings, ranks)
    expected = [(torch.tensor(a).item(), torch.tensor(b).item()) for a, b in pairs(rows)]
    assert sorted(zip(scores[winners].tolist(), scores[losers].tolist(), strict=True)) == sorted(expected)
    hits = [1.0 if a > b else 0.5 if a == b else 0.0 for a, b in expected]
    mean = sum(hits) / len(hits) if hits else 0.0
    assert agreement.accuracy(scores, rankings, ranks) == pytest.approx(mean)
    turned = agreement.accuracy(-scores, rankings, ranks)
    assert turned == pytest.approx(1 - mean if hits else 0.0)


@given(ranked, st.sampled_from([0.0, 0.7]), st.sampled_from([0.0, 0.2]))
def test_bradley_terry_is_the_log_likelihood_of_the_pairs(rows: list, margin: float, smoothing: float) -> None:
    found = pairs(rows)
    loss = preference.bradley_terry(
        torch.tensor([a for a, _ in found]), torch.tensor([b for _, b in found]), margin, smoothing
    )
    terms = []
    for a, b in found:
        p = 1 / (1 + math.exp(-(a - b - margin)))
        terms.append(-(1 - smoothing) * math.log(p) - smoothing * math.log1p(-p))
    assert float(loss) == pytest.approx(sum(terms) / len(terms) if terms else 0.0, abs=1e-4)


def test_plackett_luce_by_hand() -> None:
    """Order 1, 2, 0 of scores 0, 2, 1: (e2 / (e2+e1+e0)) (e1 / (e1+e0))."""
    e0, e1, e2 = 1.0, math.e, math.e**2
    expected = -math.log(e2 / (e0 + e1 + e2)) - math.log(e1 / (e0 + e1))
    rows = preference.plackett_luce_per_row(torch.tensor([0.0, 2.0, 1.0]), torch.zeros(3), torch.tensor([2, 0, 1]))
    assert float(rows.sum()) == pytest.approx(expected, abs=1e-6)
    tied = preference.plackett_luce_per_row(torch.tensor([0.0, 1.0, 3.0]), torch.zeros(3), torch.tensor([0, 0, 1]))
    whole = 1 + math.e + math.e**3
    assert tied.tolist() == pytest.approx([math.log(whole), math.log(whole / math.e), 0.0], abs=1e-6)


@given(st.lists(numbers, min_size=2, max_size=5), st.randoms(use_true_random=False))
def test_plackett_luce_per_row_adds_up_to_the_whole_and_to_bradley_terry_for_two(scores: list, random: object) -> None:
    order = list(range(len(scores)))
    random.shuffle(order)  # type: ignore[attr-defined]
    ranks = torch.tensor([order.index(i) for i in range(len(order))])
    own = torch.tensor(scores)
    per_row = preference.plackett_luce_per_row(own, torch.zeros(len(scores)), ranks)
    assert float(per_row.sum()) == pytest.approx(float(preference.plackett_luce(own, torch.tensor(order))), abs=1e-4)
    if len(scores) == 2:
        loss = preference.bradley_terry(own[order[:1]], own[order[1:]])
        assert float(per_row.sum()) == pytest.approx(float(loss), abs=1e-5)


def test_accuracy_interval_by_hand() -> None:
    """Two rankings of 1 and 3 pairs, of which 1 and 0 are right: p = 1/4; residuals 3/4 and -3/4."""
    scores = torch.tensor([1.0, 0.0, 0.0, 1.0, 2.0])
    rankings, ranks = torch.tensor([0, 0, 1, 1, 1]), torch.tensor([0, 1, 0, 1, 2])
    assert agreement.accuracy(scores, rankings, ranks) == 0.25
    expected = 1.96 * math.sqrt(2 / 1 * (0.75**2 + 0.75**2)) / 4
    assert agreement.accuracy_interval(scores, rankings, ranks) == pytest.approx(expected)
    assert agreement.accuracy_interval(scores[:2], rankings[:2], ranks[:2]) == 0.0


def test_the_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    generator = torch.Generator().manual_seed(1)
    inside = 0
    for _ in range(300):
        scores = torch.randn(60, 4, generator=generator)
        noise = torch.randn(60, 4, generator=generator)
        ranks = (-(scores + noise)).argsort(dim=1).argsort(dim=1)
        rankings = torch.arange(60).repeat_interleave(4)
        p = agreement.accuracy(scores.flatten(), rankings, ranks.flatten())
        half = agreement.accuracy_interval(scores.flatten(), rankings, ranks.flatten())
        inside += abs(p - 0.75) <= half  # P(sign(x) = sign(x + y)) for equal variances is 3/4
    assert 0.91 <= inside / 300 <= 0.985


def test_the_ceiling_is_what_the_true_score_reaches() -> None:
    gaps = torch.tensor([0.0, 1.0, -2.0])
    expected = (0.5 + 1 / (1 + math.exp(-2)) + 1 / (1 + math.exp(-4))) / 3
    assert agreement.noise_ceiling(gaps, 2.0) == pytest.approx(expected)


def test_calibration_by_hand() -> None:
    """Two pairs of confidence sigmoid(2) = 0.881, one right: error |1/2 - 0.881|."""
    scores = torch.tensor([2.0, 0.0, 0.0, 2.0])
    error, bins = agreement.calibration(scores, torch.tensor([0, 0, 1, 1]), torch.tensor([0, 1, 0, 1]))
    p = 1 / (1 + math.exp(-2))
    assert error == pytest.approx(p - 0.5)
    assert len(bins) == 1
    assert bins[0][0] == 2


def test_a_calibrated_model_has_no_error() -> None:
    generator = torch.Generator().manual_seed(2)
    scores = 2 * torch.randn(4000, 2, generator=generator)
    first = torch.rand(4000, generator=generator) < torch.sigmoid(scores[:, 0] - scores[:, 1])
    ranks = torch.stack([~first, first], dim=1).long().flatten()
    rankings = torch.arange(4000).repeat_interleave(2)
    assert agreement.calibration(scores.flatten(), rankings, ranks)[0] < 0.025
    assert agreement.calibration(5 * scores.flatten(), rankings, ranks)[0] > 0.08


def test_spearman_by_hand() -> None:
    """Order 0 1 2 3 against scores that exchange the middle two: 1 - 6 * 2 / (4 * 15) = 0.8."""
    scores, ranks = torch.tensor([9.0, 5.0, 7.0, 1.0]), torch.tensor([0, 1, 2, 3])
    assert agreement.spearman(scores, torch.zeros(4), ranks) == pytest.approx(0.8)
    both = torch.cat([scores, -scores, torch.ones(4)])
    rankings = torch.tensor([0] * 4 + [1] * 4 + [2] * 4)  # the last has no order of its own and is left out
    assert agreement.spearman(both, rankings, ranks.repeat(3)) == pytest.approx(0.0, abs=1e-9)
    tied = agreement.spearman(torch.tensor([3.0, 1.0, 1.0]), torch.zeros(3), torch.tensor([0, 1, 2]))
    assert tied == pytest.approx(1.5 / math.sqrt(1.5 * 2.0))


def test_length_bias_by_hand() -> None:
    scores, ranks = torch.tensor([3.0, 1.0, 1.0, 2.0]), torch.tensor([0, 1, 0, 1])
    found = agreement.length_bias(scores, torch.tensor([0, 0, 1, 1]), ranks, torch.tensor([9, 4, 5, 6]))
    assert found["length_accuracy"] == 0.5
    assert (found["accuracy_longer_better"], found["accuracy_shorter_better"]) == (1.0, 0.0)
    expected = agreement.correlation(scores, torch.tensor([9.0, 4.0, 5.0, 6.0]))
    assert found["length_correlation"] == pytest.approx(expected)
    assert agreement.correlation(torch.tensor([1.0, 2.0]), torch.tensor([5.0, 3.0])) == pytest.approx(-1.0)
    assert math.isnan(agreement.correlation(torch.ones(3), torch.arange(3)))
