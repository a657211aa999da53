"""The seam of an environment: text in, text out; it never sees tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from spaniel.types import Failure, Message, Prompt


@dataclass(frozen=True)
class Action:
    """One turn of the policy: `text` is what it wrote in this turn, and nothing else.

    `turn` counts from 0. `state` is what this environment's previous `Step` of the episode carried.
    """

    prompt: Prompt
    text: str
    turn: int
    state: Any = None


@dataclass(frozen=True)
class Reply:
    """Text that the world appends. Where it exceeds the observation budget, `body` is cut at a token
    boundary; `opening` and `closing` are kept."""

    opening: str = ""
    body: str = ""
    closing: str = ""

    @property
    def text(self) -> str:
        return self.opening + self.body + self.closing


@dataclass(frozen=True)
class Step:
    """The world's answer to one action. `action` names what it was (see `Turn`)."""

    action: str
    reply: Reply | None
    done: bool
    reward: float = 0.0
    failure: Failure | None = None
    """A boundary failed while replying. With `fatal`, the episode ends as an environment error."""
    fatal: bool = False
    state: Any = None


class Env(Protocol):
    """A world. Objects are shared by all episodes and hold no episode state: that travels in
    `Step.state` -> `Action.state`, so that a batch of episodes is stepped in one call (one retriever
    request per turn) and an episode can be stored and resumed."""

    @property
    def stop(self) -> tuple[str, ...]:
        """Strings that end a turn as soon as they stand in the policy's text."""
        ...

    @property
    def max_turns(self) -> int:
        """Turns of the policy in one episode, the last one included."""
        ...

    def start(self, prompt: Prompt) -> Sequence[Message]:
        """The messages that the policy is shown."""
        ...

    def step(self, actions: Sequence[Action]) -> list[Step]:
        """One step of each episode, in order."""
        ...
