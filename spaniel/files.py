"""Files that are either whole or not there: written aside, synced, renamed."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ASIDE = re.compile(r"\.(?P<name>.+)\.\d+\.(?P<kind>part|old)")
"""Names that this module gives to what it writes aside; the number is the process that wrote."""


def write_atomically(path: str | Path, content: str | bytes) -> None:
    """Replace `path` by `content`; a reader, or a run killed at any instant, sees the old or the new, never a part."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    aside = target.with_name(f".{target.name}.{os.getpid()}.part")
    data = content.encode("utf-8") if isinstance(content, str) else content
    try:
        with open(aside, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, target)
    finally:
        aside.unlink(missing_ok=True)
    sync_folder(target.parent)


@contextmanager
def folder_atomically(path: str | Path) -> Iterator[Path]:
    """Yield an empty folder to fill; on success it becomes `path` (an existing one is replaced), on failure it
    is removed."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    aside = target.with_name(f".{target.name}.{os.getpid()}.part")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir()
    try:
        yield aside
        for file in aside.rglob("*"):
            if file.is_file():
                _sync_file(file)
        for folder in [*(f for f in aside.rglob("*") if f.is_dir()), aside]:
            sync_folder(folder)
        old = target.with_name(f".{target.name}.{os.getpid()}.old")
        shutil.rmtree(old, ignore_errors=True)
        if target.exists():
            os.rename(target, old)
        try:
            os.rename(aside, target)
        except BaseException:
            if old.exists():
                os.rename(old, target)
            raise
        sync_folder(target.parent)
        shutil.rmtree(old, ignore_errors=True)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise


def remove_leftovers(folder: str | Path) -> None:
    """Delete what writes that were killed left aside, anywhere below `folder` (nobody else may be writing there).

    A folder that was moved out of the way for a new one that never came is put back.
    """
    found = [(path, match) for path in Path(folder).rglob(".*") if (match := ASIDE.fullmatch(path.name))]
    for path, match in found:
        target = path.with_name(match["name"])
        if match["kind"] == "old" and path.exists() and not target.exists():
            os.rename(path, target)
        elif path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def _sync_file(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_folder(path: Path) -> None:
    """Make renames in `path` survive a power cut (where the file system allows a folder to be synced)."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(descriptor)
    except OSError:
        pass
    finally:
        os.close(descriptor)
