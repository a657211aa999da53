"""Rollouts as rows of plain data, for the run folder and for people."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from spaniel.types import Failure, Rollout, Sampled, Score


def record(rollout: Rollout, step: int, text: Callable[[Sequence[int]], str]) -> dict[str, Any]:
    """One rollout: who wrote what, token counts, what the environment made of it, and the verdict."""
    score = rollout.score
    failure = rollout.failure or (score if isinstance(score, Failure) else None)
    return {
        "step": step,
        "id": rollout.prompt.id,
        "source": rollout.prompt.source,
        "group": rollout.group,
        "reference": list(rollout.prompt.reference),
        "spans": [
            {
                "by": "policy" if isinstance(span, Sampled) else "world",
                "text": text(span.tokens),
                "tokens": len(span.tokens),
            }
            for span in rollout.spans
        ],
        "turns": [
            {"action": turn.action, "failure": None if turn.failure is None else vars(turn.failure)}
            for turn in rollout.turns
        ],
        "stop": rollout.stop.value,
        "score": score.value if isinstance(score, Score) else None,
        "parts": dict(score.parts) if isinstance(score, Score) else {},
        "failure": None if failure is None else vars(failure),
    }
