"""What every worker group owes; so far there is one."""

from __future__ import annotations

import torch

from spaniel.cluster.local import LocalGroup
from spaniel.cluster.weights import sync
from tests.fakes.sampler import ScriptedSampler
from tests.workers.test_learner import batch, learner


class Adder:
    def __init__(self, own: int) -> None:
        self.own = own

    def add(self, rows: torch.Tensor, more: int = 0) -> torch.Tensor:
        return rows + self.own + more


def test_calls_name_the_method_and_rows_keep_their_order() -> None:
    group = LocalGroup(Adder(1))
    assert group.scatter(Adder.add, torch.tensor([5, 3, 9]), more=2).tolist() == [8, 6, 12]
    assert [t.tolist() for t in group.broadcast(Adder.add, torch.tensor([1]))] == [[2]]


def test_a_learner_in_a_group_is_the_learner() -> None:
    from spaniel.workers.learner import Learner

    own = learner()
    assert torch.equal(LocalGroup(own).scatter(Learner.infer, batch()), own.infer(batch()))


def test_sync_hands_over_weights_and_version() -> None:
    from spaniel.workers.learner import Learner

    sampler = ScriptedSampler(lambda r: [1])
    sync(LocalGroup(learner()), Learner.weights, sampler, 4)
    assert sampler.version == 4
