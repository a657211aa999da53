"""The reply of a `/retrieve` server, checked: it comes from a program that others wrote."""

from __future__ import annotations

import math
from typing import Any

from spaniel.retrieval.base import Passage


def parse_reply(reply: Any, queries: int, k: int) -> list[list[Passage]]:
    """The passages of a `/retrieve` reply, with scores or without (then 0); ValueError naming what is not as agreed.

    As many results as `queries`, each of at most `k` documents; an id is text or a whole number, or is missing
    (Search-R1's servers over web search have none, and it becomes ""); a score is finite.
    """
    result = reply.get("result") if isinstance(reply, dict) else None
    if not isinstance(result, list):
        raise ValueError(f"expected an object with a list `result`, found {str(reply)[:80]!r}")
    if len(result) != queries:
        raise ValueError(f"{len(result)} results for {queries} queries")
    return [_passages(hits, f"result[{number}]", k) for number, hits in enumerate(result)]


def _passages(hits: Any, where: str, k: int) -> list[Passage]:
    if not isinstance(hits, list):
        raise ValueError(f"{where} is {type(hits).__name__}, expected a list")
    if len(hits) > k:
        raise ValueError(f"{where} has {len(hits)} documents, topk is {k}")
    return [_passage(hit, f"{where}[{place}]") for place, hit in enumerate(hits)]


def _passage(hit: Any, where: str) -> Passage:
    document = hit.get("document", hit) if isinstance(hit, dict) else None
    contents = document.get("contents") if isinstance(document, dict) else None
    if not isinstance(document, dict) or not isinstance(contents, str):
        raise ValueError(f"{where} has no document with contents")
    key, score = document.get("id", ""), hit.get("score", 0.0)
    if isinstance(key, bool) or not isinstance(key, str | int):
        raise ValueError(f"{where}.id is {str(key)[:80]!r}, expected text or a whole number")
    if isinstance(score, bool) or not isinstance(score, int | float) or not math.isfinite(score):
        raise ValueError(f"{where}.score is {str(score)[:80]!r}, expected a number")
    return Passage(str(key), contents, float(score))
