"""The nouns: what they refuse, what they count."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from spaniel.types import (
    Batch,
    Counts,
    Failure,
    Observed,
    Prompt,
    Rollout,
    Sampled,
    Score,
    Stop,
    Tally,
    Targets,
    Turn,
    add_tallies,
)
from tests.workers.test_learner import batch

PROMPT = Prompt("q", ({"role": "user", "content": "?"},), ("yes",))
WROTE = Sampled((3, 4), (-1.0, -0.5), 0, "stop")


def test_tokens_and_log_probabilities_come_together() -> None:
    with pytest.raises(ValueError, match="2 sampled tokens but 1 log-prob"):
        Sampled((3, 4), (-1.0,), 0, "stop")


def test_a_rollout_counts_its_own() -> None:
    rollout = Rollout(PROMPT, 0, (Observed((1, 2, 5)), WROTE, Observed((6,)), WROTE), Stop.ANSWERED)
    assert (rollout.length, rollout.sampled_count, rollout.sampled) == (8, 4, (WROTE, WROTE))


def test_a_rollout_is_valid_where_there_is_something_to_learn_from() -> None:
    graded = Rollout(PROMPT, 0, (Observed((1,)), WROTE), Stop.ANSWERED, score=Score(0.0))
    assert graded.valid
    for broken in (
        {"score": None},
        {"score": Failure("reward", "timed out")},
        {"failure": Failure("environment", "gone")},
        {"spans": (Observed((1,)),)},
    ):
        assert not dataclasses.replace(graded, **broken).valid


def test_turns_are_valid_unless_named_invalid() -> None:
    assert Turn("search").valid
    assert not Turn("invalid").valid


def test_rows_are_taken_in_the_order_asked_for_and_cut_to_a_width() -> None:
    data = batch()
    rows = torch.tensor([5, 1])
    own = data.take(rows, 4)
    assert len(own) == 2
    for spec in dataclasses.fields(Batch):
        before, after = getattr(data, spec.name), getattr(own, spec.name)
        if before is None:
            assert after is None
        else:
            assert torch.equal(after, before[rows][:, :4] if before.dim() == 2 else before[rows])
    whole = data.take(rows)
    assert whole.tokens.shape[1] == data.tokens.shape[1]
    targets = Targets(torch.arange(12.0).view(3, 4))
    assert targets.take(torch.tensor([2]), 2).advantages.tolist() == [[8.0, 9.0]]
    assert targets.take(torch.tensor([2])).returns is None


def test_a_mean_is_formed_once() -> None:
    assert Tally(0.0, 0.0).mean == 0
    added = add_tallies([{"a": Tally(3.0, 1.0), "b": Tally(1.0, 2.0)}, {"a": Tally(1.0, 3.0)}])
    assert added == {"a": Tally(4.0, 4.0), "b": Tally(1.0, 2.0)}
    assert added["a"].mean == 1  # not (3 + 1/3) / 2
    assert Counts(4, 2) == Counts(actions=4, sequences=2)
