"""From rewards to advantages. Pure functions; B rows, T positions, `actions` bool[B, T] the only mask.

Everything is counted in actions: what stands between two of them (a tool's reply of any length), before
the first or behind the last changes nothing, NaN included.
"""

from __future__ import annotations

import torch
from torch import Tensor

from spaniel.algo import masked

GROUP_EPSILON = 1e-6
"""Added to a group's standard deviation, as in DeepSeekMath's released implementations (verl)."""


def gae(
    rewards: Tensor, values: Tensor, actions: Tensor, gamma: float, lam: float, bootstrap: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (Schulman et al. 2016, arXiv:1506.02438) over actions only.

        delta_k = r_k + gamma V_{k+1} - V_k        A_k = delta_k + gamma lam A_{k+1}        R_k = A_k + V_k

    k counts the actions of a row. V behind the last action is 0, or `bootstrap` (f32[B]: the value of the
    state in which a cut-off rollout stopped). Rewards are taken as by `credit`.

    Returns:
        (advantages, returns), each [B, T], 0 where not an action; not whitened.
    """
    actions = actions.bool()
    rewards, values = masked.real(rewards.detach()), masked.real(values.detach())
    slot, filled = _slots(actions)
    held = _pack(masked.select(values, actions), slot, filled)
    following = torch.cat([held[:, 1:], held.new_zeros(len(held), 1)], dim=1)
    if bootstrap is not None:
        final = torch.arange(held.shape[1], device=held.device) == filled.sum(1, keepdim=True) - 1
        following = torch.where(final, bootstrap.detach().to(held)[:, None], following)
    delta = masked.select(_pack(_paid(rewards, actions), slot, filled) + gamma * following - held, filled)
    advantages = _unpack(_discounted_sums(delta, gamma * lam), slot, actions)
    return advantages, masked.select(advantages + values, actions)


def rewards_to_go(rewards: Tensor, actions: Tensor, gamma: float = 1.0) -> Tensor:
    """R_k = r_k + gamma R_{k+1} over the actions of each row, [B, T]; an observation in between does not cut it."""
    actions = actions.bool()
    slot, filled = _slots(actions)
    paid = _pack(_paid(masked.real(rewards.detach()), actions), slot, filled)
    return _unpack(_discounted_sums(paid, gamma), slot, actions)


def credit(rewards: Tensor, actions: Tensor) -> Tensor:
    """Token rewards [B, T] moved onto actions: one on any other token goes to the last action before it.

    Where there is none before, it goes to the first; a row without actions has no place for any (all 0).
    NaN and inf on other tokens are dropped: nothing was paid there. Padding cannot be told from an observation
    here, so it must hold no other number than 0.
    """
    actions = actions.bool()
    slot, filled = _slots(actions)
    return _unpack(_pack(_paid(masked.real(rewards), actions), slot, filled), slot, actions)


def place(scores: Tensor, actions: Tensor) -> Tensor:
    """Scores [B] at the last action of each row, [B, T]; a row without actions gets none."""
    positions = torch.arange(actions.shape[1], device=actions.device)
    last = torch.where(actions.bool(), positions, -1).amax(1, keepdim=True)
    return torch.where(positions == last, masked.real(scores)[:, None], 0.0)


def spread(per_row: Tensor, actions: Tensor) -> Tensor:
    """A number for each row [B] at every action of the row, [B, T]."""
    return masked.select(masked.real(per_row)[:, None].expand(actions.shape), actions)


def group_relative(scores: Tensor, groups: Tensor, divide_by_std: bool = True, valid: Tensor | None = None) -> Tensor:
    """GRPO (Shao et al. 2024, arXiv:2402.03300): (score - group mean) / (group std + 1e-6), on [B].

    The standard deviation is the unbiased one. `divide_by_std=False` is Dr. GRPO (Liu et al. 2025,
    arXiv:2503.20783). Members are told by `groups` (i64[B]), never by position. Equal scores give exactly 0,
    and so does a group with one usable row; rows that are not `valid` (bool[B]) enter no statistic and get 0.
    """
    centred, count, slot = _centre(scores, groups, valid)
    if divide_by_std:
        squares = torch.zeros_like(count).index_add(0, slot, centred.square())
        std = (squares / (count - 1).clamp(min=1)).sqrt()
        centred = centred / (std + GROUP_EPSILON)[slot]
    return centred.to(masked.real(scores).dtype)


def leave_one_out(scores: Tensor, groups: Tensor, valid: Tensor | None = None) -> Tensor:
    """RLOO (Ahmadian et al. 2024, arXiv:2402.14740): score - mean of the others = (score - mean) n / (n-1), on [B].

    A group with one usable row has 0, and so have rows that are not `valid`.
    """
    centred, count, slot = _centre(scores, groups, valid)
    return (centred * (count / (count - 1).clamp(min=1))[slot]).to(masked.real(scores).dtype)


def optimal_baseline(scores: Tensor, lengths: Tensor, groups: Tensor, valid: Tensor | None = None) -> Tensor:
    """OPO (Hao et al. 2025, arXiv:2505.23585): score - sum(length score) / sum(length) over the group, on [B].

    Equal scores and a group with one usable row give exactly 0, and so do rows that are not `valid`.
    """
    values, usable, slot, number = _members(scores, groups, valid)
    weight = masked.select(lengths.double(), usable)
    total = values.new_zeros(number).index_add(0, slot, weight)
    mean = values.new_zeros(number).index_add(0, slot, weight * values) / total.masked_fill(total == 0, 1)
    low, high = _range(values, usable, slot, number)
    return masked.select(values - mean[slot], usable & (low != high)[slot]).to(masked.real(scores).dtype)


def remax(scores: Tensor, baselines: Tensor, valid: Tensor | None = None) -> Tensor:
    """ReMax (Li et al. 2023, arXiv:2310.10505): score - score of the greedy rollout of the same prompt, on [B]."""
    difference = masked.real(scores.detach()) - masked.real(baselines.detach())
    return difference if valid is None else masked.select(difference, valid)


def reinforce_plus_plus(rewards: Tensor, actions: Tensor, gamma: float = 1.0) -> Tensor:
    """REINFORCE++ (Hu et al. 2025, arXiv:2501.03262): reward-to-go over actions, whitened over all of them, [B, T]."""
    return masked.whiten(rewards_to_go(rewards, actions, gamma), actions)


def overlong_penalty(lengths: Tensor, budget: float, cache: float) -> Tensor:
    """DAPO's soft punishment (arXiv:2503.14476, equation 13), on [B]: 0 up to budget - cache, then down in a
    straight line to -1 at `budget`, and -1 beyond."""
    return ((budget - cache - lengths) / cache).clamp(-1.0, 0.0)


def without_signal(scores: Tensor, groups: Tensor, valid: Tensor | None = None) -> Tensor:
    """bool[number of groups]: True where no two usable rows of the group differ in score."""
    scores, usable, slot, number = _members(scores, groups, valid)
    low, high = _range(scores, usable, slot, number)
    return high <= low


def _members(scores: Tensor, groups: Tensor, valid: Tensor | None) -> tuple[Tensor, Tensor, Tensor, int]:
    """Scores in float64 (so that equal ones have exactly their mean), usable rows, group slot, number of groups."""
    usable = torch.ones_like(groups, dtype=torch.bool) if valid is None else valid.bool()
    if not scores.shape == groups.shape == usable.shape or scores.dim() != 1:
        shapes = f"{tuple(scores.shape)}, {tuple(groups.shape)}, {tuple(usable.shape)}"
        raise ValueError(f"scores, groups and valid must each be one number a row, got shapes {shapes}")
    names, slot = torch.unique(groups, return_inverse=True)
    return masked.select(scores.detach().double(), usable), usable, slot, len(names)


def _range(scores: Tensor, usable: Tensor, slot: Tensor, number: int) -> tuple[Tensor, Tensor]:
    empty = scores.new_full((number,), float("inf"))
    low = empty.scatter_reduce(0, slot, scores.masked_fill(~usable, float("inf")), "amin")
    high = (-empty).scatter_reduce(0, slot, scores.masked_fill(~usable, float("-inf")), "amax")
    return low, high


def _centre(scores: Tensor, groups: Tensor, valid: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """(score - mean of its group [B], usable rows of each group [G], group slot of each row [B])."""
    scores, usable, slot, number = _members(scores, groups, valid)
    count = scores.new_zeros(number).index_add(0, slot, usable.to(scores))
    mean = scores.new_zeros(number).index_add(0, slot, scores) / count.clamp(min=1)
    low, high = _range(scores, usable, slot, number)
    return masked.select(scores - mean[slot], usable & (low != high)[slot]), count, slot


def _slots(actions: Tensor) -> tuple[Tensor, Tensor]:
    """Where each token goes when a row's actions are moved to the left: (slot i64[B, T], filled bool[B, K]).

    The k-th action of a row goes to slot k, any other token to that of the last action before it, or to the
    first. K is the largest number of actions in a row (at least 1), `filled` says which slots an action has.
    """
    count = actions.sum(1, keepdim=True)
    width = max(int(count.max()), 1) if len(actions) else 1
    filled = torch.arange(width, device=actions.device) < count
    return (actions.cumsum(1) - 1).clamp_(min=0), filled


def _paid(rewards: Tensor, actions: Tensor) -> Tensor:
    """Rewards at actions as they are, at other tokens only where they are numbers."""
    return masked.select(rewards, actions | rewards.isfinite())


def _pack(x: Tensor, slot: Tensor, filled: Tensor) -> Tensor:
    """The sum of what goes to each slot, [B, K]."""
    return x.new_zeros(filled.shape).scatter_add(1, slot, x)


def _unpack(packed: Tensor, slot: Tensor, actions: Tensor) -> Tensor:
    """What stands in each action's slot, [B, T], 0 where not an action."""
    return masked.select(packed.gather(1, slot), actions)


def _discounted_sums(x: Tensor, factor: float, block: int = 64) -> Tensor:
    """y_k = x_k + factor y_{k+1} along the last dimension of [B, K].

    Blocks of `block` are summed by one matrix product with the powers of `factor`; only the first element
    of each block is carried from block to block, so the Python loop has K / block turns.
    """
    rows, width = x.shape
    blocks = -(-width // block)
    padded = torch.cat([x, x.new_zeros(rows, blocks * block - width)], dim=1).view(rows, blocks, block)
    distance = torch.arange(block, device=x.device)
    later = distance[:, None] - distance[None, :]
    base = torch.tensor(factor, dtype=x.dtype, device=x.device)
    powers = torch.where(later >= 0, base ** later.clamp(min=0), 0.0)
    inside = padded @ powers
    carried = x.new_zeros(rows, blocks + 1)
    for at in range(blocks - 1, -1, -1):
        carried[:, at] = inside[:, at, 0] + factor**block * carried[:, at + 1]
    decay = base ** (block - distance)
    return (inside + decay * carried[:, 1:, None]).view(rows, blocks * block)[:, :width]
