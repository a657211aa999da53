"""What every retriever owes its users, run on each implementation and on the fake."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from spaniel.retrieval.base import Passage, RetrieverError
from spaniel.retrieval.bm25 import BM25
from spaniel.retrieval.client import HttpRetriever
from spaniel.retrieval.nothing import NothingRetriever
from spaniel.retrieval.server import running
from tests.fakes.retriever import FailingRetriever, FakeRetriever

PASSAGES = [
    Passage("a", '"Seoul"\nSeoul is the capital of South Korea.'),
    Passage("b", '"Pyongyang"\nPyongyang is the capital of North Korea.'),
    Passage("7", '"Malmö"\nMalmö is a city in Sweden, across the strait from Denmark.'),
    Passage("d", '"Korea"\nA peninsula divided into north and south.'),
    Passage("e", '"Twin"\nidentical words here'),
    Passage("f", '"Twin"\nidentical words here'),
]


@pytest.fixture(scope="module", params=["memory", "disk", "http", "fake"])
def retriever(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    if request.param == "memory":
        yield BM25.from_passages(PASSAGES)
    elif request.param == "disk":
        yield BM25.open(index(tmp_path_factory.mktemp("index")))
    elif request.param == "http":
        with running(BM25.from_passages(PASSAGES)) as url, HttpRetriever(url, cache_size=0) as client:
            yield client
    else:
        yield FakeRetriever(PASSAGES)


def index(folder: Path) -> Path:
    rows = [json.dumps({"id": p.id, "contents": p.contents}) for p in PASSAGES]
    (folder / "corpus.jsonl").write_text("\n".join(rows), encoding="utf-8")
    BM25.build(folder / "corpus.jsonl", folder / "index")
    return folder / "index"


def ids(found: list[list[Passage]]) -> list[list[str]]:
    return [[p.id for p in passages] for passages in found]


def test_the_best_passage_comes_first_and_at_most_k_come(retriever: Any) -> None:
    found = retriever.search(["capital South Korea", "Sweden city"], 2)
    assert found[0][0] == Passage("a", PASSAGES[0].contents, found[0][0].score)
    assert found[1][0].id == "7"
    assert all(len(passages) <= 2 for passages in found)
    for passages in retriever.search(["korea capital north"], 6):
        scores = [p.score for p in passages]
        assert scores == sorted(scores, reverse=True)


def test_a_batch_gives_what_single_queries_give(retriever: Any) -> None:
    queries = ["capital", "Korea", "", "strait Denmark", "capital"]
    assert retriever.search(queries, 3) == [retriever.search([q], 3)[0] for q in queries]


def test_no_queries_and_empty_queries_find_nothing(retriever: Any) -> None:
    assert retriever.search([], 3) == []
    assert retriever.search(["", "  \n"], 3) == [[], []]
    assert retriever.search(["zzzunknown"], 3) == [[]]


def test_k_beyond_the_corpus_and_k_below_one(retriever: Any) -> None:
    assert len(retriever.search(["korea capital sweden identical"], 100)[0]) == 6
    with pytest.raises(ValueError, match="k is 0"):
        retriever.search(["korea"], 0)


def test_equal_scores_come_in_corpus_order(retriever: Any) -> None:
    assert ids(retriever.search(["identical"], 2)) == [["e", "f"]]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.text(st.characters(exclude_categories=()), max_size=40), max_size=3))  # half surrogate pairs too
def test_no_text_of_a_policy_is_an_error(retriever: Any, queries: list[str]) -> None:
    found = retriever.search(queries, 2)
    assert len(found) == len(queries)
    assert found == retriever.search(queries, 2)


HOSTILE = ['"', "a AND (", "title:x^2 OR", "[1 TO *]", "korea\x00\x1b[31m", "-korea", "~" * 999, "\ud800 korea"]
LONG = ["korea " * 20_000, "korea " + "".join(f"w{i} " for i in range(16_000)), "x" * 100_000]


@pytest.mark.parametrize("query", [*HOSTILE, *LONG], ids=lambda query: repr(query[:12]))
def test_query_syntax_is_plain_text(retriever: Any, query: str) -> None:
    (found,) = retriever.search([query], 3)
    assert ("korea" not in query.lower()) or found


def test_a_caller_who_edits_an_answer_changes_no_other(retriever: Any) -> None:
    first, second = retriever.search(["capital", "capital"], 3)
    expected = list(first)
    first.clear()
    assert second == expected == retriever.search(["capital"], 3)[0]


def test_the_retriever_that_knows_nothing() -> None:
    assert NothingRetriever().search(["korea", ""], 3) == [[], []]
    assert NothingRetriever().search([], 3) == []


def test_the_retriever_that_fails() -> None:
    every, third = FailingRetriever(FakeRetriever(PASSAGES)), FailingRetriever(FakeRetriever(PASSAGES), every=3)
    for _ in range(2):
        with pytest.raises(RetrieverError, match="down"):
            every.search(["korea"], 1)
    assert third.search(["korea"], 1) == third.search(["korea"], 1)
    with pytest.raises(RetrieverError, match="down"):
        third.search(["korea"], 1)
