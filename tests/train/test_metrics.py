"""Metrics and validation: the right tokens, the right denominators, every example once."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spaniel.errors import BadInput, RunStopped
from spaniel.retrieval.base import Passage
from spaniel.rollout.episode import Budget
from spaniel.train.evaluate import Evaluation, evaluate, interval, pass_at_k, validation_metrics
from spaniel.train.gather import check_failures
from spaniel.train.metrics import rollout_metrics, summarise
from spaniel.train.recall import recall
from spaniel.types import Failure, Observed, Prompt, Rollout, Sampled, Score, Stop, Tally, Turn
from tests.fakes.env import CountingEnv
from tests.fakes.retriever import FakeRetriever
from tests.fakes.reward import ScriptedReward
from tests.fakes.sampler import ScriptedSampler
from tests.fakes.template import CharTemplate

BUDGET = Budget(10, 4, 10, 100)


def prompt(name: str = "p", source: str = "s", **meta: Any) -> Prompt:
    return Prompt(name, ({"role": "user", "content": name},), ("x",), source, meta)


def rollout(
    *sizes: int, score: Any = None, turns: tuple[Turn, ...] = (), stop: Stop = Stop.ANSWERED, **kw: Any
) -> Rollout:
    """Sizes of spans: prompt, turn, reply, turn, .."""
    spans: list[Observed | Sampled] = []
    for i, n in enumerate(sizes):
        own = Sampled((1,) * n, (0.0,) * n, 0, "stop")
        spans.append(own if i % 2 else Observed((1,) * n))
    return Rollout(kw.pop("prompt", prompt()), 0, tuple(spans), stop, turns, score, **kw)


def test_lengths_count_what_the_policy_wrote_against_the_configured_budget() -> None:
    rollouts = [
        rollout(3, 4, 5, 2, score=Score(1.0, {"exact_match": 1.0})),
        rollout(5, 1, score=Score(0.0, {"exact_match": 0.0})),
    ]
    m = rollout_metrics(rollouts, BUDGET)
    assert m["response_length/mean"] == 3.5
    assert m["response_length/max"] == 6
    assert m["response_length/clip_ratio"] == pytest.approx(1 / 3)  # one of three turns is as long as a turn may be
    assert m["prompt_length/mean"] == 4
    assert m["observation_length/mean"] == 2.5
    assert m["state_tokens/total"] == 7
    assert m["state_tokens/coverage"] == pytest.approx(7 / 20)
    assert m["global_seqlen/max"] == 14
    assert m["critic/score/mean"] == 0.5
    assert m["reward/exact_match"] == 0.5


def test_actions_searches_and_failures() -> None:
    down = Failure("retriever", "down")
    rollouts = [
        rollout(1, 1, score=Score(1.0), turns=(Turn("search"), Turn("search", down), Turn("answer"))),
        rollout(1, 1, score=Score(0.0), turns=(Turn("invalid"),), stop=Stop.MAX_TURNS),
        rollout(1, 1, score=Failure("reward", "x")),
        rollout(1, 1, stop=Stop.ENVIRONMENT_ERROR, failure=Failure("environment", "x")),
    ]
    m = rollout_metrics(rollouts, BUDGET)
    assert m["env/number_of_actions/mean"] == 1.0
    assert m["env/ratio_of_valid_action"] == 0.75
    assert m["env/number_of_valid_search"] == 0.25
    assert m["env/finish_ratio"] == 0.5
    assert m["env/stop/max_turns"] == 0.25
    assert (m["failures/environment"], m["failures/reward"], m["failures/retriever"]) == (1, 1, 1)
    assert m["failures/share"] == 0.5
    assert m["failures/search_share"] == 0.5
    assert m["critic/score/mean"] == 0.5  # of the two that were judged


def test_a_summary_divides_once() -> None:
    learned = {"actor/x": Tally(3.0, 4.0) + Tally(5.0, 1.0)}
    m = summarise(7, [rollout(1, 1, score=Score(1.0))], {"critic/kl": 0.5}, learned, {"step": 2.0}, BUDGET)
    assert m["step"] == 7
    assert m["actor/x"] == pytest.approx(8 / 5)
    assert m["timing_s/step"] == 2.0
    assert m["timing_per_token_ms/step"] == 1000.0


def test_failures_beyond_the_limit_stop_the_run_with_the_cause() -> None:
    bad = rollout(1, 1, stop=Stop.ENVIRONMENT_ERROR, failure=Failure("environment", "it burns"))
    good = rollout(1, 1, score=Score(1.0))
    check_failures([bad, good], 0.5)
    with pytest.raises(RunStopped, match="2 of 3 rollouts .* environment: it burns"):
        check_failures([bad, bad, good], 0.5)
    down = Turn("search", Failure("retriever", "down"))
    with pytest.raises(RunStopped, match="1 of 1 searches .* retriever: down"):
        check_failures([rollout(1, 1, score=Score(0.0), turns=(down,))], 0.5)


def test_validation_is_per_source_with_counts_and_intervals() -> None:
    rollouts = [
        rollout(1, 1, score=Score(float(v)), prompt=prompt(str(i), "abb"[i % 3])) for i, v in enumerate([1, 0, 1, 1, 0])
    ]
    rollouts.append(rollout(1, 1, score=Failure("reward", "x"), prompt=prompt("6", "a")))
    m = validation_metrics(rollouts)
    assert m["val/score"] == pytest.approx(0.6)
    assert m["val/count"] == 6
    assert m["val/failed"] == 1
    assert m["val/test_score/a"] == 1.0
    assert m["val/test_score/b"] == pytest.approx(1 / 3)
    assert m["val/count/a"] == 3
    s = math.sqrt(sum((v - 0.6) ** 2 for v in [1, 0, 1, 1, 0]) / 4)
    assert m["val/score_ci95"] == pytest.approx(1.96 * s / math.sqrt(5))
    assert interval([1.0]) == 0


def sampled(texts: dict[str, str]) -> ScriptedSampler:
    template = CharTemplate()

    def script(request: Any) -> Any:
        name = template.decode(request.tokens).split(":")[1].split("\n")[0]
        return template.encode(texts[name])

    return ScriptedSampler(script, template.piece, template.eos_ids)


@pytest.mark.parametrize("batch", [1, 2, 3, 5, 100])
def test_every_example_once_in_order_whatever_the_batch(batch: int) -> None:
    names = ["a", "b", "c", "d", "e"]
    sampler = sampled({n: "1stop" if n in "ace" else "0stop" for n in names})
    reward = ScriptedReward(lambda t: float("1" in t.policy_text))
    prompts = [prompt(n) for n in names]
    metrics, done = evaluate(
        prompts, CountingEnv(), sampler, CharTemplate(), reward, Budget(20, 9, 9, 99), Evaluation(batch_size=batch)
    )
    assert [r.prompt.id for r in done] == names
    assert metrics["val/score"] == pytest.approx(0.6)
    assert {params.temperature for _, params in sampler.calls} == {0.0}  # greedy


@given(st.integers(1, 12), st.data())
def test_pass_at_k_is_the_chance_of_a_draw_without_replacement(n: int, data: st.DataObject) -> None:
    correct, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    from itertools import combinations

    draws = list(combinations(range(n), k))
    expected = sum(any(i < correct for i in draw) for draw in draws) / len(draws)
    assert pass_at_k(n, correct, k) == pytest.approx(expected)


def test_several_samples_report_pass_and_mean() -> None:
    assert pass_at_k(4, 1, 2) == 0.5
    values = [1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    rollouts = [rollout(1, 1, score=Score(v, {"exact_match": v})) for v in values]
    m = validation_metrics(rollouts, samples=4)
    assert m["val/pass@1"] == pytest.approx(0.125)
    assert m["val/pass@2"] == pytest.approx(0.25)
    assert m["val/pass@4"] == pytest.approx(0.5)
    assert m["val/mean@4"] == pytest.approx(0.125)


@pytest.mark.parametrize("kwargs", [{"samples": 0}, {"samples": 2}, {"temperature": -1.0}, {"batch_size": 0}])
def test_bad_evaluation_settings(kwargs: dict) -> None:
    with pytest.raises(BadInput, match="evaluation"):
        Evaluation(**kwargs)


def test_recall_by_answer_and_by_gold_passage() -> None:
    passages = [Passage("1", "T\nred x"), Passage("2", "T\nred y"), Passage("3", "T\nblue y")]
    prompts = [prompt("red", gold_ids=["1", "2"]), prompt("blue", gold_ids=[3]), prompt("green")]
    found = recall(
        prompts, FakeRetriever(passages), lambda p: p.id, lambda text, refs: refs[0] in text.split(), ks=(1, 2)
    )
    assert found["questions"] == 3
    assert found["recall@1/answer"] == pytest.approx(1 / 3)
    assert found["recall@1/gold"] == 0.5
    assert found["recall@2/gold"] == 1.0
    assert found["recall@1/any_gold"] == 1.0
    assert found["recall@2/answer/s"] == pytest.approx(1 / 3)
