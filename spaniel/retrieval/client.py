"""A retriever on other machines: time-outs, bounded retries, concurrent batches, a cache."""

from __future__ import annotations

import itertools
import json
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

import httpx
from tenacity import Retrying, retry_if_exception, stop_after_attempt, stop_before_delay
from tenacity.wait import wait_base, wait_exponential, wait_random

from spaniel.errors import BadInput
from spaniel.retrieval.base import Passage, RetrieverError
from spaniel.retrieval.reply import parse_reply

_HEALTH_S = 5.0


class _Failed(Exception):
    """One request that failed; `again` where another try may go better (no connection, no answer in time, an
    overloaded or broken server), not before `retry_after` seconds."""

    def __init__(self, url: str, cause: str, again: bool = True, retry_after: float = 0.0) -> None:
        super().__init__(f"retriever {url}: {cause}")
        self.again = again
        self.retry_after = retry_after


@dataclass
class Traffic:
    """What a client has done so far; every request is a try of a batch, every failure a batch given up."""

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
        asked = error.retry_after if isinstance(error, _Failed) else 0.0
        return max(self._backoff(retry_state), min(asked, self._most))


class HttpRetriever:
    """The `/retrieve` protocol of Search-R1, on one pooled connection set.

    `url` is a server's base URL, or with `/retrieve`; with several the requests take turns, and a try that failed
    goes on at the next. `timeout_s` bounds each request's connecting, sending and waiting, and its whole answer;
    `tries` and `deadline_s` bound all tries of a batch with the waits between them. Queries are sent in batches
    of `batch_size`, `concurrency` at once; answers are kept for the last `cache_size` (query, k). Whatever goes
    wrong is a `RetrieverError` that names the URL, the cause and the number of tries. Threads may share one.
    """

    def __init__(
        self,
        url: str | Sequence[str],
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
        for name, number in (("backoff_s", backoff_s), ("max_backoff_s", max_backoff_s), ("cache_size", cache_size)):
            if number < 0:
                raise BadInput(f"retriever.{name}: {number}; expected 0 or more")
        if timeout_s <= 0 or deadline_s <= 0:
            raise BadInput(f"retriever: timeout_s {timeout_s}, deadline_s {deadline_s}; expected more than 0 seconds")
        self.bases = tuple(_base(each) for each in ([url] if isinstance(url, str) else url))
        if not self.bases:
            raise BadInput("retriever.url: no URL; expected at least one")
        self.timeout_s = timeout_s
        self.deadline_s = deadline_s
        self.batch_size = batch_size
        self.cache_size = cache_size
        self.traffic = Traffic()
        limits = httpx.Limits(max_connections=concurrency, max_keepalive_connections=concurrency)
        self._http = httpx.Client(limits=limits, trust_env=False)
        self._workers = ThreadPoolExecutor(concurrency, thread_name_prefix="retriever")
        self._stop = stop_after_attempt(tries) | stop_before_delay(deadline_s)
        self._wait = _Wait(backoff_s, max_backoff_s)
        self._turn = itertools.cycle(self.bases)
        self._cache: OrderedDict[tuple[str, int], list[Passage]] = OrderedDict()
        self._lock = threading.Lock()
        self._process: int | None = os.getpid()

    def __enter__(self) -> HttpRetriever:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections; searches that wait for their turn fail, and so does every later one."""
        self._process = None
        self._workers.shutdown(wait=True, cancel_futures=True)
        self._http.close()

    def health(self) -> dict[str, Any]:
        """What the (first) server says of itself; one that has no /health (Search-R1's) is asked for nothing instead.

        Every server is asked, each within seconds. A `BadInput` names the URL that does not answer, or those
        that hold different corpora.
        """
        said = {base: self._health(base) for base in self.bases}
        counts = {base: each["passages"] for base, each in said.items() if each.get("passages") is not None}
        if len(set(map(repr, counts.values()))) > 1:
            raise BadInput(f"retriever.url: the servers hold different numbers of passages: {counts}")
        return said[self.bases[0]]

    def _health(self, base: str) -> dict[str, Any]:
        try:
            status, body, _ = self._send("GET", f"{base}/health", _HEALTH_S)
            if status == 404:
                self._retrieve(base, [""], 1, _HEALTH_S)
                return {"status": "ok"}
            if status != 200:
                raise ValueError(f"HTTP {status}: {_start(body)}")
            said = json.loads(body)
            if not isinstance(said, dict):
                raise ValueError(f"/health says {_start(body)}")
            return said
        except (_Failed, ValueError, RecursionError) as error:
            raise BadInput(
                f"retriever {base}: no healthy server answers ({error}); "
                "start one with `spaniel serve-retriever`, or correct retriever.url"
            ) from error

    def search(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        """The `k` best passages of each query. One request for a query that stands several times; none for one
        that is empty or known."""
        if k < 1:
            raise ValueError(f"search: k is {k}; expected 1 or more")
        if self._process != os.getpid():
            # The threads of the pool do not live on in a forked process: to wait for them would be to wait for ever.
            raise RetrieverError(
                f"retriever {self.bases[0]}: is closed, or was made in another process; make a new one"
            )
        found: dict[str, list[Passage]] = {}
        missing = []
        for query in dict.fromkeys(queries):
            known = [] if not query.strip() else self._known(query, k)
            if known is None:
                missing.append(query)
            else:
                found[query] = known
        batches = [missing[i : i + self.batch_size] for i in range(0, len(missing), self.batch_size)]
        try:
            for batch, answers in zip(batches, self._workers.map(lambda b: self._ask(b, k), batches), strict=True):
                found.update(zip(batch, answers, strict=True))
                self._keep(batch, answers, k)
        except CancelledError as error:
            raise RetrieverError(f"retriever {self.bases[0]}: was closed during a search") from error
        return [list(found[query]) for query in queries]

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
        retrying = Retrying(stop=self._stop, wait=self._wait, retry=retry_if_exception(_again), reraise=True)
        end = time.monotonic() + self.deadline_s
        try:
            return retrying(self._once, batch, k, end)
        except _Failed as error:
            tries = retrying.statistics["attempt_number"]
            self._count(failures=1)
            raise RetrieverError(f"{error}; gave up after {tries} {'try' if tries == 1 else 'tries'}") from error
        finally:
            self._count(retries=retrying.statistics["attempt_number"] - 1)

    def _once(self, batch: Sequence[str], k: int, end: float) -> list[list[Passage]]:
        with self._lock:
            self.traffic.requests += 1
            base = next(self._turn)
        return self._retrieve(base, batch, k, max(0.001, min(self.timeout_s, end - time.monotonic())))

    def _retrieve(self, base: str, batch: Sequence[str], k: int, seconds: float) -> list[list[Passage]]:
        """One request; `_Failed` whatever goes wrong."""
        url = f"{base}/retrieve"
        queries = [query.encode("utf-8", "replace").decode() for query in batch]  # half a surrogate pair is no text
        wanted = {"queries": queries, "topk": k, "return_scores": True}
        status, body, asked = self._send("POST", url, seconds, wanted)
        if status == 429 or status >= 500:
            raise _Failed(url, f"HTTP {status}", retry_after=_seconds(asked))
        if status != 200:
            raise _Failed(url, f"HTTP {status}: {_start(body)}", again=False)
        try:
            return parse_reply(json.loads(body), len(batch), k)
        except (ValueError, RecursionError) as error:
            # A proxy's error page or a cut body may be gone at the next try.
            raise _Failed(url, f"not the agreed reply: {error}") from error

    def _send(self, method: str, url: str, seconds: float, wanted: Any = None) -> tuple[int, bytes, str]:
        """Status, body and Retry-After of the answer. `seconds` bounds the body as a whole: httpx's own time-out
        starts afresh at every piece, so that a server that trickles would never meet it."""
        end = time.monotonic() + seconds
        body = bytearray()
        try:
            with self._http.stream(method, url, json=wanted, timeout=seconds) as reply:
                for part in reply.iter_bytes():
                    body += part
                    if time.monotonic() > end:
                        raise httpx.ReadTimeout("the body came too slowly")
        except httpx.TimeoutException as error:
            raise _Failed(url, f"no answer within {seconds:.3g} s ({type(error).__name__})") from error
        except httpx.RequestError as error:
            raise _Failed(url, f"no connection ({type(error).__name__}: {error})") from error
        return reply.status_code, bytes(body), reply.headers.get("retry-after", "")

    def _count(self, failures: int = 0, retries: int = 0) -> None:
        with self._lock:
            self.traffic.failures += failures
            self.traffic.retries += retries


def _base(url: str) -> str:
    try:
        parsed = httpx.URL(url)
        parsed.host.encode("idna")  # as the name look-up will; it refuses a..b
        good = parsed.scheme in ("http", "https") and parsed.host and (parsed.port or 80) < 2**16
    except (httpx.InvalidURL, TypeError, UnicodeError):
        good = False
    if not good:
        raise BadInput(f"retriever.url: {url!r}; expected http://host:port or http://host:port/retrieve")
    return url.rstrip("/").removesuffix("/retrieve")


def _again(error: BaseException) -> bool:
    return isinstance(error, _Failed) and error.again


def _start(body: bytes) -> str:
    return body[:200].decode("utf-8", "replace")


def _seconds(header: str) -> float:
    """The wait that a Retry-After header asks for: seconds, or a date."""
    try:
        return max(0.0, float(header))
    except ValueError:
        pass
    try:
        return max(0.0, (parsedate_to_datetime(header) - datetime.now(UTC)).total_seconds())
    except (ValueError, TypeError):  # no date, or one without a time zone
        return 0.0
