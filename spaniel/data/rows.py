"""Rows of parquet and jsonl files, each with words that say where it stands."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from spaniel.errors import BadInput


def read_rows(path: str | Path, what: str) -> Iterator[tuple[str, Any]]:
    """(where, row) for each row of a .parquet, .jsonl or .json (lines) file; `what` begins every message.

    A missing or empty file, another extension, broken JSON, a corrupt parquet file or text that is not UTF-8 is an
    error that names the file, and the line where there is one.
    """
    file = Path(path)
    name = f"{what} {file}"
    if not file.is_file():
        raise BadInput(f"{name}: file not found")
    readers = {".parquet": _parquet, ".jsonl": _jsonl, ".json": _jsonl}
    if file.suffix not in readers:
        raise BadInput(f"{name}: extension {file.suffix!r}; expected one of {', '.join(readers)}")
    count = 0
    for where, row in readers[file.suffix](file, name):
        count += 1
        yield where, row
    if not count:
        raise BadInput(f"{name}: is empty; expected at least one row")


def _jsonl(file: Path, name: str) -> Iterator[tuple[str, Any]]:
    try:
        with open(file, encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                try:
                    yield f"{name}, line {number}", json.loads(line)
                except json.JSONDecodeError as error:
                    raise BadInput(f"{name}, line {number}: not valid JSON: {error}") from error
    except UnicodeDecodeError as error:
        raise BadInput(f"{name}: not UTF-8 text: {error}") from error


def _parquet(file: Path, name: str) -> Iterator[tuple[str, Any]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        rows = pq.read_table(file).to_pylist()
    except (pa.ArrowException, OSError) as error:
        raise BadInput(f"{name}: not a readable parquet file: {error}") from error
    for number, row in enumerate(rows):
        yield f"{name}, row {number}", row
