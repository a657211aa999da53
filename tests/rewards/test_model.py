"""A reward model as the judge: its own tokenizer, what is too long, ensembles, and the gold score beside it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from spaniel.data.tokenizer import character_tokenizer
from spaniel.errors import BadInput
from spaniel.rewards.base import Transcript
from spaniel.rewards.model import Judging, Measured, ModelReward
from spaniel.rewards.rules import Composite, FunctionReward, Guarded
from spaniel.types import Failure, Prompt, Rollout, Sampled, Score, Stop
from tests.fakes.reward import ConstantReward

TEMPLATE = character_tokenizer("abcdefghijklmnopqrstuvwxyz ")
OTHER = character_tokenizer("zyxwvutsrqponmlkjihgfedcba ")


def said(text: str, stop: Stop = Stop.ANSWERED) -> Transcript:
    prompt = Prompt("p", ({"role": "user", "content": "ask "},), ("yes",))
    return Transcript(Rollout(prompt, 0, (Sampled((9,), (0.0,), 0, "stop"),), stop), ((False, "ask "), (True, text)))


def counting(template: object, letter: str) -> Judging:
    """Scores the number of a letter, found by the id that this template gives it."""
    (wanted,) = template.encode(letter)  # type: ignore[attr-defined]

    def score(sequences: Sequence[Sequence[int]]) -> torch.Tensor:
        return torch.tensor([float(sum(x == wanted for x in ids)) for ids in sequences])

    return Judging(template, score, context=12)  # type: ignore[arg-type]


def test_each_model_reads_text_in_its_own_tokenizer() -> None:
    texts = [said("eel"), said("yes"), said("a")]
    for template in (TEMPLATE, OTHER):
        found = ModelReward((counting(template, "e"),))(texts)
        assert [s.value for s in found if isinstance(s, Score)] == [2.0, 1.0, 0.0]


def test_it_reads_prompt_and_response_and_the_end() -> None:
    seen: list[Sequence[int]] = []

    def score(sequences: Sequence[Sequence[int]]) -> torch.Tensor:
        seen.extend(sequences)
        return torch.zeros(len(sequences))

    ModelReward((Judging(TEMPLATE, score),))([said("yes")])
    assert TEMPLATE.text(seen[0]) == "ask yes"
    assert seen[0] == TEMPLATE.judged(({"role": "user", "content": "ask "},), "yes")
    assert seen[0][-1] == TEMPLATE.eos_id


def test_too_long_is_a_failure_of_that_response_alone() -> None:
    first, second = ModelReward((counting(TEMPLATE, "e"),))([said("e" * 20), said("e")])
    assert isinstance(first, Failure)
    assert "25 tokens with its prompt; the reward model takes 12" in first.cause
    assert isinstance(second, Score)
    assert second.value == 1.0


def test_an_ensemble_and_a_cut_response() -> None:
    models = (counting(TEMPLATE, "e"), counting(TEMPLATE, "s"))
    (mean,) = ModelReward(models)([said("see")])
    (least,) = ModelReward(models, "min")([said("see")])
    (careful,) = ModelReward(models, "mean_minus_std", 2.0)([said("see")])
    assert isinstance(mean, Score)
    assert isinstance(least, Score)
    assert isinstance(careful, Score)
    # "ask see": two of e, two of s
    assert (mean.value, least.value, careful.value) == (2.0, 2.0, 2.0)
    (careful,) = ModelReward(models, "mean_minus_std", 2.0)([said("eee")])
    assert isinstance(careful, Score)
    assert careful.value == pytest.approx(2.0 - 2.0 * 2**0.5)
    assert careful.parts["model/std"] == pytest.approx(2**0.5)
    judge = ModelReward(models, missing_eos_penalty=0.5)
    whole, cut = judge([said("see"), said("see", Stop.OUT_OF_LENGTH)])
    assert isinstance(whole, Score)
    assert isinstance(cut, Score)
    assert (whole.value, cut.value, cut.parts["missing_eos"]) == (2.0, 1.5, 1.0)


def test_gold_stands_beside_and_is_never_learned_from() -> None:
    gold = FunctionReward(lambda prompt, text: {"score": float(len(text)), "right": 1.0})
    (found,) = Measured(ConstantReward(0.5), gold)([said("four")])
    assert isinstance(found, Score)
    assert found.value == 0.5
    assert {k: v for k, v in found.parts.items() if k.startswith("gold")} == {
        "gold": 4.0, "gold_failed": 0.0, "gold/right": 1.0}  # fmt: skip


def test_a_gold_scorer_that_fails_is_counted_and_costs_nothing() -> None:
    def broken(prompt: Prompt, text: str) -> float:
        raise RuntimeError("no gold")

    (found,) = Measured(ConstantReward(0.5), Guarded(FunctionReward(broken)))([said("x")])
    assert isinstance(found, Score)
    assert (found.value, found.parts["gold_failed"]) == (0.5, 1.0)
    assert "gold" not in found.parts
    (failed,) = Measured(Guarded(FunctionReward(broken)), ConstantReward(1.0))([said("x")])
    assert isinstance(failed, Failure)


def test_a_model_and_a_rule_add_up() -> None:
    both = Composite((("judge", 2.0, ModelReward((counting(TEMPLATE, "e"),))), ("rule", 1.0, ConstantReward(0.25))))
    (found,) = both([said("ee")])
    assert isinstance(found, Score)
    assert found.value == 4.25


def test_a_mapping_without_a_score_is_a_failure_not_a_zero() -> None:
    (found,) = Guarded(FunctionReward(lambda prompt, text: {"right": 1.0}))([said("x")])
    assert isinstance(found, Failure)
    assert "score" in found.cause


def test_an_empty_sum_is_refused() -> None:
    from spaniel.rewards.sections import Sum

    with pytest.raises(BadInput, match=r"reward\.parts: empty"):
        Sum({})
