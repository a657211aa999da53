"""The named algorithms: settings that work, refusals, and a page that says the same as the code."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from spaniel.algo import ALGORITHMS, KL, Mismatch, advantage, catalogue, kl, loss
from spaniel.errors import BadInput
from spaniel.types import Counts
from tests.workers.test_learner import batch

PAGE = Path("docs/algorithms.md").read_text()


def table(first: str) -> list[list[str]]:
    """The cells of the table of the page whose first heading is `first`, without its two heading lines."""
    rows = PAGE[PAGE.index(f"| {first} |") :].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip().strip("`") for cell in row.strip("|").split("|")] for row in rows]


def test_the_page_says_what_the_catalogue_says() -> None:
    for entry in catalogue():
        assert f"| `{entry.name}` | {entry.equation} | {entry.source} |" in PAGE


def test_the_page_lists_the_defaults() -> None:
    """What an algorithm sets, and what all of them have in common."""
    entries = {entry.name: entry.defaults for entry in catalogue()}
    shared = {k: v for k, v in entries["ppo"].items() if all(k in e and e[k] == v for e in entries.values())}
    assert dict(table("key of all")) == {k: yaml_text(v) for k, v in shared.items()}
    listed = {name: dict(item.split(": ") for item in cell.split(", ")) for name, cell in table("algorithm")}
    own = {name: {k: yaml_text(v) for k, v in e.items() if k not in shared} for name, e in entries.items()}
    for defaults in own.values():
        if defaults["kl.place"] == "none":  # then nothing else of it is read
            for key in ("kl.kind", "kl.beta"):
                del defaults[key]
    assert listed == own


def yaml_text(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return f"{value:g}" if isinstance(value, float) else str(value)


def test_the_worked_example_of_aggregation() -> None:
    losses = torch.tensor([[1.0, 2.0, 3.0], [4.0, 9.0, 9.0]])
    actions = torch.tensor([[1, 1, 1], [1, 0, 0]])
    rows = table("`loss_aggregation`")
    assert {mode for mode, _, _ in rows} == set(loss.AGGREGATIONS)
    for mode, _, example in rows:
        shown = float(example.split("=")[1].split()[0])
        assert float(loss.aggregate(losses, actions, mode, length_budget=10)) == pytest.approx(shown)


def test_the_table_of_kl_estimators() -> None:
    own, ref = torch.tensor(-1.2, dtype=torch.float64), torch.tensor(-1.0, dtype=torch.float64)
    rows = table("`kl.kind`")
    assert [kind for kind, *_ in rows] == ["k1", "abs", "k2", "k3"]
    for kind, _, example, _ in rows:
        assert float(kl.estimate(own, ref, kind)) == pytest.approx(float(example), abs=5e-5)


def test_the_worked_example_of_the_alignment() -> None:
    """Five tokens: what each row of the page's table says about them."""
    rows = {name: cells for name, *cells in table("token | P")}
    number = {
        name: torch.tensor([[float(c) if c else 0.0 for c in cells]]) for name, cells in rows.items() if name != "read"
    }
    own, returns = advantage.gae(number["reward"], number["value"], number["action"], 1.0, 1.0)
    torch.testing.assert_close(own, number["advantage"])
    torch.testing.assert_close(returns, number["return"])
    assert [bool(c) for c in rows["value"]] == [False, True, True, True, True]  # the reply has one, nothing reads it


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
        (lambda: ALGORITHMS["dapo"](length_budget=9, overlong_share=0.0), "overlong_share is 0.0"),  # type: ignore[call-arg]
        (lambda: ALGORITHMS["dapo"](overlong_share=0.3), "overlong_share is 0.3; expected nothing"),  # type: ignore[call-arg]
        (lambda: Mismatch(cap=3.0), "mismatch.cap is 3.0; expected nothing"),
        (lambda: KL(place="reward", beta=0.1, horizon=9.0), "kl.horizon is 9.0; expected nothing"),
        (lambda: KL(place="reward", beta=0.1, controller="adaptive", horizon=10.0).check_step(50), "more than 10"),
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
    some = replace(data, valid=torch.arange(8) > 2)  # three failed: five sequences were measured
    _, fewer, _ = algorithm.targets(some, zeros, data.logprobs - 0.1, {"beta": 0.1})
    assert fewer["beta"] == pytest.approx(0.1 * (1 + 0.2 * 5 / 80))
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
