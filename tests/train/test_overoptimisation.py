"""Best-of-n's chances against enumeration; the verdict on runs whose course is known."""

from __future__ import annotations

import itertools
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spaniel.train.best_of_n import chances, kl_of, table
from spaniel.train.overoptimisation import Point, judge, points_of, smoothed, window_of
from spaniel.types import Prompt, Rollout, Sampled, Score, Stop


@given(st.lists(st.integers(0, 3), min_size=1, max_size=6), st.data())
def test_the_chance_of_being_the_best_is_that_of_all_subsets(scores: list[int], data: st.DataObject) -> None:
    n = data.draw(st.integers(1, len(scores)))
    expected = [0.0] * len(scores)
    subsets = list(itertools.combinations(range(len(scores)), n))
    for subset in subsets:
        best = [i for i in subset if scores[i] == max(scores[j] for j in subset)]
        for i in best:
            expected[i] += 1 / len(best) / len(subsets)
    # Equal scores share what they have together, so only their sum must agree.
    found = chances([float(s) for s in scores], n)
    for score in set(scores):
        same = [i for i, s in enumerate(scores) if s == score]
        assert sum(found[i] for i in same) == pytest.approx(sum(expected[i] for i in same))
    assert sum(found) == pytest.approx(1.0)


def test_bounds() -> None:
    assert kl_of(1) == 0.0
    assert kl_of(4) == pytest.approx(math.log(4) - 0.75)
    with pytest.raises(ValueError, match="expected 1 to 2"):
        chances([1.0, 2.0], 3)


def test_the_table_by_hand() -> None:
    prompt = Prompt("p", ({"role": "user", "content": "q"},), ())

    def one(score: float, gold: float, length: int) -> Rollout:
        span = Sampled((1,) * length, (0.0,) * length, 0, "stop")
        return Rollout(prompt, 0, (span,), Stop.ANSWERED, score=Score(score, {"gold": gold}))

    first, second = table([[one(1.0, 5.0, 2), one(3.0, 1.0, 4)]])
    assert (first.n, first.proxy, first.gold, first.length) == (1, 2.0, 3.0, 3.0)
    assert (second.n, second.proxy, second.gold, second.length) == (2, 3.0, 1.0, 4.0)


def run(gold: list[float], proxy: list[float]) -> list[Point]:
    return [Point(i + 1, p, g, 0.1 * i, 3.0) for i, (p, g) in enumerate(zip(proxy, gold, strict=True))]


def test_a_gold_score_that_falls_is_found_where_it_turns() -> None:
    noise = random.Random(1)
    gold = [1 - abs(i - 40) / 40 + noise.gauss(0, 0.02) for i in range(100)]
    verdict = judge(run(gold, [i / 100 for i in range(100)]))
    assert verdict is not None
    assert verdict.over_optimised
    assert verdict.turn is not None
    assert abs(verdict.turn.step - 41) <= 5
    assert verdict.proxy_rise == pytest.approx(0.54, abs=0.07)


def test_noise_alone_is_no_turn() -> None:
    found = 0
    for seed in range(500):
        noise = random.Random(seed)
        rising = [min(1.0, i / 50) + noise.gauss(0, 0.1) for i in range(100)]
        verdict = judge(run(rising, rising))
        assert verdict is not None
        found += verdict.over_optimised
    assert found <= 5  # one in a hundred


def test_without_gold_there_is_no_verdict() -> None:
    rows = [{"step": 1.0, "critic/score/mean": 0.5}, {"step": 2.0}, {"step": 3.0, "critic/score/mean": 1.0,
            "critic/kl": -0.5, "response_length/mean": 4.0}]  # fmt: skip
    points = points_of(rows)
    assert [(p.step, p.gold, p.kl) for p in points] == [(1, None, None), (3, None, -0.5)]
    assert points[1].distance == 0.0
    assert judge(points) is None
    assert judge([]) is None


@given(st.lists(st.floats(-5, 5), min_size=1, max_size=30))
def test_smoothing_keeps_constants_and_bounds(values: list[float]) -> None:
    window = window_of(len(values))
    assert window % 2 == 1
    found = smoothed(values, window)
    assert all(min(values) - 1e-9 <= x <= max(values) + 1e-9 for x in found)
    assert smoothed([2.0] * len(values), window) == pytest.approx([2.0] * len(values))
