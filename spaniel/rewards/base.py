"""The seam of a reward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from spaniel.types import Failure, Rollout, Score


@dataclass(frozen=True)
class Transcript:
    """A rollout as a reward reads it: the same spans as text, in order, each with who wrote it.

    `spans[0]` is the prompt (written by the world).
    """

    rollout: Rollout
    spans: tuple[tuple[bool, str], ...]
    """(True where the policy wrote it, text)."""

    @property
    def policy_text(self) -> str:
        """Only what the policy wrote, spans joined by a newline so that no tag can span two turns."""
        return "\n".join(text for by_policy, text in self.spans if by_policy)

    @property
    def response(self) -> tuple[tuple[bool, str], ...]:
        """All spans after the prompt."""
        return self.spans[1:]


class Reward(Protocol):
    """Judges rollouts; sees all rollouts of a step at once, hence whole groups."""

    def __call__(self, transcripts: Sequence[Transcript]) -> list[Score | Failure]:
        """One score per transcript, in order; a `Failure` where one cannot be judged."""
        ...
