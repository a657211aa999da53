"""A retriever on another machine: time-outs, bounded retries, concurrent batches, a cache."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx
from tenacity import Retrying, retry_if_exception_type, stop_after_attempt, stop_after_delay
from tenacity.wait import wait_base, wait_exponential, wait_random

from spaniel.errors import BadInput
from spaniel.retrieval.base import Passage, RetrieverError

_RETRIED_STATUS = frozenset({429, 500, 502, 503, 504})


class _Transient(Exception):
    """Worth another try: no connection, no answer in time, an overloaded or broken server."""

    def __init__(self, cause: str, retry_after: float = 0.0) -> None:
        super().__init__(cause)
        self.retry_after = retry_after


@dataclass
class Traffic:
    """What a client has done so far."""

    requests: int = 0
    retries: int = 0
    failures: int = 0
    cache_hits: int = 0


class _Wait(wait_base):
    """Exponential back-off with jitter, and at least what the server's Retry-After asks for (up to `most`)."""

    def __init__(self, first: float, most: float) -> None:
        self._backoff = wait_exponential(multiplier=first, max=most) + wait_random(0, first)
        self._most = most

    def __call__(self, retry_state: Any) -> float:
        error = retry_state.outcome.exception() if retry_state.outcome else None
        asked = error.retry_after if isinstance(error, _Transient) else 0.0
        return max(self._backoff(retry_state), min(asked, self._most))


class HttpRetriever:
    """The `/retrieve` protocol of Search-R1, on one pooled connection set.

    `timeout_s` bounds one request, `tries` and `deadline_s` all tries of a batch. Queries are sent in batches of
    `batch_size`, `concurrency` at once; answers are kept for the last `cache_size` (query, k). Whatever goes wrong
    is a `RetrieverError` that names the URL, the cause and the number of tries.
    """

    def __init__(
        self,
        url: str,
        *,
        timeout_s: float = 10.0,
        tries: int = 4,
        deadline_s: float = 60.0,
        backoff_s: float = 0.2,
        max_backoff_s: float = 5.0,
        concurrency: int = 4,
        batch_size: int = 256,
        cache_size: int = 100_000,
    ) -> None:
        for name, value in (("tries", tries), ("concurrency", concurrency), ("batch_size", batch_size)):
            if value < 1:
                raise BadInput(f"retriever.{name}: {value}; expected 1 or more")
        if not url.startswith(("http://", "https://")):
            raise BadInput(f"retriever.url: {url!r}; expected http://host:port or http://host:port/retrieve")
        if timeout_s <= 0 or deadline_s <= 0:
            raise BadInput(f"retriever: timeout_s {timeout_s}, deadline_s {deadline_s}; expected more than 0 seconds")
        self.base = url.rstrip("/").removesuffix("/retrieve")
        self.url = f"{self.base}/retrieve"
        self.batch_size = batch_size
        self.cache_size = cache_size
        self.traffic = Traffic()
        limits = httpx.Limits(max_connections=concurrency, max_keepalive_connections=concurrency)
        self._http = httpx.Client(timeout=timeout_s, limits=limits, trust_env=False)
        self._workers = ThreadPoolExecutor(concurrency, thread_name_prefix="retriever")
        self._stop = stop_after_attempt(tries) | stop_after_delay(deadline_s)
        self._wait = _Wait(backoff_s, max_backoff_s)
        self._cache: OrderedDict[tuple[str, int], list[Passage]] = OrderedDict()
        self._lock = threading.Lock()

    def __enter__(self) -> HttpRetriever:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections; the retriever cannot be used after it."""
        self._workers.shutdown(wait=True, cancel_futures=True)
        self._http.close()

    def health(self) -> dict[str, Any]:
        """What the server says of itself; a server that has no /health (Search-R1's) is asked for nothing instead.

        A `BadInput` that names the URL where nobody answers.
        """
        try:
            reply = self._http.get(f"{self.base}/health", timeout=5.0)
            if reply.status_code == 404:
                self._ask([""], 1)
                return {"status": "ok"}
            reply.raise_for_status()
            return dict(reply.json())
        except (httpx.HTTPError, ValueError, TypeError, RetrieverError) as error:
            raise BadInput(
                f"retriever {self.base}: no healthy server answers ({type(error).__name__}: {error}); "
                "start one with `spaniel serve-retriever`, or correct retriever.url"
            ) from error

    def search(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        """The `k` best passages of each query. One request for a query that stands several times; none for one
        that is empty or known."""
        if k < 1:
            raise ValueError(f"search: k is {k}; expected 1 or more")
        found: dict[str, list[Passage]] = {}
        missing = []
        for query in dict.fromkeys(queries):
            known = [] if not query.strip() else self._known(query, k)
            if known is None:
                missing.append(query)
            else:
                found[query] = known
        batches = [missing[i : i + self.batch_size] for i in range(0, len(missing), self.batch_size)]
        for batch, answers in zip(batches, self._workers.map(lambda b: self._ask(b, k), batches), strict=True):
            found.update(zip(batch, answers, strict=True))
            self._keep(batch, answers, k)
        return [found[query] for query in queries]

    def _known(self, query: str, k: int) -> list[Passage] | None:
        with self._lock:
            known = self._cache.get((query, k))
            if known is not None:
                self._cache.move_to_end((query, k))
                self.traffic.cache_hits += 1
            return known

    def _keep(self, batch: Sequence[str], answers: Sequence[list[Passage]], k: int) -> None:
        with self._lock:
            self._cache.update({(query, k): passages for query, passages in zip(batch, answers, strict=True)})
            while len(self._cache) > self.cache_size:
                self._cache.popitem(last=False)

    def _ask(self, batch: Sequence[str], k: int) -> list[list[Passage]]:
        retrying = Retrying(stop=self._stop, wait=self._wait, retry=retry_if_exception_type(_Transient), reraise=True)
        try:
            return retrying(self._once, batch, k)
        except _Transient as error:
            tries = retrying.statistics.get("attempt_number", 1)
            self._count(failures=1)
            raise RetrieverError(f"retriever {self.url}: {error}; gave up after {tries} tries") from error
        except RetrieverError:
            self._count(failures=1)
            raise
        finally:
            self._count(retries=retrying.statistics.get("attempt_number", 1) - 1)

    def _once(self, batch: Sequence[str], k: int) -> list[list[Passage]]:
        self._count(requests=1)
        try:
            reply = self._http.post(self.url, json={"queries": list(batch), "topk": k, "return_scores": True})
        except httpx.TimeoutException as error:
            raise _Transient(f"no answer within {self._http.timeout.read} s ({type(error).__name__})") from error
        except httpx.TransportError as error:
            raise _Transient(f"no connection ({type(error).__name__}: {error})") from error
        if reply.status_code in _RETRIED_STATUS:
            raise _Transient(f"HTTP {reply.status_code}", _seconds(reply.headers.get("retry-after", "")))
        if reply.status_code != 200:
            raise RetrieverError(f"retriever {self.url}: HTTP {reply.status_code}: {reply.text[:200]}")
        try:
            return parse_reply(reply.json(), len(batch), k)
        except ValueError as error:
            # A proxy's error page or a cut body may be gone at the next try.
            raise _Transient(f"not the agreed reply: {error}") from error

    def _count(self, **more: int) -> None:
        with self._lock:
            for name, value in more.items():
                setattr(self.traffic, name, getattr(self.traffic, name) + value)


def _seconds(header: str) -> float:
    try:
        return max(0.0, float(header))
    except ValueError:
        return 0.0


def parse_reply(reply: Any, queries: int, k: int) -> list[list[Passage]]:
    """The passages of a `/retrieve` reply; ValueError (naming what is wrong) where it is not as agreed."""
    result = reply.get("result") if isinstance(reply, dict) else None
    if not isinstance(result, list):
        raise ValueError(f"expected an object with a list `result`, found {str(reply)[:80]!r}")
    if len(result) != queries:
        raise ValueError(f"{len(result)} results for {queries} queries")
    return [_passages(hits, number, k) for number, hits in enumerate(result)]


def _passages(hits: Any, number: int, k: int) -> list[Passage]:
    if not isinstance(hits, list):
        raise ValueError(f"result[{number}] is {type(hits).__name__}, expected a list")
    if len(hits) > k:
        raise ValueError(f"result[{number}] has {len(hits)} documents, topk is {k}")
    return [_passage(hit, f"result[{number}][{place}]") for place, hit in enumerate(hits)]


def _passage(hit: Any, where: str) -> Passage:
    document = hit.get("document", hit) if isinstance(hit, dict) else None
    contents = document.get("contents") if isinstance(document, dict) else None
    score = hit.get("score", 0.0) if isinstance(hit, dict) else None
    if document is None or not isinstance(contents, str):
        raise ValueError(f"{where} has no document with contents")
    if isinstance(score, bool) or not isinstance(score, int | float):
        raise ValueError(f"{where}.score is {score!r}, expected a number")
    return Passage(str(document.get("id", "")), contents, float(score))
