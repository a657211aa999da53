"""Gradients on a closed-form softmax bandit: three actions, one state, everything known exactly.

Expectations are sums over all actions (or all groups of G actions) weighed by their probability, so an unbiased
estimator meets the true gradient to rounding, and a biased one differs by an amount that can be named. One test
samples, to show that the averages a learner sees go to the same place.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
import torch
from torch import Tensor

from spaniel.algo import advantage, kl, loss, masked, mismatch

F64 = torch.float64
LOGITS = torch.tensor([0.3, -0.8, 1.1], dtype=F64)
REWARD = torch.tensor([1.0, -2.0, 0.5], dtype=F64)
REF = torch.log_softmax(torch.tensor([0.0, 0.5, -0.5], dtype=F64), 0)
SAMPLER = torch.log_softmax(torch.tensor([0.1, -0.5, 1.4], dtype=F64), 0)
"""Another engine's idea of the policy: close, not the same."""
G = 3


def policy() -> tuple[Tensor, Tensor]:
    logits = LOGITS.clone().requires_grad_()
    return logits, torch.log_softmax(logits, 0)


def gradient(of: Callable[[Tensor], Tensor]) -> Tensor:
    """The gradient of a function of log pi with respect to the logits."""
    logits, log_pi = policy()
    (out,) = torch.autograd.grad(of(log_pi), logits)
    return out


def expected(per_action: Callable[[Tensor], Tensor], under: Tensor | None = None) -> Tensor:
    """The mean gradient of a loss of one sampled action, the sampling itself not differentiated."""
    chance = torch.log_softmax(LOGITS, 0).exp() if under is None else under.exp()
    return gradient(lambda log_pi: (chance * per_action(log_pi)).sum())


TRUE = gradient(lambda log_pi: -(log_pi.exp() * REWARD).sum())
TRUE_KL = gradient(lambda log_pi: (log_pi.exp() * (log_pi - REF)).sum())


def over_groups(weigh: Callable[[Tensor], Tensor]) -> Tensor:
    """The mean gradient of REINFORCE with advantages `weigh(scores)` over every possible group of G actions."""
    groups = torch.tensor(list(product(range(3), repeat=G)))
    chance = torch.log_softmax(LOGITS, 0)[groups].sum(1).exp()
    advantages = torch.stack([weigh(REWARD[members]) for members in groups])
    return gradient(lambda log_pi: (chance * loss.reinforce(log_pi[groups], advantages).mean(1)).sum())


def one_group(scores: Tensor) -> Tensor:
    return torch.zeros(len(scores), dtype=torch.int64)


@pytest.mark.parametrize(
    "terms",
    [
        lambda lp: loss.reinforce(lp, REWARD),
        lambda lp: loss.clipped(lp, lp.detach(), REWARD, 0.2, 0.28),
        lambda lp: loss.clipped(lp, lp.detach(), REWARD, 0.2, 0.28, 3.0),
        lambda lp: loss.cispo(lp, lp.detach(), REWARD),
        lambda lp: loss.gspo(lp[:, None], lp.detach()[:, None], REWARD[:, None], torch.ones(3, 1), 0.1, 0.1)[:, 0],
    ],
)
def test_every_policy_loss_has_the_true_gradient_where_it_was_sampled(terms: Callable[[Tensor], Tensor]) -> None:
    torch.testing.assert_close(expected(terms), TRUE)


@pytest.mark.parametrize(
    ("weigh", "factor"),
    [
        (lambda s: advantage.leave_one_out(s, one_group(s)), 1.0),
        (lambda s: advantage.remax(s, torch.full((G,), float(REWARD[2]), dtype=F64)), 1.0),  # greedy: the third action
        (lambda s: s, 1.0),
        # The group's mean holds the rollout's own score: the gradient is short by (G - 1) / G, in the same direction.
        (lambda s: advantage.group_relative(s, one_group(s), False), (G - 1) / G),
        (lambda s: advantage.optimal_baseline(s, torch.ones(G), one_group(s)), (G - 1) / G),
    ],
)
def test_baselines_leave_the_gradient_or_scale_it(weigh: Callable[[Tensor], Tensor], factor: float) -> None:
    torch.testing.assert_close(over_groups(weigh), factor * TRUE)


def test_dividing_by_the_std_of_the_group_bends_the_gradient() -> None:
    """GRPO's is no multiple of the true gradient (Dr. GRPO's point): a group that differs by 0.5 weighs as much as one
    that differs by 3. Its direction is off, here by 48 degrees (numbers from a separate enumeration in numpy)."""
    own = over_groups(lambda s: advantage.group_relative(s, one_group(s), True))
    cosine = float(own @ TRUE / (own.norm() * TRUE.norm()))
    assert cosine == pytest.approx(0.667411, abs=1e-5)
    assert float(own.norm() / TRUE.norm()) == pytest.approx(0.940052, abs=1e-5)


def test_a_baseline_weighed_by_length_is_biased_where_length_tells_the_action() -> None:
    """OPO's baseline holds the rollout's own score, weighed by its length: with lengths 1, 2, 3 for the three actions
    the gradient differs from (G - 1) / G of the true one."""
    length = torch.tensor([1.0, 2.0, 3.0], dtype=F64)

    def weigh(scores: Tensor) -> Tensor:
        lengths = torch.stack([length[int((s == REWARD).nonzero())] for s in scores])
        return advantage.optimal_baseline(scores, lengths, one_group(scores))

    off = over_groups(weigh) - (G - 1) / G * TRUE
    assert 0.01 < float(off.norm() / TRUE.norm()) < 0.2


def test_kl_gradients() -> None:
    """k2's, and the value of any estimator under it, is the true one; k1's is zero; k3's is that of KL(ref | pi)."""
    for terms in (
        lambda lp: kl.estimate(lp, REF, "k2"),
        lambda lp: kl.unbiased(lp, REF, "k2"),
        lambda lp: kl.unbiased(lp, REF, "k3"),
        lambda lp: kl.unbiased(lp, REF, "abs"),
    ):
        torch.testing.assert_close(expected(terms), TRUE_KL)
    torch.testing.assert_close(expected(lambda lp: kl.estimate(lp, REF, "k1")), torch.zeros(3, dtype=F64))
    other = gradient(lambda lp: (REF.exp() * (REF - lp)).sum())
    torch.testing.assert_close(expected(lambda lp: kl.estimate(lp, REF, "k3")), other)
    assert float((other - TRUE_KL).norm() / TRUE_KL.norm()) == pytest.approx(0.533780, abs=1e-5)  # biased, by this much
    exact = gradient(lambda lp: kl.estimate(lp[None], REF[None], "full").sum())
    torch.testing.assert_close(exact, TRUE_KL)


def test_kl_in_the_reward_is_the_policy_gradient_of_the_kl() -> None:
    """With k1; with k3 in the reward the gradient is another one."""

    def held(kind: str) -> Tensor:
        one = torch.ones(3, 1)
        log_pi = torch.log_softmax(LOGITS, 0)
        rewards = kl.penalised_rewards(torch.zeros(3, dtype=F64), log_pi[:, None], REF[:, None], one, 1.0, kind)
        return expected(lambda lp: loss.reinforce(lp, rewards[:, 0]))

    torch.testing.assert_close(held("k1"), TRUE_KL)
    assert float((held("k3") - TRUE_KL).norm() / TRUE_KL.norm()) > 0.1


def test_the_values_of_the_estimators() -> None:
    """k1 and k3 average to the KL; k2 and abs do not, by this much."""
    log_pi = torch.log_softmax(LOGITS, 0)
    true = float((log_pi.exp() * (log_pi - REF)).sum())
    mean = {k: float((log_pi.exp() * kl.estimate(log_pi, REF, k)).sum()) for k in ("k1", "k2", "k3", "abs")}
    assert mean["k1"] == pytest.approx(true)
    assert mean["k3"] == pytest.approx(true)
    assert mean["k2"] / true == pytest.approx(1.032691, abs=1e-5)
    assert mean["abs"] / true == pytest.approx(1.637337, abs=1e-5)
    assert kl.estimate(log_pi[None], REF[None], "full").tolist() == pytest.approx([true])


def test_importance_weights_undo_the_samplers_distribution_and_their_bound_costs_a_bias() -> None:
    log_pi = torch.log_softmax(LOGITS, 0)
    one = torch.ones(3, 1)

    def corrected(cap: float, mode: str) -> Tensor:
        weights = mismatch.weights(log_pi[:, None], SAMPLER[:, None], one, cap, mode)[:, 0]
        return expected(lambda lp: weights * loss.clipped(lp, lp.detach(), REWARD, 0.2, 0.2), SAMPLER)

    def bias(gradient: Tensor) -> float:
        return float((gradient - TRUE).norm() / TRUE.norm())

    none = expected(lambda lp: loss.clipped(lp, lp.detach(), REWARD, 0.2, 0.2), SAMPLER)
    torch.testing.assert_close(corrected(10.0, "truncate"), TRUE)  # no weight reaches the cap
    torch.testing.assert_close(corrected(10.0, "mask"), TRUE)
    assert 0 < bias(corrected(1.05, "truncate")) < bias(none)
    assert bias(corrected(1.05, "mask")) > 0.1
    # Without weights, the ratio to the sampler in the loss itself does the same (one system's `bypass` mode).
    direct = expected(lambda lp: loss.clipped(lp, SAMPLER, REWARD, 0.9, 9.0), SAMPLER)
    torch.testing.assert_close(direct, TRUE)


def test_the_entropy_bonus_has_the_gradient_of_the_entropy() -> None:
    own = LOGITS.clone().requires_grad_()
    (gradient_of,) = torch.autograd.grad(loss.entropy(own[None]).sum(), own)
    torch.testing.assert_close(gradient_of, gradient(lambda lp: -(lp.exp() * lp).sum()))


@pytest.mark.parametrize("name", ["reinforce", "leave_one_out", "clipped", "k2", "unbiased k3"])
def test_sampled_means_go_to_the_true_gradient(name: str) -> None:
    """300,000 draws, in groups of 3; each coordinate within five standard errors."""
    draws = torch.multinomial(
        torch.log_softmax(LOGITS, 0).exp(), 300_000, replacement=True, generator=torch.Generator().manual_seed(7)
    )
    scores, groups = REWARD[draws], torch.arange(len(draws)) // G
    logits, log_pi = policy()
    lp = log_pi[draws]
    if name == "reinforce":
        per_draw, true = loss.reinforce(lp, scores), TRUE
    elif name == "leave_one_out":
        per_draw, true = loss.reinforce(lp, advantage.leave_one_out(scores, groups)), TRUE
    elif name == "clipped":
        per_draw, true = loss.clipped(lp, lp.detach(), scores, 0.2, 0.28), TRUE
    elif name == "k2":
        per_draw, true = kl.estimate(lp, REF[draws], "k2"), TRUE_KL
    else:
        per_draw, true = kl.unbiased(lp, REF[draws], "k3"), TRUE_KL
    (own,) = torch.autograd.grad(masked.mean(per_draw, torch.ones_like(draws)), logits, retain_graph=True)
    # d/d logits of a draw's log-probability is (its one-hot - pi), so a gradient is a mean of those, weighed.
    (slope,) = torch.autograd.grad(per_draw.sum(), lp)
    spread = (slope[:, None] * (torch.nn.functional.one_hot(draws, 3) - log_pi.exp().detach())).std(0)
    assert ((own - true).abs() < 5 * spread / len(draws) ** 0.5).all()
    assert float((own - true).abs().max()) < 0.02
