"""BM25 over a corpus, on tantivy: in memory, or as an index folder that is built once."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import tantivy

from spaniel.errors import BadInput
from spaniel.files import folder_atomically
from spaniel.retrieval.base import Passage
from spaniel.retrieval.corpus import read_corpus

_MANIFEST = "spaniel-index.json"
_FORMAT = 1
_ANALYZER = "words"
_HEAP_BYTES = 128_000_000
_SLACK = 32  # hits beyond k that are fetched, so that ties at the end are broken by corpus order
_MAX_TERMS = 256  # a query is text that a policy wrote, possibly without end


class BM25:
    """Okapi BM25 (Robertson and Zaragoza 2009; k1 = 1.2, b = 0.75) over title and text.

    Words are runs of letters and digits, case-folded, accents removed (`Malmo` finds `Malmö`), not stemmed.
    A query is the set of its words; nothing in it is syntax. Equal scores come in corpus order.
    """

    def __init__(self, index: tantivy.Index, analyzer: Any, count: int) -> None:
        self._index = index
        self._analyzer = analyzer
        self._searcher = index.searcher()
        self._count = count

    def __len__(self) -> int:
        return self._count

    @classmethod
    def from_passages(cls, passages: Iterable[Passage]) -> BM25:
        """An index in memory."""
        index, analyzer = tantivy.Index(_schema()), _analyzer()
        index.register_tokenizer(_ANALYZER, analyzer)
        count = _fill(index, passages)
        return cls(index, analyzer, count)

    @classmethod
    def build(cls, corpus: str | Path, folder: str | Path) -> bool:
        """Index `corpus` into `folder`, atomically. False where the folder holds that index already.

        An existing folder is replaced only if it is an index (or empty).
        """
        source, target = Path(corpus), Path(folder)
        if not source.is_file():
            raise BadInput(f"corpus {source}: file not found")
        manifest = {"format": _FORMAT, "sha256": _sha256(source)}
        if target.exists():
            old = _read_manifest(target)
            if old is None and (not target.is_dir() or any(target.iterdir())):
                raise BadInput(f"index {target}: exists and is not an index; choose another folder or remove it")
            if old is not None and all(old.get(key) == value for key, value in manifest.items()):
                return False
        with folder_atomically(target) as aside:
            index = tantivy.Index(_schema(), path=str(aside))
            index.register_tokenizer(_ANALYZER, _analyzer())
            count = _fill(index, read_corpus(source))
            (aside / _MANIFEST).write_text(json.dumps({**manifest, "passages": count}), encoding="utf-8")
        return True

    @classmethod
    def open(cls, folder: str | Path) -> BM25:
        """The index that `build` wrote."""
        path = Path(folder)
        manifest = _read_manifest(path)
        if manifest is None:
            raise BadInput(f"index {path}: not found, or no index; make it with `spaniel index CORPUS {path}`")
        if manifest.get("format") != _FORMAT:
            raise BadInput(f"index {path}: format {manifest.get('format')!r}; expected {_FORMAT}; build it again")
        try:
            index, analyzer = tantivy.Index.open(str(path)), _analyzer()
            index.register_tokenizer(_ANALYZER, analyzer)
            opened = cls(index, analyzer, int(manifest["passages"]))
            found = opened._searcher.num_docs
        except (ValueError, KeyError, OSError) as error:
            raise BadInput(f"index {path}: damaged ({error}); build it again") from error
        if found != len(opened):
            raise BadInput(f"index {path}: holds {found} passages, its manifest says {len(opened)}; build it again")
        return opened

    def search(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        """The `k` best passages of each query, best first; none for a query without words."""
        if k < 1:
            raise ValueError(f"search: k is {k}; expected 1 or more")
        found: dict[str, list[Passage]] = {}
        for query in queries:
            if query not in found:  # the samples of one prompt often ask the same
                found[query] = self._search(query, k)
        return [found[query] for query in queries]

    def _search(self, query: str, k: int) -> list[Passage]:
        terms = list(dict.fromkeys(self._analyzer.analyze(query)))[:_MAX_TERMS]
        if not terms:
            return []
        schema = self._index.schema
        wanted = [(tantivy.Occur.Should, tantivy.Query.term_query(schema, "text", term, "freq")) for term in terms]
        hits = self._searcher.search(tantivy.Query.boolean_query(wanted), k + _SLACK, count=False).hits
        scored = [(score, self._searcher.doc(address)) for score, address in hits]
        scored.sort(key=lambda hit: (-hit[0], hit[1]["order"][0]))
        return [_passage(doc, score) for score, doc in scored[:k]]


def _passage(document: tantivy.Document, score: float) -> Passage:
    key, contents = json.loads(bytes(document["passage"][0]))
    return Passage(key, contents, float(score))


def _schema() -> tantivy.Schema:
    builder = tantivy.SchemaBuilder()
    builder.add_text_field("text", tokenizer_name=_ANALYZER, index_option="freq")
    builder.add_bytes_field("passage", stored=True)  # id and contents as they are: only stored, never indexed
    builder.add_unsigned_field("order", stored=True)  # place in the corpus, to break ties
    return builder.build()


def _analyzer() -> Any:
    words = tantivy.TextAnalyzerBuilder(tantivy.Tokenizer.simple())
    for each in (tantivy.Filter.remove_long(64), tantivy.Filter.lowercase(), tantivy.Filter.ascii_fold()):
        words = words.filter(each)
    return words.build()


def _fill(index: tantivy.Index, passages: Iterable[Passage]) -> int:
    # One thread: with several, documents of equal score would come in another order at every build.
    writer = index.writer(_HEAP_BYTES, num_threads=1)
    count = 0
    for count, passage in enumerate(passages, 1):
        document = tantivy.Document(text=passage.contents)
        document.add_bytes("passage", json.dumps([passage.id, passage.contents]).encode())
        document.add_unsigned("order", count)
        writer.add_document(document)
    writer.commit()
    writer.wait_merging_threads()
    index.reload()
    return count


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _read_manifest(folder: Path) -> dict[str, Any] | None:
    try:
        found = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None
