"""A corpus: jsonl (or jsonl.gz) with `id` and `contents`, checked row by row."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from spaniel.errors import BadInput
from spaniel.retrieval.base import Passage


def read_corpus(path: str | Path) -> Iterator[Passage]:
    """The passages in file order, one line at a time (only the ids stay in memory).

    A missing, unreadable or empty file, a broken line, a missing or duplicate id, or empty contents is a
    `BadInput` that names the line. A whole number as id becomes text.
    """
    file = Path(path)
    if not file.is_file():
        raise BadInput(f"corpus {file}: file not found")
    seen: dict[str, int] = {}
    for number, line in _lines(file):
        passage = _passage(line, f"corpus {file}, line {number}")
        if passage.id in seen:
            raise BadInput(f"corpus {file}, line {number}: id {passage.id!r} stands in line {seen[passage.id]} already")
        seen[passage.id] = number
        yield passage
    if not seen:
        raise BadInput(f"corpus {file}: is empty; expected lines with id and contents")


def _lines(file: Path) -> Iterator[tuple[int, bytes]]:
    number = 0
    try:
        with gzip.open(file, "rb") if file.suffix == ".gz" else open(file, "rb") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield number, line
    except (OSError, EOFError, zlib.error) as error:
        raise BadInput(f"corpus {file}, line {number + 1}: cannot be read: {error}") from error


def _passage(line: bytes, where: str) -> Passage:
    try:
        row: Any = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise BadInput(f"{where}: cannot be read as UTF-8: {error}") from error
    except (ValueError, RecursionError) as error:
        raise BadInput(f"{where}: not valid JSON: {error}") from error
    if not isinstance(row, dict):
        raise BadInput(f"{where}: is {type(row).__name__}; expected an object with id and contents")
    key, contents = row.get("id"), row.get("contents")
    if isinstance(key, bool) or not isinstance(key, str | int) or key == "":
        raise BadInput(f"{where}: id is {_shown(key)}; expected text or a whole number")
    if not isinstance(contents, str) or not contents.strip():
        raise BadInput(f"{where}: contents is {_shown(contents)}; expected text: a title line, then the passage")
    try:
        f"{key}{contents}".encode()
    except UnicodeEncodeError as error:  # JSON can say "\ud800"; no tokenizer and no HTTP reply can
        raise BadInput(f"{where}: is no valid Unicode: {error}") from error
    return Passage(str(key), contents)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."
