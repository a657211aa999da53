"""The named algorithms: settings that work, refusals, and a page that says the same as the code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from spaniel.algo import ALGORITHMS, KL, Mismatch, catalogue
from spaniel.errors import BadInput
from spaniel.types import Counts
from tests.workers.test_learner import batch


def test_the_page_says_what_the_catalogue_says() -> None:
    page = Path("docs/algorithms.md").read_text()
    for entry in catalogue():
        assert f"| `{entry.name}` | {entry.equation} | {entry.source} |" in page


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: KL(place="both"), "kl.place is 'both'"),
        (lambda: KL(place="reward"), "kl.beta is None"),
        (lambda: KL(place="none", beta=0.1), "kl.beta"),
        (lambda: KL(place="loss", kind="k1", beta=0.1), "expected gradient of k1 as a loss is zero"),
        (lambda: KL(place="loss", beta=0.1, controller="adaptive"), "kl.controller"),
        (lambda: KL(place="reward", beta=0.1, controller="adaptive", target=0.0), "kl.target"),
        (lambda: KL(place="reward", beta=0.1, controller="adaptive", horizon=0.0), "kl.horizon"),
        (lambda: KL(place="reward", kind="full", beta=0.1), "kl.kind is 'full'"),
        (lambda: KL(place="reward", beta=-1.0), "kl.beta is -1.0"),
        (lambda: Mismatch(mode="truncated"), "mismatch.mode"),
        (lambda: Mismatch(mode="mask", cap=0.5), "mismatch.cap"),
        (lambda: ALGORITHMS["grpo"](group_size=1), "group_size is 1"),  # type: ignore[call-arg]
        (lambda: ALGORITHMS["grpo"](clip_low=-0.1), "clip_low"),  # type: ignore[call-arg]
        (lambda: ALGORITHMS["grpo"](dual_clip=0.5), "dual_clip"),  # type: ignore[call-arg]
        (lambda: ALGORITHMS["grpo"](loss_aggregation="mean"), "loss_aggregation is 'mean'"),  # type: ignore[call-arg]
        (lambda: ALGORITHMS["grpo"](length_budget=9), "length_budget"),  # type: ignore[call-arg]
        (lambda: ALGORITHMS["dr_grpo"](length_budget=None), "length_budget is None"),  # type: ignore[call-arg]
        (lambda: ALGORITHMS["ppo"](gamma=1.1), "gamma is 1.1"),  # type: ignore[call-arg]
        (lambda: ALGORITHMS["ppo"](value_clip=0.0), "value_clip is 0.0"),  # type: ignore[call-arg]
        (lambda: ALGORITHMS["dapo"](overlong_share=0.0), "overlong_share is 0.0"),  # type: ignore[call-arg]
        (lambda: ALGORITHMS["ppo"](entropy_coef=-1.0), "entropy_coef is -1.0"),  # type: ignore[call-arg]
    ],
)
def test_refusals(make: Any, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        make()


def test_the_adaptive_controller_is_fed_the_sequence_kl_and_its_state_goes_in_and_out() -> None:
    algorithm: Any = ALGORITHMS["ppo"](kl=KL(place="reward", beta=0.1, controller="adaptive", target=0.3, horizon=80.0))  # type: ignore[call-arg]
    data = batch()
    zeros = torch.zeros_like(data.logprobs)
    _, state, metrics = algorithm.targets(data, zeros, data.logprobs - 0.1, {"beta": 0.1})
    mean_kl = 0.1 * float(data.actions.sum()) / 8
    assert metrics["critic/kl"] == pytest.approx(mean_kl, rel=1e-4)
    assert metrics["critic/kl_per_token"] == pytest.approx(0.1, rel=1e-4)
    assert state["beta"] == pytest.approx(0.1 * (1 + min(max(mean_kl / 0.3 - 1, -0.2), 0.2) * 8 / 80))
    _, later, _ = algorithm.targets(data, zeros, data.logprobs - 0.1, {"beta": 0.4})
    assert later["beta"] == pytest.approx(4 * state["beta"])  # it goes on from the state, not from the recipe
    _, state, _ = algorithm.targets(data, zeros, torch.full_like(zeros, torch.nan), {"beta": 0.1})
    assert state["beta"] == 0.1  # a KL that is no number never reaches the controller


def test_changing_the_kl_coefficient_changes_the_result_in_every_place() -> None:
    data = batch()
    zeros = torch.zeros_like(data.logprobs)
    for place in ("reward", "loss"):
        seen = []
        for beta in (0.0, 0.5):
            algorithm: Any = ALGORITHMS["ppo"](kl=KL(place=place, beta=beta), whiten_advantages=False)  # type: ignore[call-arg]
            ref = data.logprobs - torch.linspace(0, 1, data.tokens.shape[1])
            targets, _, _ = algorithm.targets(data, zeros, ref, algorithm.initial_state())
            logprobs = data.logprobs.clone().requires_grad_()
            share, _ = algorithm.policy_loss(logprobs, zeros, data, targets, Counts(int(data.actions.sum()), 8))
            share.backward()
            seen.append(logprobs.grad)
        assert not torch.allclose(seen[0], seen[1])
