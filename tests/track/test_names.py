"""Every metric that a run writes is documented."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from spaniel.track.names import meaning, page, unknown
from tests.e2e.conftest import PPO_SMALL, SMALL, metrics, spaniel  # noqa: F401 - a fixture


def test_the_page_is_what_the_names_say() -> None:
    assert (Path(__file__).parents[2] / "docs/metrics.md").read_text() == page()


def test_the_closest_entry_explains_a_name() -> None:
    assert meaning("actor/entropy") != meaning("actor/lr")
    assert meaning("val/test_score/x") != meaning("val/score")
    assert meaning("nonsense") is None


@pytest.mark.parametrize("name", ["search_tiny_grpo", "search_tiny_ppo"])
def test_every_metric_of_a_run_is_documented(name: str, spaniel: Callable[..., Any], tmp_path: Path) -> None:  # noqa: F811
    small = SMALL if "grpo" in name else PPO_SMALL
    code, _, err = spaniel("train", name, *small, "steps=1", f"out={tmp_path}/run")
    assert code == 0, err
    assert unknown({key for row in metrics(tmp_path / "run") for key in row}) == []
