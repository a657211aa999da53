"""The lab as a user runs it, whole, three seeds: about ten minutes each on one core."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PIPELINE = Path("recipes/rlhf_digits/pipeline.py").resolve()
TARGET = 0.7
"""Of the adaptive run, as the pipeline sets it."""


def run_lab(out: Path, seed: int) -> dict[str, Any]:
    """What the pipeline measured; first and last tenth of each run."""
    words = [sys.executable, str(PIPELINE), "--seed", str(seed), "--out", str(out), "--jobs", "1"]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    results: dict[str, Any] = json.loads((out / "results.json").read_text())
    return results


@pytest.mark.e2e
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_rankings_to_policy(seed: int, tmp_path: Path) -> None:
    results = run_lab(tmp_path, seed)
    reward_model, ppo, beta0, adaptive, ptx = (
        results[name] for name in ("reward_model", "ppo", "beta0", "adaptive", "ptx")
    )
    # The reward model is within 2 points of what anyone who knows the gold score could reach.
    assert reward_model["val/accuracy"] > reward_model["val/ceiling"] - 0.02
    # Digit counts alone see less, and their weights show the flaw.
    weights = results["digit_counts"]["weights"]
    assert results["digit_counts"]["accuracy"] < reward_model["val/accuracy"] - 0.05
    assert min(weights[7:]) > max(weights[:7])
    # PPO with the KL penalty raises the gold score, near the reference.
    assert ppo["gold"][1] > ppo["gold"][0] + 0.08
    assert ppo["kl"][1] < 2
    # Without it the proxy rises and the gold score falls; the report says so and marks where.
    assert beta0["proxy"][1] > beta0["proxy"][0] + 0.15
    assert beta0["gold"][1] < beta0["verdict"]["peak"] - 0.1
    assert beta0["verdict"]["turn"] is not None
    report = (tmp_path / "beta0/report/over_optimisation.md").read_text()
    assert "**Over-optimised.**" in report
    assert f"after step {beta0['verdict']['turn']['step']}," in report
    # The adaptive controller holds the KL within 25 % of its target.
    assert adaptive["kl_of_second_half"] == pytest.approx(TARGET, rel=0.25)
    assert adaptive["gold"][1] > adaptive["gold"][0]
    # PPO-ptx keeps the sums right, without any penalty.
    assert ptx["right"][1] > ptx["right"][0]
    assert ptx["right"][1] > beta0["right"][1] + 0.1
