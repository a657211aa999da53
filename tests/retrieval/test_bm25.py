"""BM25: the scores are BM25's, the index survives, what is wrong is said."""

from __future__ import annotations

import gzip
import itertools
import json
import math
import shutil
import time
import unicodedata
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import tantivy
from hypothesis import given, settings
from hypothesis import strategies as st

from spaniel import __version__
from spaniel.errors import BadInput
from spaniel.retrieval import bm25
from spaniel.retrieval.base import Passage, RetrieverError
from spaniel.retrieval.bm25 import BM25
from spaniel.retrieval.corpus import read_corpus

DOCS = ["red fish blue fish", "one fish", "red red red bird", "two old birds in one tree"]


def reference(query: list[str], docs: list[str], shorter: float = 1.0) -> list[float]:
    """Okapi BM25 in float64, k1 = 1.2, b = 0.75, idf = ln(1 + (N - n + 0.5) / (n + 0.5)), written from the paper.

    `shorter` scales each document's own length."""
    split = [d.split() for d in docs]
    mean = sum(map(len, split)) / len(split)
    out = []
    for words in split:
        score, length = 0.0, shorter * len(words)
        for term in query:
            n = sum(term in other for other in split)
            f = words.count(term)
            idf = math.log(1 + (len(docs) - n + 0.5) / (n + 0.5))
            score += idf * f * 2.2 / (f + 1.2 * (1 - 0.75 + 0.75 * length / mean))
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


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.sampled_from("abcdef"), min_size=1, max_size=12).map(" ".join), min_size=1, max_size=12),
    st.lists(st.sampled_from("abcdefg"), min_size=1, max_size=4, unique=True),
    st.integers(1, 12),
)
def test_the_order_is_that_of_the_formula_and_ties_keep_corpus_order(docs: list[str], query: list[str], k: int) -> None:
    index = BM25.from_passages([Passage(str(i), d) for i, d in enumerate(docs)])
    expected = reference(query, docs)
    found = index.search([" ".join(query)], len(docs))[0]
    assert {int(p.id) for p in found} == {i for i, score in enumerate(expected) if score > 0}
    for p, after in itertools.pairwise(found):
        assert expected[int(p.id)] >= expected[int(after.id)] - 1e-5
        if p.score == after.score:
            assert int(p.id) < int(after.id)
    for p in found:
        assert p.score == pytest.approx(expected[int(p.id)], rel=1e-5)
    assert index.search([" ".join(query)], k)[0] == found[:k]


def test_long_documents_count_as_up_to_an_eighth_shorter() -> None:
    docs = [f"needle {'hay ' * n}" for n in (39, 40, 100, 333, 1_000, 5_000)]
    index = BM25.from_passages([Passage(str(i), d) for i, d in enumerate(docs)])
    found = {int(p.id): p.score for p in index.search(["needle"], 10)[0]}
    whole, most = reference(["needle"], docs), reference(["needle"], docs, shorter=7 / 8)
    assert found[0] == pytest.approx(whole[0], rel=1e-5)  # 40 words
    for i in range(len(docs)):
        assert whole[i] * (1 - 1e-5) <= found[i] <= most[i] * (1 + 1e-5)


def test_title_and_text_case_accents() -> None:
    index = BM25.from_passages([Passage("1", '"Malmö (MMX)"\nA city.'), Passage("2", '"Other"\nmentions nothing')])
    for query in ("malmo", "MALMÖ", "mmx", "CITY", unicodedata.normalize("NFD", "Malmö")):
        assert [p.id for p in index.search([query], 5)[0]] == ["1"]
    # letters in pieces, a capital that has no single lower case, an alphabet that has no accents to lose
    words = [unicodedata.normalize("NFD", "Zürich"), "İstanbul", "ΑΘΉΝΑ"]
    index = BM25.from_passages([Passage(word, word) for word in words])
    asked = ("zurich", "Zürich", "istanbul", "ISTANBUL", "αθήνα")
    assert [[p.id for p in found] for found in index.search(asked, 5)] == [
        [words[0]], [words[0]], [words[1]], [words[1]], [words[2]],
    ]  # fmt: skip


def test_ties_keep_corpus_order_in_an_index_of_several_segments() -> None:
    index = tantivy.Index(bm25._schema())
    index.register_tokenizer(bm25._ANALYZER, bm25._analyzer())
    writer = index.writer(20_000_000, num_threads=1)
    for start in (200, 0, 100):  # as a writer leaves them that merges what it likes
        for number in range(start, start + 100):
            document = tantivy.Document(text="same words")
            document.add_bytes("passage", json.dumps([str(number), "same words"]).encode())
            document.add_unsigned("order", number)
            writer.add_document(document)
        writer.commit()
    index.reload()
    assert index.searcher().num_segments == 3
    found = BM25(index, bm25._analyzer(), 300)
    for k in (1, 3, 150, 300):
        assert [p.id for p in found.search(["same"], k)[0]] == [str(i) for i in range(k)]


def test_no_passages_no_words_and_a_caller_who_edits_the_answer() -> None:
    assert BM25.from_passages([]).search(["x"], 3) == [[]]
    index = BM25.from_passages([Passage("1", "x")])
    assert index.search(["!?", "x" * 70_000], 3) == [[], []]
    first, second = index.search(["x", "x"], 3)
    first.clear()
    assert len(second) == 1


def test_threads_share_an_index() -> None:
    index = BM25.from_passages([Passage(str(i), d) for i, d in enumerate(DOCS)])
    queries = ["red", "fish", "one fish", "red fish bird tree"] * 20
    expected = index.search(queries, 3)
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda q: index.search([q], 3)[0], queries)) == expected


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
        (["", GOOD, "", GOOD], "line 4: id '1' stands in line 2 already"),
        ([{"id": 1, "contents": ["x"] * 99}], r"contents is \['x', .*\.\.\.; expected text"),
        (["[" * 100_000], "line 1: not valid JSON"),
        (['{"id": ' + "1" * 5_000 + "}"], "line 1: not valid JSON"),
        ([GOOD, '{"id": 2, "contents": "\\ud800"}'], "line 2: is no valid Unicode"),
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
    with pytest.raises(BadInput, match="cannot be read"):
        BM25.build(tmp_path, tmp_path / "index")
    (tmp_path / "latin").write_bytes(b'{"id": 1, "contents": "x"}\n{"id": 2, "contents": "\xe9"}')
    with pytest.raises(BadInput, match="line 2: cannot be read"):
        list(read_corpus(tmp_path / "latin"))
    (tmp_path / "bom").write_bytes(b'\xef\xbb\xbf{"id": 1, "contents": "x"}\r\n{"id": 2, "contents": "a\xe2\x80\xa8b"}')
    assert [p.contents for p in read_corpus(tmp_path / "bom")] == ["x", "a\u2028b"]
    with gzip.open(tmp_path / "c.jsonl.gz", "wt") as file:
        file.write(json.dumps(GOOD))
    assert [p.id for p in read_corpus(tmp_path / "c.jsonl.gz")] == ["1"]
    whole = (tmp_path / "c.jsonl.gz").read_bytes()
    for broken in (whole[:-9], whole[:-20] + bytes(12) + whole[-8:], b"no gzip"):
        (tmp_path / "bad.gz").write_bytes(broken)
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
    for broken in ({"format": good["format"]}, {**good, "passages": None}, {**good, "files": [1]}):
        manifest.write_text(json.dumps(broken))
        with pytest.raises(BadInput, match="damaged"):
            BM25.open(tmp_path / "index")
    manifest.write_text("{")
    with pytest.raises(BadInput, match="no index"):
        BM25.open(tmp_path / "index")


@pytest.mark.parametrize("how", ["cut", "flipped", "gone"])
def test_a_damaged_file_is_found_and_built_anew(tmp_path: Path, how: str) -> None:
    corpus = write(tmp_path / "c.jsonl", *({"id": i, "contents": f"T{i}\nword{i % 7}"} for i in range(50)))
    BM25.build(corpus, tmp_path / "index")
    names = [file.name for file in (tmp_path / "index").iterdir() if not file.name.startswith((".", "spaniel-index"))]
    assert len(names) > 5
    for name in names:
        damaged = tmp_path / "damaged"
        shutil.copytree(tmp_path / "index", damaged)
        data = (damaged / name).read_bytes()
        if how == "gone":
            (damaged / name).unlink()
        else:
            middle = len(data) // 2
            changed = b"" if how == "cut" else bytes([data[middle] ^ 1]) + data[middle + 1 :]
            (damaged / name).write_bytes(data[:middle] + changed)
        with pytest.raises(BadInput, match="damaged.*build it again"):
            BM25.open(damaged)
        damaged = damaged.rename(tmp_path / name)
    assert BM25.build(corpus, damaged) is True  # what the message advises helps
    assert len(BM25.open(damaged)) == 50


def test_the_manifest_and_an_index_of_another_corpus(tmp_path: Path) -> None:
    corpus = write(tmp_path / "c.jsonl", GOOD)
    other = write(tmp_path / "other.jsonl", {"id": 2, "contents": "T\ny"})
    BM25.build(corpus, tmp_path / "index")
    manifest = json.loads((tmp_path / "index" / "spaniel-index.json").read_text())
    assert manifest["passages"] == 1
    assert manifest["spaniel"] == __version__
    assert "no stemming" in manifest["tokenizer"]
    assert len(manifest["sha256"]) == 64
    assert len(BM25.open(tmp_path / "index", corpus)) == 1
    with pytest.raises(BadInput, match=r"is not of corpus .*other\.jsonl"):
        BM25.open(tmp_path / "index", other)


def test_two_runs_that_build_at_once_share_the_first_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    corpus, target = write(tmp_path / "c.jsonl", GOOD), tmp_path / "index"
    BM25.build(corpus, tmp_path / "first")

    def meanwhile(path: Path) -> Iterator[Passage]:
        shutil.copytree(tmp_path / "first", target)
        yield from read_corpus(path)

    monkeypatch.setattr(bm25, "read_corpus", meanwhile)
    assert BM25.build(corpus, target) is False
    files = [{f.name for f in folder.iterdir()} for folder in (tmp_path / "first", target)]
    assert files[0] == files[1]  # the one that somebody may be reading was not replaced
    assert sorted(p.name for p in tmp_path.iterdir()) == ["c.jsonl", "first", "index"]


def test_a_folder_that_cannot_be_written_and_one_that_cannot_be_read(tmp_path: Path) -> None:
    corpus = write(tmp_path / "c.jsonl", GOOD)
    with pytest.raises(BadInput, match="cannot be written"):
        BM25.build(corpus, corpus / "index")
    index = BM25.from_passages([Passage("1", "x")])

    class Broken:
        def search(self, *_: Any, **__: Any) -> Any:
            raise ValueError("An IO error occurred")

    index._searcher = Broken()
    with pytest.raises(RetrieverError, match="cannot be read.*IO error"):
        index.search(["x"], 1)


def test_progress_is_told_and_a_small_index_is_ready_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bm25, "_PROGRESS_EVERY", 8)
    corpus = write(tmp_path / "c.jsonl", *({"id": i, "contents": f"T{i}\nx"} for i in range(20)))
    start, seen = time.monotonic(), []
    BM25.build(corpus, tmp_path / "index", seen.append)
    assert BM25.open(tmp_path / "index").search(["T7"], 1)[0][0].id == "7"
    assert time.monotonic() - start < 5
    assert seen == [8, 16]


def test_a_long_document_is_returned_whole() -> None:
    text = "T\n" + "word " * 40_000
    assert BM25.from_passages([Passage("1", text)]).search(["word"], 1)[0][0].contents == text
