"""The seam of a retriever, and its failure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from spaniel.errors import SpanielError


@dataclass(frozen=True)
class Passage:
    """A document of the corpus: `contents` is its title on the first line (quoted, as in the Search-R1
    corpora, or not) and its text on the others; `score` is the retriever's, higher is better."""

    id: str
    contents: str
    score: float = 0.0

    @property
    def title(self) -> str:
        return self.contents.split("\n", 1)[0]

    @property
    def text(self) -> str:
        head, _, rest = self.contents.partition("\n")
        return rest if rest else head


class RetrieverError(SpanielError):
    """The retriever did not answer, or not as agreed; the message names it, the cause and the tries."""


class Retriever(Protocol):
    """Finds passages for queries."""

    def search(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        """For each query its at most `k` best passages, best first; an empty query finds nothing.

        Raises `RetrieverError` where it cannot answer (never an empty result instead).
        """
        ...
