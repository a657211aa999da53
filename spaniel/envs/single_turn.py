"""One prompt, one response."""

from __future__ import annotations

from collections.abc import Sequence

from spaniel.envs.base import Action, Step
from spaniel.types import Message, Prompt


class SingleTurnEnv:
    """The policy speaks once; whatever it says ends the episode."""

    stop: tuple[str, ...] = ()
    max_turns = 1

    def start(self, prompt: Prompt) -> Sequence[Message]:
        return prompt.messages

    def step(self, actions: Sequence[Action]) -> list[Step]:
        return [Step("message", None, done=True) for _ in actions]
