"""What every algorithm owes the loop, run on each named one and on the fake."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from spaniel.algo import ALGORITHMS
from spaniel.types import Batch, Counts
from tests.fakes.algorithm import ScoreIsAdvantage
from tests.workers.test_learner import batch

NAMES = [*ALGORITHMS, "fake"]


def made(name: str) -> Any:
    if name == "fake":
        return ScoreIsAdvantage()
    return ALGORITHMS[name](**({} if name in ("ppo", "remax", "reinforce_plus_plus") else {"group_size": 4}))


@pytest.mark.parametrize("name", NAMES)
def test_a_named_algorithm_gives_targets_and_a_loss_with_gradient(name: str) -> None:
    algorithm = made(name)
    data = batch()
    if algorithm.needs_greedy:
        data = Batch(**{**vars(data), "baselines": torch.tensor([0.5] * 7 + [torch.nan])})
    values = torch.zeros_like(data.logprobs) if algorithm.needs_critic else None
    ref = data.logprobs - 0.1 if algorithm.needs_reference else None
    targets, state, metrics = algorithm.targets(data, values, ref, algorithm.initial_state())
    assert targets.advantages.shape == data.tokens.shape
    assert not targets.advantages[~data.actions].any()
    assert torch.isfinite(targets.advantages).all()
    assert set(state) == set(algorithm.initial_state())
    assert all(isinstance(v, float) for v in metrics.values())
    logprobs = (data.logprobs + 0.01).requires_grad_()
    counts = Counts(int(data.actions.sum()), 8)
    share, tallies = algorithm.policy_loss(logprobs, torch.ones_like(logprobs), data, targets, counts)
    share.backward()
    assert logprobs.grad is not None
    assert logprobs.grad.abs().sum() > 0  # a reward that varies gives a gradient
    assert not logprobs.grad[~data.actions].any()
    assert tallies["actor/entropy"].mean == pytest.approx(1.0)
    if algorithm.needs_critic:
        predicted = values.clone().requires_grad_()  # type: ignore[union-attr]
        share, tallies = algorithm.value_loss(predicted, data, targets, counts)
        share.backward()
        assert predicted.grad is not None
        assert predicted.grad.abs().sum() > 0


@pytest.mark.parametrize("name", NAMES)
def test_a_failed_row_leaves_every_statistic(name: str) -> None:
    """A row that is not valid changes nothing about the others, whatever stands in it."""
    algorithm = made(name)
    data = batch()
    failed = torch.arange(8) == 2
    mask = data.actions & ~failed[:, None]

    def advantages(rewards: torch.Tensor, logprobs: torch.Tensor) -> torch.Tensor:
        changed = {"actions": mask, "valid": ~failed, "rewards": rewards, "logprobs": logprobs}
        if algorithm.needs_greedy:
            changed["baselines"] = torch.full((8,), 0.5)
        own = Batch(**{**vars(data), **changed})
        values = torch.zeros_like(data.logprobs) if algorithm.needs_critic else None
        ref = data.logprobs - 0.1 if algorithm.needs_reference else None
        return algorithm.targets(own, values, ref, algorithm.initial_state())[0].advantages

    clean = advantages(torch.where(mask, data.rewards, 0.0), data.logprobs)
    dirty = advantages(
        torch.where(failed[:, None], torch.nan, data.rewards), torch.where(failed[:, None], torch.inf, data.logprobs)
    )
    torch.testing.assert_close(dirty, clean)
    assert not clean[2].any()
