"""A retriever that knows nothing: the control that shows whether an agent truly searches."""

from __future__ import annotations

from collections.abc import Sequence

from spaniel.retrieval.base import Passage


class NothingRetriever:
    """Finds no passage for any query."""

    def search(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        return [[] for _ in queries]
