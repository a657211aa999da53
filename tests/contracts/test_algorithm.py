"""What every algorithm owes the loop, run on each named one and on the fake."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from spaniel.algo import ALGORITHMS, Algorithm
from spaniel.types import Batch, Counts, Metrics, Tallies, Targets, add_tallies
from tests.fakes.algorithm import ScoreIsAdvantage
from tests.workers.test_learner import batch

NAMES = [*ALGORITHMS, "fake"]
NAN = float("nan")


def made(name: str) -> Any:
    if name == "fake":
        return ScoreIsAdvantage()
    return ALGORITHMS[name](**({} if name in ("ppo", "remax", "reinforce_plus_plus") else {"group_size": 4}))


def changed(data: Batch, **fields: Any) -> Batch:
    return dataclasses.replace(data, **fields)


@dataclass(frozen=True)
class Step:
    """One step's tensors, for an algorithm that may want any of them."""

    batch: Batch
    values: Tensor
    ref: Tensor
    logprobs: Tensor
    """Of the policy that learns: a little away from those at sampling."""
    entropy: Tensor
    new_values: Tensor

    def columns(self, places: Tensor, fill: float) -> Step:
        """The tokens at `places` (i64[new T]); -1 makes a token that is not an action, `fill` standing there."""
        keep = places >= 0

        def moved(x: Tensor, empty: float | bool) -> Tensor:
            return torch.where(keep, x[:, places.clamp(min=0)], torch.tensor(empty, dtype=x.dtype))

        own = self.batch
        # Lengths count up to the last real token, wherever it went.
        real = torch.arange(own.tokens.shape[1]) < own.lengths[:, None]
        last = torch.where(moved(real, False), torch.arange(len(places)), -1).amax(1)
        data = changed(
            own,
            tokens=moved(own.tokens, 0),
            actions=moved(own.actions, False),
            logprobs=moved(own.logprobs, fill),
            rewards=moved(own.rewards, 0.0),
            lengths=last + 1,
        )
        rest = {f.name: moved(getattr(self, f.name), fill) for f in dataclasses.fields(self) if f.name != "batch"}
        return Step(data, **rest)

    def rows(self, rows: Tensor) -> Step:
        rest = {f.name: getattr(self, f.name)[rows] for f in dataclasses.fields(self) if f.name != "batch"}
        return Step(self.batch.take(rows), **rest)


def step(algorithm: Algorithm, seed: int = 3) -> Step:
    data = batch()
    generator = torch.Generator().manual_seed(seed)
    noise = [torch.randn(data.tokens.shape, generator=generator) for _ in range(5)]
    lp = torch.where(data.actions, -3.0 + 0.2 * noise[0], 0.0)
    baselines = torch.tensor([0.5] * 7 + [NAN]) if algorithm.needs_greedy else None
    data = changed(data, logprobs=lp, baselines=baselines)
    return Step(data, noise[1], lp + 0.3 * noise[2], lp + 0.2 * noise[3], noise[4].abs(), noise[1] + 0.3 * noise[4])


def targets(algorithm: Algorithm, s: Step) -> tuple[Targets, dict[str, Any], Metrics]:
    values = s.values if algorithm.needs_critic else None
    ref = s.ref if algorithm.needs_reference else None
    return algorithm.targets(s.batch, values, ref, algorithm.initial_state())


def counts_of(data: Batch) -> Counts:
    return Counts(int(data.actions.sum()), int(data.actions.any(1).sum()))


def losses(algorithm: Algorithm, s: Step, own: Targets, counts: Counts) -> list[tuple[Tensor, Tallies, Tensor]]:
    """(share, tallies, gradient) of the policy loss and, where there is a critic, of the value loss."""
    logprobs, entropy = s.logprobs.clone().requires_grad_(), s.entropy.clone().requires_grad_()
    share, tallies = algorithm.policy_loss(logprobs, entropy, s.batch, own, counts)
    out = [(share, tallies, torch.autograd.grad(share, logprobs)[0])]
    if algorithm.needs_critic:
        values = s.new_values.clone().requires_grad_()
        share, tallies = algorithm.value_loss(values, s.batch, own, counts)
        out.append((share, tallies, torch.autograd.grad(share, values)[0]))
    return out


@pytest.mark.parametrize("name", NAMES)
def test_targets_and_a_loss_with_gradient(name: str) -> None:
    algorithm = made(name)
    s = step(algorithm)
    own, state, metrics = targets(algorithm, s)
    assert own.advantages.shape == s.batch.tokens.shape
    assert not own.advantages[~s.batch.actions].any()
    assert torch.isfinite(own.advantages).all()
    assert set(state) == set(algorithm.initial_state())
    assert all(isinstance(v, float) for v in (*state.values(), *metrics.values()))
    for share, _, gradient in losses(algorithm, s, own, counts_of(s.batch)):
        assert share.dim() == 0
        assert torch.isfinite(share)
        assert gradient.abs().sum() > 0  # a reward that varies gives a gradient
        assert not gradient[~s.batch.actions].any()
    tallies = losses(algorithm, s, own, counts_of(s.batch))[0][1]
    assert tallies["actor/entropy"].mean == pytest.approx(float(s.entropy[s.batch.actions].mean()), rel=1e-5)
    if not algorithm.needs_critic:
        with pytest.raises(ValueError, match="no critic"):
            algorithm.value_loss(s.values, s.batch, own, counts_of(s.batch))


@pytest.mark.parametrize("name", NAMES)
def test_a_failed_row_leaves_every_statistic(name: str) -> None:
    """A row that is not valid changes nothing about the others, whatever stands in it."""
    algorithm = made(name)
    s = step(algorithm)
    failed = torch.arange(8) == 2
    mask = s.batch.actions & ~failed[:, None]

    def seen(rewards: Tensor, logprobs: Tensor) -> tuple[Targets, dict[str, Any], Metrics]:
        data = changed(s.batch, actions=mask, valid=~failed, rewards=rewards, logprobs=logprobs)
        return targets(algorithm, dataclasses.replace(s, batch=data))

    clean = seen(torch.where(mask, s.batch.rewards, 0.0), s.batch.logprobs)
    nothing = torch.where(failed[:, None], torch.inf, s.batch.logprobs)
    dirty = seen(torch.where(failed[:, None], NAN, s.batch.rewards), nothing)
    torch.testing.assert_close(dirty[0].advantages, clean[0].advantages)
    assert dirty[1:] == clean[1:]
    assert not clean[0].advantages[2].any()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "parts", [[[0, 1, 2, 3, 4, 5, 6], [7]], [[6, 2], [0], [5, 7, 1, 3, 4]], [[i] for i in range(8)]]
)
def test_micro_batches_and_ranks_add_up_to_the_whole(name: str, parts: list[list[int]]) -> None:
    algorithm = made(name)
    s = step(algorithm)
    own, _, _ = targets(algorithm, s)
    counts = counts_of(s.batch)
    whole = losses(algorithm, s, own, counts)
    pieces = [losses(algorithm, s.rows(rows), own.take(rows), counts) for rows in map(torch.tensor, parts)]
    for place, (share, tallies, gradient) in enumerate(whole):
        torch.testing.assert_close(torch.stack([piece[place][0] for piece in pieces]).sum(), share)
        gathered = torch.zeros_like(gradient)
        for rows, piece in zip(parts, pieces, strict=True):
            gathered[rows] = piece[place][2]
        torch.testing.assert_close(gathered, gradient)
        added = add_tallies([piece[place][1] for piece in pieces])
        assert {k: t.mean for k, t in added.items()} == pytest.approx(
            {k: t.mean for k, t in tallies.items()}, rel=1e-5, abs=1e-6
        )


@pytest.mark.parametrize("name", NAMES)
def test_the_order_of_rows_does_not_matter(name: str) -> None:
    algorithm = made(name)
    s = step(algorithm)
    order = torch.tensor([5, 0, 7, 2, 3, 6, 1, 4])
    one, two = targets(algorithm, s), targets(algorithm, s.rows(order))
    torch.testing.assert_close(two[0].advantages, one[0].advantages[order])
    assert two[1] == pytest.approx(one[1])
    assert two[2] == pytest.approx(one[2], rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("fill", [NAN, torch.inf, -torch.inf, 1e30])
def test_padding_and_a_longer_tool_reply_change_nothing(name: str, fill: float) -> None:
    """Seven more positions in the middle of the reply and four behind the end, anything standing there."""
    algorithm = made(name)
    s = step(algorithm)
    width = s.batch.tokens.shape[1]
    mine = s.batch.actions.any(0)
    gap = next(t for t in range(2, width) if not (mine[:t].all() or mine[t:].all()))
    places = torch.tensor([*range(gap), *[-1] * 7, *range(gap, width), *[-1] * 4])
    wide = s.columns(places, fill)
    one, two = targets(algorithm, s), targets(algorithm, wide)
    kept = places >= 0
    torch.testing.assert_close(two[0].advantages[:, kept], one[0].advantages)
    assert two[1] == pytest.approx(one[1])
    assert two[2] == pytest.approx(one[2], rel=1e-5, abs=1e-6)
    counts = counts_of(s.batch)
    for a, b in zip(losses(algorithm, s, one[0], counts), losses(algorithm, wide, two[0], counts), strict=True):
        torch.testing.assert_close(b[0], a[0])
        torch.testing.assert_close(b[2][:, kept], a[2])
        assert not b[2][:, ~kept].any()
        means = {k: t.mean for k, t in a[1].items()}
        assert {k: t.mean for k, t in b[1].items()} == pytest.approx(means, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_whatever_stands_at_observed_tokens_and_padding_reaches_nothing(name: str) -> None:
    algorithm = made(name)
    s = step(algorithm)
    off = ~s.batch.actions
    for value in (NAN, torch.inf):
        rest = {f.name: torch.where(off, value, getattr(s, f.name)) for f in dataclasses.fields(s) if f.name != "batch"}
        data = changed(s.batch, logprobs=torch.where(off, value, s.batch.logprobs))
        dirty = Step(data, **rest)
        one, two = targets(algorithm, s), targets(algorithm, dirty)
        torch.testing.assert_close(two[0].advantages, one[0].advantages)
        assert two[2] == one[2]
        counts = counts_of(s.batch)
        for a, b in zip(losses(algorithm, s, one[0], counts), losses(algorithm, dirty, two[0], counts), strict=True):
            torch.testing.assert_close(b[0], a[0])
            torch.testing.assert_close(b[2], a[2])
            assert b[1] == a[1]


@pytest.mark.parametrize("name", NAMES)
def test_a_number_that_is_none_at_an_action_is_seen_in_loss_and_gradient(name: str) -> None:
    """So that no optimizer step can take the rest for good."""
    algorithm = made(name)
    s = step(algorithm)
    own, _, _ = targets(algorithm, s)
    where = tuple(s.batch.actions.nonzero()[3].tolist())
    for field in ("logprobs", "new_values") if algorithm.needs_critic else ("logprobs",):
        spoilt = getattr(s, field).clone()
        spoilt[where] = NAN
        share, _, gradient = losses(algorithm, dataclasses.replace(s, **{field: spoilt}), own, counts_of(s.batch))[
            0 if field == "logprobs" else 1
        ]
        assert share.isnan()
        assert gradient.isnan().any()


@pytest.mark.parametrize("name", NAMES)
def test_rows_without_actions_cost_nothing_and_have_a_graph(name: str) -> None:
    algorithm = made(name)
    s = step(algorithm)
    own, _, _ = targets(algorithm, s)
    counts = counts_of(s.batch)
    empty = dataclasses.replace(s, batch=changed(s.batch, actions=torch.zeros_like(s.batch.actions)))
    for share, tallies, gradient in losses(algorithm, empty, own, counts):
        assert float(share.detach()) == 0
        assert not gradient.any()
        assert all(t.total == 0 and t.count == 0 for t in tallies.values())


@pytest.mark.parametrize("name", NAMES)
def test_nothing_given_is_changed(name: str) -> None:
    """State goes in and out; tensors are only read."""
    algorithm = made(name)
    s = step(algorithm)
    state = algorithm.initial_state()
    before = dict(state), s.batch.rewards.clone(), s.values.clone(), s.ref.clone()
    algorithm.targets(
        s.batch, s.values if algorithm.needs_critic else None, s.ref if algorithm.needs_reference else None, state
    )
    assert state == before[0]
    for own, old in zip((s.batch.rewards, s.values, s.ref), before[1:], strict=True):
        assert torch.equal(own, old)
