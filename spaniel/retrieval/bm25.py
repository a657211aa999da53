"""BM25 over a corpus, on tantivy: in memory, or as an index folder that is built once."""

from __future__ import annotations

import hashlib
import json
import unicodedata
import zlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import tantivy

from spaniel import __version__
from spaniel.errors import BadInput
from spaniel.files import folder_atomically
from spaniel.retrieval.base import Passage, RetrieverError
from spaniel.retrieval.corpus import read_corpus

_MANIFEST = "spaniel-index.json"
_FORMAT = 2
_ANALYZER = "words"
_LONGEST_WORD = 64
_TOKENIZER = f"NFC, runs of letters and digits below {_LONGEST_WORD} bytes, accents removed, lower case, no stemming"
_HEAP_BYTES = 128_000_000
_SLACK = 32  # hits beyond k that are fetched at first, to see whether equal scores go on behind the k-th
_MAX_TERMS = 256  # a query is text that a policy wrote, possibly without end
_PROGRESS_EVERY = 100_000


class BM25:
    """Okapi BM25 (Robertson and Zaragoza 2009; k1 = 1.2, b = 0.75) over title and text.

    score(d) = sum over query words w of ln(1 + (N - n + 0.5) / (n + 0.5)) f (k1 + 1) / (f + k1 (1 - b + b |d| / m)),
    f the count of w in d, n the number of the N passages that have w, |d| the words of d, m their mean. tantivy
    keeps |d| in one byte: exact up to 40 words, above that rounded down, by less than an eighth.

    Words are runs of letters and digits, lower case, accents removed (`Malmo` finds `Malmö`), not stemmed.
    A query is the set of its (first 256) words; nothing in it is syntax. Equal scores come in corpus order.
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
    def build(cls, corpus: str | Path, folder: str | Path, progress: Callable[[int], None] | None = None) -> bool:
        """Index `corpus` into `folder`, atomically. False where the folder holds that index already, undamaged.

        An existing folder is replaced only if it is an index (or empty). `progress` is told the number of
        passages read, every 100,000.
        """
        source, target = Path(corpus), Path(folder)
        wanted = _wanted(source)
        if target.exists() and _read_manifest(target) is None and (not target.is_dir() or any(target.iterdir())):
            raise BadInput(f"index {target}: exists and is not an index; choose another folder or remove it")
        if _is_current(target, wanted):
            return False
        try:
            with folder_atomically(target) as aside:
                index = tantivy.Index(_schema(), path=str(aside))
                index.register_tokenizer(_ANALYZER, _analyzer())
                count = _fill(index, read_corpus(source), progress)
                manifest = {**wanted, "passages": count, "spaniel": __version__, "tokenizer": _TOKENIZER}
                manifest["files"] = {file.name: _crc32(file) for file in _data_files(aside)}
                (aside / _MANIFEST).write_text(json.dumps(manifest), encoding="utf-8")
                if _is_current(target, wanted):  # another run was faster, and may be reading its own already
                    raise _BuiltByAnother
        except _BuiltByAnother:
            return False
        except OSError as error:
            raise BadInput(f"index {target}: cannot be written: {error}") from error
        return True

    @classmethod
    def open(cls, folder: str | Path, corpus: str | Path | None = None) -> BM25:
        """The index that `build` wrote; `BadInput` where it is missing, damaged or, with `corpus` given, of another."""
        path = Path(folder)
        manifest = _read_manifest(path)
        if manifest is None:
            raise BadInput(f"index {path}: not found, or no index; make it with `spaniel index CORPUS {path}`")
        if manifest.get("format") != _FORMAT:
            raise BadInput(f"index {path}: format {manifest.get('format')!r}; expected {_FORMAT}; build it again")
        if corpus is not None and manifest.get("sha256") != _wanted(Path(corpus))["sha256"]:
            raise BadInput(f"index {path}: is not of corpus {corpus}; build it again, or name the corpus it is of")
        try:
            for name, checksum in manifest["files"].items():
                if _crc32(path / name) != checksum:  # a flipped bit would change scores in silence
                    raise ValueError(f"{name} has changed")
            index, analyzer = tantivy.Index.open(str(path)), _analyzer()
            index.register_tokenizer(_ANALYZER, analyzer)
            opened = cls(index, analyzer, int(manifest["passages"]))
            found = opened._searcher.num_docs
        except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
            raise BadInput(f"index {path}: damaged ({type(error).__name__}: {error}); build it again") from error
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
        return [list(found[query]) for query in queries]

    def _search(self, query: str, k: int) -> list[Passage]:
        terms = list(dict.fromkeys(self._analyzer.analyze(_clean(query))))[:_MAX_TERMS]
        if not terms:
            return []
        schema = self._index.schema
        wanted = [(tantivy.Occur.Should, tantivy.Query.term_query(schema, "text", term, "freq")) for term in terms]
        try:
            best = self._best(tantivy.Query.boolean_query(wanted), k)
            return [_passage(self._searcher.doc(address), score) for score, address in best]
        except (ValueError, OSError) as error:
            raise RetrieverError(f"retriever BM25: the index cannot be read ({error}); build it again") from error

    def _best(self, query: tantivy.Query, k: int) -> list[tuple[float, Any]]:
        """Score and address of the `k` best; equal scores in corpus order, which is not that of the index."""
        limit = k + _SLACK
        hits = self._searcher.search(query, limit, count=False).hits
        while len(hits) == limit and hits[-1][0] == hits[k - 1][0]:
            limit *= 8
            hits = self._searcher.search(query, limit, count=False).hits
        order = self._searcher.fast_field_values("order", [address for _, address in hits])
        ranked = sorted(zip(hits, order, strict=True), key=lambda each: (-each[0][0], each[1]))
        return [hit for hit, _ in ranked[:k]]


class _BuiltByAnother(Exception):
    """The index appeared while this process was building it."""


def _passage(document: tantivy.Document, score: float) -> Passage:
    key, contents = json.loads(bytes(document["passage"][0]))
    return Passage(key, contents, float(score))


def _schema() -> tantivy.Schema:
    builder = tantivy.SchemaBuilder()
    builder.add_text_field("text", tokenizer_name=_ANALYZER, index_option="freq")
    builder.add_bytes_field("passage", stored=True)  # id and contents as they are: only stored, never indexed
    builder.add_unsigned_field("order", fast=True)  # place in the corpus, to break ties
    return builder.build()


def _analyzer() -> Any:
    words = tantivy.TextAnalyzerBuilder(tantivy.Tokenizer.simple())
    # Accents go first: the lower case of İ is an i and a combining dot, which no filter would remove.
    for each in (tantivy.Filter.remove_long(_LONGEST_WORD), tantivy.Filter.ascii_fold(), tantivy.Filter.lowercase()):
        words = words.filter(each)
    return words.build()


def _clean(text: str) -> str:
    """The same letters in the same code points, and half a surrogate pair (no text at all) as a question mark."""
    return unicodedata.normalize("NFC", text).encode("utf-8", "replace").decode()


def _fill(index: tantivy.Index, passages: Iterable[Passage], progress: Callable[[int], None] | None = None) -> int:
    writer = index.writer(_HEAP_BYTES, num_threads=1)
    count = 0
    for count, passage in enumerate(passages, 1):
        document = tantivy.Document(text=_clean(passage.contents))
        document.add_bytes("passage", json.dumps([passage.id, passage.contents]).encode())
        document.add_unsigned("order", count)
        writer.add_document(document)
        if progress and count % _PROGRESS_EVERY == 0:
            progress(count)
    writer.commit()
    writer.wait_merging_threads()
    index.reload()
    return count


def _wanted(corpus: Path) -> dict[str, Any]:
    """What the manifest of an index of this corpus must say."""
    try:
        with open(corpus, "rb") as file:
            return {"format": _FORMAT, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}
    except FileNotFoundError:
        raise BadInput(f"corpus {corpus}: file not found") from None
    except OSError as error:
        raise BadInput(f"corpus {corpus}: cannot be read: {error}") from error


def _is_current(folder: Path, wanted: dict[str, Any]) -> bool:
    manifest = _read_manifest(folder)
    if manifest is None or any(manifest.get(key) != value for key, value in wanted.items()):
        return False
    try:
        BM25.open(folder)
    except BadInput:
        return False
    return True


def _data_files(folder: Path) -> list[Path]:
    return sorted(file for file in folder.iterdir() if not file.name.startswith("."))  # locks begin with a dot


def _crc32(path: Path) -> int:
    value = 0
    with open(path, "rb") as file:
        while part := file.read(1 << 20):
            value = zlib.crc32(part, value)
    return value


def _read_manifest(folder: Path) -> dict[str, Any] | None:
    try:
        found = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None
