"""Agreement with TRL 1.16, and each deliberate difference by name."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from spaniel.algo import advantage, kl, loss, masked
from tests.golden.published import X, gap, out, same, with_gradient

ROWS = X["mask"].bool()
OLD, REF = X["old_log_prob"], X["ref_log_prob"]
ADVANTAGES = (X["scores"] - 0.4)[:, None].expand(8, 12)
MODES = {"grpo": "seq-mean-token-mean", "bnpo": "token-mean", "dapo": "token-mean", "dr_grpo": "token-sum-norm"}


def policy_term(current: Tensor, level: str, delta: str) -> Tensor:
    """TRL's `delta` is our dual clip; its sequence level, GSPO, does not read it (no ratio here is above 1.5)."""
    if level == "sequence":
        return loss.gspo(current, OLD, ADVANTAGES, ROWS, 0.2, 0.28)
    return loss.clipped(current, OLD, ADVANTAGES, 0.2, 0.28, None if delta == "None" else float(delta))


@pytest.mark.parametrize("name", MODES)
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("beta", ["0.0", "0.04"])
@pytest.mark.parametrize("delta", ["None", "1.5"])
def test_grpo_losses_and_their_gradients(name: str, level: str, beta: str, delta: str) -> None:
    """TRL weighs the KL term by the importance ratio (see the difference below), so it is weighed here."""

    def whole(current: Tensor) -> Tensor:
        apart = current - OLD
        if level == "sequence":
            apart = masked.mean(apart, ROWS, dim=1)[:, None].expand(8, 12)
        held = float(beta) * apart.exp() * kl.estimate(current, REF, "k3")
        return loss.aggregate(policy_term(current, level, delta) + held, ROWS, MODES[name], length_budget=12)

    value, gradient = with_gradient(whole)
    theirs = f"grpo_loss/{name}/{level}/beta={beta}/delta={delta}"
    same(value, out("trl", theirs))
    same(gradient, out("trl", theirs, 1))


def test_difference_the_kl_term_of_the_loss_is_not_weighed_by_the_ratio() -> None:
    """A choice: on the first update of a batch the ratio is 1 and there is none; later TRL corrects the value of the
    estimate for the drift. Ours is the plain estimate of what the policy was sampled from, under the gradient of k2."""
    first = loss.aggregate(kl.estimate(OLD, REF, "k3"), ROWS, "token-mean")
    same(loss.aggregate((OLD - OLD).exp() * kl.estimate(OLD, REF, "k3"), ROWS, "token-mean"), first)
    policy = loss.aggregate(policy_term(X["log_prob"], "token", "None"), ROWS, "token-mean")
    theirs = (out("trl", "grpo_loss/bnpo/token/beta=0.04/delta=None") - policy) / 0.04
    own = loss.aggregate(kl.estimate(X["log_prob"], REF, "k3"), ROWS, "token-mean")
    assert 1e-4 < abs(float(own - theirs)) < 0.1 * float(own)


def test_cispo_and_its_gradient() -> None:
    value, gradient = with_gradient(
        lambda lp: loss.aggregate(loss.cispo(lp, OLD, ADVANTAGES, None, 4.0), ROWS, "token-mean")
    )
    same(value, out("trl", "grpo_loss/cispo/token/beta=0.0/delta=None"))
    same(gradient, out("trl", "grpo_loss/cispo/token/beta=0.0/delta=None", 1))


def test_difference_bounds_of_cispo_are_relative_to_one() -> None:
    """TRL clamps the ratio at epsilon_high itself: with PPO's 0.28 every weight would be at most 0.28. We are right by
    the paper (MiniMax-M1): the bound is 1 + epsilon_high."""
    rho = torch.tensor([1.0, 1.2, 3.0], dtype=torch.float64)
    own = loss.cispo(rho.log(), torch.zeros(3, dtype=torch.float64), torch.ones(3), None, 0.28)
    assert (-own / rho.log()).tolist()[1:] == pytest.approx([1.2, 1.28])


def test_difference_epsilon_of_the_group_std() -> None:
    """TRL adds 1e-4 to the standard deviation, verl and we 1e-6: of no weight but for nearly equal scores, which then
    differ from 0 as they should."""
    scores, groups = torch.tensor([0.0, 1e-3], dtype=torch.float64), torch.zeros(2).long()
    own, std = advantage.group_relative(scores, groups), float(scores.std())
    assert float(own[1]) == pytest.approx(5e-4 / (std + 1e-6))
    assert float(own[1]) > 1.1 * 5e-4 / (std + 1e-4)


def test_entropy() -> None:
    same(loss.entropy(X["logits"]), out("trl", "entropy_from_logits"))
    assert gap(loss.entropy(X["logits"] / 2), out("trl", "entropy_from_logits"), X["mask"]) > 0.1
