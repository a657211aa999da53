"""Rewards for tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from spaniel.rewards.base import Transcript
from spaniel.types import Failure, Score


class ConstantReward:
    """The same value for all."""

    def __init__(self, value: float) -> None:
        self.value = value

    def __call__(self, transcripts: Sequence[Transcript]) -> list[Score | Failure]:
        return [Score(self.value, {"constant": self.value}) for _ in transcripts]


class ScriptedReward:
    """`judge(transcript)` gives a value or a `Failure`."""

    def __init__(self, judge: Callable[[Transcript], float | Failure]) -> None:
        self.judge = judge

    def __call__(self, transcripts: Sequence[Transcript]) -> list[Score | Failure]:
        values = [self.judge(t) for t in transcripts]
        return [v if isinstance(v, Failure) else Score(v, {"exact_match": v}) for v in values]
