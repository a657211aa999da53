"""The distance to the reference policy: estimators, KL-penalised rewards, the adaptive controller.

With x = log pi(a) - log ref(a) at a sampled token (Schulman 2020, "Approximating KL divergence",
http://joschu.net/blog/kl-approx.html):

    k1 (kl)          x                   unbiased, may be negative
    abs              |x|                 biased
    k2 (mse)         x^2 / 2             biased; its gradient is the unbiased gradient of the KL
    k3 (low_var_kl)  exp(-x) - 1 + x     unbiased, never negative; its own gradient is biased
    full             sum over the vocabulary, exact; takes logits
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from spaniel.algo import advantage, masked
from spaniel.errors import BadInput

EXPONENT_LIMIT = 80.0
"""Largest exponent formed: exp(80) is a float32 number. Nothing else is clamped."""

KINDS = {"k1": "k1", "kl": "k1", "abs": "abs", "k2": "k2", "mse": "k2", "k3": "k3", "low_var_kl": "k3", "full": "full"}
"""Every accepted name of an estimator, and the one it stands for."""


def estimate(logprobs: Tensor, ref_logprobs: Tensor, kind: str) -> Tensor:
    """The estimator `kind` at each token, in the shape of `logprobs`, with the estimator's own gradient.

    For `full` the two are logits (or log-probabilities) over the vocabulary, [..., V], and the result is
    KL(softmax(logits) || softmax(ref_logits)), [...]. An entry that is not finite gives NaN and no gradient,
    so that a mask applied to the result is enough.
    """
    if kind not in KINDS:
        raise BadInput(f"KL estimator {kind!r}; expected one of {', '.join(KINDS)}")
    logprobs, ref_logprobs = masked.real(logprobs), masked.real(ref_logprobs)
    kind = KINDS[kind]
    if kind == "full":
        return _full(logprobs, ref_logprobs)
    known = logprobs.isfinite() & ref_logprobs.isfinite()
    x = masked.select(logprobs, known) - masked.select(ref_logprobs, known)
    if kind == "k1":
        value = x
    elif kind == "abs":
        value = x.abs()
    elif kind == "k2":
        value = x.square() / 2
    else:
        limited = x.clamp(min=-EXPONENT_LIMIT)
        value = torch.expm1(-limited) + limited
    return torch.where(known, value, math.nan)


def unbiased(logprobs: Tensor, ref_logprobs: Tensor, kind: str) -> Tensor:
    """The value of `kind` with the gradient of k2: x * grad log pi, whose mean is the true gradient of the KL.

    (Straight-through; Tang and Munos 2025, arXiv:2506.09477.) Exact for samples of the current policy.
    """
    carrier = estimate(logprobs, ref_logprobs, "k2")
    return carrier + (estimate(logprobs, ref_logprobs, kind) - carrier).detach()


def penalised_rewards(
    scores: Tensor, logprobs: Tensor, ref_logprobs: Tensor, actions: Tensor, beta: float, kind: str = "k1"
) -> Tensor:
    """r[b, t] = -beta kl[b, t] at each action, plus the score at the row's last action; f32[B, T], detached.

    With k1 a row sums to score - beta (log pi - log ref) (Ziegler et al. 2019, arXiv:1909.08593). `scores` is
    one number a row, [B], or token rewards, [B, T], which are then taken as by `advantage.credit`.
    """
    earned = advantage.place(scores, actions) if scores.dim() == 1 else advantage.credit(scores, actions)
    return masked.select(earned - beta * estimate(logprobs, ref_logprobs, kind), actions).detach()


def per_sequence(logprobs: Tensor, ref_logprobs: Tensor, actions: Tensor) -> Tensor:
    """log pi - log ref summed over the actions of each row, [B]: the k1 estimate of the sequence KL."""
    return masked.sum(estimate(logprobs, ref_logprobs, "k1"), actions, dim=1).detach()


def adapt(beta: float, kl: float, target: float, sequences: int, horizon: float) -> float:
    """beta (1 + clip(kl / target - 1, -0.2, 0.2) n / horizon): Ziegler et al. 2019, section 2.2.

    `kl` is the mean sequence KL of the step just measured, n its number of sequences. A KL that is not
    finite leaves beta as it is. A horizon so short that the factor could reach 0 is refused.
    """
    if not (target > 0 and horizon > 0):
        raise BadInput(f"adaptive KL: target {target} and horizon {horizon} must both be above 0")
    if 0.2 * sequences / horizon >= 1:
        raise BadInput(
            f"adaptive KL: horizon {horizon} is too short for {sequences} sequences a step: the coefficient "
            f"could become 0 or negative; expected more than {0.2 * sequences:g}"
        )
    if not math.isfinite(kl):
        return beta
    return beta * (1 + min(max(kl / target - 1, -0.2), 0.2) * sequences / horizon)


def _full(logits: Tensor, ref_logits: Tensor) -> Tensor:
    logp, logq = torch.log_softmax(logits, -1), torch.log_softmax(ref_logits, -1)
    p = logp.exp()
    # p (log p - log q) is 0 where p is 0, also where its logarithm is -inf.
    possible = p > 0
    return (p * (masked.select(logp, possible) - masked.select(logq, possible))).sum(-1)
