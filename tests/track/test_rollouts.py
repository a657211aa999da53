"""Rollouts on disk: one JSON object a line, whatever a model wrote."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spaniel.track.rollouts import write_rollouts


def refused(name: str) -> None:
    raise AssertionError(f"{name} is not JSON")


def read(path: Path) -> list[dict]:
    lines = path.read_bytes().decode("utf-8").split("\n")
    assert lines.pop() == ""
    return [json.loads(line, parse_constant=refused) for line in lines]


def test_rows_come_back_as_they_were(tmp_path: Path) -> None:
    row = {
        "step": 3,
        "group": 0,
        "spans": [{"by": "world", "text": "Who?\n"}, {"by": "policy", "text": "<answer>Zürich 東京 😀\u2028</answer>"}],
        "score": 1 / 3,
        "parts": {"exact_match": 1.0},
        "stop": "answered",
        "failure": None,
    }
    write_rollouts(tmp_path / "deep" / "r.jsonl", [row, {}])
    assert read(tmp_path / "deep" / "r.jsonl") == [row, {}]
    assert "東京" in (tmp_path / "deep" / "r.jsonl").read_text(encoding="utf-8")  # readable in an editor
    write_rollouts(tmp_path / "deep" / "r.jsonl", [])
    assert read(tmp_path / "deep" / "r.jsonl") == []


@pytest.mark.parametrize(
    ("given_", "written"),
    [
        (float("nan"), "nan"),
        (float("-inf"), "-inf"),
        ("a\ud800b", "a\ufffdb"),
        ("\udc00", "\ufffd"),
        ("\ud83d\ude00", "😀"),
        ("\ufeffx", "\ufeffx"),
        ((1, 2.5, True, None), [1, 2.5, True, None]),
    ],
)
def test_what_json_or_utf8_cannot_hold_is_written_visibly(given_: object, written: object, tmp_path: Path) -> None:
    write_rollouts(tmp_path / "r.jsonl", [{"x": given_, "deep": {"y": [given_]}}])
    assert read(tmp_path / "r.jsonl") == [{"x": written, "deep": {"y": [written]}}]


@given(st.lists(st.dictionaries(st.text(), st.text(st.characters()) | st.floats() | st.none(), max_size=3), max_size=3))
def test_any_text_and_number_gives_one_valid_line_a_row(tmp_path_factory: pytest.TempPathFactory, rows: list) -> None:
    path = tmp_path_factory.mktemp("r") / "r.jsonl"
    write_rollouts(path, rows)
    assert len(read(path)) == len(rows)
