"""A run killed at any instant goes on as if nothing had happened."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.e2e.conftest import SMALL, metrics, weights

RUN = [*SMALL, "steps=8", "eval_every=3"]


def start(out: Path, *more: str) -> subprocess.Popen[str]:
    code = "from spaniel.cli import main; main()"
    command = [sys.executable, "-c", code, "train", "search_tiny_grpo", *RUN, f"out={out}", *more]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=dict(os.environ))


def test_sigkill_at_random_instants_and_resume(spaniel: Callable[..., Any], tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert spaniel("train", "search_tiny_grpo", *RUN, f"out={whole}")[0] == 0
    chance = random.Random(4)
    kills = 0
    for _ in range(12):
        run = start(killed, "--resume")
        deadline = time.monotonic() + 120
        # the start-up is not what is tested: wait until this process has taken the folder over
        while run.poll() is None and not (killed / "metrics.jsonl").exists():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        try:
            # the first is killed early in its steps; later ones have to start up first, and may finish
            run.wait(timeout=chance.uniform(0.2, 1.5) if kills == 0 else chance.uniform(3.0, 8.0))
            break
        except subprocess.TimeoutExpired:
            run.send_signal(signal.SIGKILL)
            run.wait(30)
            kills += 1
    code, _, err = spaniel("train", "search_tiny_grpo", *RUN, f"out={killed}", "--resume")
    assert code == 0, err
    assert kills >= 1
    assert metrics(killed) == metrics(whole)
    assert not [p for p in killed.rglob(".*") if p.name != ".lock"]  # nothing half-written is left
    one, other = weights(killed, 8), weights(whole, 8)
    assert all(torch.equal(one[name], other[name]) for name in one)
