"""Validation: every example exactly once, greedy unless told otherwise, reported per data source."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from spaniel.data.template import Template
from spaniel.envs.base import Env
from spaniel.errors import BadInput
from spaniel.rewards.base import Reward
from spaniel.rewards.grade import grade
from spaniel.rollout.episode import Budget, rollout
from spaniel.rollout.sampler import Sampler
from spaniel.train.metrics import mean, searches_of
from spaniel.types import Metrics, Prompt, Rollout, Score, Stop


@dataclass(frozen=True)
class Evaluation:
    """How to validate: `samples` answers a question at `temperature` (0 is greedy)."""

    samples: int = 1
    temperature: float = 0.0
    batch_size: int = 256
    """Prompts per batch (memory only; the last, smaller one is kept)."""

    def __post_init__(self) -> None:
        if self.samples < 1 or self.batch_size < 1:
            raise BadInput(
                f"evaluation: samples {self.samples}, batch_size {self.batch_size}; expected 1 or more of each"
            )
        if self.temperature < 0:
            raise BadInput(f"evaluation.temperature: {self.temperature}; expected 0 (greedy) or more")
        if self.samples > 1 and self.temperature == 0:
            raise BadInput(f"evaluation: samples {self.samples} at temperature 0 would all be the same; raise it")


def evaluate(
    prompts: Sequence[Prompt],
    env: Env,
    sampler: Sampler,
    template: Template,
    reward: Reward,
    budget: Budget,
    how: Evaluation = Evaluation(),
    seed: int = 0,
) -> tuple[Metrics, list[Rollout]]:
    """Metrics under `val/` and the graded rollouts, in the order of the prompts."""
    rollouts: list[Rollout] = []
    for start in range(0, len(prompts), how.batch_size):
        part = prompts[start : start + how.batch_size]
        done = rollout(
            part, env, sampler, template, budget, group_size=how.samples, seed=(seed, 0, 0), temperature=how.temperature
        )
        rollouts += grade(done, reward, template.text)
    return validation_metrics(rollouts, how.samples), rollouts


def validation_metrics(rollouts: Sequence[Rollout], samples: int = 1) -> Metrics:
    """Per source and over all: mean score with its 95 % interval, counts, answered share, searches a question.

    A failed rollout is in no mean; `val/failed` counts it.
    """
    by_source: dict[str, list[Rollout]] = defaultdict(list)
    for r in rollouts:
        by_source[r.prompt.source or "all"].append(r)
    scores = [_value(r) for r in rollouts if isinstance(r.score, Score)]
    out: Metrics = {
        "val/score": mean(scores),
        "val/score_ci95": interval(scores),
        "val/count": float(len(rollouts)),
        "val/failed": float(len(rollouts) - len(scores)),
        "val/answered_share": mean([float(r.stop is Stop.ANSWERED) for r in rollouts]),
        "val/searches_per_question": mean([searches_of(r) for r in rollouts]),
        "val/response_length": mean([r.sampled_count for r in rollouts]),
        "val/ratio_of_valid_action": mean([float(turn.valid) for r in rollouts for turn in r.turns]),
    }
    names = sorted({name for r in rollouts if isinstance(r.score, Score) for name in r.score.parts})
    for name in names:
        out[f"val/{name}"] = mean(
            [r.score.parts[name] for r in rollouts if isinstance(r.score, Score) and name in r.score.parts]
        )
    for source, members in sorted(by_source.items()):
        own = [_value(r) for r in members if isinstance(r.score, Score)]
        out[f"val/test_score/{source}"] = mean(own)
        out[f"val/count/{source}"] = float(len(members))
        out[f"val/ci95/{source}"] = interval(own)
    return out | (_at_k(rollouts, samples) if samples > 1 else {})


def _value(rollout: Rollout) -> float:
    assert isinstance(rollout.score, Score)
    return rollout.score.value


def interval(scores: Sequence[float]) -> float:
    """Half the width of the normal 95 % interval of the mean: 1.96 s / sqrt(n), s the unbiased deviation."""
    if len(scores) < 2:
        return 0.0
    centre = mean(scores)
    variance = sum((x - centre) ** 2 for x in scores) / (len(scores) - 1)
    return 1.96 * math.sqrt(variance / len(scores))


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Unbiased chance that at least one of k of n samples is right: 1 - C(n-c, k) / C(n, k) (Chen et al. 2021)."""
    return 1.0 - math.comb(n - correct, k) / math.comb(n, k)


def _at_k(rollouts: Sequence[Rollout], samples: int) -> Metrics:
    """pass@k by exact match (right: 1) for k = 1, 2, 4, .. and mean@k of the score; failed samples left out."""
    questions = [rollouts[i : i + samples] for i in range(0, len(rollouts), samples)]
    judged = [[r.score for r in q if isinstance(r.score, Score)] for q in questions]
    out: Metrics = {f"val/mean@{samples}": mean([mean([s.value for s in q]) for q in judged if q])}
    k = 1
    while k <= samples:
        enough = [q for q in judged if len(q) >= k]
        right = [pass_at_k(len(q), sum(s.parts.get("exact_match", s.value) >= 1 for s in q), k) for q in enough]
        out[f"val/pass@{k}"] = mean(right)
        k *= 2
    return out
