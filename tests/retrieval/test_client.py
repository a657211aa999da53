"""The client against a server that misbehaves in every way it can."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from spaniel.errors import BadInput
from spaniel.retrieval.base import Passage, RetrieverError
from spaniel.retrieval.bm25 import BM25
from spaniel.retrieval.client import HttpRetriever
from spaniel.retrieval.reply import parse_reply
from spaniel.retrieval.server import running

Script = Callable[[int, dict[str, Any]], tuple[int, bytes, dict[str, str]] | None]


class Server(ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, script: Script) -> None:
        self.script, self.bodies, self.open, self.most = script, [], set(), 0
        self.lock = threading.Lock()
        super().__init__(("127.0.0.1", 0), Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        with self.server.lock:
            self.server.bodies.append(body)
            self.server.open.add(self.client_address)
            number = len(self.server.bodies)
        answer = self.server.script(number, body)
        if answer is None:  # drop the connection
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)
            return
        status, content, headers = answer
        self.send_response(status)
        for name, value in {"content-length": str(len(content)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    do_GET = do_POST

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def misbehaving(script: Script) -> Iterator[Server]:
    server = Server(script)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join(5)


def good(body: dict[str, Any]) -> tuple[int, bytes, dict[str, str]]:
    hits = [[{"document": {"id": 1, "contents": f"T\n{q}"}, "score": 1.5}] for q in body["queries"]]
    return 200, json.dumps({"result": hits}).encode(), {}


def client(url: str, **kwargs: Any) -> HttpRetriever:
    return HttpRetriever(url, **{"timeout_s": 0.5, "tries": 3, "backoff_s": 0.001, "max_backoff_s": 0.02, **kwargs})


BROKEN: dict[str, tuple[Any, str]] = {
    "500": ((500, b"oops", {}), "HTTP 500; gave up after 3 tries"),
    "429": ((429, b"", {"retry-after": "3600"}), "HTTP 429; gave up after 3 tries"),
    "not JSON": ((200, b"{", {}), "not the agreed reply"),
    "HTML": ((200, b"<html>busy</html>", {}), "not the agreed reply"),
    "{}": ((200, b"{}", {}), "list `result`"),
    "too few results": ((200, b'{"result": []}', {}), "0 results for 1 queries"),
    "too many documents": (
        (200, json.dumps({"result": [[{"document": {"contents": "x"}}] * 3]}).encode(), {}),
        "topk is 2",
    ),
    "no contents": ((200, b'{"result": [[{"document": {"id": 1}}]]}', {}), "no document with contents"),
    "score": ((200, b'{"result": [[{"document": {"contents": "x"}, "score": "high"}]]}', {}), "score is 'high'"),
    "dropped": (None, "no connection"),
    "cut body": ((200, b'{"result": [[', {"content-length": "999"}), "gave up after 3 tries"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_every_failure_is_named_and_bounded(name: str) -> None:
    answer, message = BROKEN[name]
    start = time.monotonic()
    with misbehaving(lambda n, body: answer) as server, client(server.url) as own:
        with pytest.raises(RetrieverError, match=message) as caught:
            own.search(["q"], 2)
        assert server.url in str(caught.value)
        assert own.traffic.failures == 1
        assert own.traffic.requests == 3
        assert own.traffic.retries == 2
    assert time.monotonic() - start < 8


def test_a_refused_request_is_not_tried_again() -> None:
    with misbehaving(lambda n, body: (404, b"no such page", {})) as server, client(server.url) as own:
        with pytest.raises(RetrieverError, match="HTTP 404: no such page"):
            own.search(["q"], 2)
        assert own.traffic.requests == 1


def test_a_slow_server_meets_the_time_out() -> None:
    def slow(number: int, body: dict[str, Any]) -> Any:
        time.sleep(0.4)
        return good(body)

    with misbehaving(slow) as server, client(server.url, timeout_s=0.05, tries=2) as own:
        start = time.monotonic()
        with pytest.raises(RetrieverError, match=r"no answer within 0\.05 s"):
            own.search(["q"], 2)
        assert time.monotonic() - start < 2


def test_nobody_there() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    with client(url) as own:
        with pytest.raises(RetrieverError, match="no connection"):
            own.search(["q"], 2)
        with pytest.raises(BadInput, match=f"{url}: no healthy server"):
            own.health()


def test_a_500_once_in_three_loses_nothing() -> None:
    def flaky(number: int, body: dict[str, Any]) -> Any:
        return (500, b"", {}) if number % 3 == 0 else good(body)

    with misbehaving(flaky) as server, client(server.url, batch_size=2, concurrency=1) as own:
        queries = [f"q{i}" for i in range(20)]
        assert [p[0].text for p in own.search(queries, 2)] == queries
        assert own.traffic.retries == own.traffic.requests - 10 > 0
        assert own.traffic.failures == 0


def test_batches_cache_and_duplicates() -> None:
    with misbehaving(lambda n, body: good(body)) as server, client(server.url, batch_size=3, cache_size=4) as own:
        own.search(["a", "a", "b", "", "c", "d"], 2)
        assert sorted(len(b["queries"]) for b in server.bodies) == [1, 3]  # four queries, three a request
        own.search(["a", "d"], 2)
        assert len(server.bodies) == 2
        assert own.traffic.cache_hits == 2
        own.search(["a"], 1)  # another k is another question
        assert len(server.bodies) == 3
        own.search(["e", "b"], 2)  # b was pushed out
        assert server.bodies[-1]["queries"] == ["e", "b"]
        assert own.search([], 2) == []
        assert own.search([" "], 2) == [[]]
        assert len(server.bodies) == 4


def test_connections_are_pooled() -> None:
    with misbehaving(lambda n, body: good(body)) as server, client(server.url, batch_size=1, concurrency=3) as own:
        for i in range(40):
            own.search([f"q{i}-{j}" for j in range(5)], 1)
        assert len(server.bodies) == 200
        assert len(server.open) <= 3


def test_an_older_server_without_health_is_asked_a_question() -> None:
    def old(number: int, body: dict[str, Any]) -> Any:
        return good(body) if "queries" in body else (404, b"", {})

    with misbehaving(old) as server:
        server.RequestHandlerClass = type("Old", (Handler,), {"do_GET": lambda self: self.send_error(404)})
        with client(server.url) as own:
            assert own.health() == {"status": "ok"}
    with running(BM25.from_passages([Passage("1", "T\nx")])) as url, HttpRetriever(f"{url}/retrieve") as own:
        assert own.health()["passages"] == 1


def test_documents_without_scores_are_read_too() -> None:
    assert parse_reply({"result": [[{"id": 3, "contents": "T\nx"}]]}, 1, 5) == [[Passage("3", "T\nx", 0.0)]]


@pytest.mark.parametrize(("kwargs", "message"), [({"url": "localhost:1"}, "http://host"), ({"tries": 0}, "tries: 0")])
def test_bad_settings(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        HttpRetriever(**{"url": "http://127.0.0.1:1", **kwargs})
