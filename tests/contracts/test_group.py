"""What every worker group owes: rows come back in their order, tallies added up, broadcasts once a worker."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from spaniel.cluster.local import LocalGroup
from spaniel.cluster.weights import sync
from spaniel.types import Batch, Tally
from spaniel.workers.learner import Learner
from tests.fakes.group import SplitGroup
from tests.fakes.sampler import ScriptedSampler
from tests.workers.test_learner import batch, learner


class Counter:
    """A worker that says something about its rows."""

    def lengths(self, rows: Batch, more: int = 0) -> torch.Tensor:
        return rows.lengths + more

    def count(self, rows: Batch) -> dict[str, Tally]:
        return {"rows": Tally(float(rows.lengths.sum()), float(len(rows)))}


def made(name: str, worker: Any) -> Any:
    return LocalGroup(worker()) if name == "local" else SplitGroup([worker() for _ in range(3)])


@pytest.mark.parametrize("name", ["local", "fake"])
def test_the_contract(name: str) -> None:
    group = made(name, Counter)
    data = batch()
    assert group.scatter(Counter.lengths, data, more=2).tolist() == (data.lengths + 2).tolist()
    assert group.scatter(Counter.count, data)["rows"] == Tally(float(data.lengths.sum()), 8.0)
    workers = 1 if name == "local" else 3
    answers = group.broadcast(Counter.lengths, data)
    assert [a.tolist() for a in answers] == [data.lengths.tolist()] * workers


@pytest.mark.parametrize("name", ["local", "fake"])
def test_a_learner_infers_the_same_wherever_its_rows_go(name: str) -> None:
    group = made(name, learner)
    torch.testing.assert_close(group.scatter(Learner.infer, batch()), learner().infer(batch()))


def test_sync_hands_over_weights_and_version() -> None:
    sampler = ScriptedSampler(lambda r: [1])
    sync(LocalGroup(learner()), Learner.weights, sampler, 4)
    assert sampler.version == 4
