"""BM25: indexing and queries, in memory, from disk and over HTTP, in one run.

python benchmarks/retrieval.py [--passages 100000] [--queries 1000]
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from pathlib import Path
from typing import Any

from spaniel.retrieval.base import Passage
from spaniel.retrieval.bm25 import BM25
from spaniel.retrieval.client import HttpRetriever
from spaniel.retrieval.server import running


def passages(count: int) -> list[Passage]:
    """Texts of 40 to 100 words from a vocabulary of 30,000 with frequencies as in language (Zipf)."""
    rng = random.Random(1)
    words = [f"w{i}" for i in range(30_000)]
    weights = [1 / (i + 1) for i in range(len(words))]
    pool = rng.choices(words, weights, k=2_000_000)
    out = []
    for number in range(count):
        start = rng.randrange(len(pool) - 100)
        out.append(Passage(str(number), f'"title {number}"\n' + " ".join(pool[start : start + rng.randint(40, 100)])))
    return out


def timed(retriever: Any, queries: list[str], batch: int) -> float:
    start = time.perf_counter()
    for i in range(0, len(queries), batch):
        retriever.search(queries[i : i + batch], 3)
    return len(queries) / (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--passages", type=int, default=100_000)
    parser.add_argument("--queries", type=int, default=1_000)
    given = parser.parse_args()
    corpus = passages(given.passages)
    rng = random.Random(2)
    queries = [" ".join(rng.sample(rng.choice(corpus).text.split(), 6)) for _ in range(given.queries)]
    start = time.perf_counter()
    memory = BM25.from_passages(corpus)
    print(f"{given.passages} passages indexed in memory in {time.perf_counter() - start:.1f} s")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "corpus.jsonl"
        path.write_text("".join(json.dumps({"id": p.id, "contents": p.contents}) + "\n" for p in corpus))
        start = time.perf_counter()
        BM25.build(path, Path(folder) / "index")
        print(f"read, checked and indexed on disk in {time.perf_counter() - start:.1f} s")
        disk = BM25.open(Path(folder) / "index")
        with running(disk) as url, HttpRetriever(url, cache_size=0) as client:
            for name, retriever in (("memory", memory), ("disk", disk), ("HTTP", client)):
                single, batched = timed(retriever, queries, 1), timed(retriever, queries, 128)
                print(f"{name}: {single:.0f} queries/s one by one, {batched:.0f} in batches of 128")


if __name__ == "__main__":
    main()
