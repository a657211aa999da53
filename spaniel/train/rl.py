"""Reinforcement learning: the loop, readable top to bottom."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from spaniel.algo.base import Algorithm
from spaniel.cluster import weights
from spaniel.cluster.base import Group
from spaniel.data.prompts import PromptStream
from spaniel.data.template import Template
from spaniel.envs.base import Env
from spaniel.errors import BadInput
from spaniel.rewards.base import Reward
from spaniel.rollout.episode import Budget
from spaniel.rollout.sampler import Sampler
from spaniel.train.clock import Clock
from spaniel.train.gather import gather
from spaniel.train.metrics import summarise
from spaniel.types import Metrics, Rollout, Tallies
from spaniel.workers.frozen import Frozen
from spaniel.workers.learner import Beside, Learner


@dataclass(frozen=True)
class Sampling:
    """How training rollouts are sampled. top_p and top_k change the distribution that is sampled from, while
    log-probabilities stay those of the untruncated one: allowed, with a warning."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0

    def __post_init__(self) -> None:
        if self.temperature <= 0:
            raise BadInput(f"sampling.temperature: {self.temperature}; expected > 0 (greedy rollouts explore nothing)")
        if not 0 < self.top_p <= 1:
            raise BadInput(f"sampling.top_p: {self.top_p}; expected a number in (0, 1]")
        if self.top_k < 0:
            raise BadInput(f"sampling.top_k: {self.top_k}; expected 0 (off) or more")


@dataclass(frozen=True)
class Parts:
    """Everything that a run is made of; made by the launcher, from the recipe."""

    prompts: PromptStream
    env: Env
    sampler: Sampler
    template: Template
    reward: Reward
    algorithm: Algorithm
    policy: Group
    critic: Group | None
    reference: Group | None
    budget: Budget
    sampling: Sampling
    seed: int
    ptx: Callable[[int], Beside | None] = lambda step: None
    """The demonstrations that go beside the updates of a step."""
    critic_warmup: int = 0
    """Steps at the start in which only the critic learns."""
    max_failure_share: float = 0.5
    """A step in which more rollouts (or searches) than this failed ends the run."""


@dataclass(frozen=True)
class State:
    """What the loop carries from step to step, beside the weights: it is in every checkpoint."""

    step: int = 0
    algorithm: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Done:
    """A finished step, for whoever consumes the loop: console, files, trackers, tests."""

    state: State
    metrics: Metrics
    rollouts: Sequence[Rollout]


def train(
    parts: Parts,
    state: State,
    steps: int,
    save: Callable[[State], None],
    validate: Callable[[int], Metrics],
    due: Callable[[int], tuple[bool, bool]],
) -> Iterator[Done]:
    """Run steps `state.step` .. `steps`-1, exactly that many updates. `due(step)` says (validate, save) after
    `step` finished steps."""
    p, clock = parts, Clock()
    for step in range(state.step, steps):
        with clock.stage("sync"):
            weights.sync(p.policy, Learner.weights, p.sampler, version=step)
        with clock.stage("gen"):
            rollouts, batch, gathered = gather(p, step)
        with clock.stage("values"):
            values = p.critic.scatter(Learner.infer, batch) if p.critic else None
        with clock.stage("ref"):
            ref = p.reference.scatter(Frozen.infer, batch) if p.reference else None
        with clock.stage("old_log_prob"):
            old = p.policy.scatter(Learner.infer, batch) if p.algorithm.needs_old_logprobs else None
        targets, algorithm_state, stats = p.algorithm.targets(batch, values, ref, state.algorithm, old)
        learned: Tallies = {}
        if step >= p.critic_warmup:
            with clock.stage("update_actor"):
                learned |= p.policy.scatter(
                    Learner.learn, batch, targets, p.algorithm.policy_loss, "actor", p.ptx(step)
                )
        if p.critic:
            with clock.stage("update_critic"):
                learned |= p.critic.scatter(Learner.learn, batch, targets, p.algorithm.value_loss, "critic")
        state = State(step + 1, algorithm_state)
        metrics = summarise(step + 1, rollouts, stats | gathered, learned, clock.take(), p.budget)
        evaluate_now, save_now = due(step + 1)
        if evaluate_now:
            weights.sync(p.policy, Learner.weights, p.sampler, version=step + 1)
            metrics |= validate(step + 1)
        if save_now:
            save(state)
        yield Done(state, metrics, rollouts)
