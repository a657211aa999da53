"""Agreement with verl 0.9.1, and each deliberate difference by name."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from spaniel.algo import advantage, kl, loss, masked, mismatch
from spaniel.types import Counts
from tests.golden.published import F64, GROUPS, MASKS, X, gap, metrics, out, same, with_gradient

REWARDS = ("outcome_rewards", "dense_rewards")
OLD, CURRENT = X["old_log_prob"], X["log_prob"]


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.99, 0.95), (1.0, 0.0)])
def test_gae(mask: str, gamma: float, lam: float) -> None:
    """verl skips masked positions, as we do; it returns whitened advantages and raw returns. It drops a reward at a
    masked position, so none is given there."""
    rewards = X["dense_rewards"] * X[mask]
    own, returns = advantage.gae(rewards, X["values"], X[mask].bool(), gamma, lam)
    name = f"gae/g{gamma}_l{lam}/{mask}"
    same(masked.whiten(own, X[mask].bool()), out("verl", name), X[mask])
    same(returns, out("verl", name, 1), X[mask])


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("rewards", REWARDS)
def test_gae_as_an_advantage_estimator(mask: str, rewards: str) -> None:
    rows = X[mask].bool()
    own, returns = advantage.gae(X[rewards] * X[mask], X["values"], rows, 0.99, 0.95)
    same(masked.whiten(own, rows), out("verl", f"adv/gae/{mask}/{rewards}"), X[mask])
    same(returns, out("verl", f"adv/gae/{mask}/{rewards}", 1), X[mask])


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("rewards", REWARDS)
def test_group_advantages(mask: str, rewards: str) -> None:
    rows, scores = X[mask].bool(), (X[rewards] * X[mask] if rewards == "dense_rewards" else X[rewards]).sum(1)
    for std, tail in ((True, ""), (False, "/nostd")):
        own = advantage.spread(advantage.group_relative(scores, GROUPS, std), rows)
        for name in ("grpo", "grpo_vectorized"):
            same(own, out("verl", f"adv/{name}/{mask}/{rewards}{tail}"), X[mask])
    own = advantage.spread(advantage.leave_one_out(scores, GROUPS), rows)
    for name in ("rloo", "rloo_vectorized"):
        same(own, out("verl", f"adv/{name}/{mask}/{rewards}"), X[mask])
    own = advantage.spread(advantage.optimal_baseline(scores, X[mask].sum(1), GROUPS), rows)
    same(own, out("verl", f"adv/opo/{mask}/{rewards}"), X[mask])
    own = masked.whiten(advantage.spread(advantage.group_relative(scores, GROUPS, False), rows), rows)
    same(own, out("verl", f"adv/reinforce_plus_plus_baseline/{mask}/{rewards}"), X[mask])


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("rewards", REWARDS)
def test_reinforce_plus_plus(rewards: str, mask: str) -> None:
    own = advantage.reinforce_plus_plus(X[rewards] * X[mask], X[mask].bool(), 0.99)
    same(own, out("verl", f"adv/reinforce_plus_plus/{mask}/{rewards}"), X[mask])


@pytest.mark.parametrize("mask", MASKS)
def test_remax_with_outcome_rewards(mask: str) -> None:
    own = advantage.spread(advantage.remax(X["outcome_rewards"].sum(1), X["baselines"]), X[mask].bool())
    same(own, out("verl", f"adv/remax/{mask}/outcome_rewards"), X[mask])


@pytest.mark.parametrize("mask", MASKS)
def test_difference_remax_compares_whole_scores(mask: str) -> None:
    """With token rewards verl subtracts the greedy rollout's whole score from what is still to come. We are right
    by the paper (Li et al. 2023): both sides of the difference are scores of whole responses."""
    rows, rewards = X[mask].bool(), X["dense_rewards"] * X[mask]
    theirs = out("verl", f"adv/remax/{mask}/dense_rewards")
    same(advantage.rewards_to_go(rewards, rows) - advantage.spread(X["baselines"], rows), theirs, X[mask])
    assert gap(advantage.spread(advantage.remax(rewards.sum(1), X["baselines"]), rows), theirs, X[mask]) > 0.3


def test_difference_a_reward_at_an_observed_token_is_credited_to_the_action_before_it() -> None:
    """We are right: dropping it, as verl does, loses what a tool turn earned."""
    mask = X["mask_mt"].bool()
    assert float((X["dense_rewards"] * (1 - X["mask_mt"])).abs().sum()) > 0
    own, _ = advantage.gae(X["dense_rewards"], torch.zeros_like(X["values"]), mask, 1.0, 1.0)
    first = mask.int().argmax(1)
    earned = torch.where(torch.arange(12)[None] >= first[:, None], X["dense_rewards"], 0.0).sum(1)
    same(own.gather(1, first[:, None])[:, 0], earned)


@pytest.mark.parametrize("mask", MASKS)
def test_reductions_and_aggregation(mask: str) -> None:
    rows, x = X[mask].bool(), X["advantages"]
    same(masked.whiten(x, rows), out("verl", f"masked_whiten/{mask}"), X[mask])
    same(masked.whiten(x, rows, shift_mean=False), out("verl", f"masked_whiten_noshift/{mask}"), X[mask])
    same(masked.mean(x, rows), out("verl", f"masked_mean/{mask}"))
    same(masked.sum(x, rows), out("verl", f"agg_loss/token-sum/{mask}"))
    same(masked.mean(loss.entropy(X["logits"]), rows), out("verl", f"entropy_loss/{mask}"))
    for mode in ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean"):
        same(loss.aggregate(x, rows, mode), out("verl", f"agg_loss/{mode}/{mask}"))
    own = loss.aggregate(x, rows, "token-sum-norm", length_budget=12)
    same(own, out("verl", f"agg_loss/seq-mean-token-sum-norm/{mask}"))


@pytest.mark.parametrize("mask", MASKS)
def test_aggregation_against_global_counts(mask: str) -> None:
    """One of two ranks (verl then multiplies by their number, since gradients are averaged): 100 tokens, 16 rows."""
    counts = Counts(actions=100, sequences=16)
    modes = {"token-mean": "token-mean", "seq-mean-token-sum": "seq-mean-token-sum"}
    modes |= {"seq-mean-token-mean": "seq-mean-token-mean", "token-sum-norm": "seq-mean-token-sum-norm"}
    for mode, name in modes.items():
        own = loss.aggregate(X["advantages"], X[mask].bool(), mode, counts, length_budget=32)
        same(2 * own, out("verl", f"agg_loss_dp2/{name}/{mask}"))
    same(2 * masked.sum(X["advantages"], X[mask]), out("verl", f"agg_loss_dp2/token-sum/{mask}"))


def losses(mask: Tensor) -> dict[str, Callable[[Tensor], Tensor]]:
    adv = X["advantages"]
    return {
        "vanilla": lambda lp: loss.clipped(lp, OLD, adv, 0.2, 0.28, 3.0),
        "gspo": lambda lp: loss.gspo(lp, OLD, adv, mask, 0.2, 0.28),
        "cispo": lambda lp: loss.cispo(lp, OLD, adv, 0.2, 0.28),
        "gpg": lambda lp: loss.reinforce(lp, adv),
    }


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"])
@pytest.mark.parametrize("name", ["vanilla", "gspo", "cispo", "gpg"])
@pytest.mark.parametrize("corrected", [False, True])
def test_policy_losses_and_their_gradients(name: str, mode: str, mask: str, corrected: bool) -> None:
    """`corrected`: times the truncated token weights exp(old - rollout), as verl's rollout_is_weights."""
    rows, ours = X[mask].bool(), mode.replace("seq-mean-token-sum-norm", "token-sum-norm")
    weights = mismatch.weights(OLD, X["rollout_log_prob"], rows, 2.0, "truncate") if corrected else 1.0
    value, gradient = with_gradient(
        lambda lp: loss.aggregate(weights * losses(rows)[name](lp), rows, ours, length_budget=12)
    )
    theirs = f"policy_loss/{name}/{mode}/{mask}" + ("/is" if corrected else "")
    same(value, out("verl", theirs))
    same(gradient, out("verl", theirs, 2))


@pytest.mark.parametrize("mask", MASKS)
def test_policy_metrics(mask: str) -> None:
    rows, theirs = X[mask].bool(), metrics("verl", f"policy_loss/vanilla/token-mean/{mask}")
    low, high, dual = loss.clip_active(CURRENT, OLD, X["advantages"], 0.2, 0.28, 3.0)
    assert float(masked.mean(low | high, rows)) == pytest.approx(theirs["actor/pg_clipfrac"], abs=1e-6)
    assert float(masked.mean(dual, rows)) == pytest.approx(theirs["actor/pg_clipfrac_lower"], abs=1e-6)
    assert float(masked.mean(OLD - CURRENT, rows)) == pytest.approx(theirs["actor/ppo_kl"], abs=1e-6)


@pytest.mark.parametrize("mask", MASKS)
def test_mismatch_diagnostics(mask: str) -> None:
    """verl's `bypass_mode` measures the current policy against the one that sampled, with sequence weights up to 2."""
    rows, theirs = X[mask].bool(), metrics("verl", f"policy_loss/bypass_mode/token-mean/{mask}")
    weights = mismatch.weights(CURRENT, OLD, rows, 2.0, "truncate", "sequence")
    own = mismatch.measure(CURRENT, OLD, rows, weights)
    pairs = {"kl": "kl", "k3_kl": "k3", "rollout_is_mean": "weight_mean", "rollout_is_eff_sample_size": "ess"}
    for name, ours in pairs.items():
        assert own[f"mismatch/{ours}"] == pytest.approx(theirs[f"rollout_corr/{name}"], abs=1e-5)
    largest = float(mismatch.ratios(CURRENT, OLD, rows, "sequence").max())
    assert largest == pytest.approx(theirs["rollout_corr/rollout_is_max"], abs=1e-5)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"])
def test_value_loss(mask: str, mode: str) -> None:
    rows, new, returns = X[mask].bool(), X["values"] + X["vnoise"], X["advantages"]
    own = loss.aggregate(loss.value(new, returns, X["values"], 0.2), rows, mode)
    same(own, out("verl", f"value_loss/{mode}/{mask}"))
    flat = loss.value_clip_active(new, returns, X["values"], 0.2)
    same(masked.mean(flat, rows), out("verl", f"value_loss/{mode}/{mask}", 1))


@pytest.mark.parametrize("kind", ["kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3", "k1+", "k2+", "k3+"])
def test_kl_estimators_and_their_gradients(kind: str) -> None:
    """A + is the straight-through form: the gradient of k2 under the value of the estimator."""
    estimator, mask = kl.unbiased if kind.endswith("+") else kl.estimate, X["mask_mt"].bool()
    value, gradient = with_gradient(lambda lp: masked.sum(estimator(lp, X["ref_log_prob"], kind.rstrip("+")), mask))
    same(value, out("verl", f"kl_penalty/{kind}"))
    same(gradient, out("verl", f"kl_penalty/{kind}", 1))
    same(estimator(CURRENT, X["ref_log_prob"], kind.rstrip("+")), out("verl", f"kl_penalty/{kind}", 2))


def test_kl_in_rewards() -> None:
    own = kl.penalised_rewards(X["outcome_rewards"], OLD, X["ref_log_prob"], X["mask"].bool(), 0.05)
    same(own, out("verl", "compute_rewards"), X["mask"])


def test_adaptive_controller() -> None:
    beta, seen = 0.2, []
    for measured, count in ((3, 64), (6, 64), (20, 64), (0.1, 256)):
        beta = kl.adapt(beta, measured, 6.0, count, 10_000.0)
        seen.append(beta)
    name = "adaptive_kl_controller/init0.2_target6_h10000_seq(3,64)(6,64)(20,64)(.1,256)"
    same(torch.tensor(seen, dtype=F64), out("verl", name))


def test_entropy() -> None:
    same(loss.entropy(X["logits"]), out("verl", "entropy_from_logits"))


def test_difference_a_group_of_one_has_no_signal() -> None:
    """verl leaves the raw score as the advantage of a group of one. We are right: there is nothing to compare it to."""
    assert advantage.group_relative(torch.tensor([0.5]), torch.tensor([0])).tolist() == [0.0]


def test_difference_k3_is_exact_where_others_clamp() -> None:
    """verl clamps k3 at 10. We are right: exp(5) - 1 - 5 is 142.4, and a clamped value has no gradient."""
    own = kl.estimate(torch.tensor(-5.0), torch.tensor(0.0), "k3")
    assert float(own) == pytest.approx(142.4132, abs=1e-3)


def test_difference_nothing_is_written_under_a_zero_mask() -> None:
    """verl's whitened advantages hold numbers at padding and at a tool's tokens; whoever forgets the mask learns from
    them. Ours are 0 there."""
    theirs = out("verl", "gae/g1.0_l1.0/mask_mt")
    own, _ = advantage.gae(X["dense_rewards"], X["values"], X["mask_mt"].bool(), 1.0, 1.0)
    assert float((theirs * (1 - X["mask_mt"])).abs().max()) > 0.1
    assert not masked.whiten(own, X["mask_mt"].bool())[X["mask_mt"] == 0].any()
