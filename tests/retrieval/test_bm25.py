"""BM25: the scores are BM25's, the index survives, what is wrong is said."""

from __future__ import annotations

import gzip
import json
import math
from pathlib import Path

import pytest

from spaniel.errors import BadInput
from spaniel.retrieval.base import Passage
from spaniel.retrieval.bm25 import BM25
from spaniel.retrieval.corpus import read_corpus

DOCS = ["red fish blue fish", "one fish", "red red red bird", "two old birds in one tree"]


def reference(query: list[str], docs: list[str]) -> list[float]:
    """Okapi BM25 in float64, k1 = 1.2, b = 0.75, idf = ln(1 + (N - n + 0.5) / (n + 0.5)), written from the paper."""
    split = [d.split() for d in docs]
    mean = sum(map(len, split)) / len(split)
    out = []
    for words in split:
        score = 0.0
        for term in query:
            n = sum(term in other for other in split)
            f = words.count(term)
            idf = math.log(1 + (len(docs) - n + 0.5) / (n + 0.5))
            score += idf * f * 2.2 / (f + 1.2 * (1 - 0.75 + 0.75 * len(words) / mean))
        out.append(score)
    return out


@pytest.mark.parametrize("query", ["red", "fish", "one fish", "red fish bird tree"])
def test_scores_are_those_of_the_formula(query: str) -> None:
    index = BM25.from_passages([Passage(str(i), d) for i, d in enumerate(DOCS)])
    expected = reference(query.split(), DOCS)
    found = {p.id: p.score for p in index.search([query], 10)[0]}
    assert set(found) == {str(i) for i, score in enumerate(expected) if score > 0}
    for key, score in found.items():  # document lengths below 40 words are stored exactly
        assert score == pytest.approx(expected[int(key)], rel=1e-5)


def test_title_and_text_case_accents() -> None:
    index = BM25.from_passages([Passage("1", '"Malmö (MMX)"\nA city.'), Passage("2", '"Other"\nmentions nothing')])
    for query in ("malmo", "MALMÖ", "mmx", "CITY"):
        assert [p.id for p in index.search([query], 5)[0]] == ["1"]


def write(path: Path, *rows: object) -> Path:
    path.write_text("\n".join(r if isinstance(r, str) else json.dumps(r) for r in rows), encoding="utf-8")
    return path


GOOD = {"id": 1, "contents": "T\nx"}


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "is empty"),
        (["{"], "line 1: not valid JSON"),
        ([GOOD, [1]], "line 2: is list; expected an object"),
        ([{"contents": "x"}], "line 1: id is None"),
        ([{"id": 1.5, "contents": "x"}], r"id is 1\.5"),
        ([{"id": True, "contents": "x"}], "id is True"),
        ([{"id": 1}], "contents is None"),
        ([{"id": 1, "contents": "  "}], "contents is '  '"),
        ([GOOD, {"id": "1", "contents": "y"}], "line 2: id '1' stands in line 1 already"),
    ],
)
def test_a_bad_corpus_names_file_and_line(tmp_path: Path, rows: list, message: str) -> None:
    path = write(tmp_path / "c.jsonl", *rows)
    with pytest.raises(BadInput, match=message) as caught:
        list(read_corpus(path))
    assert str(path) in str(caught.value)
    with pytest.raises(BadInput, match=message):
        BM25.build(path, tmp_path / "index")
    assert not (tmp_path / "index").exists()  # nothing is left behind


def test_missing_files_and_wrong_encodings(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="not found"):
        list(read_corpus(tmp_path / "none"))
    with pytest.raises(BadInput, match="not found"):
        BM25.build(tmp_path / "none", tmp_path / "index")
    (tmp_path / "latin").write_bytes(b'{"id": 1, "contents": "\xe9"}')
    with pytest.raises(BadInput, match="cannot be read"):
        list(read_corpus(tmp_path / "latin"))
    with gzip.open(tmp_path / "c.jsonl.gz", "wt") as file:
        file.write(json.dumps(GOOD))
    assert [p.id for p in read_corpus(tmp_path / "c.jsonl.gz")] == ["1"]
    (tmp_path / "bad.gz").write_bytes((tmp_path / "c.jsonl.gz").read_bytes()[:-9])
    with pytest.raises(BadInput, match="cannot be read"):
        list(read_corpus(tmp_path / "bad.gz"))


def test_an_index_is_built_once_and_again_when_the_corpus_changes(tmp_path: Path) -> None:
    corpus = write(tmp_path / "c.jsonl", GOOD)
    assert BM25.build(corpus, tmp_path / "index") is True
    assert BM25.build(corpus, tmp_path / "index") is False
    write(corpus, GOOD, {"id": 2, "contents": "T\ny"})
    assert BM25.build(corpus, tmp_path / "index") is True
    index = BM25.open(tmp_path / "index")
    assert len(index) == 2
    assert index.search(["y"], 3)[0][0].id == "2"
    memory = BM25.from_passages(read_corpus(corpus))
    assert index.search(["t x y"], 3) == memory.search(["t x y"], 3)


def test_damaged_and_foreign_folders(tmp_path: Path) -> None:
    corpus = write(tmp_path / "c.jsonl", GOOD)
    with pytest.raises(BadInput, match="spaniel index"):
        BM25.open(tmp_path / "nowhere")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("precious")
    with pytest.raises(BadInput, match="exists and is not an index"):
        BM25.build(corpus, tmp_path / "mine")
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "precious"
    BM25.build(corpus, tmp_path / "index")
    manifest = tmp_path / "index" / "spaniel-index.json"
    good = json.loads(manifest.read_text())
    for changed, message in (({**good, "passages": 5}, "its manifest says 5"), ({**good, "format": 99}, "format 99")):
        manifest.write_text(json.dumps(changed))
        with pytest.raises(BadInput, match=message):
            BM25.open(tmp_path / "index")
    manifest.write_text(json.dumps(good))
    (tmp_path / "index" / "meta.json").write_text("{")
    with pytest.raises(BadInput, match="damaged"):
        BM25.open(tmp_path / "index")


def test_a_long_document_is_returned_whole() -> None:
    text = "T\n" + "word " * 40_000
    assert BM25.from_passages([Passage("1", text)]).search(["word"], 1)[0][0].contents == text
