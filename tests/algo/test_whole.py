"""Whole algorithms against the plain reference of `reference.py`: targets, losses, gradients, metrics."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from spaniel.algo import ALGORITHMS, KL, Mismatch
from spaniel.types import Counts
from tests.algo.reference import (
    Row,
    Step,
    by_gae,
    by_group,
    clipped,
    mean,
    penalised,
    row_mean,
    row_sum,
    step,
    token_mean,
)


def counts_of(s: Step) -> Counts:
    rows = s.rows()
    return Counts(sum(len(r.at) for r in rows), len(rows))


def run(algorithm: Any, s: Step) -> tuple[Any, dict[str, float], float, dict[str, float], Tensor]:
    """(targets, metrics, policy loss, means of its tallies, its gradient), the loss in three micro-batches."""
    values = s.values if algorithm.needs_critic else None
    targets, _, metrics = algorithm.targets(s.batch, values, s.ref, algorithm.initial_state(), s.old)
    counts = counts_of(s)
    logprobs = s.new.clone().requires_grad_()
    total, sums = torch.zeros((), dtype=torch.float64), {}
    for part in ([0, 3, 5], [1], [2, 4, 6, 7]):
        at = torch.tensor(part)
        share, tallies = algorithm.policy_loss(logprobs[at], s.entropy[at], s.batch.take(at), targets.take(at), counts)
        total = total + share
        for name, tally in tallies.items():
            sums[name] = sums[name] + tally if name in sums else tally
    total.backward()
    assert logprobs.grad is not None
    return targets, metrics, float(total.detach()), {k: t.mean for k, t in sums.items()}, logprobs.grad


def at_actions(rows: list[Row], x: Tensor) -> list[list[float]]:
    return [x[r.row, r.at].tolist() for r in rows]


def same(own: list[list[float]], expected: list[list[float]]) -> None:
    for a, b in zip(own, expected, strict=True):
        assert a == pytest.approx(b, abs=1e-6)


def test_grpo_with_kl_in_the_loss_entropy_and_weights() -> None:
    s = step()
    rows = by_group(s.rows())
    held = KL(place="loss", kind="k3", beta=0.3)
    grpo: Any = ALGORITHMS["grpo"](
        group_size=4, kl=held, entropy_coef=0.05, mismatch=Mismatch(mode="truncate", cap=1.1)
    )  # type: ignore[call-arg]
    targets, metrics, total, means, _ = run(grpo, s)
    same(at_actions(rows, targets.advantages), [r.advantage for r in rows])

    def weight(r: Row, k: int) -> float:
        return min(math.exp(r.old[k] - r.sampler[k]), 1.1)

    def k3(r: Row, k: int) -> float:
        x = r.new[k] - r.ref[k]
        return math.exp(-x) - 1 + x

    policy = row_mean(rows, lambda r, k: weight(r, k) * clipped(r, k, 0.2, 0.2))
    kl_term = row_mean(rows, k3)
    assert total == pytest.approx(policy + 0.3 * kl_term - 0.05 * row_mean(rows, lambda r, k: r.entropy[k]))
    assert means["actor/pg_loss"] == pytest.approx(policy)
    assert means["actor/kl_loss"] == pytest.approx(kl_term)
    assert means["actor/entropy"] == pytest.approx(token_mean(rows, lambda r, k: r.entropy[k]))
    assert means["actor/ppo_kl"] == pytest.approx(token_mean(rows, lambda r, k: r.old[k] - r.new[k]))
    assert means["actor/ratio"] == pytest.approx(token_mean(rows, lambda r, k: math.exp(r.new[k] - r.old[k])))
    assert metrics["mismatch/weight_mean"] == pytest.approx(token_mean(rows, weight))
    assert metrics["critic/kl"] == pytest.approx(row_sum(rows, lambda r, k: r.old[k] - r.ref[k]))
    assert metrics["critic/kl_per_token"] == pytest.approx(token_mean(rows, lambda r, k: r.old[k] - r.ref[k]))
    assert metrics["critic/score/mean"] == pytest.approx(mean([r.score for r in rows]))
    assert metrics["critic/rows/failed"] == 1


@pytest.mark.parametrize("unbiased", [True, False])
def test_the_gradient_of_the_kl_term(unbiased: bool) -> None:
    """(new - ref) / n of k2, or (1 - exp(ref - new)) / n of k3 itself: what is left when all advantages are 0."""
    s = step()
    s = replace(s, batch=replace(s.batch, rewards=torch.zeros_like(s.batch.rewards)))
    held = KL(place="loss", kind="k3", beta=0.3, unbiased=unbiased)
    grpo: Any = ALGORITHMS["grpo"](group_size=4, kl=held, loss_aggregation="token-mean")  # type: ignore[call-arg]
    _, _, _, _, gradient = run(grpo, s)
    rows, n = s.rows(), counts_of(s).actions

    def slope(x: float) -> float:
        return 0.3 * (x if unbiased else 1 - math.exp(-x)) / n

    expected = [[slope(a - b) for a, b in zip(r.new, r.ref, strict=True)] for r in rows]
    same(at_actions(rows, gradient), expected)


def test_ppo_with_kl_in_the_reward() -> None:
    s = step()
    rows, returns = by_gae(penalised(s.rows(), 0.2), 0.98, 0.9)
    ppo: Any = ALGORITHMS["ppo"](gamma=0.98, lam=0.9, clip_high=0.1, kl=KL(place="reward", kind="k1", beta=0.2))  # type: ignore[call-arg]
    targets, metrics, total, means, _ = run(ppo, s)
    same(at_actions(rows, targets.advantages), [r.advantage for r in rows])
    same(at_actions(rows, targets.returns), returns)
    same(at_actions(rows, targets.values), [r.value for r in rows])
    assert total == pytest.approx(token_mean(rows, lambda r, k: clipped(r, k, 0.2, 0.1)))
    assert means["actor/pg_loss"] == pytest.approx(total)

    def binds(r: Row, k: int) -> float:
        rho = math.exp(r.new[k] - r.old[k])
        return float(rho > 1.1 if r.advantage[k] > 0 else rho < 0.8)

    assert means["actor/pg_clipfrac"] == pytest.approx(token_mean(rows, binds))
    flat = [x for each in returns for x in each]
    assert metrics["critic/returns/mean"] == pytest.approx(mean(flat))
    assert metrics["critic/values/max"] == pytest.approx(max(v for r in rows for v in r.value))
    assert metrics["critic/rewards/mean"] == pytest.approx(mean([r.score for r in rows]))
    errors = [x - v for each, r in zip(returns, rows, strict=True) for x, v in zip(each, r.value, strict=True)]
    left, whole = mean([(e - mean(errors)) ** 2 for e in errors]), mean([(x - mean(flat)) ** 2 for x in flat])
    assert metrics["critic/vf_explained_var"] == pytest.approx(1 - left / whole)
    moved = s.values + 0.5 * s.new
    share, tallies = ppo.value_loss(moved, s.batch, targets, counts_of(s))
    losses, flats, left_alone = [], [], []
    for r, each in zip(rows, returns, strict=True):
        for v, old, target in zip(moved[r.row, r.at].tolist(), r.value, each, strict=True):
            near = min(max(v, old - 0.2), old + 0.2)
            losses.append(0.5 * max((v - target) ** 2, (near - target) ** 2))
            flats.append(float((near - target) ** 2 > (v - target) ** 2))
            left_alone.append(float(abs(v - old) <= 0.2))
    assert float(share) == pytest.approx(mean(losses))
    assert tallies["critic/vf_loss"].mean == pytest.approx(mean(losses))
    assert tallies["critic/vf_clipfrac"].mean == pytest.approx(mean(flats))
    assert tallies["critic/vf_moved"].mean == pytest.approx(1 - mean(left_alone))


def test_rloo_with_kl_in_the_reward() -> None:
    s = step()
    rows = penalised(s.rows(), 0.05)
    rloo: Any = ALGORITHMS["rloo"]()
    targets, _, total, _, _ = run(rloo, s)
    expected = []
    for r in rows:
        others = [o.score for o in rows if o.group == r.group and o.row != r.row]
        expected.append(replace(r, advantage=[r.score - mean(others)] * len(r.at)))
    same(at_actions(rows, targets.advantages), [r.advantage for r in expected])
    assert total == pytest.approx(row_sum(expected, lambda r, k: -r.advantage[k] * r.new[k]))


def test_dr_grpo_opo_and_dapo() -> None:
    s = step()
    rows = s.rows()

    def relative(weigh: Any, totals: dict[int, float]) -> list[Row]:
        out = []
        for r in rows:
            own = [o for o in rows if o.group == r.group]
            base = sum(weigh(o) * totals[o.row] for o in own) / sum(weigh(o) for o in own)
            out.append(replace(r, advantage=[totals[r.row] - base] * len(r.at)))
        return out

    scores = {r.row: r.score for r in rows}
    expected = relative(lambda o: 1, scores)
    targets, _, total, _, _ = run(ALGORITHMS["dr_grpo"](group_size=4, length_budget=50), s)  # type: ignore[call-arg]
    same(at_actions(rows, targets.advantages), [r.advantage for r in expected])
    assert total == pytest.approx(row_sum(expected, lambda r, k: clipped(r, k, 0.2, 0.2)) / 50)

    expected = relative(lambda o: len(o.at), scores)
    targets, _, total, _, _ = run(ALGORITHMS["opo"](group_size=4), s)  # type: ignore[call-arg]
    same(at_actions(rows, targets.advantages), [r.advantage for r in expected])
    assert total == pytest.approx(token_mean(expected, lambda r, k: -r.advantage[k] * r.new[k]))

    penalty = {r.row: max(-1.0, min(0.0, (6 - 3 - len(r.at)) / 3)) for r in rows}
    assert min(penalty.values()) < 0
    longer = [replace(r, reward=[*r.reward[:-1], r.reward[-1] + penalty[r.row]]) for r in rows]
    expected = by_group(longer)
    dapo: Any = ALGORITHMS["dapo"](group_size=4, length_budget=6, overlong_share=0.5)  # type: ignore[call-arg]
    targets, metrics, total, _, _ = run(dapo, s)
    same(at_actions(rows, targets.advantages), [r.advantage for r in expected])
    assert total == pytest.approx(token_mean(expected, lambda r, k: clipped(r, k, 0.2, 0.28)))
    assert metrics["critic/overlong_penalty/mean"] == pytest.approx(mean(list(penalty.values())))


def test_gspo_and_cispo() -> None:
    s = step()
    rows = by_group(s.rows())

    def sequence(r: Row, k: int) -> float:
        rho = math.exp(mean([a - b for a, b in zip(r.new, r.old, strict=True)]))
        return -min(rho * r.advantage[k], min(max(rho, 0.9), 1.2) * r.advantage[k])

    targets, _, total, _, _ = run(ALGORITHMS["gspo"](group_size=4, clip_low=0.1, clip_high=0.2), s)  # type: ignore[call-arg]
    same(at_actions(rows, targets.advantages), [r.advantage for r in rows])
    assert total == pytest.approx(row_mean(rows, sequence))

    def weighed(r: Row, k: int) -> float:
        return -min(math.exp(r.new[k] - r.old[k]), 1.3) * r.advantage[k] * r.new[k]

    targets, _, total, means, _ = run(ALGORITHMS["cispo"](group_size=4, clip_high=0.3), s)  # type: ignore[call-arg]
    same(at_actions(rows, targets.advantages), [r.advantage for r in rows])
    assert total == pytest.approx(token_mean(rows, weighed))
    above = token_mean(rows, lambda r, k: float(r.new[k] - r.old[k] > math.log(1.3)))
    assert means["actor/pg_clipfrac_high"] == pytest.approx(above) != 0


def test_reinforce_plus_plus_and_remax() -> None:
    s = step()
    rows = penalised(s.rows(), 0.01)
    returns = [[sum(r.reward[k:]) for k in range(len(r.at))] for r in rows]
    every = [x for each in returns for x in each]
    spread = math.sqrt(sum((x - mean(every)) ** 2 for x in every) / (len(every) - 1) + 1e-8)
    targets, _, _, _, _ = run(ALGORITHMS["reinforce_plus_plus"](), s)
    same(at_actions(rows, targets.advantages), [[(x - mean(every)) / spread for x in each] for each in returns])

    baselines = torch.linspace(-1, 1, 8, dtype=torch.float64)
    baselines[5] = math.nan
    targets, metrics, _, _, _ = run(ALGORITHMS["remax"](), replace(s, batch=replace(s.batch, baselines=baselines)))
    rows = penalised(s.rows(), 0.05)
    expected = [[0.0 if r.row == 5 else r.score - float(baselines[r.row])] * len(r.at) for r in rows]
    same(at_actions(rows, targets.advantages), expected)
    assert metrics["critic/rows/without_baseline"] == 1
