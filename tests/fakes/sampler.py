"""A sampler that says what it is told to, and records what it was asked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from spaniel.rollout.sampler import Request, SamplingParams
from spaniel.types import Sampled


class ScriptedSampler:
    """`script(request)` gives the token ids of the completion; stop strings and limits are honoured.

    Every token has log-probability -1. `piece(token)` is the text of a token.
    """

    def __init__(
        self,
        script: Callable[[Request], Sequence[int]],
        piece: Callable[[int], str] = str,
        eos_ids: frozenset[int] = frozenset(),
    ) -> None:
        self.script = script
        self.piece = piece
        self.eos_ids = eos_ids
        self.version = 0
        self.calls: list[tuple[list[Request], SamplingParams]] = []
        self.released = 0

    def load(self, weights: Any, version: int) -> None:
        self.version = version

    def release(self) -> None:
        self.released += 1

    def sample(self, requests: Sequence[Request], params: SamplingParams) -> list[Sampled]:
        self.calls.append((list(requests), params))
        return [self._one(request, params) for request in requests]

    def _one(self, request: Request, params: SamplingParams) -> Sampled:
        limit = params.max_tokens if request.max_tokens is None else min(params.max_tokens, request.max_tokens)
        tokens: list[int] = []
        text = ""
        for token in self.script(request):
            if len(tokens) == limit:
                break
            tokens.append(token)
            text += self.piece(token)
            if token in self.eos_ids:
                return self._span(tokens, "eos")
            if any(stop in text for stop in params.stop):
                return self._span(tokens, "stop")
        return self._span(tokens, "length")

    def _span(self, tokens: list[int], finish: Any) -> Sampled:
        return Sampled(tuple(tokens), (-1.0,) * len(tokens), self.version, finish)
