"""The data of the tiny search task: reproducible, split by entity, answerable only by searching."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from spaniel.retrieval.bm25 import BM25
from spaniel.retrieval.corpus import read_corpus

FOLDER = Path("recipes/search_tiny").resolve()


@pytest.fixture(scope="module")
def made() -> Iterator[Any]:
    sys.path.insert(0, str(FOLDER))
    yield importlib.import_module("make_data")
    sys.path.remove(str(FOLDER))


def rows(name: str) -> list[dict[str, Any]]:
    return pq.read_table(FOLDER / f"{name}.parquet").to_pylist()


def test_what_is_shipped_is_what_the_script_makes(made: Any, tmp_path: Path) -> None:
    made.write_data(tmp_path)
    assert (tmp_path / "corpus.jsonl").read_bytes() == (FOLDER / "corpus.jsonl").read_bytes()
    for name in ("train", "validation"):
        assert pq.read_table(tmp_path / f"{name}.parquet").to_pylist() == rows(name)


def test_sizes() -> None:
    assert len(list(read_corpus(FOLDER / "corpus.jsonl"))) >= 2000
    assert len(rows("train")) + len(rows("validation")) >= 1000
    assert sum(row["extra_info"]["hops"] == 2 for row in rows("validation")) >= 100
    texts = [row["prompt"][0]["content"] for row in rows("train") + rows("validation")]
    assert len(set(texts)) == len(texts)


def test_no_entity_is_on_both_sides(made: Any) -> None:
    countries, airports = made.load_facts(FOLDER / "facts")
    train, held_out = made.split(countries, airports)
    assert not {a.country.name for a in train} & {a.country.name for a in held_out}
    assert not {a.iata for a in train} & {a.iata for a in held_out}
    codes = {a.iata for a in held_out}
    names = {a.country.name for a in held_out}
    for row in rows("train"):
        words = row["prompt"][0]["content"].rstrip("?").split()
        assert not codes & set(words)
        assert row["prompt"][0]["content"].removeprefix("What is the capital of ").rstrip("?") not in names
    currencies = {row["reward_model"]["ground_truth"]["target"][0] for row in rows("validation")
                  if row["extra_info"]["kind"] == "country_currency"}  # fmt: skip
    assert not currencies & {a.country.currency for a in train}


def test_a_good_query_finds_the_passage_that_holds_the_answer() -> None:
    index = BM25.from_passages(read_corpus(FOLDER / "corpus.jsonl"))
    for row in rows("validation"):
        question, kind = row["prompt"][0]["content"].rstrip("?"), row["extra_info"]["kind"]
        (answer,) = row["reward_model"]["ground_truth"]["target"]
        if kind == "capital":
            query = question.removeprefix("What is the ")
        else:
            code = question.split(" airport")[0].split()[-1]
            query = f"{code} airport"
        ((passage,),) = index.search([query], 1)
        if kind.startswith("country_"):  # the second hop
            country = passage.text.rsplit(" in ", 1)[1].rstrip(".")
            ((passage,),) = index.search([f"{kind.removeprefix('country_')} of {country}"], 1)
        assert answer in passage.text


def test_demonstrations_use_no_held_out_name_and_read_faithfully(made: Any, tmp_path: Path) -> None:
    teachers = importlib.import_module("demonstrations")
    teachers.write_demonstrations(tmp_path / "d.jsonl", 300, teachers.CARELESS)
    world = teachers.World("x")
    seen = [json.loads(line)["messages"] for line in (tmp_path / "d.jsonl").read_text().splitlines()]
    searching = 0
    for messages in seen:
        replies = [m["content"] for m in messages if m["role"] == "environment"]
        said = messages[-1]["content"].split("<answer> ")[1].removesuffix(" </answer>")
        assert said not in world.forbidden
        for word in messages[0]["content"].rstrip("?").split():
            assert word not in {w for w in world.forbidden if len(w) == 3 and w.isupper()}
        if replies:
            searching += 1
            assert said in replies[-1]  # always what the passage says
    assert 100 < searching < 260  # some guess, some search
    aimless = [teachers.episode(world, teachers.AIMLESS) for _ in range(400)]
    assert all(any(m["role"] == "environment" for m in messages) for messages in aimless)
    # neither teacher shows what pays: right two-hop episodes are as rare as three tosses of a coin make them
    for episodes in (aimless, seen):
        two_hops = [m for m in episodes if "the country of" in m[0]["content"]]
        right = [m for m in two_hops if len(m) == 6 and all(len(t["content"].split()) > 9 for t in (m[1], m[3]))]
        assert len(right) < 0.25 * len(two_hops)
