"""Episodes in lockstep: append-only, budgets, who wrote what, what ends them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spaniel.data.collate import collate
from spaniel.envs.base import Action, Reply, Step
from spaniel.errors import BadInput
from spaniel.rollout.episode import Budget, cut, rollout
from spaniel.rollout.sampler import Request
from spaniel.types import Failure, Message, Observed, Prompt, Sampled, Score, Stop
from tests.fakes.sampler import ScriptedSampler
from tests.fakes.template import CharTemplate

TEMPLATE = CharTemplate()


class Echo:
    """Replies with what it was told, answers end it; `boom` raises, `dead` is fatal; state counts turns."""

    stop = ("</search>", "</answer>")

    def __init__(self, max_turns: int = 3) -> None:
        self.max_turns = max_turns
        self.seen: list[list[Action]] = []

    def start(self, prompt: Prompt) -> Sequence[Message]:
        return prompt.messages

    def step(self, actions: Sequence[Action]) -> list[Step]:
        self.seen.append(list(actions))
        return [self._one(action) for action in actions]

    def _one(self, action: Action) -> Step:
        count = (action.state or 0) + 1
        if "boom" in action.text:
            raise RuntimeError("boom")
        if "dead" in action.text:
            return Step("search", None, False, failure=Failure("retriever", "down"), fatal=True)
        if "</answer>" in action.text:
            return Step("answer", None, True, reward=0.25)
        if action.turn == self.max_turns - 1:
            return Step("invalid", None, True)
        kind = "search" if "</search>" in action.text else "invalid"
        return Step(kind, Reply("<information>", f"{count}:{action.text}", "</information>"), False, state=count)


def prompt(name: str = "a", content: str = "q") -> Prompt:
    return Prompt(name, ({"role": "user", "content": content},), ("x",))


def says(*turns: str) -> Any:
    """A script: the n-th turn of an episode says the n-th text."""

    def script(request: Request) -> Sequence[int]:
        return TEMPLATE.encode(turns[min(request.seed[-1], len(turns) - 1)])

    return script


def run(script: Any, env: Echo | None = None, prompts: Sequence[Prompt] = (), **kwargs: Any) -> Any:
    budget = kwargs.pop("budget", Budget(20, 30, 200, 600))
    sampler = ScriptedSampler(script, TEMPLATE.piece, TEMPLATE.eos_ids)
    out = rollout(list(prompts) or [prompt()], env or Echo(), sampler, TEMPLATE, budget, **kwargs)
    return out, sampler


def test_spans_say_who_wrote_what_and_nothing_is_re_encoded() -> None:
    (done,), sampler = run(says("<search>one</search> tail", "<answer>x</answer>"))
    assert done.stop is Stop.ANSWERED
    assert [type(s) for s in done.spans] == [Observed, Sampled, Observed, Sampled]
    texts = [TEMPLATE.decode(s.tokens) for s in done.spans]
    # nothing after the stop string is in the trajectory
    assert texts == [
        "user:q\n",
        "<search>one</search>",
        "<information>1:<search>one</search></information>",
        "<answer>x</answer>",
    ]
    # the second request is the first one's tokens and what was appended: append-only
    first, second = sampler.calls[0][0][0], sampler.calls[1][0][0]
    assert second.tokens[: len(first.tokens)] == first.tokens
    assert second.tokens == tuple(t for s in done.spans[:3] for t in s.tokens)
    assert [turn.action for turn in done.turns] == ["search", "answer"]
    assert done.spans[3].reward == 0.25  # a step reward is credited to its turn
    batch = collate([done])
    mask = [int(x) for x in batch.actions[0]]
    lengths = [len(s.tokens) for s in done.spans]
    assert mask == [0] * lengths[0] + [0] * (lengths[1] + lengths[2] + lengths[3] + 1)  # not graded: no signal
    graded = collate([replace(done, score=Score(1.0))])
    mask = [int(x) for x in graded.actions[0]]
    assert mask == [0] * lengths[0] + [1] * lengths[1] + [0] * lengths[2] + [1] * lengths[3] + [0]
    assert float(graded.rewards[0, sum(lengths) - 1]) == 1.25
    assert float(graded.rewards.sum()) == 1.25
    assert sampler.released == 1


def test_sampling_parameters_are_those_of_the_call_in_every_turn() -> None:
    _, sampler = run(says("<search>1</search>", "<search>2</search>", "<answer>x</answer>"), temperature=0.0)
    assert [params.temperature for _, params in sampler.calls] == [0.0, 0.0, 0.0]
    assert {params.stop for _, params in sampler.calls} == {Echo.stop}


def test_groups_and_seeds() -> None:
    env = Echo()
    done, sampler = run(says("<answer>x</answer>"), env, [prompt("a"), prompt("b")], group_size=3, seed=(5, 2))
    assert [r.group for r in done] == [0, 0, 0, 1, 1, 1]
    seeds = [request.seed for request in sampler.calls[0][0]]
    assert len(set(seeds)) == 6
    assert all(seed[:2] == (5, 2) for seed in seeds)
    assert len(env.seen) == 1  # one step of the environment for the whole batch
    assert len(env.seen[0]) == 6
    # the seed belongs to the prompt, not to its place in the batch
    _, swapped = run(says("<answer>x</answer>"), env, [prompt("b"), prompt("a")], group_size=3, seed=(5, 2))
    assert {r.seed for r in swapped.calls[0][0][:3]} == set(seeds[3:])


def test_a_turn_cut_by_its_own_limit_goes_on_and_one_cut_by_the_total_ends() -> None:
    (done,), _ = run(says("x" * 99), budget=Budget(20, 10, 200, 600))
    assert [turn.action for turn in done.turns] == ["invalid"] * 3
    assert done.stop is Stop.MAX_TURNS
    (short,), _ = run(says("x" * 99), budget=Budget(7, 10, 200, 17))
    assert short.stop is Stop.OUT_OF_LENGTH
    assert short.length == 17
    assert collate([short]).truncated.tolist() == [True]


def test_an_observation_that_exactly_fits_is_kept_and_one_more_token_ends_the_rollout() -> None:
    turn, reply = (
        len(TEMPLATE.encode("<search>a</search>")),
        len(TEMPLATE.encode("<information>1:<search>a</search></information>")),
    )
    total = len(TEMPLATE.render(prompt().messages)) + turn + reply
    for extra, spans in ((0, 3), (-1, 2)):
        (done,), _ = run(says("<search>a</search>"), budget=Budget(7, 4, 200, total + extra))
        assert done.stop is Stop.OUT_OF_LENGTH
        assert len(done.spans) == spans


def test_a_long_observation_is_cut_at_a_token_and_keeps_its_closing() -> None:
    reply = Reply("<information>", "abcdef", "</information>")
    assert TEMPLATE.decode(cut(reply, TEMPLATE, 8)) == "<information>abcdef</information>"
    assert TEMPLATE.decode(cut(reply, TEMPLATE, 5)) == "<information>abc</information>"
    assert TEMPLATE.decode(cut(reply, TEMPLATE, 2)) == "<information></information>"
    with pytest.raises(BadInput, match="max_obs_length: 1; expected at least 2"):
        cut(reply, TEMPLATE, 1)


def test_an_environment_that_raises_loses_only_the_episode_that_made_it_raise() -> None:
    def script(request: Request) -> Sequence[int]:
        return TEMPLATE.encode("boom" if request.key[0] == 1 else "<answer>x</answer>")

    done, _ = run(script, prompts=[prompt("a"), prompt("b"), prompt("c")])
    assert [r.stop for r in done] == [Stop.ANSWERED, Stop.ENVIRONMENT_ERROR, Stop.ANSWERED]
    assert done[1].failure == Failure("environment", "RuntimeError: boom")
    assert not done[1].valid


def test_a_fatal_step_ends_the_episode_with_its_cause() -> None:
    (done,), _ = run(says("<search>dead</search>"))
    assert done.stop is Stop.ENVIRONMENT_ERROR
    assert done.failure == Failure("retriever", "down")


def test_eos_is_an_action_and_the_environment_does_not_read_it() -> None:
    env = Echo()
    ids = (*TEMPLATE.encode("hi"), TEMPLATE.eos_id)
    (done,), _ = run(lambda request: ids, env)
    assert done.spans[1].tokens == ids
    assert done.spans[1].finish == "eos"
    assert env.seen[0][0].text == "hi"


def test_state_travels_through_the_seam() -> None:
    env = Echo()
    run(says("<search>a</search>", "<search>b</search>", "<answer>x</answer>"), env)
    assert [actions[0].state for actions in env.seen] == [None, 1, 2]
    assert [actions[0].turn for actions in env.seen] == [0, 1, 2]


@pytest.mark.parametrize(
    ("values", "message"),
    [((0, 1, 1, 1), "max_start_length: 0"), ((5, 6, 1, 10), "max_start_length 5 . max_response_length 6 exceed")],
)
def test_budgets_that_cannot_work_are_refused(values: tuple[int, ...], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        Budget(*values)


@given(st.lists(st.text(alphabet="ab<>/serchanw ", max_size=30), min_size=1, max_size=4), st.integers(12, 120))
def test_whatever_the_policy_says_a_rollout_is_whole(turns: list[str], total: int) -> None:
    budget = Budget(7, 5, 20, total)
    (done,), _ = run(says(*turns), budget=budget)
    assert done.length <= total
    assert isinstance(done.spans[0], Observed)
    assert all(len(s.tokens) <= 5 for s in done.sampled)
    assert sum(isinstance(s, Sampled) for s in done.spans) <= 3
    kinds = [type(s) for s in done.spans]
    assert all(a is not b for a, b in itertools.pairwise(kinds))  # world and policy alternate
