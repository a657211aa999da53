"""Files are whole or not there."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from spaniel.files import folder_atomically, remove_leftovers, write_atomically


def test_a_write_replaces_and_leaves_nothing_aside(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "f.txt"
    write_atomically(path, "one")
    write_atomically(path, b"two")
    assert path.read_text() == "two"
    assert [p.name for p in path.parent.iterdir()] == ["f.txt"]


def test_leftovers_of_killed_writes_are_removed_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "c" / ".step.7.part").mkdir(parents=True)
    (tmp_path / "c" / ".step.7.part" / "f").write_text("half")
    (tmp_path / ".m.jsonl.7.part").write_text("half")
    (tmp_path / "c" / "step").mkdir()
    (tmp_path / ".lock").write_text("")
    (tmp_path / ".notes.old").write_text("the user's")
    (tmp_path / "c" / ".download.part").write_text("the user's")
    (tmp_path / "c" / ".step.8.old").mkdir()  # the new one is there
    (tmp_path / "c" / ".lost.8.old").mkdir()  # the new one never came
    remove_leftovers(tmp_path)
    assert sorted(p.name for p in tmp_path.rglob("*")) == [".download.part", ".lock", ".notes.old", "c", "lost", "step"]


def test_a_folder_that_cannot_take_its_place_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "step"
    target.mkdir()
    (target / "f").write_text("old")
    real = os.rename

    def broken(source: Path, destination: Path) -> None:
        if str(source).endswith(".part"):
            raise OSError(5, "Input/output error")
        real(source, destination)

    monkeypatch.setattr("os.rename", broken)
    with pytest.raises(OSError, match="Input/output"), folder_atomically(target) as aside:
        (aside / "f").write_text("new")
    assert (target / "f").read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["step"]


def test_a_failed_write_keeps_the_old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "f.txt"
    write_atomically(path, "old")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_atomically(path, "new")
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["f.txt"]


def test_a_folder_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    target = tmp_path / "c" / "step"
    with folder_atomically(target) as aside:
        (aside / "a").mkdir()
        (aside / "a" / "f").write_text("1")
        assert not target.exists()
    assert (target / "a" / "f").read_text() == "1"
    with pytest.raises(RuntimeError), folder_atomically(target) as aside:  # noqa: PT012
        (aside / "g").write_text("2")
        raise RuntimeError("killed")
    assert [p.name for p in target.iterdir()] == ["a"]
    with folder_atomically(target) as aside:
        (aside / "h").write_text("3")
    assert [p.name for p in target.iterdir()] == ["h"]
    assert [p.name for p in target.parent.iterdir()] == ["step"]
