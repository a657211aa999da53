"""Properties of the mathematics, for every formula."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from spaniel.algo import advantage, kl, loss, masked
from spaniel.types import Counts

F64 = torch.float64


@st.composite
def rows(draw: st.DrawFn, tensors: int = 2, least: int = 0) -> tuple[Tensor, ...]:
    """A mask (with holes) and `tensors` float64 tensors of its shape."""
    batch, width = draw(st.integers(1, 4)), draw(st.integers(1, 7))
    bits = st.lists(st.booleans(), min_size=batch * width, max_size=batch * width)
    mask = torch.tensor(draw(bits)).view(batch, width)
    if least:
        mask[0, 0] = True
    numbers = st.lists(st.floats(-3, 3, width=32), min_size=batch * width, max_size=batch * width)
    return (mask, *(torch.tensor(draw(numbers), dtype=F64).view(batch, width) for _ in range(tensors)))


def poisoned(x: Tensor, mask: Tensor, value: float) -> Tensor:
    return torch.where(mask, x, value)


POISON = [math.nan, math.inf, -math.inf, 1e30]
MODES: list[tuple[str, dict[str, Any]]] = [
    ("token-mean", {}),
    ("seq-mean-token-sum", {}),
    ("seq-mean-token-mean", {}),
    ("token-sum-norm", {"length_budget": 9}),
]


@pytest.mark.parametrize("value", POISON)
@settings(max_examples=25)
@given(rows(3))
def test_what_stands_under_a_zero_mask_reaches_neither_value_nor_gradient(value: float, data: tuple) -> None:
    mask, x, y, z = data

    def all_of(a: Tensor, b: Tensor, c: Tensor) -> list[Tensor]:
        token = [loss.clipped(a, b, c, 0.2, 0.3, 3.0), loss.cispo(a, b, c), loss.reinforce(a, c)]
        token += [loss.gspo(a, b, c, mask, 0.2, 0.3), loss.value(a, b), loss.value(a, b, c, 0.2)]
        token += [kl.estimate(a, b, kind) for kind in ("k1", "abs", "k2", "k3")]
        out = [loss.aggregate(t, mask, mode, **more) for t in token for mode, more in MODES]
        out += [masked.sum(a, mask), masked.mean(a, mask), masked.whiten(a, mask)]
        out += [*advantage.gae(torch.where(mask, b, 0.0), a, mask, 0.9, 0.8)]
        out += [advantage.reinforce_plus_plus(torch.where(mask, b, 0.0), mask, 0.9)]
        return out

    clean = x.clone().requires_grad_()
    one = all_of(clean, y, z)
    torch.stack([t.sum() for t in one if t.requires_grad]).sum().backward()
    for which in ((True, True, True), (True, False, False), (False, True, False), (False, False, True)):
        a, b, c = (poisoned(t, mask, value) if spoil else t for t, spoil in zip((x, y, z), which, strict=True))
        check_same(one, clean, all_of, a.clone().requires_grad_(), b, c)


def check_same(one: list[Tensor], clean: Tensor, all_of: Any, dirty: Tensor, y: Tensor, z: Tensor) -> None:
    two = all_of(dirty, y, z)
    for a, b in zip(one, two, strict=True):
        torch.testing.assert_close(a, b)
    torch.stack([t.sum() for t in two if t.requires_grad]).sum().backward()
    assert clean.grad is not None
    assert dirty.grad is not None
    torch.testing.assert_close(dirty.grad, clean.grad)
    assert torch.isfinite(dirty.grad).all()


@pytest.mark.parametrize(("mode", "more"), MODES)
@given(rows(1, least=1), st.integers(0, 5), st.randoms(use_true_random=False))
def test_aggregation_ignores_padding_order_micro_batches_and_ranks(
    mode: str, more: dict, data: tuple, pad: int, random: Any
) -> None:
    mask, x = data
    counts = Counts(actions=int(mask.sum()), sequences=int(mask.any(1).sum()))
    whole = loss.aggregate(x, mask, mode, counts, **more)
    torch.testing.assert_close(loss.aggregate(x, mask, mode, **more), whole)
    wide = torch.nn.functional.pad
    padded = loss.aggregate(wide(x, (0, pad), value=5.0), wide(mask, (0, pad)), mode, counts, **more)
    torch.testing.assert_close(padded, whole)
    order = list(range(len(x)))
    random.shuffle(order)
    torch.testing.assert_close(loss.aggregate(x[order], mask[order], mode, counts, **more), whole)
    cut = random.randint(0, len(x))
    parts = [loss.aggregate(x[p], mask[p], mode, counts, **more) for p in (order[:cut], order[cut:]) if p]
    torch.testing.assert_close(torch.stack(parts).sum(), whole)


def test_aggregation_by_hand() -> None:
    """Two rows: losses 1 2 3 and 4 (padding behind it)."""
    x = torch.tensor([[1.0, 2.0, 3.0], [4.0, 99.0, 99.0]])
    mask = torch.tensor([[1, 1, 1], [1, 0, 0]]).bool()
    assert float(loss.aggregate(x, mask, "token-mean")) == 2.5
    assert float(loss.aggregate(x, mask, "seq-mean-token-sum")) == 5.0
    assert float(loss.aggregate(x, mask, "seq-mean-token-mean")) == 3.0
    assert float(loss.aggregate(x, mask, "token-sum-norm", length_budget=10)) == 0.5
    none = torch.zeros_like(mask)
    for mode, more in MODES:
        assert float(loss.aggregate(x, none, mode, **more)) == 0.0
    # one token of loss 4 and three of loss 0 in two micro-batches: 1, never 2
    assert float(loss.aggregate(torch.tensor([[4.0, 0, 0], [0, 0, 0]]), mask.flip(0), "token-mean")) == 1.0


def textbook(rewards: list[float], values: list[float], gamma: float, lam: float, tail: float = 0.0) -> list[float]:
    """GAE over a plain list, backwards, as in the paper."""
    out, running = [], 0.0
    for k in reversed(range(len(rewards))):
        after = values[k + 1] if k + 1 < len(values) else tail
        running = rewards[k] + gamma * after - values[k] + gamma * lam * running
        out.append(running)
    return out[::-1]


@given(rows(2), st.floats(0, 1), st.floats(0, 1))
def test_gae_is_the_textbook_on_the_actions_alone(data: tuple, gamma: float, lam: float) -> None:
    mask, rewards, values = data
    rewards = torch.where(mask, rewards, 0.0)
    own, returns = advantage.gae(rewards, values, mask, gamma, lam)
    for row in range(len(mask)):
        at = mask[row].nonzero().flatten()
        expected = textbook(rewards[row, at].tolist(), values[row, at].tolist(), gamma, lam)
        assert own[row, at].tolist() == pytest.approx(expected, abs=1e-9)
        assert returns[row, at].tolist() == pytest.approx(
            [a + v for a, v in zip(expected, values[row, at].tolist(), strict=True)]
        )
    assert not own[~mask].any()
    assert not returns[~mask].any()


@pytest.mark.parametrize("width", [1, 63, 64, 65, 128, 129, 300])
@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.99, 0.95), (1.0, 0.0), (0.0, 1.0)])
def test_gae_and_returns_of_long_rows(width: int, gamma: float, lam: float) -> None:
    """Sums are formed in blocks of 64: rows that end before, at and behind a block's end, with and without holes."""
    generator = torch.Generator().manual_seed(width)
    rewards, values = (torch.randn(3, width, generator=generator, dtype=F64) for _ in range(2))
    mask = torch.rand(3, width, generator=generator) < torch.tensor([[2.0], [0.8], [0.3]])
    rewards, tail = torch.where(mask, rewards, 0.0), torch.tensor([0.3, -2.0, 0.0], dtype=F64)
    own, _ = advantage.gae(rewards, values, mask, gamma, lam, tail)
    to_go = advantage.rewards_to_go(rewards, mask, gamma)
    for row in range(3):
        at = mask[row].nonzero().flatten()
        paid, held = rewards[row, at].tolist(), values[row, at].tolist()
        assert own[row, at].tolist() == pytest.approx(textbook(paid, held, gamma, lam, float(tail[row])), abs=1e-9)
        assert to_go[row, at].tolist() == pytest.approx(textbook(paid, [0.0] * len(paid), gamma, 1.0), abs=1e-9)


@given(rows(1))
def test_gae_with_lambda_one_and_no_critic_is_the_reward_to_go(data: tuple) -> None:
    mask, rewards = data
    rewards = torch.where(mask, rewards, 0.0)
    own, _ = advantage.gae(rewards, torch.zeros_like(rewards), mask, 1.0, 1.0)
    torch.testing.assert_close(own, advantage.rewards_to_go(rewards, mask))
    to_go = rewards.flip(1).cumsum(1).flip(1)
    torch.testing.assert_close(own, torch.where(mask, to_go, 0.0))


def test_gae_by_hand() -> None:
    def row(*x: float) -> Tensor:
        return torch.tensor([x], dtype=F64)

    own, _ = advantage.gae(row(0, 0, 0, 0, 1), row(0.5, 0.2, 9, 9, 0.4), row(1, 1, 0, 0, 1).bool(), 1.0, 1.0)
    assert own[0].tolist() == pytest.approx([0.5, 0.8, 0, 0, 0.6])
    own, _ = advantage.gae(row(0, 0, 1, 0, 0), row(0.1, 0.2, 0.3, 50, -50), row(1, 1, 1, 0, 0).bool(), 1.0, 0.95)
    assert own[0].tolist() == pytest.approx([0.82675, 0.765, 0.7, 0, 0])
    plain, _ = advantage.gae(row(0, 0), row(0.2, 0.4), row(1, 1).bool(), 1.0, 1.0)
    assert plain[0].tolist() == pytest.approx([-0.2, -0.4])
    boot, _ = advantage.gae(row(0, 0), row(0.2, 0.4), row(1, 1).bool(), 1.0, 1.0, torch.tensor([0.6], dtype=F64))
    assert boot[0].tolist() == pytest.approx([0.4, 0.2])
    # a reward at an observation (the tool's, or the last token of the row) is credited to the action before it
    own, _ = advantage.gae(row(0, 0, 2, 0, 1), row(0, 0, 0, 0, 0), row(1, 0, 0, 1, 0).bool(), 1.0, 0.0)
    assert own[0].tolist() == [2, 0, 0, 1, 0]


@given(rows(1, least=1))
def test_whitened_numbers_have_mean_zero_and_variance_one(data: tuple) -> None:
    mask, x = data
    own = masked.whiten(x, mask)
    kept = own[mask]
    assert float(kept.sum()) == pytest.approx(0, abs=1e-6)
    if len(kept) > 1 and float(x[mask].var()) > 1e-3:
        assert float(kept.var()) == pytest.approx(1, abs=1e-3)
    if len(kept) == 1:
        assert float(kept[0]) == 0
    assert not own[~mask].any()


groups = st.lists(st.tuples(st.integers(0, 3), st.floats(-2, 2, width=32), st.booleans()), min_size=1, max_size=12)


@given(groups, st.randoms(use_true_random=False))
def test_group_baselines(members: list, random: Any) -> None:
    number = torch.tensor([g for g, _, _ in members])
    scores = torch.tensor([s for _, s, _ in members], dtype=F64)
    valid = torch.tensor([v for _, _, v in members])
    plain = advantage.group_relative(scores, number, False, valid)
    scaled = advantage.group_relative(scores, number, True, valid)
    others = advantage.leave_one_out(scores, number, valid)
    assert not plain[~valid].any()
    for g in set(number.tolist()):
        own = (number == g) & valid
        n = int(own.sum())
        assert float(plain[own].sum()) == pytest.approx(0, abs=1e-9)  # group advantages sum to 0
        if n <= 1:
            assert not plain[own].any()
            assert not others[own].any()
            continue
        torch.testing.assert_close(plain[own], scores[own] - scores[own].mean())
        torch.testing.assert_close(others[own], plain[own] * n / (n - 1))  # RLOO = GRPO without std * n/(n-1)
        torch.testing.assert_close(scaled[own], plain[own] / (scores[own].std() + 1e-6), atol=1e-6, rtol=1e-5)
    order = list(range(len(members)))
    random.shuffle(order)
    torch.testing.assert_close(
        advantage.group_relative(scores[order], number[order], True, valid[order]), scaled[order]
    )


def test_group_baselines_by_hand() -> None:
    assert advantage.group_relative(torch.tensor([1.0, 0, 1, 0]), torch.zeros(4).long(), False).tolist() == [
        0.5,
        -0.5,
        0.5,
        -0.5,
    ]
    valid = torch.tensor([True, False, True, True])  # a failure is no 0
    own = advantage.group_relative(torch.tensor([1.0, 9, 0, 1]), torch.zeros(4).long(), False, valid)
    assert own.tolist() == pytest.approx([1 / 3, 0, -2 / 3, 1 / 3])
    assert advantage.group_relative(torch.full((3,), 0.7), torch.zeros(3).long()).tolist() == [0, 0, 0]
    mixed = advantage.group_relative(torch.tensor([1.0, 5, 0, 7]), torch.tensor([3, 8, 3, 8]), False)
    assert mixed.tolist() == [0.5, -1, -0.5, 1]  # by number, not by place


@given(rows(2))
def test_kl_estimators(data: tuple) -> None:
    mask, lp, ref = data
    x = lp - ref
    torch.testing.assert_close(kl.estimate(lp, ref, "k1"), x)
    torch.testing.assert_close(kl.estimate(lp, ref, "k2"), x * x / 2)
    torch.testing.assert_close(kl.estimate(lp, ref, "k3"), (-x).exp() - 1 + x, atol=1e-9, rtol=1e-6)
    assert (kl.estimate(lp, ref, "k3") >= 0).all()
    torch.testing.assert_close(kl.estimate(lp, ref, "abs"), x.abs())


@given(rows(2, least=1), st.floats(0, 2))
def test_penalised_rewards_sum_to_score_minus_beta_times_the_log_ratio(data: tuple, beta: float) -> None:
    mask, lp, ref = data
    scores = torch.arange(1.0, len(mask) + 1, dtype=F64)
    rewards = kl.penalised_rewards(scores, lp, ref, mask, beta)
    expected = torch.where(mask.any(1), scores, 0.0) - beta * torch.where(mask, lp - ref, 0.0).sum(1)
    torch.testing.assert_close(rewards.sum(1), expected)
    assert not rewards[~mask].any()


@pytest.mark.parametrize("gap", [80.0, -80.0, 300.0, -300.0, 1e4])
def test_extreme_log_ratios_stay_finite(gap: float) -> None:
    for kind in ("k1", "k2", "k3", "abs"):
        lp = (
            torch.tensor([-1.0 - abs(gap)], requires_grad=True) if gap < 0 else torch.tensor([-1.0], requires_grad=True)
        )
        ref = torch.tensor([-1.0]) if gap < 0 else torch.tensor([-1.0 - gap])
        value = kl.estimate(lp, ref, kind)
        value.sum().backward()
        assert torch.isfinite(value).all()
        assert lp.grad is not None
        assert torch.isfinite(lp.grad).all()
    lp = torch.tensor([[gap]], requires_grad=True)
    for sign in (1.0, -1.0):
        value = loss.clipped(lp, torch.zeros(1, 1), torch.tensor([[sign]]), 0.2, 0.2)
        value.sum().backward()
        assert torch.isfinite(value).all()
    assert lp.grad is not None
    assert torch.isfinite(lp.grad).all()


def test_losses_by_hand() -> None:
    one = torch.ones(1, dtype=F64)
    ratios = torch.tensor([1.5, 0.5], dtype=F64).log()
    own = loss.clipped(ratios, torch.zeros(2, dtype=F64), torch.tensor([1.0, -1.0], dtype=F64), 0.2, 0.28)
    assert float(own.mean()) == pytest.approx(-0.24)
    far = loss.clipped((10 * one).log(), 0 * one, -one, 0.2, 0.2, 3.0)
    assert float(far) == pytest.approx(3.0)  # dual clip: not 10
    assert float(loss.clipped((10 * one).log(), 0 * one, -one, 0.2, 0.2)) == pytest.approx(10.0)
    assert float(loss.cispo((10 * one).log(), 0 * one, one, None, 4.0)) == pytest.approx(-5 * math.log(10))
    assert float(loss.value(one, 3 * one)) == 2.0
    assert float(loss.value(one, 3 * one, 0.5 * one, 0.2)) == pytest.approx(0.5 * (0.7 - 3) ** 2)
    assert float(kl.adapt(0.1, 12.0, 6.0, 256, 10_000.0)) == pytest.approx(0.100512)
    assert float(loss.bradley_terry(torch.tensor([-100.0]), torch.tensor([0.0]))) == pytest.approx(100.0)


@given(st.lists(st.floats(-5, 5, width=32), min_size=2, max_size=6), st.floats(-9, 9, width=32))
def test_preference_losses_do_not_see_a_constant(scores: list[float], shift: float) -> None:
    own = torch.tensor([scores], dtype=F64)
    order = torch.arange(len(scores))[None]
    torch.testing.assert_close(loss.plackett_luce(own, order), loss.plackett_luce(own + shift, order))
    winners, losers = own[0, :1], own[0, 1:2]
    torch.testing.assert_close(loss.bradley_terry(winners, losers), loss.bradley_terry(winners + shift, losers + shift))
    pair = loss.plackett_luce(own[:, :2], order[:, :2])
    torch.testing.assert_close(pair, loss.bradley_terry(winners, losers))  # two responses: the same model
