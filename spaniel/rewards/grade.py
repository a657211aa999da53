"""Rollouts -> graded rollouts: the reward's boundary."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from spaniel.rewards.base import Reward, Transcript
from spaniel.types import Rollout, Sampled


def transcript(rollout: Rollout, text: Callable[[Sequence[int]], str]) -> Transcript:
    """A rollout as text, span by span; `text` turns token ids into text."""
    return Transcript(rollout, tuple((isinstance(span, Sampled), text(span.tokens)) for span in rollout.spans))


def grade(rollouts: Sequence[Rollout], reward: Reward, text: Callable[[Sequence[int]], str]) -> list[Rollout]:
    """The rollouts with their scores. One whose episode failed is not judged: it keeps its failure."""
    judged = [i for i, r in enumerate(rollouts) if r.failure is None]
    scores = reward([transcript(rollouts[i], text) for i in judged])
    out = list(rollouts)
    for i, score in zip(judged, scores, strict=True):
        out[i] = replace(rollouts[i], score=score)
    return out
