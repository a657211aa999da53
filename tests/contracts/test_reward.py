"""What every reward owes: one verdict per transcript in order, the same for a batch and alone, whatever the text."""

from __future__ import annotations

import math
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spaniel.data.tokenizer import character_tokenizer
from spaniel.launch_reward import open_judge
from spaniel.models.hf import TinyLlama, new_llama
from spaniel.models.reward import new_reward_model, save_reward_model
from spaniel.rewards.model import Judging, Measured, ModelReward
from spaniel.rewards.rules import F1, Composite, ExactMatch, ExactMatchFormat, Format, FunctionReward, Guarded
from spaniel.types import Failure, Score
from tests.fakes.reward import ConstantReward
from tests.rewards.test_rules import GOOD, episode


def tiny_judge(seed: int) -> Judging:
    """A reward model of random weights, through its folder as in a run."""
    template = character_tokenizer("</aeiPn")
    shape = TinyLlama(hidden_size=16, intermediate_size=16, layers=1, heads=2, kv_heads=2, context=512)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        network = new_llama(shape, vocab_size=len(template), eos_id=template.eos_id, pad_id=template.pad_id, seed=seed)
        network.save_pretrained(folder / "network")
        template.save(folder / "network")
        model = new_reward_model(folder / "network", heads=1, seed=seed)
        save_reward_model(model, folder / "judge", pad_id=template.pad_id)
        template.save(folder / "judge")
        return open_judge(folder / "judge")


REWARDS = {
    "exact_match": ExactMatch(),
    "exact_match_format": ExactMatchFormat(),
    "f1": F1(),
    "format": Format(),
    "function": FunctionReward(lambda prompt, response: float(len(response))),
    "composite": Composite((("a", 1.0, ExactMatch()), ("b", 0.5, Format()))),
    "guarded": Guarded(ExactMatch()),
    "model": ModelReward((tiny_judge(1), tiny_judge(2)), "mean_minus_std", missing_eos_penalty=0.5),
    "measured": Measured(Guarded(Format()), Guarded(ExactMatch())),
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
    alone = [reward([t])[0] for t in batch]
    assert [score.value for score in scores] == pytest.approx([score.value for score in alone], abs=1e-5)
    assert [list(score.parts) for score in scores] == [list(score.parts) for score in alone]
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
