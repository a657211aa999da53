"""What every reward owes: one verdict per transcript in order, the same for a batch and alone, whatever the text."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spaniel.rewards.rules import F1, Composite, ExactMatch, ExactMatchFormat, Format, FunctionReward, Guarded
from spaniel.types import Failure, Score
from tests.fakes.reward import ConstantReward
from tests.rewards.test_rules import GOOD, episode

REWARDS = {
    "exact_match": ExactMatch(),
    "exact_match_format": ExactMatchFormat(),
    "f1": F1(),
    "format": Format(),
    "function": FunctionReward(lambda prompt, response: float(len(response))),
    "composite": Composite((("a", 1.0, ExactMatch()), ("b", 0.5, Format()))),
    "guarded": Guarded(ExactMatch()),
    "fake": ConstantReward(0.5),
}
turns = st.lists(
    st.text(alphabet="<>/answersearchthinkinformation Pi\n", max_size=40)
    | st.sampled_from(["<answer> Paris </answer>", "<answer>", ">x", GOOD[1]]),
    max_size=4,
)


@pytest.mark.parametrize("name", REWARDS)
def test_one_verdict_each_in_order(name: str) -> None:
    reward: Any = REWARDS[name]
    batch = [episode(*GOOD), episode("x"), episode("<answer> Rome </answer>", group=1)]
    scores = reward(batch)
    assert len(scores) == 3
    assert scores == [reward([t])[0] for t in batch]
    assert reward(batch) == scores
    assert reward([]) == []


@pytest.mark.parametrize("name", REWARDS)
@given(turns)
def test_hostile_text_gives_finite_scores(name: str, spans: list[str]) -> None:
    (score,) = REWARDS[name]([episode(*spans)])
    assert isinstance(score, Score | Failure)
    if isinstance(score, Score):
        assert math.isfinite(score.value)
        assert all(math.isfinite(v) for v in score.parts.values())
