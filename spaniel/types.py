"""The nouns of Spaniel, in the order in which data flows through them.

    Prompt -> Observed, Sampled -> Rollout -> Score | Batch -> Targets
    Ranking (what people, or a labeler, think of several responses)

Shape letters: B rows, T token positions. Every per-token field is aligned with the token itself:
`x[b, t]` is about `tokens[b, t]`. Padding is on the right, always. No mask is stored in a rollout: a
span's *type* says who wrote its tokens, so tokens, mask and log-probabilities cannot disagree.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

if TYPE_CHECKING:
    from torch import Tensor

InputPath = Annotated[str, "a path of an input"]
"""A path in a recipe; relative ones start in the recipe's folder."""

Message = Mapping[str, str]
"""One chat message: `{"role": ..., "content": ...}`."""


@dataclass(frozen=True)
class Prompt:
    """A question: what the policy is shown (`messages`) and what only the reward sees (`reference`)."""

    id: str
    messages: tuple[Message, ...]
    reference: tuple[str, ...]
    """Accepted answers (ground truth); at least one."""
    source: str = ""
    """Name of the data set; validation is reported per source."""
    meta: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Observed:
    """Tokens that the world wrote (prompt, tool reply); never trained on."""

    tokens: tuple[int, ...]


@dataclass(frozen=True)
class Sampled:
    """Tokens that the policy wrote, each with its log-probability at sampling.

    `logprobs` are those of the temperature-scaled distribution that was sampled from. `version` is the
    number of the weights. `finish` says what ended the span. `reward` is a step reward (0 for most
    environments), credited to the last token.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    version: int
    finish: Literal["stop", "eos", "length"]
    reward: float = 0.0

    def __post_init__(self) -> None:
        if len(self.tokens) != len(self.logprobs):
            raise ValueError(f"{len(self.tokens)} sampled tokens but {len(self.logprobs)} log-probabilities")


class Stop(StrEnum):
    """Why a rollout ended."""

    ANSWERED = "answered"
    MAX_TURNS = "max_turns"
    OUT_OF_LENGTH = "out_of_length"
    ENVIRONMENT_ERROR = "environment_error"


@dataclass(frozen=True)
class Failure:
    """What went wrong at a named boundary (`environment`, `retriever`, `reward`, ...). Never a score of 0."""

    where: str
    cause: str


@dataclass(frozen=True)
class Turn:
    """What the environment made of one turn of the policy.

    `action` is the environment's name for it (`search`, `answer`, `message`, or `invalid`); `failure` is a
    boundary failure met while replying (the retriever was down), after which the episode went on.
    """

    action: str
    failure: Failure | None = None

    @property
    def valid(self) -> bool:
        return self.action != "invalid"


@dataclass(frozen=True)
class Score:
    """A judged rollout: `value` is what is learned from, `parts` its named components (all logged)."""

    value: float
    parts: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Rollout:
    """One episode: append-only spans, token in, token out.

    `group` numbers the prompt within its step: rollouts of one prompt in one step share it.
    `score` is `None` before grading, a `Failure` where the reward failed.
    """

    prompt: Prompt
    group: int
    spans: tuple[Observed | Sampled, ...]
    stop: Stop
    turns: tuple[Turn, ...] = ()
    score: Score | Failure | None = None
    failure: Failure | None = None
    """Set when `stop` is `environment_error`: the episode carries no learning signal."""

    @property
    def valid(self) -> bool:
        """True where there is something to learn from: graded, no failure, at least one sampled token."""
        return self.failure is None and isinstance(self.score, Score) and self.sampled_count > 0

    @property
    def length(self) -> int:
        return sum(len(span.tokens) for span in self.spans)

    @property
    def sampled(self) -> tuple[Sampled, ...]:
        return tuple(span for span in self.spans if isinstance(span, Sampled))

    @property
    def sampled_count(self) -> int:
        return sum(len(span.tokens) for span in self.sampled)


@dataclass(frozen=True)
class Ranking:
    """K responses to one prompt, ordered by people (or by a labeler)."""

    id: str
    messages: tuple[Message, ...]
    """The prompt; empty where the responses are judged by themselves."""
    responses: tuple[str, ...]
    ranks: tuple[int, ...]
    """The rank of each response, 0 for the best; equal ranks are ties."""
    scores: tuple[float, ...] | None = None
    """What each response was given, where the ranking comes from scores."""
    weight: float = 1.0
    margin: float = 0.0
    """By how much the winner's reward is to exceed the loser's."""
    ceiling: float | None = None
    """The best possible expected accuracy on its pairs, where the labeler is known."""
    source: str = ""

    @property
    def pairs(self) -> tuple[tuple[int, int], ...]:
        """(winner, loser) for each pair that is not tied: along the order, i = 0.., j = i+1..; at most K(K-1)/2."""
        order = sorted(range(len(self.ranks)), key=lambda i: self.ranks[i])
        every = ((order[i], order[j]) for i in range(len(order)) for j in range(i + 1, len(order)))
        return tuple((a, b) for a, b in every if self.ranks[a] < self.ranks[b])


class _Rows:
    """Tensors whose first dimension is B (or None): the common part of `Batch` and `Targets`."""

    def take(self, rows: Tensor, width: int | None = None) -> Self:
        """The same fields, only `rows` (i64[n]), in that order; of [B, T] fields the first `width` positions."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}  # type: ignore[arg-type]
        taken = {name: None if x is None else x[rows] for name, x in values.items()}
        return type(self)(**{n: x[:, :width] if x is not None and x.dim() == 2 else x for n, x in taken.items()})


@dataclass(frozen=True)
class Batch(_Rows):
    """Rollouts as tensors. `actions` is the only mask there is; attention follows from `lengths`."""

    tokens: Tensor
    """i64[B, T], right-padded; what stands behind `lengths` means nothing."""
    actions: Tensor
    """bool[B, T]: True where the policy wrote the token. All False in a row that is not `valid`."""
    logprobs: Tensor
    """f32[B, T]: log-probabilities at sampling (0 where not an action)."""
    rewards: Tensor
    """f32[B, T]: step rewards, and the score at the row's last action."""
    lengths: Tensor
    """i64[B]: real tokens per row."""
    groups: Tensor
    """i64[B]: number of the row's group."""
    versions: Tensor
    """i64[B]: number of the weights that sampled the row (the oldest, if several)."""
    valid: Tensor
    """bool[B]: False for a failed rollout, which leaves every statistic and has no action."""
    truncated: Tensor
    """bool[B]: True where the length budget ended the rollout, not the policy (T always exceeds the longest
    row, so the critic's value after the last token, aligned at `lengths`, is there to bootstrap from)."""
    baselines: Tensor | None = None
    """f32[B]: score of a greedy rollout of the row's prompt (NaN where that failed), for ReMax; None for others."""

    def __len__(self) -> int:
        return int(self.tokens.shape[0])


@dataclass(frozen=True)
class Targets(_Rows):
    """What the losses need beside the batch; each f32[B, T] or None."""

    advantages: Tensor
    returns: Tensor | None = None
    values: Tensor | None = None
    """The critic's values before the update, for the clipped value loss."""
    ref_logprobs: Tensor | None = None
    old_logprobs: Tensor | None = None
    """The learner's own log-probabilities before the update; None: those of the sampler are used."""


@dataclass(frozen=True)
class Ranked:
    """Rankings as tensors: one row a response, the rows of a ranking together."""

    tokens: Tensor
    """i64[B, T]: prompt, response and end token, right-padded."""
    lengths: Tensor
    """i64[B]"""
    rankings: Tensor
    """i64[B]: number of the row's ranking."""
    ranks: Tensor
    """i64[B]: the row's place in it, 0 best."""
    margins: Tensor
    """f32[B]: the margin of its pairs."""
    weights: Tensor
    """f32[B, n]: the ranking's share of each head's loss over the whole update; 0 where the head does not see it."""

    def __len__(self) -> int:
        return int(self.tokens.shape[0])

    def take(self, rows: Tensor) -> Ranked:
        """Only `rows` (i64[m]), in that order, as wide as the longest of them."""
        width = int(self.lengths[rows].max())
        taken = {f.name: getattr(self, f.name)[rows] for f in fields(self)}
        return Ranked(**taken | {"tokens": taken["tokens"][:, :width]})


@dataclass(frozen=True)
class Counts:
    """Global denominators of one optimizer step, over all ranks and micro-batches.

    A loss divides by these and never by what a micro-batch happens to hold.
    """

    actions: int
    """Tokens that the policy wrote."""
    sequences: int
    """Rows with at least one action."""


@dataclass(frozen=True)
class Tally:
    """A sum and a count, so that a mean is formed once, at the end, over all micro-batches and ranks."""

    total: float
    count: float

    def __add__(self, other: Tally) -> Tally:
        return Tally(self.total + other.total, self.count + other.count)

    @property
    def mean(self) -> float:
        """total / count; 0 for a count of 0."""
        return self.total / self.count if self.count else 0.0


Tallies = dict[str, Tally]
Metrics = dict[str, float]


def add_tallies(parts: list[Tallies]) -> Tallies:
    """Sum of tallies by name."""
    out: Tallies = {}
    for part in parts:
        for name, tally in part.items():
            out[name] = out[name] + tally if name in out else tally
    return out
