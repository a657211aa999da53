"""The rollouts of one step, graded: with what an algorithm asks of them beyond the plain groups."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from spaniel.data.collate import collate
from spaniel.errors import RunStopped
from spaniel.rewards.grade import grade
from spaniel.rollout.episode import rollout
from spaniel.types import Batch, Metrics, Prompt, Rollout, Score

if TYPE_CHECKING:
    from spaniel.train.rl import Parts


def gather(parts: Parts, step: int) -> tuple[list[Rollout], Batch, Metrics]:
    """Sample and grade the groups of `step`, replace those without signal as often as the algorithm allows
    (dynamic sampling), stop the run where too many failed, and collate what is left."""
    prompts = parts.prompts.batch(step)
    seed = (parts.seed, step)
    rollouts = _graded(parts, prompts, seed, parts.sampling.temperature, parts.algorithm.group_size)
    stats: Metrics = {}
    if parts.algorithm.resampling:
        rollouts, stats = _resampled(parts, rollouts, step)
    check_failures(rollouts, parts.max_failure_share)
    batch = collate(rollouts, parts.template.pad_id)
    if parts.algorithm.needs_greedy:
        batch = replace(batch, baselines=_greedy_scores(parts, prompts, seed, batch))
    return rollouts, batch, stats


def _graded(
    parts: Parts, prompts: Sequence[Prompt], seed: tuple[int, ...], temperature: float, group_size: int
) -> list[Rollout]:
    """One reward call sees all groups of the step."""
    done = rollout(
        prompts,
        parts.env,
        parts.sampler,
        parts.template,
        parts.budget,
        group_size=group_size,
        seed=seed,
        temperature=temperature,
        top_p=parts.sampling.top_p,
        top_k=parts.sampling.top_k,
    )
    return grade(done, parts.reward, parts.template.text)


def _resampled(parts: Parts, rollouts: list[Rollout], step: int) -> tuple[list[Rollout], Metrics]:
    """Groups whose scores are all equal make room for groups of other prompts, drawn from a random stream of
    their own, so that the order of the prompts stays what it is without resampling."""
    size, replaced, attempt = parts.algorithm.group_size, 0, 0
    for attempt in range(1, parts.algorithm.resampling + 1):
        dead = [g for g in range(len(rollouts) // size) if not has_signal(rollouts[g * size : (g + 1) * size])]
        if not dead:
            break
        prompts = parts.prompts.spare(step, attempt, len(dead))
        fresh = _graded(parts, prompts, (parts.seed, step, attempt), parts.sampling.temperature, size)
        for number, group in enumerate(dead):
            members = fresh[number * size : (number + 1) * size]
            rollouts[group * size : (group + 1) * size] = [replace(r, group=group) for r in members]
        replaced += len(dead)
    left = sum(not has_signal(rollouts[i : i + size]) for i in range(0, len(rollouts), size))
    return rollouts, {"resampling/groups_replaced": float(replaced), "resampling/groups_left_dead": float(left)}


def has_signal(group: Sequence[Rollout]) -> bool:
    """Whether the usable scores of a group differ."""
    return len({r.score.value for r in group if r.valid and isinstance(r.score, Score)}) > 1


def _greedy_scores(parts: Parts, prompts: Sequence[Prompt], seed: tuple[int, ...], batch: Batch) -> torch.Tensor:
    """f32[B]: the score of a greedy rollout of each row's prompt; NaN where that one failed."""
    greedy = _graded(parts, prompts, seed, 0.0, 1)
    scores = [r.score.value if r.valid and isinstance(r.score, Score) else math.nan for r in greedy]
    return torch.tensor(scores, dtype=torch.float32)[batch.groups]


def check_failures(rollouts: Sequence[Rollout], limit: float) -> None:
    """Stop the run where more than `limit` of the rollouts, or of the searches, failed: learning from the rest
    would be learning from who knows what. The message gives the counts and the first cause."""
    failed = [r.failure or r.score for r in rollouts if r.failure or not isinstance(r.score, Score)]
    searches = [turn for r in rollouts for turn in r.turns if turn.action == "search"]
    broken = [turn.failure for turn in searches if turn.failure]
    for what, bad, count in (("rollouts", failed, len(rollouts)), ("searches", broken, len(searches))):
        if count and len(bad) > limit * count:
            raise RunStopped(
                f"{len(bad)} of {count} {what} of this step failed, more than max_failure_share {limit} allows; "
                f"the first: {getattr(bad[0], 'where', '?')}: {getattr(bad[0], 'cause', bad[0])}"
            )
