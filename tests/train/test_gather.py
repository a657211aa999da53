"""What a step gathers: groups, replacements for groups without signal, greedy baselines, exact numbers of updates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from spaniel.data.prompts import PromptStream
from spaniel.envs.single_turn import SingleTurnEnv
from spaniel.errors import RunStopped
from spaniel.rollout.episode import Budget
from spaniel.rollout.sampler import Request
from spaniel.train.gather import gather, has_signal
from spaniel.train.rl import Parts, Sampling, State, train
from spaniel.types import Failure, Prompt
from tests.fakes.algorithm import ScoreIsAdvantage
from tests.fakes.group import SplitGroup
from tests.fakes.reward import ScriptedReward
from tests.fakes.sampler import ScriptedSampler
from tests.fakes.template import CharTemplate
from tests.workers.test_learner import learner

TEMPLATE = CharTemplate()


def parts(algorithm: Any, reward: Any = None, count: int = 6, script: Any = None, **kwargs: Any) -> Parts:
    prompts = [Prompt(f"p{i}", ({"role": "user", "content": f"{i}"},), ("x",)) for i in range(count)]

    def says(request: Request) -> Sequence[int]:  # even samples say a, odd ones b; greedy ones z
        return TEMPLATE.encode("ab"[request.seed[-2] % 2])

    sampler = ScriptedSampler(script or says, TEMPLATE.piece, TEMPLATE.eos_ids)
    return Parts(
        prompts=PromptStream(prompts, 2, 1, shuffle=False),
        env=SingleTurnEnv(),
        sampler=sampler,
        template=TEMPLATE,  # type: ignore[arg-type]
        reward=reward or ScriptedReward(lambda t: float("a" in t.policy_text)),
        algorithm=algorithm,
        policy=kwargs.pop("policy", None),
        critic=None,
        reference=None,
        budget=Budget(40, 4, 4, 80),
        sampling=Sampling(),
        seed=1,
        **kwargs,
    )


def prompt_ids(rollouts: Any) -> list[str]:
    return [r.prompt.id for r in rollouts]


def test_groups_are_those_of_the_step() -> None:
    rollouts, batch, stats = gather(parts(ScoreIsAdvantage(4)), 1)
    assert prompt_ids(rollouts) == ["p2"] * 4 + ["p3"] * 4
    assert batch.groups.tolist() == [0] * 4 + [1] * 4
    assert batch.rewards.sum(1).tolist() == [1, 0, 1, 0] * 2
    assert batch.baselines is None
    assert stats == {}


def test_groups_without_signal_are_replaced_a_bounded_number_of_times_and_counted() -> None:
    def judge(transcript: Any) -> float:  # p0 teaches nothing, everything else does
        return 0.0 if transcript.rollout.prompt.id == "p0" else float("a" in transcript.policy_text)

    rollouts, batch, stats = gather(parts(ScoreIsAdvantage(4, resampling=5), ScriptedReward(judge)), 0)
    assert prompt_ids(rollouts)[4:] == ["p1"] * 4  # a group with signal stays
    assert prompt_ids(rollouts)[0] != "p0"
    assert batch.groups.tolist() == [0] * 4 + [1] * 4
    assert stats["resampling/groups_replaced"] >= 1
    assert stats["resampling/groups_left_dead"] == 0
    again, _, _ = gather(parts(ScoreIsAdvantage(4, resampling=5), ScriptedReward(judge)), 0)
    assert prompt_ids(again) == prompt_ids(rollouts)
    # where nothing ever differs, it stops after the bound and trains on what there is
    calls = parts(ScoreIsAdvantage(4, resampling=3), ScriptedReward(lambda t: 1.0))
    _, _, stats = gather(calls, 0)
    assert stats == {"resampling/groups_replaced": 6.0, "resampling/groups_left_dead": 2.0}
    assert len(calls.sampler.calls) == 4  # type: ignore[attr-defined]


def test_drawing_replacements_moves_no_later_batch() -> None:
    own = parts(ScoreIsAdvantage(4, resampling=3), ScriptedReward(lambda t: 1.0))
    plain = parts(ScoreIsAdvantage(4))
    gather(own, 0)
    assert [p.id for p in own.prompts.batch(1)] == [p.id for p in plain.prompts.batch(1)]


def test_the_greedy_baseline_is_the_score_of_the_same_prompt() -> None:
    own = parts(
        ScoreIsAdvantage(2, greedy=True),
        ScriptedReward(lambda t: float(t.rollout.prompt.id[1:]) + ("a" in t.policy_text)),
    )
    _, batch, _ = gather(own, 1)
    assert batch.baselines is not None
    assert batch.baselines.tolist() == [3.0, 3.0, 4.0, 4.0]  # p2 and p3, sample 0 says a
    assert [params.temperature for _, params in own.sampler.calls] == [1.0, 0.0]  # type: ignore[attr-defined]
    failing = ScriptedReward(lambda t: Failure("reward", "x") if t.rollout.prompt.id == "p2" else 1.0)
    _, batch, _ = gather(parts(ScoreIsAdvantage(2, greedy=True), failing, max_failure_share=1.0), 1)
    assert batch.baselines is not None
    assert batch.baselines.isnan().tolist() == [True, True, False, False]


def test_a_failed_member_is_no_signal() -> None:
    rollouts, _, _ = gather(parts(ScoreIsAdvantage(2)), 0)
    assert has_signal(rollouts[:2])
    assert not has_signal(rollouts[:1])


def test_too_many_failures_stop_the_step() -> None:
    with pytest.raises(RunStopped, match="4 of 4 rollouts .* reward: broken"):
        gather(parts(ScoreIsAdvantage(2), ScriptedReward(lambda t: Failure("reward", "broken"))), 0)


def small_script(request: Request) -> Sequence[int]:
    return [2 + (request.seed[-2] % 3), 5, 0]


class SmallTemplate(CharTemplate):
    """Ids below 23, for a network of 23 tokens."""

    def render(self, messages: Any) -> tuple[int, ...]:
        return (7, 8, 9)


@pytest.mark.parametrize("workers", [1, 2])
def test_n_steps_are_n_updates_and_ranks_see_their_rows(workers: int) -> None:
    algorithm = ScoreIsAdvantage(3, old=True)
    group = SplitGroup([learner() for _ in range(workers)])
    reward = ScriptedReward(
        lambda t: float(len(t.rollout.sampled[0].tokens) == 3 and t.rollout.sampled[0].tokens[0] == 2)
    )
    own = parts(algorithm, reward, script=small_script, policy=group)
    own = Parts(**{**vars(own), "template": SmallTemplate()})
    validated, saved = [], []

    def validate(step: int) -> dict[str, float]:
        validated.append(step)
        return {"val/x": 1.0}

    done = list(
        train(
            own, State(0, {"steps": 0.0}), 5, lambda s: saved.append(s.step), validate, lambda s: (s % 2 == 0, s == 5)
        )
    )
    assert [d.state.step for d in done] == [1, 2, 3, 4, 5]
    assert done[-1].state.algorithm == {"steps": 5.0}
    assert all(w.stepper.updates == 5 for w in group.workers)
    assert validated == [2, 4]
    assert saved == [5]
    assert "val/x" in done[1].metrics
    assert "val/x" not in done[2].metrics
    assert {s.version for r in done[3].rollouts for s in r.sampled} == {3}  # weights of the step that sampled
    batch, old = algorithm.seen[0]
    assert old is not None
    torch.testing.assert_close(old, learner().infer(batch), atol=1e-5, rtol=1e-5)
