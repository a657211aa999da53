"""Losses of reward models on comparisons and rankings (re-exported by `loss`)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from spaniel.algo import masked


def bradley_terry(
    winners: Tensor,
    losers: Tensor,
    margin: float | Tensor = 0.0,
    label_smoothing: float = 0.0,
    rankings: Tensor | None = None,
) -> Tensor:
    """Mean over pairs of -logsigmoid(r_w - r_l - margin); `winners`, `losers` f32[P].

    (Bradley and Terry 1952; as in Ouyang et al. 2022, arXiv:2203.02155, equation 1; margins as in Llama 2,
    arXiv:2307.09288.) `label_smoothing` e takes the label for wrong with probability e: (1 - e) of this loss
    and e of the one with the difference turned round. `rankings` (i64[P]: the ranking that each pair comes
    from) averages within a ranking first, so that each ranking weighs 1, as in InstructGPT. No pairs: 0.
    """
    loss = bradley_terry_per_pair(winners, losers, margin, label_smoothing)
    if rankings is None:
        return loss.sum() / max(loss.numel(), 1)
    names, slot = torch.unique(rankings, return_inverse=True)
    pairs = loss.new_zeros(len(names)).index_add(0, slot, torch.ones_like(loss))
    return (loss / pairs[slot]).sum() / max(len(names), 1)


def bradley_terry_per_pair(
    winners: Tensor, losers: Tensor, margin: float | Tensor = 0.0, label_smoothing: float = 0.0
) -> Tensor:
    """The terms of `bradley_terry`, in the shape of `winners`, before any mean."""
    gap = masked.real(winners) - masked.real(losers) - margin
    return -(1 - label_smoothing) * logsigmoid(gap) - label_smoothing * logsigmoid(-gap)


def pairs_of(rankings: Tensor, ranks: Tensor) -> tuple[Tensor, Tensor]:
    """(winners, losers), i64[P] each: the rows of every pair within a ranking whose ranks differ.

    `rankings` i64[B] numbers the ranking of each row, `ranks` i64[B] its place in it (0 best).
    """
    better = (rankings[:, None] == rankings) & (ranks[:, None] < ranks)
    winners, losers = better.nonzero(as_tuple=True)
    return winners, losers


def plackett_luce_per_row(scores: Tensor, rankings: Tensor, ranks: Tensor) -> Tensor:
    """-[r_i - logsumexp over j of its ranking with rank_j >= rank_i of r_j], f32[B]: the terms of `plackett_luce`.

    Tied responses compete with each other and with all below them (Breslow 1974, for ties in such likelihoods).
    """
    real = masked.real(scores)
    rest = (rankings[:, None] == rankings) & (ranks[:, None] <= ranks)
    return torch.logsumexp(torch.where(rest, real, -torch.inf), dim=1) - real


def plackett_luce(scores: Tensor, order: Tensor) -> Tensor:
    """-sum_i [r_i - logsumexp_{j >= i} r_j] along `order` (best first): the whole ranking's likelihood.

    (Plackett 1975.) `scores` f32[..., K], `order` i64[..., K] a permutation of 0..K-1; of several rankings
    the mean. For K = 2 it is the Bradley-Terry loss.
    """
    chosen = masked.real(scores).gather(-1, order)
    rest = torch.logcumsumexp(chosen.flip(-1), dim=-1).flip(-1)
    return (rest - chosen).sum(-1).mean()
