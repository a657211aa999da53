"""The seam of a sampler: token ids in, token ids out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from spaniel.types import Sampled


@dataclass(frozen=True)
class SamplingParams:
    """How to sample; an argument of every call, never a state of the sampler.

    `temperature` 0 is greedy (its log-probabilities are those at temperature 1). `stop` strings end a
    completion with the token in which they become complete; that token is kept as sampled.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop: tuple[str, ...] = ()


@dataclass(frozen=True)
class Request:
    """One row: `tokens` is the whole context so far. `seed` fixes its random numbers, so that a completion
    does not depend on its batch mates. `key` names the episode, so that a sampler may keep its cache
    from one turn to the next; `max_tokens` (if given) is a tighter limit for this row."""

    key: tuple[int, ...]
    tokens: tuple[int, ...]
    seed: tuple[int, ...]
    max_tokens: int | None = None


class Sampler(Protocol):
    """Continues token sequences with the current policy."""

    def sample(self, requests: Sequence[Request], params: SamplingParams) -> list[Sampled]:
        """One completion per request, in order."""
        ...

    def load(self, weights: Any, version: int) -> None:
        """Take over the policy's weights and stamp later completions with `version`."""
        ...

    def release(self) -> None:
        """Forget kept caches (an end of a rollout phase)."""
        ...
