"""One step's metrics, under the names that Search-R1 and verl use. Write-only: nothing reads them to decide."""

from __future__ import annotations

from collections.abc import Sequence

from spaniel.rollout.episode import Budget
from spaniel.types import Metrics, Rollout, Score, Stop, Tallies


def summarise(
    step: int, rollouts: Sequence[Rollout], stats: Metrics, learned: Tallies, seconds: dict[str, float], budget: Budget
) -> Metrics:
    """Everything there is to say about step `step` (1 for the first): floats by name."""
    total = sum(r.length for r in rollouts)
    return {
        "step": float(step),
        **rollout_metrics(rollouts, budget),
        **stats,
        **{name: tally.mean for name, tally in learned.items()},
        **{f"timing_s/{name}": value for name, value in seconds.items()},
        **{f"timing_per_token_ms/{name}": 1000 * value / max(1, total) for name, value in seconds.items()},
    }


def mean(values: Sequence[float]) -> float:
    """sum / count; 0 for no values."""
    return sum(values) / len(values) if values else 0.0


def rollout_metrics(rollouts: Sequence[Rollout], budget: Budget) -> Metrics:
    """What can be counted in the rollouts themselves: rewards by part, lengths, actions, failures."""
    graded = [r for r in rollouts if isinstance(r.score, Score)]
    parts = sorted({name for r in graded for name in r.score.parts})  # type: ignore[union-attr]
    scores = [r.score for r in graded if isinstance(r.score, Score)]
    out: Metrics = {
        "critic/score/mean": mean([s.value for s in scores]),
        "critic/score/max": max((s.value for s in scores), default=0.0),
        "critic/score/min": min((s.value for s in scores), default=0.0),
    }
    for name in parts:
        out[f"reward/{name}"] = mean([s.parts[name] for s in scores if name in s.parts])
    return out | _lengths(rollouts, budget) | _actions(rollouts) | _failures(rollouts)


def _lengths(rollouts: Sequence[Rollout], budget: Budget) -> Metrics:
    sampled = [r.sampled_count for r in rollouts]
    prompts = [len(r.spans[0].tokens) for r in rollouts]
    replies = [r.length - len(r.spans[0].tokens) - r.sampled_count for r in rollouts]
    total = sum(r.length for r in rollouts)
    turns = [span for r in rollouts for span in r.sampled]
    out: Metrics = {}
    named = (("response_length", sampled), ("prompt_length", prompts), ("observation_length", replies))
    for name, values in named:
        out |= {f"{name}/mean": mean(values), f"{name}/max": float(max(values)), f"{name}/min": float(min(values))}
    # Of turns, against the configured budget of a turn: not the batch's own width.
    out["response_length/clip_ratio"] = mean([float(len(t.tokens) >= budget.max_response_length) for t in turns])
    out["prompt_length/clip_ratio"] = mean([float(n >= budget.max_start_length) for n in prompts])
    out["state_tokens/total"] = float(sum(sampled))
    out["state_tokens/coverage"] = sum(sampled) / total if total else 0.0
    out["global_seqlen/mean"] = mean([r.length for r in rollouts])
    out["global_seqlen/max"] = float(max(r.length for r in rollouts))
    out["global_seqlen/min"] = float(min(r.length for r in rollouts))
    return out


def _actions(rollouts: Sequence[Rollout]) -> Metrics:
    actions = [len(r.turns) for r in rollouts]
    valid = [sum(turn.valid for turn in r.turns) for r in rollouts]
    searches = [searches_of(r) for r in rollouts]
    return {
        "env/number_of_actions/mean": mean(actions),
        "env/number_of_actions/max": float(max(actions)),
        "env/number_of_actions/min": float(min(actions)),
        "env/finish_ratio": mean([float(r.stop is Stop.ANSWERED) for r in rollouts]),
        "env/number_of_valid_action": mean(valid),
        "env/ratio_of_valid_action": sum(valid) / sum(actions) if sum(actions) else 0.0,
        "env/number_of_valid_search": mean(searches),
        **{f"env/stop/{stop.value}": mean([float(r.stop is stop) for r in rollouts]) for stop in Stop},
    }


def searches_of(rollout: Rollout) -> int:
    """Searches that the retriever answered."""
    return sum(turn.action == "search" and turn.failure is None for turn in rollout.turns)


def _failures(rollouts: Sequence[Rollout]) -> Metrics:
    searches = [turn for r in rollouts for turn in r.turns if turn.action == "search"]
    failed = sum(turn.failure is not None for turn in searches)
    return {
        "failures/environment": float(sum(r.failure is not None for r in rollouts)),
        "failures/reward": float(sum(r.failure is None and not isinstance(r.score, Score) for r in rollouts)),
        "failures/retriever": float(failed),
        "failures/share": mean([float(not r.valid) for r in rollouts]),
        "failures/search_share": failed / len(searches) if searches else 0.0,
    }
