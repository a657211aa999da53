"""Cases small enough to do on paper: what users of other systems met and asked about, with the right answer.

Where a docstring names a public thread, somebody ran into it there.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from spaniel.algo import ALGORITHMS, KL, advantage, kl, loss, masked
from spaniel.types import Counts
from tests.workers.test_learner import batch

F64 = torch.float64


def row(*x: float) -> Tensor:
    return torch.tensor([x], dtype=F64)


def bits(*x: int) -> Tensor:
    return torch.tensor([x]).bool()


def test_a_step_down_the_kl_term_brings_the_policy_nearer() -> None:
    """A KL loss of the wrong sign is maximised."""
    for term in (kl.estimate, kl.unbiased):
        for kind in ("k2", "k3"):
            logits = torch.tensor([0.0, 1.0], dtype=F64, requires_grad=True)
            ref = torch.log_softmax(torch.tensor([0.5, 0.0], dtype=F64), 0)

            def distance(x: Tensor, ref: Tensor = ref) -> float:
                return float(kl.estimate(x.detach()[None], ref[None], "full"))

            before = distance(logits)
            log_pi = torch.log_softmax(logits, 0)
            (log_pi.exp().detach() * term(log_pi, ref, kind)).sum().backward()
            assert distance(logits - 0.1 * logits.grad) < before  # type: ignore[operator]


def test_estimators_of_one_token() -> None:
    """OpenRLHF/OpenRLHF#768: which estimator is which."""
    lp, ref = torch.tensor(-1.2, dtype=F64), torch.tensor(-1.0, dtype=F64)
    values = {kind: float(kl.estimate(lp, ref, kind)) for kind in ("k1", "abs", "k2", "k3")}
    for x, k3 in ((-40.0, math.exp(40) - 41), (-80.0, math.exp(80)), (60.0, 59.0), (1e4, 9999.0)):  # nothing is clamped
        assert float(kl.estimate(torch.tensor(x), torch.tensor(0.0), "k3")) == pytest.approx(k3, rel=1e-5)
    assert values == pytest.approx({"k1": -0.2, "abs": 0.2, "k2": 0.02, "k3": math.exp(0.2) - 1 - 0.2})


def test_the_policy_that_is_its_own_reference_has_no_kl() -> None:
    """huggingface/trl#256 and others: a negative KL from padding or another forward."""
    x = torch.randn(2, 5, generator=torch.Generator().manual_seed(0))
    mask = torch.tensor([[1, 1, 0, 1, 0], [0, 1, 1, 1, 1]])
    assert kl.per_sequence(x, x, mask).tolist() == [0, 0]
    rewards = kl.penalised_rewards(torch.tensor([1.0, 2.0]), x, x, mask, 0.5)
    assert rewards.tolist() == [[0, 0, 0, 1, 0], [0, 0, 0, 0, 2]]


def test_a_group_is_told_by_its_number_in_any_order_and_of_any_size() -> None:
    """PeterGriffinJin/Search-R1#39, PrimeIntellect-ai/prime-rl#600, THUDM/slime#1918: groups by position or row."""
    number, score = torch.tensor([7, 3, 7, 3, 3, 9]), torch.tensor([1.0, 4.0, 0.0, 1.0, 1.0, 0.5])
    own = advantage.group_relative(score, number, False)
    assert own.tolist() == [0.5, 2.0, -0.5, -1.0, -1.0, 0.0]
    scaled = advantage.group_relative(score, number)
    std = torch.tensor([0.5**0.5, 3**0.5, 0.5**0.5, 3**0.5, 3**0.5, 1.0])  # of 1, 0; of 4, 1, 1; of one, none
    torch.testing.assert_close(scaled, own / std, atol=1e-5, rtol=1e-5)


def test_equal_scores_have_exactly_no_advantage() -> None:
    """Also where their sum divided by their number is not the score: 0.1 + 0.1 + 0.1 is not 0.3."""
    assert (0.1 + 0.1 + 0.1) / 3 != 0.1
    for kind in (torch.float32, F64):
        scores, groups = torch.full((3,), 0.1, dtype=kind), torch.zeros(3).long()
        for own in (
            advantage.group_relative(scores, groups),
            advantage.group_relative(scores, groups, False),
            advantage.leave_one_out(scores, groups),
            advantage.optimal_baseline(scores, torch.tensor([3, 1, 7]), groups),
        ):
            assert own.tolist() == [0, 0, 0]
        assert advantage.without_signal(scores, groups).tolist() == [True]


def test_every_member_of_a_group_enters_its_mean() -> None:
    """Not the first rollout alone."""
    own = advantage.group_relative(torch.tensor([1.0, 0, 0, 0]), torch.zeros(4).long(), False)
    assert own.tolist() == [0.75, -0.25, -0.25, -0.25]


def test_a_failed_member_is_not_a_zero() -> None:
    """verl-project/verl#6375: rejected samples still entered the baseline."""
    valid = torch.tensor([True, False, True, True])
    for score in (0.0, 99.0, math.nan, math.inf):
        own = advantage.leave_one_out(torch.tensor([1.0, score, 0.0, 1.0]), torch.zeros(4).long(), valid)
        assert own.tolist() == pytest.approx([0.5, 0.0, -1.0, 0.5])


def test_whitening() -> None:
    """alibaba/ROLL#475 (one element divides by 0), THUDM/slime#1369 (what shift_mean=False means),
    verl-project/verl#6497 (a number spread over a row weighs as many times as the row has actions)."""
    assert masked.whiten(row(5, 7, 9), bits(0, 1, 0)).tolist() == [[0, 0, 0]]
    assert masked.whiten(row(5, 7, 9), bits(0, 1, 0), shift_mean=False).tolist() == [[0, 7, 0]]
    half = 2 / 8**0.5  # the unbiased standard deviation of 0 and 4 is sqrt(8)
    assert masked.whiten(row(0, 4), bits(1, 1))[0].tolist() == pytest.approx([-half, half])
    assert masked.whiten(row(0, 4), bits(1, 1), shift_mean=False)[0].tolist() == pytest.approx([2 - half, 2 + half])
    long = torch.tensor([[1, 0, 0], [1, 1, 1]]).bool()
    own = masked.whiten(advantage.spread(torch.tensor([3.0, -1.0], dtype=F64), long), long)
    assert own[0, 0] == pytest.approx(1.5)  # mean (3 - 1 - 1 - 1) / 4 = 0, variance (9 + 3) / 3 = 4
    assert own[1].tolist() == pytest.approx([-0.5] * 3)


def test_the_share_of_groups_that_teach_nothing() -> None:
    """Two rollouts of a question that is answered in 15 of 100 tries: 0.85^2 + 0.15^2 = 74.5 % of groups are silent."""
    hit = torch.rand(200_000, generator=torch.Generator().manual_seed(2)) < 0.15
    silent = advantage.without_signal(hit.float(), torch.arange(200_000) // 2)
    assert float(silent.double().mean()) == pytest.approx(0.745, abs=0.005)
    lone = advantage.without_signal(
        torch.tensor([1.0, 0.0, 2.0, 2.0]), torch.tensor([0, 0, 1, 1]), torch.tensor([1, 0, 1, 1])
    )
    assert lone.tolist() == [True, True]  # one usable row is compared with nothing


def test_two_rewards_that_differ_give_a_gradient() -> None:
    """Also under default settings."""
    lp = torch.zeros(2, 1, requires_grad=True)
    own = advantage.spread(advantage.group_relative(torch.tensor([1.0, 0.0]), torch.zeros(2).long()), torch.ones(2, 1))
    loss.aggregate(loss.clipped(lp, lp.detach(), own, 0.2, 0.2), torch.ones(2, 1), "token-mean").backward()
    assert lp.grad is not None
    assert lp.grad.flatten().tolist() == pytest.approx([-(0.5**0.5) / 2, 0.5**0.5 / 2], abs=1e-5)


def test_a_masked_nan_stays_where_it_is() -> None:
    """verl-project/verl#6361: 0 * NaN is NaN."""
    lp, ref = row(-1.0, -0.5, math.nan), row(-1.2, -0.4, -1.0)
    own = kl.penalised_rewards(torch.tensor([1.0], dtype=F64), lp, ref, bits(1, 1, 0), 0.1)
    assert own[0].tolist() == pytest.approx([-0.02, 1.01, 0])
    assert float(masked.mean(kl.estimate(lp, ref, "k1"), bits(1, 1, 0))) == pytest.approx(0.05)


def test_a_token_the_policy_gave_up_has_a_finite_k3() -> None:
    """OpenRLHF/OpenRLHF#1335: an overflow, or a NaN gradient behind a clamp."""
    lp = torch.tensor([-200.0], requires_grad=True)
    for term in (kl.estimate, kl.unbiased):
        value = term(lp, torch.tensor([-1.0]), "k3")
        (gradient,) = torch.autograd.grad(value.sum(), lp)
        assert torch.isfinite(value).all()
        assert torch.isfinite(gradient).all()
    assert float(gradient) == -199  # the unbiased one still pulls back


def test_a_gap_of_a_hundred_in_a_pair() -> None:
    """microsoft/DeepSpeedExamples#423: -log(sigmoid(x)) written out is inf."""
    gap = torch.tensor([-100.0], requires_grad=True)
    own = loss.bradley_terry(gap, torch.tensor([0.0]))
    own.backward()
    assert float(own.detach()) == pytest.approx(100)
    assert gap.grad is not None
    assert float(gap.grad) == pytest.approx(-1)


def test_a_ranking_by_hand() -> None:
    """Scores 1, 0, 2; order third, first, second."""
    own = loss.plackett_luce(torch.tensor([1.0, 0.0, 2.0], dtype=F64), torch.tensor([2, 0, 1]))
    e = math.e
    assert float(own) == pytest.approx(math.log((e**2 + e + 1) / e**2) + math.log((e + 1) / e))


def test_no_actions_no_loss_and_no_gradient() -> None:
    """huggingface/trl#5662: all responses truncated gives 0/0."""
    lp = torch.randn(2, 3, requires_grad=True)
    nothing = torch.zeros(2, 3)
    for mode in loss.AGGREGATIONS:
        own = loss.aggregate(loss.reinforce(lp, torch.ones(2, 3)), nothing, mode, length_budget=3)
        (gradient,) = torch.autograd.grad(own, lp)
        assert float(own.detach()) == 0
        assert not gradient.any()


def test_token_mean_over_micro_batches_of_different_size() -> None:
    """verl-project/verl#906, PrimeIntellect-ai/prime-rl#583: one token of loss 4 and three of 0 give 1, never 2."""
    counts = Counts(actions=4, sequences=2)
    parts = [(row(4.0), bits(1)), (row(0.0, 0.0, 0.0), bits(1, 1, 1))]
    assert sum(float(loss.aggregate(x, m, "token-mean", counts)) for x, m in parts) == 1.0
    assert sum(float(loss.aggregate(x, m, "seq-mean-token-mean", counts)) for x, m in parts) == 2.0


def test_the_denominator_counts_what_the_numerator_counts() -> None:
    """huggingface/trl#6369: it counted tokens of a rollout that was masked for truncation."""
    x, mask = torch.tensor([[1.0, 3, 0, 0], [5, 5, 5, 5]]), torch.tensor([[1, 1, 0, 0], [0, 0, 0, 0]])
    for mode in ("token-mean", "seq-mean-token-mean"):
        assert float(loss.aggregate(x, mask, mode)) == 2.0
    assert float(loss.aggregate(x, mask, "seq-mean-token-sum")) == 4.0


def test_what_a_token_weighs_in_a_short_and_in_a_long_answer() -> None:
    """huggingface/trl#3138: a mean over one's own length makes long wrong answers cheap."""
    mask = torch.arange(8)[None] < torch.tensor([[2], [8]])
    weigh: dict[str, tuple[float, float]] = {
        "token-mean": (1 / 10, 1 / 10),
        "seq-mean-token-sum": (1 / 2, 1 / 2),
        "seq-mean-token-mean": (1 / 4, 1 / 16),
        "token-sum-norm": (1 / 16, 1 / 16),
    }
    for mode, (short, long) in weigh.items():
        x = torch.zeros(2, 8, dtype=F64, requires_grad=True)
        loss.aggregate(loss.reinforce(x, -torch.ones(2, 8)), mask, mode, length_budget=8).backward()
        assert x.grad is not None
        assert x.grad[0, 0] == pytest.approx(short)
        assert x.grad[1, 7] == pytest.approx(long)


def test_on_the_first_update_of_a_batch_the_ratio_is_one_and_nothing_is_clipped() -> None:
    """huggingface/open-r1#227, verl-project/verl#2305: readers cannot tell whether the clip matters."""
    data = batch()
    grpo: Any = ALGORITHMS["grpo"](group_size=4, kl=KL())  # type: ignore[call-arg]
    targets, _, _ = grpo.targets(data, None, None, {})
    zeros = torch.zeros_like(data.logprobs)
    _, tallies = grpo.policy_loss(data.logprobs, zeros, data, targets, Counts(int(data.actions.sum()), 8))
    assert tallies["actor/ratio"].mean == 1
    assert tallies["actor/ppo_kl"].mean == 0
    assert tallies["actor/pg_clipfrac"].mean == 0


def test_a_score_stands_at_the_last_action() -> None:
    """huggingface/trl#3750 (padding behind the end), verl-project/verl#6310 (no action: never index -1); and where an
    observation ends the row."""
    assert advantage.place(torch.tensor([7.0]), bits(1, 1, 1, 0, 0)).tolist() == [[0, 0, 7, 0, 0]]
    assert advantage.place(torch.tensor([10.0]), bits(0, 0, 0)).tolist() == [[0, 0, 0]]
    assert advantage.credit(row(0, 0, 1), bits(1, 1, 0)).tolist() == [[0, 1, 0]]
    assert advantage.credit(row(2, 0, 0, 3, 0, 5), bits(0, 1, 0, 0, 1, 0)).tolist() == [[0, 5, 0, 0, 5, 0]]
    assert advantage.credit(row(1, 1), bits(0, 0)).tolist() == [[0, 0]]
    spoilt, mask = row(math.nan, 2, math.inf, 1, -math.inf), bits(0, 1, 0, 1, 0)  # nothing was paid there
    assert advantage.credit(spoilt, mask).tolist() == [[0, 2, 0, 1, 0]]
    assert advantage.rewards_to_go(spoilt, mask).tolist() == [[0, 3, 0, 1, 0]]
    assert advantage.gae(spoilt, torch.zeros_like(spoilt), mask, 1.0, 1.0)[0].tolist() == [[0, 3, 0, 1, 0]]


def test_one_number_a_row_reaches_each_of_its_actions() -> None:
    """NovaSky-AI/SkyRL#1492: the mask of the last step cut off the longer earlier ones."""
    mask = torch.tensor([[1, 1, 1], [1, 0, 0]]).bool()
    assert advantage.spread(torch.tensor([2.0, 2.0]), mask).tolist() == [[2, 2, 2], [2, 0, 0]]


def test_a_return_crosses_an_observation() -> None:
    """verl-project/verl#7278: the running return was multiplied by the mask and lost there."""
    assert advantage.rewards_to_go(row(0, 0, 0, 1), bits(1, 0, 0, 1)).tolist() == [[1, 0, 0, 1]]
    assert advantage.rewards_to_go(row(0, 0, 0, 1), bits(1, 0, 0, 1), 0.5).tolist() == [[0.5, 0, 0, 1]]


def test_the_kl_of_a_tool_reply_reaches_no_return() -> None:
    """THUDM/slime#1370, radixark/miles#1383: penalties at tool tokens leaked into the policy's returns."""
    lp, mask = row(0.2, 5, 5, 0.4), bits(1, 0, 0, 1)
    rewards = kl.penalised_rewards(torch.tensor([1.0], dtype=F64), lp, torch.zeros_like(lp), mask, 0.5)
    assert advantage.rewards_to_go(rewards, mask)[0].tolist() == pytest.approx([0.7, 0, 0, 0.8])


def test_a_share_is_one_of_actions_not_of_width() -> None:
    """huggingface/trl#6803, huggingface/trl#2022: clip ratio and entropy were averaged over padding."""
    low, high, _ = loss.clip_active(row(0.5, 0, 9, 9), row(0, 0, 0, 0), row(1, 1, 1, 1), 0.2, 0.2)
    assert float(masked.mean(low | high, bits(1, 1, 0, 0))) == 0.5
    assert float(masked.mean(row(0.5, 0.7, 99), bits(1, 1, 0))) == pytest.approx(0.6)


def test_a_lab_may_give_masks_of_numbers_and_half_precision() -> None:
    """(B, T) tensors with masks of 1s then 0s, as a single-turn lab has them."""
    for kind in (torch.float32, torch.int64, torch.bool, torch.bfloat16):
        mask = torch.tensor([[1, 1, 0], [1, 0, 0]]).to(kind)
        x = torch.tensor([[1.0, 3.0, 9.0], [2.0, 9.0, 9.0]]).to(torch.bfloat16)
        assert float(masked.mean(x, mask)) == 2.0
        own, returns = advantage.gae(x, torch.zeros_like(x), mask, 1.0, 1.0)
        # (a number behind the end that is no padding value is taken for an observation's reward: 9 goes to the action)
        assert own.dtype == torch.float32
        assert own.tolist() == returns.tolist() == [[13, 12, 0], [20, 0, 0]]
        assert float(loss.aggregate(loss.gspo(x, x, x, mask, 0.2, 0.2), mask, "seq-mean-token-mean")) == -2.0
        assert kl.penalised_rewards(torch.ones(2), x, x, mask, 0.1).tolist() == [[0, 1, 0], [1, 0, 0]]
