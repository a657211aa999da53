"""Agreement with verl 0.9.1, TRL 1.16 and OpenRLHF 0.11.2 (values in this folder, computed with those packages), and
each deliberate difference by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from spaniel.algo import advantage, kl, loss, masked

HERE = Path(__file__).parent


def tensor(value: Any) -> Tensor:
    return torch.tensor(value["data"], dtype=torch.float64).reshape(value["shape"])


FILES = {name: json.loads((HERE / f"{name}.json").read_text()) for name in ("verl", "trl", "openrlhf")}
X = {name: tensor(value) for name, value in FILES["verl"]["inputs"].items()}
GROUPS = X["index"].long()
MASKS = ("mask", "mask_mt")


def out(package: str, name: str) -> list[Tensor]:
    return [tensor(value) for value in FILES[package]["outputs"][name]]


def same(own: Tensor, theirs: Tensor, mask: Tensor | None = None) -> None:
    torch.testing.assert_close(own, theirs if mask is None else theirs * mask, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.99, 0.95), (1.0, 0.0)])
def test_gae_of_verl(mask: str, gamma: float, lam: float) -> None:
    """verl skips masked positions, as we do; it returns whitened advantages and raw returns. A reward at a masked
    position is dropped there, and credited to the action before it here, so none is given."""
    rewards = X["dense_rewards"] * X[mask]
    own, returns = advantage.gae(rewards, X["values"], X[mask].bool(), gamma, lam)
    theirs = out("verl", f"gae/g{gamma}_l{lam}/{mask}")
    same(masked.whiten(own, X[mask].bool()), theirs[0], X[mask])
    same(returns, theirs[1], X[mask])


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.99, 0.95)])
def test_gae_of_openrlhf_on_single_turn_rows(gamma: float, lam: float) -> None:
    own, _ = advantage.gae(X["dense_rewards"] * X["mask"], X["values"], X["mask"].bool(), gamma, lam)
    same(own, out("openrlhf", f"gae/g{gamma}_l{lam}/mask")[0], X["mask"])


def test_difference_gae_of_openrlhf_lets_lambda_decay_over_a_tool_reply() -> None:
    """We are right: a reply of any length between two actions is no transition of the policy."""
    own, _ = advantage.gae(X["dense_rewards"] * X["mask_mt"], X["values"], X["mask_mt"].bool(), 0.99, 0.95)
    theirs = out("openrlhf", "gae/g0.99_l0.95/mask_mt")[0]
    assert float((own - theirs * X["mask_mt"]).abs().max()) > 0.1


def test_difference_a_reward_at_an_observed_token_is_credited_to_the_action_before_it() -> None:
    """We are right: dropping it, as verl does, loses the reward of a tool turn."""
    mask = X["mask_mt"].bool()
    lost = float((X["dense_rewards"] * (1 - X["mask_mt"]) * X["mask"]).abs().sum())
    assert lost > 0
    with_all, _ = advantage.gae(X["dense_rewards"], torch.zeros_like(X["values"]), mask, 1.0, 1.0)
    first = mask.int().argmax(1)
    after_first = torch.where(torch.arange(12)[None] >= first[:, None], X["dense_rewards"], 0.0).sum(1)
    same(with_all.gather(1, first[:, None])[:, 0], after_first)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("rewards", ["outcome_rewards", "dense_rewards"])
def test_group_advantages_of_verl(mask: str, rewards: str) -> None:
    scores = (X[rewards] * X[mask]).sum(1) if rewards == "dense_rewards" else X[rewards].sum(1)
    rows = X[mask].bool()
    for std in (True, False):
        theirs = out("verl", f"adv/grpo/{mask}/{rewards}" + ("" if std else "/nostd"))[0]
        same(advantage.spread(advantage.group_relative(scores, GROUPS, std), rows), theirs, X[mask])
    theirs = out("verl", f"adv/rloo/{mask}/{rewards}")[0]
    same(advantage.spread(advantage.leave_one_out(scores, GROUPS), rows), theirs, X[mask])
    theirs = out("verl", f"adv/opo/{mask}/{rewards}")[0]
    own = advantage.optimal_baseline(scores, X[mask].sum(1), GROUPS)
    same(advantage.spread(own, rows), theirs, X[mask])


@pytest.mark.parametrize("mask", MASKS)
def test_remax_of_verl_with_outcome_rewards(mask: str) -> None:
    own = advantage.remax(X["outcome_rewards"].sum(1), X["baselines"])
    same(advantage.spread(own, X[mask].bool()), out("verl", f"adv/remax/{mask}/outcome_rewards")[0], X[mask])


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("rewards", ["outcome_rewards", "dense_rewards"])
def test_reinforce_plus_plus_of_verl(rewards: str, mask: str) -> None:
    own = advantage.reinforce_plus_plus(X[rewards] * X[mask], X[mask].bool(), 0.99)
    same(own, out("verl", f"adv/reinforce_plus_plus/{mask}/{rewards}")[0], X[mask])


def test_difference_an_observation_does_not_cut_a_return() -> None:
    """Systems that multiply the running return by the mask lose it there; the earlier turn earned what came after."""
    alone = advantage.rewards_to_go(torch.tensor([[0.0, 0.0, 0.0, 1.0]]), torch.tensor([[1, 0, 0, 1]]).bool())
    assert alone.tolist() == [[1.0, 0.0, 0.0, 1.0]]


@pytest.mark.parametrize("mask", MASKS)
def test_reductions_of_verl(mask: str) -> None:
    rows, x = X[mask].bool(), X["advantages"]
    same(masked.whiten(x, rows), out("verl", f"masked_whiten/{mask}")[0], X[mask])
    same(masked.whiten(x, rows, shift_mean=False), out("verl", f"masked_whiten_noshift/{mask}")[0], X[mask])
    same(masked.mean(x, rows), out("verl", f"masked_mean/{mask}")[0])
    for mode in ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean"):
        same(loss.aggregate(x, rows, mode), out("verl", f"agg_loss/{mode}/{mask}")[0])
    own = loss.aggregate(x, rows, "token-sum-norm", length_budget=12)
    same(own, out("verl", f"agg_loss/seq-mean-token-sum-norm/{mask}")[0])


def losses(mask: Tensor) -> dict[str, Callable[[Tensor], Tensor]]:
    old, adv = X["old_log_prob"], X["advantages"]
    return {
        "vanilla": lambda lp: loss.clipped(lp, old, adv, 0.2, 0.28, 3.0),
        "gspo": lambda lp: loss.gspo(lp, old, adv, mask, 0.2, 0.2),
        "cispo": lambda lp: loss.cispo(lp, old, adv, 0.2, 0.28),
        "gpg": lambda lp: loss.reinforce(lp, adv),
    }


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean"])
@pytest.mark.parametrize("name", ["vanilla", "gspo", "cispo", "gpg"])
def test_policy_losses_of_verl_and_their_gradients(name: str, mode: str, mask: str) -> None:
    rows = X[mask].bool()
    current = X["log_prob"].clone().requires_grad_()
    own = loss.aggregate(losses(rows)[name](current), rows, mode)
    own.backward()
    theirs = out("verl", f"policy_loss/{name}/{mode}/{mask}")
    same(own.detach(), theirs[0])
    assert current.grad is not None
    same(current.grad, theirs[1])


@pytest.mark.parametrize(
    ("name", "settings"),
    [("{}", (0.2, 0.2)), ('{"clip_eps_high": 0.28}', (0.2, 0.28)), ('{"dual_clip": 3.0}', (0.2, 0.2, 3.0))],
)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("level", "mode"), [("True", "token-mean"), ("False", "seq-mean-token-mean")])
def test_policy_loss_of_openrlhf(name: str, settings: tuple, mask: str, level: str, mode: str) -> None:
    own = loss.clipped(X["log_prob"], X["old_log_prob"], X["advantages"], *settings)
    theirs = out("openrlhf", f"PolicyLoss/{name}/token_level={level}/{mask}")[0]
    same(loss.aggregate(own, X[mask].bool(), mode), theirs)


@pytest.mark.parametrize("name", ["grpo", "bnpo", "dr_grpo"])
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("beta", ["0.0", "0.04"])
def test_grpo_loss_of_trl_and_its_gradient(name: str, level: str, beta: str) -> None:
    """TRL weighs its KL term by the importance ratio; ours is the plain estimate, so the ratio is put in here."""
    rows = X["mask"].bool()
    adv = (X["scores"] - 0.4)[:, None].expand(8, 12)
    mode = {"grpo": "seq-mean-token-mean", "bnpo": "token-mean", "dr_grpo": "token-sum-norm"}[name]
    current = X["log_prob"].clone().requires_grad_()
    if level == "token":
        per_token = loss.clipped(current, X["old_log_prob"], adv, 0.2, 0.28)
    else:
        per_token = loss.gspo(current, X["old_log_prob"], adv, rows, 0.2, 0.28)
    gap = current - X["old_log_prob"]
    if level == "sequence":
        mean = masked.mean(gap, rows, dim=1)[:, None].expand(8, 12)
        gap = gap - gap.detach() + mean.detach()
    per_token = per_token + float(beta) * gap.exp() * kl.estimate(current, X["ref_log_prob"], "k3")
    own = loss.aggregate(per_token, rows, mode, length_budget=12 if name == "dr_grpo" else None)
    own.backward()
    theirs = out("trl", f"grpo_loss/{name}/{level}/beta={beta}/delta=None")
    same(own.detach(), theirs[0])
    assert current.grad is not None
    if level == "token" or beta == "0.0":  # their gradient of the weighed KL runs through the sequence's mean
        same(current.grad, theirs[1])


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean"])
def test_value_losses(mask: str, mode: str) -> None:
    rows, new, returns = X[mask].bool(), X["values"] + X["vnoise"], X["advantages"]
    clipped = loss.aggregate(loss.value(new, returns, X["values"], 0.2), rows, mode)
    same(clipped, out("verl", f"value_loss/{mode}/{mask}")[0])
    level = "True" if mode == "token-mean" else "False"
    same(clipped, out("openrlhf", f"ValueLoss/clip=0.2/token_level={level}/{mask}")[0])
    plain = loss.aggregate(loss.value(new, returns), rows, mode)
    same(plain, out("openrlhf", f"ValueLoss/clip=None/token_level={level}/{mask}")[0])


@pytest.mark.parametrize("kind", ["k1", "abs", "k2", "k3"])
def test_kl_estimators(kind: str) -> None:
    own = kl.estimate(X["log_prob"], X["ref_log_prob"], kind)
    same(own, out("verl", f"kl_penalty/{kind}")[2])
    if kind != "abs":
        same(own, out("openrlhf", f"compute_approx_kl/{kind}")[0])


def test_adaptive_controller_of_verl() -> None:
    beta, seen = 0.2, []
    for measured, count in ((3, 64), (6, 64), (20, 64), (0.1, 256)):
        beta = kl.adapt(beta, measured, 6.0, count, 10_000.0)
        seen.append(beta)
    (name,) = [n for n in FILES["verl"]["outputs"] if n.startswith("adaptive_kl")]
    same(torch.tensor(seen, dtype=torch.float64), out("verl", name)[0])


def test_pairwise_losses_of_openrlhf() -> None:
    same(loss.bradley_terry(X["chosen"], X["rejected"]), out("openrlhf", "PairWiseLoss")[0])
    same(loss.bradley_terry(X["chosen"], X["rejected"], margin=X["margin"]), out("openrlhf", "PairWiseLoss/margin")[0])


def test_entropy_of_verl() -> None:
    same(loss.entropy(X["logits"]), out("verl", "entropy_from_logits")[0])


def test_difference_a_group_of_one_has_no_signal() -> None:
    """verl leaves the raw score of a group of one as its advantage; there is nothing to compare it with."""
    assert advantage.group_relative(torch.tensor([0.5]), torch.tensor([0])).tolist() == [0.0]


def test_difference_k3_is_exact_where_others_clamp() -> None:
    """verl clamps k3 at 10; exp(5) - 1 - 5 is 142.4."""
    own = kl.estimate(torch.tensor(-5.0), torch.tensor(0.0), "k3")
    assert float(own) == pytest.approx(142.4132, abs=1e-3)
