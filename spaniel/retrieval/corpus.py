"""A corpus: jsonl (or jsonl.gz) with `id` and `contents`, checked row by row."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from spaniel.errors import BadInput
from spaniel.retrieval.base import Passage


def read_corpus(path: str | Path) -> Iterator[Passage]:
    """The passages in file order. A missing or empty file, a broken line, a missing or duplicate id, or empty
    contents is an error that names the line."""
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


def _lines(file: Path) -> Iterator[tuple[int, str]]:
    try:
        with gzip.open(file, "rt", encoding="utf-8") if file.suffix == ".gz" else open(file, encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield number, line
    except (UnicodeDecodeError, gzip.BadGzipFile, EOFError) as error:
        raise BadInput(f"corpus {file}: cannot be read: {error}") from error


def _passage(line: str, where: str) -> Passage:
    try:
        row: Any = json.loads(line)
    except json.JSONDecodeError as error:
        raise BadInput(f"{where}: not valid JSON: {error}") from error
    if not isinstance(row, dict):
        raise BadInput(f"{where}: is {type(row).__name__}; expected an object with id and contents")
    key, contents = row.get("id"), row.get("contents")
    if isinstance(key, bool) or not isinstance(key, str | int) or key == "":
        raise BadInput(f"{where}: id is {key!r}; expected text or a whole number")
    if not isinstance(contents, str) or not contents.strip():
        raise BadInput(f"{where}: contents is {contents!r}; expected text: a title line, then the passage")
    return Passage(str(key), contents)
