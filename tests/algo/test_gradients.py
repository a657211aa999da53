"""The gradient of every loss, in float64, against finite differences."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from spaniel.algo import ALGORITHMS, KL, Mismatch, kl, loss, masked
from spaniel.types import Batch, Counts
from tests.workers.test_learner import batch

F64 = torch.float64
MASK = torch.tensor([[1, 1, 0, 1], [1, 0, 0, 0], [0, 0, 0, 0]]).bool()
MODES: list[tuple[str, dict[str, Any]]] = [
    ("token-mean", {}),
    ("seq-mean-token-sum", {}),
    ("seq-mean-token-mean", {}),
    ("token-sum-norm", {"length_budget": 9}),
]


def drawn(*shape: int, count: int, seed: int = 4) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(*shape, generator=generator, dtype=F64) for _ in range(count)]


LOSSES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "clipped": lambda x, old, adv: loss.clipped(x, old, adv, 0.2, 0.3),
    "dual": lambda x, old, adv: loss.clipped(x, old, adv, 0.2, 0.3, 2.0),
    "reinforce": lambda x, old, adv: loss.reinforce(x, adv),
    "value": lambda x, old, adv: loss.value(x, adv),
    "value clipped": lambda x, old, adv: loss.value(x, adv, old, 0.2),
    "k1": lambda x, old, adv: kl.estimate(x, old, "k1"),
    "abs": lambda x, old, adv: kl.estimate(x, old, "abs"),
    "k2": lambda x, old, adv: kl.estimate(x, old, "k2"),
    "k3": lambda x, old, adv: kl.estimate(x, old, "k3"),
}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize(("mode", "more"), MODES)
def test_token_losses(name: str, mode: str, more: dict[str, Any]) -> None:
    x, old, adv = drawn(3, 4, count=3)
    x.requires_grad_()
    assert torch.autograd.gradcheck(lambda t: loss.aggregate(LOSSES[name](t, old, adv), MASK, mode, **more), x)


def numeric(of: Callable[[Tensor], Tensor], at: Tensor, step: float = 1e-6) -> Tensor:
    """Central differences, one entry at a time."""
    out = torch.zeros_like(at)
    for place in torch.cartesian_prod(*(torch.arange(n) for n in at.shape)).view(-1, at.dim()):
        index = tuple(place.tolist())
        change = torch.zeros_like(at)
        change[index] = step
        out[index] = (of(at + change) - of(at - change)) / (2 * step)
    return out


def test_gspo_has_the_gradient_of_the_sequence_loss() -> None:
    """With one advantage a row: L = mean over rows of -min(s A, clip(s) A), s = exp(mean of (lp - old))."""
    x, old, _ = drawn(3, 4, count=3)
    adv = torch.tensor([0.7, -1.2, 9.0], dtype=F64)

    def sequences(lp: Tensor) -> Tensor:
        s = masked.mean(lp - old, MASK, dim=1).exp()[:2]
        return torch.maximum(-s * adv[:2], -s.clamp(0.5, 1.5) * adv[:2]).mean()

    own = x.clone().requires_grad_()
    per_token = loss.gspo(own, old, adv[:, None].expand(3, 4), MASK, 0.5, 0.5)
    value = loss.aggregate(per_token, MASK, "seq-mean-token-mean")
    torch.testing.assert_close(value, sequences(x))
    value.backward()
    torch.testing.assert_close(own.grad, numeric(sequences, x), atol=1e-7, rtol=1e-6)


def test_cispo_has_the_gradient_of_log_pi_under_frozen_weights() -> None:
    x, old, adv = drawn(3, 4, count=3)
    weights = (x - old).exp().clamp(0.6, 1.5)
    own = x.clone().requires_grad_()
    loss.aggregate(loss.cispo(own, old, adv, 0.4, 0.5), MASK, "token-mean").backward()
    frozen = numeric(lambda lp: loss.aggregate(-weights * adv * lp, MASK, "token-mean"), x)
    torch.testing.assert_close(own.grad, frozen, atol=1e-7, rtol=1e-6)
    assert (weights[MASK] == 1.5).any()  # a weight at its bound still teaches its token
    assert (own.grad[MASK] != 0).all()  # type: ignore[index]


def test_the_unbiased_kl_has_the_gradient_of_k2_under_the_value_of_k3() -> None:
    x, ref, _ = drawn(3, 4, count=3)
    own = x.clone().requires_grad_()
    value = masked.sum(kl.unbiased(own, ref, "k3"), MASK)
    torch.testing.assert_close(value, masked.sum(kl.estimate(x, ref, "k3"), MASK))
    value.backward()
    torch.testing.assert_close(own.grad, masked.select(x - ref, MASK))


def test_entropy_and_the_full_kl() -> None:
    logits, ref = drawn(2, 3, 5, count=2)
    logits.requires_grad_()
    assert torch.autograd.gradcheck(loss.entropy, logits)
    assert torch.autograd.gradcheck(lambda x: kl.estimate(x, ref, "full"), logits)


def test_preference_losses() -> None:
    winners, losers = (x.requires_grad_() for x in drawn(5, count=2))
    rankings = torch.tensor([0, 0, 0, 4, 4])
    for more in ({}, {"margin": 0.3}, {"label_smoothing": 0.2}, {"rankings": rankings}):
        assert torch.autograd.gradcheck(lambda w, x, more=more: loss.bradley_terry(w, x, **more), (winners, losers))
    scores = drawn(2, 5, count=1)[0].requires_grad_()
    order = torch.tensor([[3, 1, 0, 4, 2], [0, 1, 2, 3, 4]])
    assert torch.autograd.gradcheck(lambda s: loss.plackett_luce(s, order), scores)


WHOLE = {
    "ppo": {"entropy_coef": 0.1, "kl": KL()},
    "grpo": {"group_size": 4, "kl": KL(place="loss", kind="k3", beta=0.3, unbiased=False)},
    "dr_grpo": {"group_size": 4, "entropy_coef": 0.1},
    "rloo": {"kl": KL()},
    "reinforce_plus_plus": {"kl": KL(place="loss", kind="k2", beta=0.3), "dual_clip": 2.0},
    "dapo": {"group_size": 4, "mismatch": Mismatch(mode="truncate", cap=1.1)},
}


@pytest.mark.parametrize("name", WHOLE)
def test_the_whole_policy_loss_of_an_algorithm(name: str) -> None:
    """Policy term, entropy bonus, KL term and weights together, in the numbers of float64."""
    algorithm: Any = ALGORITHMS[name](**WHOLE[name])
    data = batch()
    data = Batch(**{**vars(data), "logprobs": data.logprobs.double(), "rewards": data.rewards.double()})
    shape = tuple(data.tokens.shape)
    noise, ref, old, entropy = drawn(*shape, count=4, seed=2)
    ref, old = data.logprobs + 0.3 * ref, data.logprobs + 0.2 * old
    values = noise if algorithm.needs_critic else None
    targets, _, _ = algorithm.targets(data, values, ref, {}, old)
    counts = Counts(int(data.actions.sum()), 8)

    def both(lp: Tensor, ent: Tensor) -> Tensor:
        return algorithm.policy_loss(lp, ent, data, targets, counts)[0]

    inputs = ((old + 0.3 * noise).requires_grad_(), entropy.requires_grad_())
    assert torch.autograd.gradcheck(both, inputs)


def test_the_value_loss_of_ppo() -> None:
    ppo: Any = ALGORITHMS["ppo"](kl=KL())  # type: ignore[call-arg]
    data = batch()
    values, noise = drawn(*tuple(data.tokens.shape), count=2)
    targets, _, _ = ppo.targets(data, values, None, {})
    counts = Counts(int(data.actions.sum()), 8)
    moved = (values + 0.3 * noise).requires_grad_()
    assert torch.autograd.gradcheck(lambda v: ppo.value_loss(v, data, targets, counts)[0], moved)
