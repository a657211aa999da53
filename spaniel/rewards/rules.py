"""Rule-based rewards for questions with known answers: exact match, token F1, format.

Only what the policy itself wrote is graded: an `<answer>` inside a retrieved passage is the passage's.
"""

from __future__ import annotations

import math
import re
import string
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from spaniel.errors import BadInput
from spaniel.rewards.base import Reward, Transcript
from spaniel.rewards.structure import retrieved, well_structured
from spaniel.types import Failure, Prompt, Score

_ANSWER = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalise(text: str) -> str:
    """SQuAD's normalisation: lower case, no punctuation, no articles, white space folded.

    Where nothing would be left (the answer is "The" or "!"), articles, and then punctuation, are kept.
    """
    lower = text.lower()
    bare = lower.translate(_PUNCTUATION)
    for candidate in (_ARTICLES.sub(" ", bare), bare, lower):
        if folded := " ".join(candidate.split()):
            return folded
    return ""


def exact_match(prediction: str, references: Sequence[str]) -> float:
    """1 where the normalised prediction equals a normalised reference; an empty prediction never matches."""
    own = normalise(prediction)
    return float(bool(own) and any(own == normalise(reference) for reference in references))


def substring_match(prediction: str, references: Sequence[str]) -> float:
    """1 where a normalised reference stands inside the normalised prediction."""
    own = normalise(prediction)
    return float(any(gold in own for gold in map(normalise, references) if gold))


def f1(prediction: str, references: Sequence[str]) -> float:
    """The best token F1 over the references: 2 p r / (p + r), p and r from the multiset of common words."""
    return max((_f1(normalise(prediction).split(), normalise(ref).split()) for ref in references), default=0.0)


def _f1(own: list[str], gold: list[str]) -> float:
    common = sum((Counter(own) & Counter(gold)).values())
    return 2 * common / (len(own) + len(gold)) if common else 0.0


def contains_answer(passage: str, references: Sequence[str]) -> bool:
    """Whether a reference stands in the passage as whole words, both normalised."""
    text = f" {normalise(passage)} "
    return any(f" {gold} " in text for gold in map(normalise, references) if gold)


def extract_answer(transcript: Transcript) -> str | None:
    """The last complete `<answer>` in the policy's own spans (an answer cannot span two turns); None for none."""
    found = [m[1].strip() for by_policy, text in transcript.spans if by_policy for m in _ANSWER.finditer(text)]
    return found[-1] if found else None


def _parts(transcript: Transcript) -> tuple[str | None, dict[str, float]]:
    """The answer, and what every rule reports beside its own value."""
    answer = extract_answer(transcript)
    references = transcript.rollout.prompt.reference
    parts = {
        "answered": float(answer is not None),
        "exact_match": exact_match(answer or "", references),
        "substring_match": substring_match(answer or "", references),
        "f1": f1(answer or "", references),
    }
    return answer, parts


@dataclass(frozen=True)
class ExactMatch:
    """`score` for a right answer, `format_score` for a wrong one, 0 for none (Search-R1's qa_em)."""

    score: float = 1.0
    format_score: float = 0.0

    def __call__(self, transcripts: Sequence[Transcript]) -> list[Score | Failure]:
        return [self._one(t) for t in transcripts]

    def _one(self, transcript: Transcript) -> Score:
        answer, parts = _parts(transcript)
        if answer is None:
            return Score(0.0, parts)
        return Score(self.score if parts["exact_match"] else self.format_score, parts)


@dataclass(frozen=True)
class F1:
    """Token F1 of the answer, 0 for none."""

    def __call__(self, transcripts: Sequence[Transcript]) -> list[Score | Failure]:
        judged = [_parts(t)[1] for t in transcripts]
        return [Score(parts["f1"], parts) for parts in judged]


@dataclass(frozen=True)
class Format:
    """`score` for the structure think -> (search -> information -> think)* -> answer, whatever the answer."""

    score: float = 1.0

    def __call__(self, transcripts: Sequence[Transcript]) -> list[Score | Failure]:
        out: list[Score | Failure] = []
        for transcript in transcripts:
            structured = float(well_structured(transcript))
            out.append(Score(self.score * structured, _parts(transcript)[1] | {"structure": structured}))
        return out


@dataclass(frozen=True)
class ExactMatchFormat:
    """Search-R1's structured reward (qa_em_format), by (structure valid, retrieval right, final answer):

        right answer, valid structure           score
        right answer, otherwise                 score - structure_format_score
        wrong answer or none, valid structure   structure_format_score (+ retrieval_score if retrieval is right)
        wrong answer, otherwise                 final_format_score
        no answer, otherwise                    0

    Retrieval is right where a reference stands in a retrieved passage.
    """

    score: float = 1.0
    structure_format_score: float = 0.2
    final_format_score: float = 0.1
    retrieval_score: float = 0.1

    def __post_init__(self) -> None:
        if self.score < self.structure_format_score + self.retrieval_score:
            raise BadInput(
                f"reward: structure_format_score {self.structure_format_score} + retrieval_score "
                f"{self.retrieval_score} exceed score {self.score}; a wrong answer could pay more than a right one"
            )

    def __call__(self, transcripts: Sequence[Transcript]) -> list[Score | Failure]:
        return [self._one(t) for t in transcripts]

    def _one(self, transcript: Transcript) -> Score:
        answer, parts = _parts(transcript)
        references = transcript.rollout.prompt.reference
        structured = well_structured(transcript)
        found = any(contains_answer(passages, references) for passages in retrieved(transcript))
        parts |= {"structure": float(structured), "retrieval": float(found)}
        if parts["exact_match"]:
            return Score(self.score if structured else self.score - self.structure_format_score, parts)
        if structured:
            return Score(self.structure_format_score + (self.retrieval_score if found else 0.0), parts)
        return Score(self.final_format_score if answer is not None else 0.0, parts)


@dataclass(frozen=True)
class FunctionReward:
    """A user's function of the prompt and the policy's own text: a number, or a mapping with `score` and other named
    numbers, which are logged."""

    function: Callable[[Prompt, str], float | Mapping[str, float]]
    name: str = "function"

    def __call__(self, transcripts: Sequence[Transcript]) -> list[Score | Failure]:
        return [self._one(self.function(t.rollout.prompt, t.policy_text)) for t in transcripts]

    def _one(self, found: float | Mapping[str, float]) -> Score:
        if isinstance(found, Mapping):
            return Score(found["score"], {n: float(v) for n, v in found.items() if n != "score"})
        return Score(found, {self.name: found})


@dataclass(frozen=True)
class Composite:
    """Weighted sum of named rewards: value = sum of weight * value of each; every part is logged as used.

    A failure of one part is a failure of the whole.
    """

    parts: tuple[tuple[str, float, Reward], ...]

    def __call__(self, transcripts: Sequence[Transcript]) -> list[Score | Failure]:
        columns = [(name, weight, reward(transcripts)) for name, weight, reward in self.parts]
        return [self._sum([(n, w, scores[i]) for n, w, scores in columns]) for i in range(len(transcripts))]

    def _sum(self, row: list[tuple[str, float, Score | Failure]]) -> Score | Failure:
        value = 0.0
        parts: dict[str, float] = {}
        for name, weight, score in row:
            if isinstance(score, Failure):
                return score
            value += weight * score.value
            parts |= {**score.parts, name: score.value, f"{name}/weighted": weight * score.value}
        return Score(value, parts)


@dataclass(frozen=True)
class Guarded:
    """The reward's boundary: an exception, a missing or a non-finite value becomes a `Failure` of the rollouts
    concerned, never a score. After an exception the groups are judged one by one, so that only the culprits'
    group is lost."""

    reward: Reward

    def __call__(self, transcripts: Sequence[Transcript]) -> list[Score | Failure]:
        try:
            return self._checked(transcripts)
        except Exception:
            by_group = [list(g) for _, g in groupby(transcripts, key=lambda t: t.rollout.group)]
            return [score for group in by_group for score in self._group(group)]

    def _group(self, group: list[Transcript]) -> list[Score | Failure]:
        try:
            return self._checked(group)
        except Exception as error:
            return [Failure("reward", f"{type(error).__name__}: {error}")] * len(group)

    def _checked(self, transcripts: Sequence[Transcript]) -> list[Score | Failure]:
        scores = self.reward(transcripts)
        if len(scores) != len(transcripts):
            raise ValueError(f"the reward gave {len(scores)} scores for {len(transcripts)} rollouts")
        return [self._finite(score) for score in scores]

    def _finite(self, score: Score | Failure) -> Score | Failure:
        if isinstance(score, Failure):
            return score
        if not isinstance(score.value, int | float) or not math.isfinite(score.value):
            return Failure("reward", f"the value is {score.value!r}; expected a finite number")
        return score
