"""What every tracker owes: takes any step's metrics, can be closed twice, never shows raw control characters."""

from __future__ import annotations

import io
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from spaniel.track.base import Trackers
from spaniel.track.console import ConsoleTracker, printable
from spaniel.track.jsonl import JsonlTracker
from tests.fakes.tracker import MemoryTracker

ROWS = [
    {"step": 0.0, "val/exact_match": 0.25},
    {"step": 1.0, "critic/score/mean": 1 / 3, "actor/entropy": math.nan, "x\x1b[31m": 1.0},
    {"step": 2.0, "critic/score/mean": 1e-300, "critic/kl": math.inf},
]


def made(name: str, folder: Path) -> tuple[Any, Any]:
    """A tracker, and what it wrote so far."""
    if name == "jsonl":
        tracker = JsonlTracker(folder / "m.jsonl")
        return tracker, lambda: (folder / "m.jsonl").read_text()
    if name in ("console", "terminal"):
        out = io.StringIO()
        console = Console(file=out, force_terminal=name == "terminal", width=100)
        return ConsoleTracker(2, console=console), out.getvalue
    if name == "fan-out":
        memory = MemoryTracker()
        return Trackers([memory], report=lambda _: None), lambda: str(memory.rows)
    memory = MemoryTracker()
    return memory, lambda: str(memory.rows)


@pytest.mark.parametrize("name", ["jsonl", "console", "terminal", "fan-out", "fake"])
def test_the_contract(name: str, tmp_path: Path) -> None:
    tracker, written = made(name, tmp_path)
    for row in ROWS:
        tracker.log(row)
    tracker.close()
    tracker.close()
    assert "0.25" in written()
    if name != "terminal":
        assert "\x1b" not in written()


def test_one_object_a_line_with_full_precision_and_named_non_finite_numbers(tmp_path: Path) -> None:
    tracker = JsonlTracker(tmp_path / "deep" / "m.jsonl")
    for row in ROWS:
        tracker.log(row)
        last = (tmp_path / "deep" / "m.jsonl").read_text().splitlines()[-1]  # on disk at once
        assert json.loads(last)["step"] == row["step"]
    rows = [json.loads(line) for line in (tmp_path / "deep" / "m.jsonl").read_text().splitlines()]
    assert [type(row["step"]) for row in rows] == [int] * 3
    assert rows[1]["critic/score/mean"] == 1 / 3
    assert rows[1]["actor/entropy"] is None
    assert rows[1]["nonfinite"] == ["actor/entropy"]
    assert rows[2]["nonfinite"] == ["critic/kl"]
    assert "nonfinite" not in rows[0]


def test_a_resumed_file_forgets_what_comes_after_and_a_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    JsonlTracker(path).truncate_after(3)  # nothing there yet
    path.write_text('{"step": 9}\n{"step": 10}\n{"step": 11}\n{"step": 1')
    JsonlTracker(path).truncate_after(10)
    assert path.read_text() == '{"step": 9}\n{"step": 10}\n'


@pytest.mark.parametrize("tail", [b"\xff\xfe", b"\x00" * 40, b'{"st', b"[1]\n", b'{"step": 1e999}\n', b'{"x": 1}\n'])
def test_whatever_a_crash_left_at_the_end_is_forgotten(tail: bytes, tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_bytes(b'{"step": 1}\n' + tail)
    tracker = JsonlTracker(path)
    tracker.truncate_after(5)
    tracker.log({"step": 2.0})
    tracker.close()
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n'


def test_a_failing_tracker_is_reported_once_counted_and_stops_nothing() -> None:
    said: list[str] = []
    good, bad = MemoryTracker(), MemoryTracker(every=2)
    trackers = Trackers([bad, good], report=said.append)
    for step in range(6):
        trackers.log({"step": float(step)})
    trackers.close()
    assert [row["step"] for row in good.rows] == [0, 1, 2, 3, 4, 5]
    assert trackers.failures == {"MemoryTracker": 3}
    assert len(said) == 1
    assert "tracker down" in said[0]
    assert bad.closed


def test_a_report_that_cannot_be_made_stops_nothing_either() -> None:
    def closed_pipe(_: str) -> None:
        raise BrokenPipeError

    good = MemoryTracker()
    trackers = Trackers([MemoryTracker(every=1), good], report=closed_pipe)
    trackers.log({"step": 0.0})
    trackers.log({"step": 1.0})
    assert len(good.rows) == 2
    assert trackers.failures == {"MemoryTracker": 2}


def test_the_metrics_file_is_essential() -> None:
    with pytest.raises(ConnectionError):
        Trackers([], essential=[MemoryTracker(every=1)]).log({"step": 0.0})


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain ü\n\t", "plain ü\n\t"),
        ("\x1b[31mred", "\\u001b[31mred"),
        ("a\u202eb\u200fc", "a\\u202eb\\u200fc"),
        ("\x00\x07\r", "\\u0000\\u0007\\u000d"),
        ("[bold]x[/bold]", "[bold]x[/bold]"),
    ],
)
def test_control_characters_are_shown_not_obeyed(text: str, shown: str) -> None:
    assert printable(text) == shown


def test_the_plain_console_says_progress_and_time_left() -> None:
    out = io.StringIO()
    tracker = ConsoleTracker(10, console=Console(file=out, width=200))
    tracker.log({"step": 1.0, "critic/score/mean": 0.5, "unknown": 3.0})
    assert out.getvalue().startswith("step 1/10  score 0.500")
    assert "left 0:" in out.getvalue()
    assert "unknown" not in out.getvalue()


@pytest.mark.parametrize("setting", [{"NO_COLOR": "1"}, {"TERM": "dumb"}])
def test_a_terminal_that_asks_for_plain_text_gets_no_escape(setting: dict[str, str]) -> None:
    out = io.StringIO()
    environ = {"TERM": "xterm-256color"} | setting
    tracker = ConsoleTracker(2, console=Console(file=out, force_terminal=True, width=200, _environ=environ))
    for row in ROWS:
        tracker.log(row)
    tracker.close()
    assert "\x1b" not in out.getvalue()
    assert "step 2/2" in out.getvalue()


def test_a_terminal_shows_the_numbers_and_how_far_it_is() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=100, _environ={"TERM": "xterm-256color"})
    tracker = ConsoleTracker(4, console=console)
    tracker.log({"step": 1.0, "critic/score/mean": 0.5})
    tracker.log({"step": 2.0, "critic/kl": 0.125, "unknown": 1.0})
    tracker.close()
    shown = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", out.getvalue())
    last = shown[shown.rindex("score") :]  # the last picture keeps what an earlier step said
    assert re.search(r"score +0\.500", last)
    assert re.search(r"KL +0\.125", last)
    assert "2/4" in last
    assert "unknown" not in shown
