"""The whole pipeline on real open-domain input that no one here wrote."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

FIXTURES = Path("tests/fixtures/open_domain")


def test_convert_index_and_evaluate(spaniel: Callable[..., Any], tmp_path: Path) -> None:
    command = [
        "recipes/open_domain/convert.py",
        str(tmp_path),
        "--nq",
        str(FIXTURES / "nq.jsonl"),
        "--hotpot",
        str(FIXTURES),
    ]
    said = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=True, timeout=60).stdout
    assert "and 35 questions" in said
    code, text, err = spaniel("index", str(tmp_path / "corpus.jsonl"), str(tmp_path / "index"))
    assert code == 0, err
    count = len((tmp_path / "corpus.jsonl").read_text().splitlines())
    assert f"index of {count} passages" in text
    files = [
        f"data.validation={tmp_path / 'questions.jsonl'}",
        f"retriever.corpus={tmp_path / 'corpus.jsonl'}",
        f"retriever.index={tmp_path / 'index'}",
    ]
    code, _, err = spaniel("eval", "open_domain", *files, "--retriever-only", "--out", str(tmp_path))
    assert code == 0, err
    found = json.loads((tmp_path / "recall.json").read_text())
    assert found["questions"] == 35
    for k in (1, 3, 5):
        assert 0.6 < found[f"recall@{k}/gold/nq"] <= 1  # a corpus of some 120 passages is an easy one
        assert 0 <= found[f"recall@{k}/gold/hotpotqa"] <= found[f"recall@{k}/any_gold/hotpotqa"] <= 1
    assert found["recall@1/gold/hotpotqa"] == 0  # two passages cannot both be first
    code, _, err = spaniel("eval", "open_domain", *files, "--out", str(tmp_path))
    assert code == 0, err
    judged = json.loads((tmp_path / "metrics.json").read_text())
    assert judged["val/count/nq"] == 25
    assert judged["val/count/hotpotqa"] + judged["val/skipped_too_long"] == 10
    assert judged["val/failed"] == 0
    assert 0 <= judged["val/exact_match"] <= judged["val/f1"] <= 1
    rows = [json.loads(line) for line in (tmp_path / "rollouts.jsonl").read_text().splitlines()]
    assert all(row["spans"][-1]["by"] in ("policy", "world") and row["reference"] for row in rows)
    assert any("<information>" in span["text"] for row in rows for span in row["spans"] if span["by"] == "world")
