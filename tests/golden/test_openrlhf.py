"""Agreement with OpenRLHF 0.11.2, and each deliberate difference by name."""

from __future__ import annotations

import json

import pytest
import torch
from torch import Tensor

from spaniel.algo import advantage, kl, loss, masked, mismatch
from tests.golden.published import MASKS, X, gap, out, same, with_gradient

OLD, CURRENT, SAMPLER, ADVANTAGES = X["old_log_prob"], X["log_prob"], X["rollout_log_prob"], X["advantages"]
LEVELS = [("True", "token-mean"), ("False", "seq-mean-token-mean")]
"""OpenRLHF's `token_level`, and what it means."""


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.99, 0.95)])
def test_gae_on_single_turn_rows(gamma: float, lam: float) -> None:
    own, returns = advantage.gae(X["dense_rewards"], X["values"], X["mask"].bool(), gamma, lam)
    same(own, out("openrlhf", f"gae/g{gamma}_l{lam}/mask"), X["mask"])
    same(returns, out("openrlhf", f"gae/g{gamma}_l{lam}/mask", 1), X["mask"])


def test_gae_on_rows_with_tool_replies_where_nothing_decays() -> None:
    rewards = X["dense_rewards"] * X["mask_mt"]
    own, _ = advantage.gae(rewards, X["values"], X["mask_mt"].bool(), 1.0, 1.0)
    same(own, out("openrlhf", "gae/g1.0_l1.0/mask_mt"), X["mask_mt"])


def test_difference_gae_lets_lambda_decay_over_a_tool_reply() -> None:
    """We are right: a reply of any length between two actions is no transition of the policy, and its values none of
    the policy's states; a longer reply would discount what the answer earned."""
    rewards = X["dense_rewards"] * X["mask_mt"]
    own, _ = advantage.gae(rewards, X["values"], X["mask_mt"].bool(), 0.99, 0.95)
    assert gap(own, out("openrlhf", "gae/g0.99_l0.95/mask_mt"), X["mask_mt"]) > 0.1


def test_cumulative_returns() -> None:
    own = advantage.rewards_to_go(X["dense_rewards"], X["mask"].bool(), 0.99)
    same(own, out("openrlhf", "cumret/mask"), X["mask"])


def test_difference_returns_are_not_discounted_over_a_tool_reply() -> None:
    """We are right, as for GAE: gamma counts the policy's own steps."""
    own = advantage.rewards_to_go(X["dense_rewards"] * X["mask_mt"], X["mask_mt"].bool(), 0.99)
    assert gap(own, out("openrlhf", "cumret/mask_mt"), X["mask_mt"]) > 0.01


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("level", "mode"), LEVELS)
def test_aggregation(mask: str, level: str, mode: str) -> None:
    own = loss.aggregate(ADVANTAGES, X[mask].bool(), mode)
    same(own, out("openrlhf", f"aggregate_loss/token_level={level}/{mask}"))


@pytest.mark.parametrize(
    ("name", "settings"),
    [("{}", (0.2, 0.2)), ('{"clip_eps_high": 0.28}', (0.2, 0.28)), ('{"dual_clip": 3.0}', (0.2, 0.2, 3.0))],
)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("level", "mode"), LEVELS)
def test_policy_loss_its_gradient_and_metrics(name: str, settings: tuple, mask: str, level: str, mode: str) -> None:
    rows, theirs = X[mask].bool(), f"PolicyLoss/{name}/token_level={level}/{mask}"
    value, gradient = with_gradient(lambda lp: loss.aggregate(loss.clipped(lp, OLD, ADVANTAGES, *settings), rows, mode))
    same(value, out("openrlhf", theirs))
    same(gradient, out("openrlhf", theirs, 5))
    low, high, _ = loss.clip_active(CURRENT, OLD, ADVANTAGES, *settings)
    same(masked.mean(low | high, rows), out("openrlhf", theirs, 1))
    same(masked.mean(OLD - CURRENT, rows), out("openrlhf", theirs, 2))


@pytest.mark.parametrize("mask", MASKS)
def test_gspo_and_difference_in_its_gradient(mask: str) -> None:
    """OpenRLHF differentiates the mean in the sequence's ratio, so a token gets the row's mean advantage; ours is
    GSPO-token, where each token keeps its own. With one advantage a row, as GSPO has, they are the same, and so
    are the sums over rows here, where advantages differ by token."""
    rows, theirs = X[mask].bool(), f'PolicyLoss/{{"policy_loss_type": "gspo"}}/token_level=True/{mask}'
    value, gradient = with_gradient(
        lambda lp: loss.aggregate(loss.gspo(lp, OLD, ADVANTAGES, rows, 0.2, 0.2), rows, "seq-mean-token-mean")
    )
    same(value, out("openrlhf", theirs))
    assert gap(gradient, out("openrlhf", theirs, 5), X[mask]) > 0.01
    same(gradient.sum(1), out("openrlhf", theirs, 5).sum(1))


def correction(level: str, mode: str, bounds: list[float], token_level: str, mask: str) -> str:
    settings = {"is_correction_level": level, "is_correction_mode": mode, "is_correction_gating": "ratio"}
    name = json.dumps(settings | {"is_correction_threshold": bounds})
    return f"PolicyLoss/{name}/token_level={token_level}/{mask}"


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("level", "mode"), LEVELS)
@pytest.mark.parametrize("kind", ["clip", "mask"])
def test_token_corrections_for_the_sampler(mask: str, level: str, mode: str, kind: str) -> None:
    """Its `clip` also has a lower bound, our truncation only where a floor is given."""
    rows, theirs = X[mask].bool(), correction("token", kind, [0.95, 1.05], level, mask)
    weights = mismatch.weights(OLD, SAMPLER, rows, 1.05, "truncate" if kind == "clip" else "mask", "token", 0.95)
    check_weighed(weights, rows, mode, theirs)
    own = mismatch.measure(OLD, SAMPLER, rows)
    assert own["mismatch/kl"] == pytest.approx(float(out("openrlhf", theirs, 3)), abs=1e-5)
    plain = mismatch.ratios(OLD, SAMPLER, rows)
    outside = (plain < 0.95) | (plain > 1.05)
    same(masked.mean(outside, rows), out("openrlhf", theirs, 4))


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("level", "mode"), LEVELS)
def test_difference_a_sequence_that_is_kept_is_weighed_as_a_sequence(mask: str, level: str, mode: str) -> None:
    """OpenRLHF keeps a sequence by the geometric mean of its ratios and then weighs each token by its own. Ours weighs
    by what it judges by; the other is composed here from two calls."""
    rows, theirs = X[mask].bool(), correction("seq", "mask", [0.99, 1.01], level, mask)
    kept = mismatch.weights(OLD, SAMPLER, rows, 1.01, "mask", "geometric", 0.99)
    check_weighed(torch.where(kept > 0, mismatch.ratios(OLD, SAMPLER, rows), 0.0), rows, mode, theirs)
    own = loss.aggregate(kept * loss.clipped(CURRENT, OLD, ADVANTAGES, 0.2, 0.2), rows, mode)
    assert abs(float(own - out("openrlhf", theirs))) > 1e-3


def check_weighed(weights: Tensor, rows: Tensor, mode: str, theirs: str) -> None:
    value, gradient = with_gradient(
        lambda lp: loss.aggregate(weights * loss.clipped(lp, OLD, ADVANTAGES, 0.2, 0.2), rows, mode)
    )
    same(value, out("openrlhf", theirs))
    same(gradient, out("openrlhf", theirs, 5))


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("level", "mode"), LEVELS)
def test_value_loss(mask: str, level: str, mode: str) -> None:
    rows, new, returns = X[mask].bool(), X["values"] + X["vnoise"], ADVANTAGES
    own = loss.aggregate(loss.value(new, returns, X["values"], 0.2), rows, mode)
    same(own, out("openrlhf", f"ValueLoss/clip=0.2/token_level={level}/{mask}"))
    plain = loss.aggregate(loss.value(new, returns), rows, mode)
    same(plain, out("openrlhf", f"ValueLoss/clip=None/token_level={level}/{mask}"))


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_kl_estimators(kind: str) -> None:
    same(kl.estimate(CURRENT, X["ref_log_prob"], kind), out("openrlhf", f"compute_approx_kl/{kind}"))


@pytest.mark.parametrize("mask", MASKS)
def test_kl_in_rewards(mask: str) -> None:
    """The score stands at the last action, the penalty at every action; OpenRLHF writes one at padding too."""
    own = kl.penalised_rewards(X["scores"], CURRENT, X["ref_log_prob"], X[mask].bool(), 0.05)
    same(own, out("openrlhf", f"compute_reward/{mask}"), X[mask])


@pytest.mark.parametrize("mask", MASKS)
def test_difference_whitening_is_over_the_whole_batch(mask: str) -> None:
    """OpenRLHF's masked_normalize takes each row by itself, with the population variance: a row's advantages then say
    nothing about how good the row was. We are right: PPO's advantages are compared over the batch. The n-1 variance is
    verl's too."""
    rows, theirs = X[mask].bool(), out("openrlhf", f"masked_normalize/{mask}")
    for row in range(8):
        x = ADVANTAGES[row, rows[row]]
        expected = (x - x.mean()) / (x.var(unbiased=False) + 1e-8).sqrt()
        same(expected, theirs[row, rows[row]])
    assert gap(masked.whiten(ADVANTAGES, rows), theirs, X[mask]) > 0.5


def test_preference_losses() -> None:
    same(loss.bradley_terry(X["chosen"], X["rejected"]), out("openrlhf", "PairWiseLoss"))
    same(loss.bradley_terry(X["chosen"], X["rejected"], margin=X["margin"]), out("openrlhf", "PairWiseLoss/margin"))
    same(loss.bradley_terry(X["chosen"], X["rejected"]), out("openrlhf", "LogExpLoss"))


def test_entropy() -> None:
    same(loss.entropy(X["logits"]), out("openrlhf", "compute_entropy"))
