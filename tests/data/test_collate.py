"""Rollouts -> tensors."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from spaniel.data.collate import collate
from spaniel.types import Failure, Observed, Prompt, Rollout, Sampled, Score, Stop, Turn

PROMPT = Prompt("p", ({"role": "user", "content": "q"},), ("x",))


def rollout(*spans: Observed | Sampled, score: float | None = 1.0, **kwargs: object) -> Rollout:
    judged = None if score is None else Score(score)
    return Rollout(PROMPT, 0, spans, Stop.ANSWERED, score=judged, **kwargs)  # type: ignore[arg-type]


def sampled(*tokens: int, version: int = 0, reward: float = 0.0) -> Sampled:
    return Sampled(tokens, tuple(-0.1 * t for t in tokens), version, "stop", reward)


def test_owner_comes_from_the_span_and_pad_may_equal_eos() -> None:
    # 6 written, 5 observed, 4 written; id 2 is both eos and pad, and the policy's eos stays an action
    batch = collate([rollout(Observed((5, 2)), sampled(1, 1, 1, 1, 1, 2), Observed((2,) * 5), sampled(3, 3, 3, 2))], 2)
    assert batch.actions[0].int().tolist() == [0, 0] + [1] * 6 + [0] * 5 + [1] * 4 + [0]
    assert batch.lengths.tolist() == [17]
    assert batch.tokens.shape == (1, 18)  # one position behind the longest row
    assert batch.logprobs[0, 7] == pytest.approx(-0.2)
    assert batch.logprobs[0, 9] == 0


def test_score_at_the_last_action_step_rewards_at_their_spans_fractions_kept() -> None:
    batch = collate(
        [rollout(Observed((5,)), sampled(7, 8, reward=0.25), Observed((9, 9)), sampled(4), Observed((6,)), score=0.5)]
    )
    assert batch.rewards[0].tolist() == [0, 0, 0.25, 0, 0, 0.5, 0, 0]
    assert batch.rewards.dtype == torch.float32


def test_failed_empty_and_ungraded_rows_have_no_action_and_no_reward() -> None:
    good = rollout(Observed((5,)), sampled(7))
    failed = rollout(Observed((5,)), sampled(7), score=None, failure=Failure("environment", "x"))
    unjudged = Rollout(PROMPT, 0, (Observed((5,)), sampled(7)), Stop.ANSWERED, score=Failure("reward", "x"))
    empty = rollout(Observed((5, 6, 7)), sampled())
    batch = collate([good, failed, unjudged, empty])
    assert batch.valid.tolist() == [True, False, False, False]
    assert batch.actions.any(1).tolist() == [True, False, False, False]
    assert batch.rewards.sum(1).tolist() == [1, 0, 0, 0]


def test_the_oldest_weights_are_the_rows_version() -> None:
    assert collate([rollout(Observed((5,)), sampled(7, version=4), sampled(8, version=3))]).versions.tolist() == [3]


def test_what_counts_as_a_valid_turn() -> None:
    assert [Turn(a).valid for a in ("search", "answer", "message", "invalid")] == [True, True, True, False]


def test_nothing_to_collate_is_an_error() -> None:
    with pytest.raises(ValueError, match="no rollouts"):
        collate([])


def test_a_span_cannot_disagree_with_its_logprobs() -> None:
    with pytest.raises(ValueError, match="2 sampled tokens but 1 log-prob"):
        Sampled((1, 2), (0.0,), 0, "stop")


spans = st.lists(
    st.one_of(
        st.builds(lambda t: Observed(tuple(t)), st.lists(st.integers(0, 9), max_size=4)),
        st.builds(lambda t: sampled(*t), st.lists(st.integers(0, 9), max_size=4)),
    ),
    min_size=1,
    max_size=6,
).filter(lambda s: sum(len(x.tokens) for x in s) > 0)


@given(st.lists(st.tuples(spans, st.floats(-2, 2, width=32)), min_size=1, max_size=5), st.integers(0, 9))
def test_every_row_is_whole_and_its_rewards_sum_to_its_score(rows: list, pad: int) -> None:
    rollouts = [rollout(Observed((3,)), *s, score=v) for s, v in rows]
    batch = collate(rollouts, pad)
    for i, r in enumerate(rollouts):
        ids = [t for s in r.spans for t in s.tokens]
        assert batch.tokens[i, : len(ids)].tolist() == ids
        assert batch.tokens[i, len(ids) :].tolist() == [pad] * (batch.tokens.shape[1] - len(ids))
        owners = [isinstance(s, Sampled) for s in r.spans for _ in s.tokens]
        assert batch.actions[i, : len(ids)].tolist() == owners
        assert not batch.actions[i, len(ids) :].any()
        if any(owners):
            assert float(batch.rewards[i].sum()) == r.score.value  # type: ignore[union-attr]
            last = max(j for j, own in enumerate(owners) if own)
            assert float(batch.rewards[i, last]) == r.score.value  # type: ignore[union-attr]
    assert len(collate(rollouts[:1]).take(torch.tensor([0]))) == 1
