"""By hand: mismatch weights, DAPO's parts, bootstrapping, diagnostics, and every refusal of the mathematics."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from spaniel.algo import ALGORITHMS, KL, Mismatch, advantage, diagnostics, kl, loss, masked, mismatch
from spaniel.errors import BadInput, RunStopped
from spaniel.types import Batch, Counts, Targets
from tests.workers.test_learner import batch

F64 = torch.float64
MASK = torch.tensor([[1, 1, 0, 1], [1, 0, 0, 0]]).bool()
OLD = torch.tensor([[0.0, 0.0, 9.0, 0.0], [0.0, 9.0, 9.0, 9.0]], dtype=F64)
SAMPLER = OLD - torch.tensor([[0.0, math.log(4), 0, math.log(0.25)], [math.log(2), 0, 0, 0]], dtype=F64)


def test_mismatch_weights_by_hand() -> None:
    w = mismatch.ratios(OLD, SAMPLER, MASK)
    assert w.tolist() == [pytest.approx([1, 4, 0, 0.25]), pytest.approx([2, 0, 0, 0])]
    sequence = mismatch.ratios(OLD, SAMPLER, MASK, "sequence")
    assert sequence.tolist() == [pytest.approx([1, 1, 0, 1]), pytest.approx([2, 0, 0, 0])]
    geometric = mismatch.ratios(OLD, SAMPLER, MASK, "geometric")
    assert geometric.tolist() == [pytest.approx([1, 1, 0, 1]), pytest.approx([2, 0, 0, 0])]
    cut = mismatch.weights(OLD, SAMPLER, MASK, 2.0, "truncate")
    assert cut.tolist() == [pytest.approx([1, 2, 0, 0.25]), pytest.approx([2, 0, 0, 0])]
    floored = mismatch.weights(OLD, SAMPLER, MASK, 2.0, "truncate", floor=0.5)
    assert floored[0].tolist() == pytest.approx([1, 2, 0, 0.5])
    kept = mismatch.weights(OLD, SAMPLER, MASK, 2.0, "mask")
    assert kept.tolist() == [pytest.approx([1, 0, 0, 0]), pytest.approx([2, 0, 0, 0])]
    learner = OLD.clone().requires_grad_()
    assert not mismatch.weights(learner, SAMPLER, MASK, 2.0, "truncate").requires_grad
    with pytest.raises(ValueError, match="level 'row'"):
        mismatch.ratios(OLD, SAMPLER, MASK, "row")
    with pytest.raises(ValueError, match="mode 'none'"):
        mismatch.weights(OLD, SAMPLER, MASK, 2.0, "none")


def test_mismatch_measures_by_hand() -> None:
    seen = mismatch.measure(OLD, SAMPLER, MASK)
    gaps = [0, math.log(4), math.log(0.25), math.log(2)]
    assert seen["mismatch/kl"] == pytest.approx(-sum(gaps) / 4)
    assert seen["mismatch/k3"] == pytest.approx(sum(math.exp(g) - 1 - g for g in gaps) / 4)
    assert seen["mismatch/max_abs_diff"] == pytest.approx(math.log(4))
    assert seen["mismatch/weight_mean"] == pytest.approx(7.25 / 4)
    assert seen["mismatch/ess"] == pytest.approx(7.25**2 / (4 * (1 + 16 + 1 / 16 + 4)))
    assert float(mismatch.effective_sample_size(torch.zeros(1, 2), torch.ones(1, 2))) == 0
    assert float(mismatch.effective_sample_size(torch.full((1, 3), 0.5), torch.ones(1, 3))) == pytest.approx(1)


def test_mismatch_in_an_algorithm_weighs_the_loss_and_needs_the_learners_logprobs() -> None:
    data = batch()
    more: dict[str, Any] = {"group_size": 4, "kl": KL(), "loss_aggregation": "token-mean"}
    plain: Any = ALGORITHMS["grpo"](**more)
    weighed: Any = ALGORITHMS["grpo"](**more, mismatch=Mismatch(mode="truncate", cap=1.5))
    with pytest.raises(ValueError, match="own log-probabilities"):
        weighed.targets(data, None, None, {})
    assert weighed.needs_old_logprobs
    old = data.logprobs + math.log(3.0)
    targets, _, metrics = weighed.targets(data, None, None, {}, old)
    assert metrics["mismatch/weight_mean"] == pytest.approx(1.5)
    counts = Counts(int(data.actions.sum()), 8)
    zeros = torch.zeros_like(old)
    moved = old + 0.1 * torch.rand(old.shape, generator=torch.Generator().manual_seed(1))  # at ratio 1 the sum is 0
    own, _ = weighed.policy_loss(moved, zeros, data, targets, counts)
    unweighed, _ = plain.policy_loss(moved, zeros, data, targets, counts)
    torch.testing.assert_close(own, 1.5 * unweighed)
    assert abs(float(own)) > 1e-4


def test_dapo_penalises_length_over_the_last_share_of_the_budget() -> None:
    lengths = torch.tensor([1.0, 80.0, 90.0, 100.0, 130.0])
    assert advantage.overlong_penalty(lengths, 100, 20).tolist() == pytest.approx([0, 0, -0.5, -1, -1])
    data = batch()
    dapo: Any = ALGORITHMS["dapo"](group_size=4, length_budget=6, overlong_share=0.5)  # type: ignore[call-arg]
    assert dapo.resampling == 3
    _, _, metrics = dapo.targets(data, None, None, {})
    lengths = data.actions.sum(1).double()
    assert metrics["critic/overlong_penalty/mean"] == pytest.approx(
        float(advantage.overlong_penalty(lengths, 6, 3).mean())
    )


def test_ppo_bootstraps_a_cut_off_rollout_from_the_value_behind_its_last_token() -> None:
    data = batch(1)
    cut = Batch(**{**vars(data), "truncated": torch.tensor([True]), "rewards": torch.zeros_like(data.rewards)})
    values = torch.zeros_like(data.logprobs)
    values[0, int(data.lengths[0])] = 0.6
    settings: dict[str, Any] = {"gamma": 1.0, "lam": 1.0, "whiten_advantages": False, "kl": KL()}
    booted: Any = ALGORITHMS["ppo"](bootstrap_truncated=True, **settings)
    plain: Any = ALGORITHMS["ppo"](**settings)
    own = booted.targets(cut, values, None, {})[0].advantages
    assert own[data.actions].tolist() == pytest.approx([0.6] * int(data.actions.sum()))
    assert not plain.targets(cut, values, None, {})[0].advantages.any()
    narrow = cut.take(torch.tensor([0]), int(cut.lengths[0]))
    with pytest.raises(ValueError, match="rows must be shorter than T"):
        booted.targets(narrow, values[:, : int(cut.lengths[0])], None, {})


def test_ppo_without_a_value_clip_and_without_targets() -> None:
    ppo: Any = ALGORITHMS["ppo"](value_clip=None, kl=KL())  # type: ignore[call-arg]
    data = batch()
    zeros = torch.zeros_like(data.logprobs)
    targets, _, _ = ppo.targets(data, zeros, None, {})
    share, tallies = ppo.value_loss(zeros + 0.5, data, targets, Counts(int(data.actions.sum()), 8))
    expected = loss.aggregate(loss.value(zeros + 0.5, targets.returns), data.actions, "token-mean")
    torch.testing.assert_close(share, expected)
    assert "critic/vf_clipfrac" not in tallies
    with pytest.raises(ValueError, match="needs the returns"):
        ppo.value_loss(zeros, data, Targets(zeros), Counts(1, 1))
    with pytest.raises(ValueError, match="needs the critic's values"):
        ppo.targets(data, None, None, {})


def test_reinforce_plus_plus_with_baseline() -> None:
    data = batch()
    own: Any = ALGORITHMS["reinforce_plus_plus"](baseline=True, group_size=4, kl=KL())  # type: ignore[call-arg]
    got = own.targets(data, None, None, {})[0].advantages
    scores = data.rewards.sum(1)
    centred = advantage.spread(advantage.group_relative(scores, data.groups, False), data.actions)
    torch.testing.assert_close(got, masked.whiten(centred, data.actions))
    with pytest.raises(BadInput, match="gamma"):
        ALGORITHMS["reinforce_plus_plus"](baseline=True, group_size=4, gamma=0.9)  # type: ignore[call-arg]
    with pytest.raises(BadInput, match="group_size"):
        ALGORITHMS["reinforce_plus_plus"](baseline=True)  # type: ignore[call-arg]


def test_explained_variance_is_pooled() -> None:
    values, returns = torch.tensor([[0.0, 1.0], [0.5, 0.5]]), torch.tensor([[0.0, 1.0], [0.4, 0.6]])
    everywhere = torch.ones(2, 2).bool()
    assert float(diagnostics.explained_variance(values, returns, everywhere)) == pytest.approx(0.9615, abs=1e-4)


def test_value_clip_share_looks_at_the_unclipped_value() -> None:
    one = torch.ones(1)
    assert loss.value_clip_active(one, 0 * one, 0 * one, 0.2).tolist() == [False]  # moved, but not flat
    assert loss.value_clip_active(one, 2 * one, 0 * one, 0.2).tolist() == [True]  # the clipped error is the larger


def test_pairs_of_one_ranking_weigh_one_together_and_labels_can_be_smoothed() -> None:
    winners, losers = torch.tensor([1.0, 2.0, 0.5], dtype=F64), torch.tensor([0.0, 0.0, 1.0], dtype=F64)
    each = [math.log(1 + math.exp(-(w - x))) for w, x in zip(winners.tolist(), losers.tolist(), strict=True)]
    assert float(loss.bradley_terry(winners, losers)) == pytest.approx(sum(each) / 3)
    ranked = loss.bradley_terry(winners, losers, rankings=torch.tensor([7, 7, 9]))
    assert float(ranked) == pytest.approx(((each[0] + each[1]) / 2 + each[2]) / 2)
    turned = [math.log(1 + math.exp(w - x)) for w, x in zip(winners.tolist(), losers.tolist(), strict=True)]
    smoothed = loss.bradley_terry(winners, losers, label_smoothing=0.1)
    assert float(smoothed) == pytest.approx(sum(0.9 * a + 0.1 * b for a, b in zip(each, turned, strict=True)) / 3)
    assert float(loss.bradley_terry(winners[:0], losers[:0])) == 0


def test_empty_masks_give_zero() -> None:
    nothing = torch.zeros(2, 3).bool()
    assert [float(x) for x in masked.extremes(torch.ones(2, 3), nothing)] == [0, 0]
    assert float(masked.mean(torch.full((2, 3), math.nan), nothing)) == 0


REFUSED: list[tuple[Any, type[Exception], str]] = [
    (lambda: kl.estimate(torch.zeros(1), torch.zeros(1), "k9"), BadInput, "estimator 'k9'"),
    (lambda: kl.adapt(0.1, 1.0, 0.0, 8, 100.0), BadInput, "must both be above 0"),
    (lambda: kl.adapt(0.1, 1.0, 1.0, 600, 100.0), BadInput, "horizon 100.0 is too short for 600"),
    (lambda: loss.value(torch.zeros(1), torch.zeros(1), None, 0.2), ValueError, "before the update"),
    (lambda: loss.aggregate(torch.zeros(1, 1), MASK[:1, :1], "token-sum-norm"), BadInput, "length budget"),
    (lambda: loss.aggregate(torch.zeros(1, 1), MASK[:1, :1], "token-men"), BadInput, "did you mean 'token-mean'"),
    (lambda: advantage.group_relative(torch.zeros(2), torch.zeros(3).long()), ValueError, "one number a row"),
]


@pytest.mark.parametrize(("call", "kind", "message"), REFUSED)
def test_refusals(call: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        call()


def test_an_algorithm_says_what_it_misses() -> None:
    data = batch()
    assert ALGORITHMS["grpo"]().resampling == 0
    held: Any = ALGORITHMS["grpo"](group_size=4, kl=KL(place="loss", beta=0.1))  # type: ignore[call-arg]
    zeros = torch.zeros_like(data.logprobs)
    with pytest.raises(ValueError, match="the reference's log-probabilities are missing"):
        held.targets(data, None, None, {})
    with pytest.raises(ValueError, match="hold no log-probabilities of the reference"):
        held.policy_loss(zeros, zeros, data, Targets(zeros), Counts(1, 1))
    with pytest.raises(ValueError, match="has no critic"):
        held.value_loss(zeros, data, Targets(zeros), Counts(1, 1))
    with pytest.raises(ValueError, match="two prompts seem to share"):
        held.targets(Batch(**{**vars(data), "groups": torch.zeros(8).long()}), None, zeros, {})
    with pytest.raises(ValueError, match=r"Batch\.baselines"):
        ALGORITHMS["remax"]().targets(data, None, zeros, {"beta": 0.05})
    rewards = data.rewards.clone()
    rewards[1, int(data.lengths[1]) - 1] = math.nan
    with pytest.raises(RunStopped, match="reward of row 1"):
        held.targets(Batch(**{**vars(data), "rewards": rewards}), None, zeros, {})


def test_the_entropy_bonus_is_meaned_like_the_loss_and_lowers_it() -> None:
    data = batch()
    bonus: Any = ALGORITHMS["grpo"](group_size=4, kl=KL(), entropy_coef=0.1)  # type: ignore[call-arg]
    plain: Any = ALGORITHMS["grpo"](group_size=4, kl=KL())  # type: ignore[call-arg]
    targets, _, _ = plain.targets(data, None, None, {})
    counts = Counts(int(data.actions.sum()), 8)
    entropy = torch.rand(data.tokens.shape, generator=torch.Generator().manual_seed(1))
    with_bonus, _ = bonus.policy_loss(data.logprobs, entropy, data, targets, counts)
    without, _ = plain.policy_loss(data.logprobs, entropy, data, targets, counts)
    spread = loss.aggregate(entropy, data.actions, plain.loss_aggregation)
    torch.testing.assert_close(with_bonus, without - 0.1 * spread)


def test_a_dual_clip_is_reported() -> None:
    data = batch()
    dual: Any = ALGORITHMS["grpo"](group_size=4, kl=KL(), dual_clip=2.0)  # type: ignore[call-arg]
    targets, _, _ = dual.targets(data, None, None, {})
    far = data.logprobs + math.log(5.0)
    _, tallies = dual.policy_loss(far, torch.zeros_like(far), data, targets, Counts(int(data.actions.sum()), 8))
    negative = (targets.advantages < 0) & data.actions
    assert tallies["actor/pg_clipfrac_dual"].total == float(negative.sum()) > 0


def test_a_step_of_any_size_suits_a_fixed_controller_and_a_small_one_an_adaptive() -> None:
    KL(place="reward", beta=0.1).check_step(10**9)
    KL(place="reward", beta=0.1, controller="adaptive", horizon=10.0).check_step(49)


def test_an_adaptive_controller_without_usable_rows_keeps_its_coefficient() -> None:
    settings = KL(place="reward", beta=0.1, controller="adaptive")
    assert settings.next_state({"beta": 0.3}, 5.0, 0) == {"beta": 0.3}
