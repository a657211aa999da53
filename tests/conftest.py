"""Settings of the whole suite."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import pytest
import torch
from hypothesis import HealthCheck, settings

torch.set_num_threads(1)
# No deadline: a busy machine must not fail a test. Derandomised: a red run can be repeated.
settings.register_profile("suite", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("suite")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest first (those with a time limit of their own), so that no worker ends with one alone."""
    items.sort(key=lambda item: item.get_closest_marker("timeout") is None)
