"""Retrievers for tests: one that counts words, ones that fail."""

from __future__ import annotations

import re
from collections.abc import Sequence

from spaniel.retrieval.base import Passage, RetrieverError


class FakeRetriever:
    """Ranks by the number of different query words in a passage; records its calls."""

    def __init__(self, passages: Sequence[Passage]) -> None:
        self.passages = list(passages)
        self.calls: list[list[str]] = []

    def search(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        if k < 1:
            raise ValueError(f"search: k is {k}; expected 1 or more")
        self.calls.append(list(queries))
        return [self._one(query, k) for query in queries]

    def _one(self, query: str, k: int) -> list[Passage]:
        words = set(re.findall(r"\w+", query.lower()))
        hits = [
            Passage(p.id, p.contents, float(len(words & set(re.findall(r"\w+", p.contents.lower())))))
            for p in self.passages
        ]
        return sorted((p for p in hits if p.score > 0), key=lambda p: -p.score)[:k]


class FailingRetriever:
    """Fails at every `every`-th call (1: always)."""

    def __init__(self, inner: FakeRetriever, every: int = 1) -> None:
        self.inner = inner
        self.every = every
        self.count = 0

    def search(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        self.count += 1
        if self.count % self.every == 0:
            raise RetrieverError("retriever fake: down; gave up after 3 tries")
        return self.inner.search(queries, k)
