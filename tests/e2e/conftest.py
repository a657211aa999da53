"""Runs of the shipped tiny agents, made small."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from spaniel.cli import main

SMALL = [
    "steps=4",
    "eval_every=2",
    "save_every=1",
    "threads=1",
    "data.batch_size=4",
    "algorithm.group_size=4",
    "data.val_data_num=8",
    "track=[jsonl]",
]
PPO_SMALL = [
    *(x for x in SMALL if "group" not in x),
    "policy.learning.minibatch_rows=2",
    "critic.learning.minibatch_rows=2",
    "critic.warmup_steps=1",
    "algorithm.kl={place: reward, kind: k1, beta: 0.05, controller: adaptive, target: 0.5, horizon: 50}",
]
"""With the state that only PPO has: a critic, an adaptive controller, several optimizer steps a batch."""


def command(*arguments: str) -> int:
    """Run the command line in this process; its exit code."""
    try:
        main(list(arguments))
    except SystemExit as end:
        return int(end.code or 0)
    return 0


@pytest.fixture
def spaniel(capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """`spaniel("train", ...)` -> (exit code, what it printed, what it complained about)."""

    def run(*arguments: str) -> tuple[int, str, str]:
        capsys.readouterr()
        code = command(*arguments)
        out, err = capsys.readouterr()
        return code, out, err

    return run


def metrics(run: Path) -> list[dict[str, Any]]:
    """The metrics of a run without the clock's."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if not k.startswith("timing")} for row in rows]


def weights(run: Path, step: int, name: str = "policy") -> dict[str, Any]:
    from safetensors.torch import load_file

    return load_file(str(run / "checkpoints" / f"step-{step:06d}" / name / "model.safetensors"))
