"""The server, asked as Search-R1's own client asks and as a stranger would."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from spaniel.errors import BadInput, SpanielError
from spaniel.retrieval import server
from spaniel.retrieval.base import Passage
from spaniel.retrieval.bm25 import BM25
from tests.fakes.retriever import FailingRetriever, FakeRetriever

PASSAGES = [
    Passage("0", '"Evan Morris"\nEvan Morris was a lobbyist.'),
    Passage("1", '"Hale"\nHoratio Hale, ethnologist.'),
]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with server.running(BM25.from_passages(PASSAGES)) as base:
        yield base


def post(url: str, **kwargs: object) -> httpx.Response:
    return httpx.post(f"{url}/retrieve", timeout=20, trust_env=False, **kwargs)  # type: ignore[arg-type]


def test_the_agreed_shape_with_and_without_scores(url: str) -> None:
    body = {"queries": ["Evan Morris", "ethnologist"], "topk": 1, "return_scores": True}
    first, second = post(url, json=body).json()["result"]
    assert first[0]["document"] == {"id": "0", "contents": PASSAGES[0].contents}
    assert first[0]["score"] > 0
    assert [hit["document"]["id"] for hit in second] == ["1"]
    plain = post(url, json={"queries": ["ethnologist"]}).json()
    assert plain == {"result": [[{"id": "1", "contents": PASSAGES[1].contents}]]}


def test_no_queries_empty_queries_and_a_thousand(url: str) -> None:
    assert post(url, json={"queries": []}).json() == {"result": []}
    assert post(url, json={"queries": [""]}).json() == {"result": [[]]}
    many = post(url, json={"queries": [f"Hale {i}" for i in range(1000)], "topk": 2}).json()["result"]
    assert len(many) == 1000


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "queries"),
        ({"queries": "Hale"}, "queries"),
        ({"queries": [1]}, "queries"),
        ({"queries": ["x"], "topk": 0}, "topk"),
        ({"queries": ["x"], "topk": "3"}, "topk"),
        ({"queries": ["x"], "topk": 10**9}, "topk"),
        ({"queries": ["x"], "return_scores": "yes"}, "return_scores"),
        ({"queries": ["x"], "top_k": 3}, "top_k"),
        ([1], None),
        ("x", None),
    ],
)
def test_a_malformed_request_is_422_and_names_the_field(url: str, body: object, field: str | None) -> None:
    reply = post(url, json=body)
    assert reply.status_code == 422
    assert field is None or reply.json()["detail"][0]["loc"][0] == field


def test_broken_bodies(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert post(url, content=b"{").status_code == 422
    assert post(url, content=b"\xff\xfe").status_code == 422
    monkeypatch.setattr(server, "MAX_BODY_BYTES", 100)
    assert post(url, json={"queries": ["x" * 200]}).status_code == 413
    assert httpx.get(f"{url}/retrieve", trust_env=False).status_code == 405
    assert httpx.get(f"{url}/nowhere", trust_env=False).status_code == 404


def test_health(url: str) -> None:
    assert httpx.get(f"{url}/health", trust_env=False).json()["passages"] == 2


def test_a_failing_retriever_is_503_with_its_cause() -> None:
    with server.running(FailingRetriever(FakeRetriever(PASSAGES))) as base:
        reply = post(base, json={"queries": ["x"]})
        assert reply.status_code == 503
        assert "down" in reply.json()["detail"]


def test_a_taken_port_is_named(url: str) -> None:
    port = int(url.rsplit(":", 1)[1])
    with pytest.raises((BadInput, SpanielError), match=str(port)), server.running(FakeRetriever(PASSAGES), port=port):
        pass
