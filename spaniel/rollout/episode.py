"""Prompt -> Rollout: episodes in lockstep, turn by turn, each an append-only list of spans."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from spaniel.data.template import Template
from spaniel.envs.base import Action, Env, Reply, Step
from spaniel.errors import BadInput
from spaniel.rollout.sampler import Request, Sampler, SamplingParams
from spaniel.types import Failure, Observed, Prompt, Rollout, Sampled, Stop, Turn


@dataclass(frozen=True)
class Budget:
    """Lengths in tokens. A prompt that exceeds `max_start_length` is refused or skipped when data is loaded."""

    max_start_length: int = 256
    max_response_length: int = 64
    """Of one turn of the policy."""
    max_obs_length: int = 256
    """Of one reply of the environment; a longer one is cut at a token boundary, its closing kept."""
    max_total_length: int = 1024
    """Of the whole episode, prompt included."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value <= 0:
                raise BadInput(f"rollout.{name}: {value}; expected a positive number of tokens")
        if self.max_start_length + self.max_response_length > self.max_total_length:
            raise BadInput(
                f"rollout: max_start_length {self.max_start_length} + max_response_length {self.max_response_length} "
                f"exceed max_total_length {self.max_total_length}; the longest prompt would have no room for a turn"
            )


@dataclass
class _Episode:
    """A rollout in the making."""

    prompt: Prompt
    group: int
    sample: int
    spans: list[Observed | Sampled]
    tokens: list[int]
    turns: list[Turn] = field(default_factory=list)
    state: Any = None
    stop: Stop | None = None
    failure: Failure | None = None

    def append(self, span: Observed | Sampled) -> None:
        self.spans.append(span)
        self.tokens.extend(span.tokens)

    def finished(self) -> Rollout:
        assert self.stop is not None
        return Rollout(self.prompt, self.group, tuple(self.spans), self.stop, tuple(self.turns), failure=self.failure)


def rollout(
    prompts: Sequence[Prompt],
    env: Env,
    sampler: Sampler,
    template: Template,
    budget: Budget,
    *,
    group_size: int = 1,
    seed: tuple[int, ...] = (0,),
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = 0,
) -> list[Rollout]:
    """`group_size` episodes of each prompt; those of one prompt are neighbours and share the group number.

    `seed` names the occasion, e.g. (run seed, step): with the prompt's id, the sample's number and the turn
    it decides a row's random numbers. An episode ends when the environment says so (answered), after the
    environment's last turn, when the total budget leaves no room (out of length), or when the environment
    fails (environment error).
    """
    episodes = [
        _begin(prompt, group, sample, env, template)
        for group, prompt in enumerate(prompts)
        for sample in range(group_size)
    ]
    params = SamplingParams(budget.max_response_length, temperature, top_p, top_k, env.stop)
    for turn in range(env.max_turns):
        active = [episode for episode in episodes if episode.stop is None]
        if not active:
            break
        _sample_turn(active, turn, sampler, params, budget, seed)
        active = [episode for episode in active if episode.stop is None]
        _step_environment(active, turn, env, template, budget)
    sampler.release()
    for episode in episodes:
        episode.stop = episode.stop or Stop.MAX_TURNS
    return [episode.finished() for episode in episodes]


def _begin(prompt: Prompt, group: int, sample: int, env: Env, template: Template) -> _Episode:
    start = Observed(template.render(env.start(prompt)))
    return _Episode(prompt, group, sample, [start], list(start.tokens))


def _sample_turn(
    active: list[_Episode], turn: int, sampler: Sampler, params: SamplingParams, budget: Budget, seed: tuple[int, ...]
) -> None:
    requests, sampling = [], []
    for episode in active:
        room = budget.max_total_length - len(episode.tokens)
        if room <= 0:
            episode.stop = Stop.OUT_OF_LENGTH
            continue
        row_seed = (*seed, zlib.crc32(episode.prompt.id.encode()), episode.sample, turn)
        requests.append(Request((episode.group, episode.sample), tuple(episode.tokens), row_seed, room))
        sampling.append(episode)
    if not requests:
        return
    for episode, span in zip(sampling, sampler.sample(requests, params), strict=True):
        episode.append(span)
        # A turn cut by its own limit is still a turn (the environment corrects it); one cut by the total is not.
        if span.finish == "length" and len(episode.tokens) >= budget.max_total_length:
            episode.stop = Stop.OUT_OF_LENGTH


def _step_environment(active: list[_Episode], turn: int, env: Env, template: Template, budget: Budget) -> None:
    if not active:
        return
    actions = [
        Action(episode.prompt, template.text(episode.spans[-1].tokens), turn, episode.state) for episode in active
    ]
    try:
        steps: list[Step | Failure] = list(env.step(actions))
    except Exception as error:  # the environment boundary: what failed is recorded, other episodes may live on
        steps = [_alone(env, action, error, len(actions)) for action in actions]
    for episode, step in zip(active, steps, strict=True):
        _apply(episode, step, template, budget)


def _alone(env: Env, action: Action, error: Exception, batch: int) -> Step | Failure:
    """After a batch failed: one episode by itself, so that only the culprits are lost."""
    if batch > 1:
        try:
            return env.step([action])[0]
        except Exception as own:
            error = own
    return Failure("environment", f"{type(error).__name__}: {error}")


def _apply(episode: _Episode, step: Step | Failure, template: Template, budget: Budget) -> None:
    if isinstance(step, Failure):
        episode.failure, episode.stop = step, Stop.ENVIRONMENT_ERROR
        return
    episode.turns.append(Turn(step.action, step.failure))
    episode.state = step.state
    last = episode.spans[-1]
    if isinstance(last, Sampled) and step.reward:
        episode.spans[-1] = Sampled(last.tokens, last.logprobs, last.version, last.finish, last.reward + step.reward)
    if step.fatal:
        episode.failure = step.failure or Failure("environment", "ended without a cause")
        episode.stop = Stop.ENVIRONMENT_ERROR
    elif step.done:
        episode.stop = _stop_of(step, last)
    elif step.reply is not None:
        observed = Observed(cut(step.reply, template, budget.max_obs_length))
        # What exactly fills the budget is kept (the next turn then finds no room and says so).
        if len(episode.tokens) + len(observed.tokens) > budget.max_total_length:
            episode.stop = Stop.OUT_OF_LENGTH
        else:
            episode.append(observed)


def _stop_of(step: Step, last: Observed | Sampled) -> Stop:
    if step.action == "answer":
        return Stop.ANSWERED
    if step.action == "message":
        cut_off = isinstance(last, Sampled) and last.finish == "length"
        return Stop.OUT_OF_LENGTH if cut_off else Stop.ANSWERED
    return Stop.MAX_TURNS


def cut(reply: Reply, template: Template, limit: int) -> tuple[int, ...]:
    """Ids of a reply within `limit` tokens: opening and closing whole, the body cut at a token boundary."""
    whole = template.encode(reply.text)
    if len(whole) <= limit:
        return whole
    opening, closing = template.encode(reply.opening), template.encode(reply.closing)
    room = limit - len(opening) - len(closing)
    if room < 0:
        raise BadInput(
            f"rollout.max_obs_length: {limit}; expected at least {len(opening) + len(closing)}, "
            f"the tokens of {reply.opening!r} and {reply.closing!r}"
        )
    return (*opening, *template.encode(reply.body)[:room], *closing)
