"""A retriever over HTTP, as Search-R1's retrieval server speaks it.

POST /retrieve {"queries": ["..", ..], "topk": 3, "return_scores": true}
  -> {"result": [[{"document": {"id": .., "contents": ..}, "score": ..}, ..], ..]}
(without scores the documents themselves: [[{"id": .., "contents": ..}, ..], ..])
GET /health -> {"status": "ok", "name": "BM25", "passages": .., "version": ..}
A malformed request gets 422 and {"detail": [{"loc": [field, ..], "msg": ..}, ..]}.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator, Sized
from contextlib import contextmanager
from typing import Annotated, Any

import uvicorn
from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictInt, StrictStr, ValidationError
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from spaniel import __version__
from spaniel.errors import BadInput, SpanielError
from spaniel.retrieval.base import Passage, Retriever

MAX_BODY_BYTES = 64_000_000
MAX_QUERIES = 10_000
MAX_TOPK = 1_000
_START_STOP_S = 10.0


class Query(BaseModel):
    """The body of a request."""

    model_config = ConfigDict(extra="forbid")

    queries: Annotated[list[StrictStr], Field(max_length=MAX_QUERIES)]
    topk: Annotated[StrictInt, Field(ge=1, le=MAX_TOPK)] | None = None
    return_scores: StrictBool = False


def application(retriever: Retriever, topk: int = 3) -> Starlette:
    """The server as an ASGI application; `topk` is used where a request names none."""

    async def retrieve(request: Request) -> Response:
        body = await _body(request)
        if body is None:
            return JSONResponse({"detail": f"the body is larger than {MAX_BODY_BYTES} bytes"}, status_code=413)
        try:
            query = Query.model_validate_json(body)
        except ValidationError as error:
            return JSONResponse({"detail": error.errors(include_url=False, include_input=False, include_context=False)},
                                status_code=422)  # fmt: skip
        try:
            found = await run_in_threadpool(retriever.search, query.queries, query.topk or topk)
        except SpanielError as error:
            return JSONResponse({"detail": str(error)}, status_code=503)
        return JSONResponse({"result": [[_shown(p, query.return_scores) for p in passages] for passages in found]})

    async def health(request: Request) -> Response:
        count = len(retriever) if isinstance(retriever, Sized) else None
        name = type(retriever).__name__
        return JSONResponse({"status": "ok", "name": name, "passages": count, "version": __version__})

    return Starlette(routes=[Route("/retrieve", retrieve, methods=["POST"]), Route("/health", health)])


async def _body(request: Request) -> bytes | None:
    """The request's body, or None once it exceeds the limit (whatever its header claims)."""
    parts: list[bytes] = []
    size = 0
    async for part in request.stream():
        size += len(part)
        if size > MAX_BODY_BYTES:
            return None
        parts.append(part)
    return b"".join(parts)


def _shown(passage: Passage, with_score: bool) -> dict[str, Any]:
    document = {"id": passage.id, "contents": passage.contents}
    return {"document": document, "score": passage.score} if with_score else document


def serve(retriever: Retriever, *, host: str = "127.0.0.1", port: int = 8000, topk: int = 3) -> None:
    """Serve until interrupted. Only this machine is listened to unless `host` says otherwise."""
    listening = _listen(host, port)
    _server(retriever, topk).run(sockets=[listening])


@contextmanager
def running(retriever: Retriever, *, host: str = "127.0.0.1", port: int = 0, topk: int = 3) -> Iterator[str]:
    """Serve in a thread for the length of a `with` block; gives the base URL (a free port where `port` is 0).

    `SpanielError` where the server is not up, or not down again, within 10 s.
    """
    listening = _listen(host, port)
    server = _server(retriever, topk)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, name="retrieval server", daemon=True)
    thread.start()
    place = f"[{host}]" if ":" in host else host
    url = f"http://{place}:{listening.getsockname()[1]}"
    try:
        deadline = time.monotonic() + _START_STOP_S
        while not server.started:
            if time.monotonic() > deadline or not thread.is_alive():
                raise SpanielError(f"the retrieval server on {url} did not start within {_START_STOP_S:.0f} s")
            time.sleep(0.01)
        yield url
    finally:
        server.should_exit = True
        thread.join(_START_STOP_S)
        listening.close()
    if thread.is_alive():
        raise SpanielError(f"the retrieval server on {url} did not stop within {_START_STOP_S:.0f} s")


def _server(retriever: Retriever, topk: int) -> uvicorn.Server:
    # A request that does not end must not keep the server from ending.
    config = uvicorn.Config(application(retriever, topk), log_level="warning", timeout_graceful_shutdown=5)
    return uvicorn.Server(config)


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # The protocol is named because asyncio turns Nagle off (40 ms a reply) only where it is.
    listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, port))
    except (OSError, OverflowError) as error:
        listening.close()
        cause = getattr(error, "strerror", None) or error
        raise BadInput(f"retrieval server: cannot listen on {host}:{port}: {cause}") from error
    return listening
