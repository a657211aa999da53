"""Rewards: what is an answer, what is right, whose text is graded."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spaniel.errors import BadInput
from spaniel.rewards.base import Transcript
from spaniel.rewards.rules import (
    F1,
    Composite,
    ExactMatch,
    ExactMatchFormat,
    Format,
    FunctionReward,
    Guarded,
    contains_answer,
    exact_match,
    extract_answer,
    f1,
    normalise,
    substring_match,
)
from spaniel.rewards.structure import retrieved, well_structured
from spaniel.types import Failure, Observed, Prompt, Rollout, Sampled, Score, Stop


def episode(*spans: str, references: tuple[str, ...] = ("Paris",), group: int = 0) -> Transcript:
    """Spans after the prompt; one that starts with `>` is the world's."""
    prompt = Prompt("p", ({"role": "user", "content": "q"},), references)
    world = [(False, "For example, <answer> Beijing </answer>. Question: q")]
    texts = world + [(False, s[1:]) if s.startswith(">") else (True, s) for s in spans]
    ids = tuple(Sampled((1,), (0.0,), 0, "stop") if own else Observed((1,)) for own, _ in texts)
    return Transcript(Rollout(prompt, group, ids, Stop.ANSWERED), tuple(texts))


INFO = '>\n\n<information>Doc 1(Title: "France") Paris is the capital.</information>\n\n'
GOOD = ("<think> a </think><search> france </search>", INFO, "<think> b </think>\n<answer> Paris </answer>")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The  Eiffel-Tower!", "eiffeltower"),  # SQuAD removes punctuation, it does not split at it
        ("A b c", "b c"),
        ("an Apple, the pear", "apple pear"),
        ("The", "the"),
        ("a", "a"),
        ("!", "!"),
        ("The!", "the"),
        ("  \n", ""),
        ("Theatre", "theatre"),
        ("U.S.A.", "usa"),
    ],
)
def test_normalisation_by_hand(text: str, expected: str) -> None:
    assert normalise(text) == expected


@given(st.text(max_size=30))
def test_normalisation_is_idempotent_and_empties_only_white_space(text: str) -> None:
    once = normalise(text)
    assert normalise(once) == once
    assert (once == "") == (not text.lower().split())


def test_matches_by_hand() -> None:
    assert exact_match("the paris.", ["London", "Paris"]) == 1
    assert exact_match("in Paris, France", ["Paris"]) == 0
    assert substring_match("in Paris, France", ["Paris"]) == 1
    assert exact_match("B", ["A"]) == 0  # a reference that is an article still has to be said
    assert exact_match("a", ["A"]) == 1
    assert exact_match("", ["A"]) == exact_match("", [""]) == exact_match(" ", ["The"]) == 0
    assert f1("big red dog", ["red dog house"]) == pytest.approx(2 / 3)
    assert f1("red red", ["red"]) == pytest.approx(2 * (0.5 * 1) / 1.5)
    assert f1("x", ["red", "x y"]) == pytest.approx(2 / 3)
    assert f1("", ["x"]) == 0
    assert contains_answer("He lives in Paris now", ["paris"])
    assert not contains_answer("Parisian", ["Paris"])


@given(st.text(max_size=20), st.lists(st.text(max_size=20), min_size=1, max_size=3))
def test_relations_between_the_measures(prediction: str, references: list[str]) -> None:
    right, share = exact_match(prediction, references), f1(prediction, references)
    assert right in (0.0, 1.0)
    assert 0 <= share <= 1
    assert right <= share + 1e-12  # what matches exactly shares all words
    assert right <= substring_match(prediction, references)


def test_only_the_policys_own_answers_count_and_the_last_one() -> None:
    assert extract_answer(episode("no tags")) is None  # not even the prompt's example
    assert extract_answer(episode(">\n<information><answer> Paris </answer></information>")) is None
    assert extract_answer(episode("<answer> a </answer> <answer> b </answer>")) == "b"
    assert extract_answer(episode("<answer> once </answer>")) == "once"  # one is enough
    assert extract_answer(episode("<answer> half", INFO, "rest </answer>")) is None  # not across turns
    assert extract_answer(episode("<answer> x <answer> y </answer>")) == "y"
    assert extract_answer(episode("<answer></answer>")) == ""


def test_exact_match_counts_none_wrong_right() -> None:
    reward = ExactMatch(score=2.0, format_score=0.5)
    scores = reward([episode("x"), episode("<answer> Rome </answer>"), episode("<answer> paris </answer>")])
    assert [s.value for s in scores] == [0, 0.5, 2.0]  # type: ignore[union-attr]
    assert [s.parts["answered"] for s in scores] == [0, 1, 1]  # type: ignore[union-attr]
    assert [s.parts["exact_match"] for s in scores] == [0, 0, 1]  # type: ignore[union-attr]


def test_a_reference_may_be_one_text_or_several() -> None:
    assert ExactMatch()([episode("<answer> p </answer>", references=("Paris",))])[0].value == 0  # type: ignore[union-attr]
    assert ExactMatch()([episode("<answer> b </answer>", references=("x", "B"))])[0].value == 1  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("spans", "valid"),
    [
        (GOOD, True),
        (("<think> a </think> <answer> b </answer>",), True),
        (("<answer> b </answer>",), False),  # no thought
        (("<think> a </think>",), False),  # no answer
        (("<think> a </think> so <answer> b </answer>",), False),  # text between
        (("<think> a </think><answer> b </answer> done",), False),
        (("<think> a <search> q </search> </think><answer> b </answer>",), False),  # nested
        (("<think> a </think><search> q </search>", GOOD[2]), False),  # no information in between
        (("<think> a </think><search> q </search>", "<information> forged </information>", GOOD[2]), False),
        ((GOOD[0], ">\nMy previous action is invalid.\n", GOOD[2]), False),
        ((*GOOD[:2], "<answer> Paris </answer>"), False),  # no thought after the information
        ((GOOD[0], INFO, GOOD[0], INFO, GOOD[2]), True),
    ],
)
def test_structure(spans: tuple[str, ...], valid: bool) -> None:
    assert well_structured(episode(*spans)) is valid


def test_structured_reward_pays_as_the_table_says() -> None:
    reward = ExactMatchFormat(1.0, 0.2, 0.1, 0.05)
    think = "<think> a </think>"
    rows = [
        (GOOD, 1.0),
        (("<answer> Paris </answer>",), 0.8),
        ((GOOD[0], INFO, f"{think}<answer> Rome </answer>"), 0.25),
        ((f"{think}<answer> Rome </answer>",), 0.2),
        (("<answer> Rome </answer>",), 0.1),
        (("nothing",), 0.0),
    ]
    assert [s.value for s in reward([episode(*spans) for spans, _ in rows])] == pytest.approx([v for _, v in rows])  # type: ignore[union-attr]
    assert retrieved(episode(*GOOD)) == ['Doc 1(Title: "France") Paris is the capital.']
    with pytest.raises(BadInput, match="a wrong answer could pay more"):
        ExactMatchFormat(score=0.1)


def test_format_and_f1() -> None:
    assert [s.value for s in Format(0.5)([episode(*GOOD), episode("x")])] == [0.5, 0]  # type: ignore[union-attr]
    assert F1()([episode("<answer> Paris France </answer>")])[0].value == pytest.approx(2 / 3)  # type: ignore[union-attr]


def test_composite_logs_what_it_uses() -> None:
    half = FunctionReward(lambda prompt, response: 0.4, "brevity")
    mixed = Composite((("em", 0.5, ExactMatch()), ("brevity", 0.5, half)))
    score = mixed([episode("<answer> Paris </answer>")])[0]
    assert isinstance(score, Score)
    assert score.value == pytest.approx(0.7)
    assert score.parts["em/weighted"] + score.parts["brevity/weighted"] == pytest.approx(score.value)
    assert score.parts["em"] == 1


def test_a_reward_that_fails_is_a_failure_of_its_group_and_never_a_zero() -> None:
    def fragile(prompt: Prompt, response: str) -> float:
        if "boom" in response:
            raise RuntimeError("boom")
        return math.nan if "nan" in response else 1.0

    rollouts = [episode("a"), episode("boom", group=1), episode("c", group=1), episode("nan", group=2)]
    first, second, third, fourth = Guarded(FunctionReward(fragile))(rollouts)
    assert isinstance(first, Score)
    assert first.value == 1
    assert second == third == Failure("reward", "RuntimeError: boom")
    assert isinstance(fourth, Failure)
    assert "nan" in fourth.cause
    none = Guarded(lambda ts: [Score(None, {})])([episode("a")])  # type: ignore[arg-type,list-item]
    assert isinstance(none[0], Failure)
    short = Guarded(lambda ts: [])([episode("a")])
    assert isinstance(short[0], Failure)
    assert "0 scores for 1" in short[0].cause
