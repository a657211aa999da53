"""Per-token losses, and the one way in which they become a number.

B rows, T positions; rho = exp(logprobs - old). An entry that is not finite makes that token's loss NaN and
passes no gradient: under a zero mask `aggregate` then drops it, at an action the loss says so.
"""

from __future__ import annotations

import math
from typing import Literal, get_args

import torch
from torch import Tensor

from spaniel.algo import masked
from spaniel.algo.kl import EXPONENT_LIMIT
from spaniel.algo.preference import bradley_terry as bradley_terry
from spaniel.algo.preference import plackett_luce as plackett_luce
from spaniel.errors import BadInput, nearest
from spaniel.types import Counts

Aggregation = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "token-sum-norm"]
AGGREGATIONS: tuple[str, ...] = get_args(Aggregation)


def ratio(logprobs: Tensor, old: Tensor) -> Tensor:
    """rho = exp(logprobs - old); the exponent is limited to +-80, beyond which rho has no gradient."""
    return (logprobs - old).clamp(-EXPONENT_LIMIT, EXPONENT_LIMIT).exp()


def clipped(
    logprobs: Tensor,
    old: Tensor,
    advantages: Tensor,
    eps_low: float,
    eps_high: float,
    dual_clip: float | None = None,
) -> Tensor:
    """-min(rho A, clip(rho, 1 - eps_low, 1 + eps_high) A) per token (PPO, Schulman et al. 2017, arXiv:1707.06347).

    Different bounds are DAPO's clip-higher (arXiv:2503.14476). With `dual_clip` c > 1 the loss of a token
    with A < 0 is at most -c A (Ye et al. 2020, arXiv:1912.09729).
    """
    known, (logprobs, old, advantages) = _finite(logprobs, old, advantages)
    rho = ratio(logprobs, old)
    loss = torch.maximum(-rho * advantages, -rho.clamp(1 - eps_low, 1 + eps_high) * advantages)
    if dual_clip is not None:
        loss = torch.where(advantages < 0, torch.minimum(loss, -dual_clip * advantages), loss)
    return torch.where(known, loss, math.nan)


def clip_active(
    logprobs: Tensor,
    old: Tensor,
    advantages: Tensor,
    eps_low: float,
    eps_high: float,
    dual_clip: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Where `clipped` is flat: (low, high, dual), bool each.

    low: A < 0 and rho below 1 - eps_low; high: A > 0 and rho above 1 + eps_high; dual: A < 0 and rho above c.
    """
    rho = ratio(logprobs.detach(), old)
    low = (advantages < 0) & (rho < 1 - eps_low)
    high = (advantages > 0) & (rho > 1 + eps_high)
    dual = (advantages < 0) & (rho > (math.inf if dual_clip is None else dual_clip))
    return low, high, dual


def gspo(logprobs: Tensor, old: Tensor, advantages: Tensor, actions: Tensor, eps_low: float, eps_high: float) -> Tensor:
    """The clipped loss with the sequence's ratio s = exp(mean over actions of (logprobs - old)) at every token.

    The value of s is detached; the gradient flows through each token's own log-probability, s A grad logprob
    (GSPO-token; Zheng et al. 2025, arXiv:2507.18071). Aggregate by seq-mean-token-mean for the paper's loss.
    """
    carried, zero = _sequence_log_ratio(logprobs, old, actions)
    return clipped(carried, zero, masked.select(advantages, actions), eps_low, eps_high)


def gspo_clip_active(
    logprobs: Tensor, old: Tensor, advantages: Tensor, actions: Tensor, eps_low: float, eps_high: float
) -> tuple[Tensor, Tensor, Tensor]:
    """`clip_active` of the sequence's ratio, at each of its tokens."""
    carried, zero = _sequence_log_ratio(logprobs, old, actions)
    return clip_active(carried, zero, masked.select(advantages, actions), eps_low, eps_high)


def _sequence_log_ratio(logprobs: Tensor, old: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
    """(log s at each action with the gradient of the token's own log-probability, zeros)."""
    current = masked.select(masked.real(logprobs), actions)
    log_s = masked.mean(current.detach() - masked.select(masked.real(old), actions), actions, dim=1)
    carried = masked.select(log_s[:, None] + (current - current.detach()), actions)
    return carried, torch.zeros_like(carried)


def cispo(
    logprobs: Tensor, old: Tensor, advantages: Tensor, eps_low: float | None = None, eps_high: float = 4.0
) -> Tensor:
    """-sg(clip(rho, 1 - eps_low, 1 + eps_high)) A logprob per token (MiniMax 2025, arXiv:2506.13585).

    The ratio only weighs the token and has no gradient, so no token is ever dropped. Bounds are relative
    to 1; `eps_low` None is no lower bound.
    """
    known, (logprobs, old, advantages) = _finite(logprobs, old, advantages)
    low = 0.0 if eps_low is None else 1 - eps_low
    weight = ratio(logprobs.detach(), old).clamp(low, 1 + eps_high)
    return torch.where(known, -weight * advantages * logprobs, math.nan)


def reinforce(logprobs: Tensor, advantages: Tensor) -> Tensor:
    """-A logprob per token: the policy gradient itself, for samples of the current policy (Williams 1992)."""
    known, (logprobs, advantages) = _finite(logprobs, advantages)
    return torch.where(known, -advantages * logprobs, math.nan)


def entropy(logits: Tensor) -> Tensor:
    """Entropy of softmax(logits) over the last dimension, in nats; a token with logit -inf has no part in it."""
    log_p = torch.log_softmax(masked.real(logits), -1)
    p = log_p.exp()
    return -(p * masked.select(log_p, p > 0)).sum(-1)


def value(values: Tensor, returns: Tensor, old_values: Tensor | None = None, eps: float | None = None) -> Tensor:
    """0.5 (V - R)^2 per token or, with `eps`, 0.5 max((V - R)^2, (clip(V, V_old +- eps) - R)^2).

    (The clipped form is that of openai/baselines ppo2.)
    """
    if eps is None:
        known, (values, returns) = _finite(values, returns)
        return torch.where(known, 0.5 * (values - returns).square(), math.nan)
    if old_values is None:
        raise ValueError("the clipped value loss needs the values before the update")
    known, (values, returns, old_values) = _finite(values, returns, old_values)
    near = torch.clamp(values, old_values - eps, old_values + eps)
    return torch.where(known, 0.5 * torch.maximum((values - returns).square(), (near - returns).square()), math.nan)


def value_clip_active(values: Tensor, returns: Tensor, old_values: Tensor, eps: float) -> Tensor:
    """Where the clipped value loss is flat: V left V_old +- eps, and the clipped error is the larger one; bool."""
    values = values.detach()
    near = torch.clamp(values, old_values - eps, old_values + eps)
    return (near - returns).square() > (values - returns).square()


def aggregate(
    per_token: Tensor,
    actions: Tensor,
    mode: str,
    counts: Counts | None = None,
    length_budget: int | None = None,
) -> Tensor:
    """The loss of these rows as a share of the loss of one optimizer step.

        token-mean            sum / actions
        seq-mean-token-sum    sum / sequences
        seq-mean-token-mean   sum over rows of the row's mean / sequences
        token-sum-norm        sum / (sequences * length_budget)           (Dr. GRPO, arXiv:2503.20783)

    `counts` are the global denominators over all micro-batches and ranks, so that the shares add up to the
    loss; None: these rows are all there are. A row without actions is no sequence. Without any action: 0.
    A loss that is not finite is NaN, and so is its whole gradient: no optimizer step can take it for good.
    """
    share = _share(per_token, actions.bool(), mode, counts, length_budget)
    return share * torch.where(share.detach().isfinite(), 1.0, math.nan)


def _share(per_token: Tensor, actions: Tensor, mode: str, counts: Counts | None, length_budget: int | None) -> Tensor:
    if counts is None:
        counts = Counts(actions=int(actions.sum()), sequences=int(actions.any(1).sum()))
    if mode == "token-mean":
        return masked.sum(per_token, actions) / max(counts.actions, 1)
    if mode == "seq-mean-token-sum":
        return masked.sum(per_token, actions) / max(counts.sequences, 1)
    if mode == "seq-mean-token-mean":
        return masked.mean(per_token, actions, dim=1).sum() / max(counts.sequences, 1)
    if mode == "token-sum-norm":
        if length_budget is None or length_budget < 1:
            raise BadInput(f"token-sum-norm divides by the length budget, a number above 0, not {length_budget}")
        return masked.sum(per_token, actions) / (max(counts.sequences, 1) * length_budget)
    raise BadInput(f"loss aggregation {mode!r}{nearest(mode, AGGREGATIONS)}; expected one of {', '.join(AGGREGATIONS)}")


def _finite(*tensors: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
    """(where all are finite, the tensors with 0 elsewhere)."""
    real = [masked.real(x) for x in tensors]
    known = torch.ones((), dtype=torch.bool, device=real[0].device)
    for x in real:
        known = known & x.isfinite()
    return known, tuple(masked.select(x, known) for x in real)
