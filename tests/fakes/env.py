"""An environment with state: it counts turns, in `Step.state` and nowhere else."""

from __future__ import annotations

from collections.abc import Sequence

from spaniel.envs.base import Action, Reply, Step
from spaniel.types import Message, Prompt


class CountingEnv:
    """Says how often it was spoken to; `stop` ends it, and so does the third turn."""

    stop = ("stop",)
    max_turns = 3

    def start(self, prompt: Prompt) -> Sequence[Message]:
        return prompt.messages

    def step(self, actions: Sequence[Action]) -> list[Step]:
        return [self._one(action, (action.state or 0) + 1) for action in actions]

    def _one(self, action: Action, count: int) -> Step:
        if "stop" in action.text or action.turn >= self.max_turns - 1:
            return Step("answer", None, done=True, state=count)
        return Step("message", Reply(body=f" {count} "), done=False, state=count)
