"""RLHF from the reward model up, in one file: five short parts over `spaniel.algo`, and the loop they make.

`python recipes/rlhf_digits/lab.py` runs it: supervised start, rankings of K = 4, a reward model whose weights are
printed, PPO with a KL penalty.
"""

from __future__ import annotations

import argparse
import copy
import math
import random
from collections.abc import Sequence
from typing import Any

import torch
from prefs import KAPPA, DigitRM, ValueModel, digit_counts, gold_score
from tinylm import TinyLM, make_batch, masked_mean, masked_whiten, sample, sequence_logprobs, sft_loss
from torch import Tensor

from spaniel.algo import advantage, agreement, kl, loss, preference
from spaniel.types import Ranking

# 1. The reward model


def bt_loss(r_chosen: Tensor, r_rejected: Tensor) -> Tensor:
    """Bradley-Terry: mean over pairs of -log sigmoid(r_chosen - r_rejected)."""
    return preference.bradley_terry(r_chosen, r_rejected)


def ranking_to_pairs(ranking: Sequence[int]) -> list[tuple[int, int]]:
    """A ranking of K responses, best first -> its K(K-1)/2 pairs (winner, loser)."""
    places = {response: place for place, response in enumerate(ranking)}
    names = sorted(places)
    if len(names) < len(ranking):
        raise ValueError(f"ranking {list(ranking)} names a response twice")
    pairs = Ranking("", (), ("",) * len(names), tuple(places[name] for name in names)).pairs
    return [(names[winner], names[loser]) for winner, loser in pairs]


# 2. Rewards and advantages


def kl_penalized_rewards(logp: Tensor, ref_logp: Tensor, score: Tensor, mask: Tensor, beta: float) -> Tensor:
    """-beta (logp - ref_logp) at each real token, and the score (B,) at the last one; (B, T)."""
    return kl.penalised_rewards(score, logp, ref_logp, mask.bool(), beta)


def gae_per_token(
    rewards: Tensor, values: Tensor, mask: Tensor, gamma: float = 1.0, lam: float = 0.95
) -> tuple[Tensor, Tensor]:
    """(advantages, returns), (B, T): A_t = sum_k (gamma lam)^k delta_{t+k}, the value behind the last token being 0."""
    real = mask.bool()
    return advantage.gae(torch.where(real, rewards, 0.0), values, real, gamma, lam)


# 3. The loss


def ppo_rlhf_loss(
    logp: Tensor,
    old_logp: Tensor,
    values: Tensor,
    advantages: Tensor,
    returns: Tensor,
    mask: Tensor,
    clip_eps: float = 0.2,
    vf_coef: float = 0.5,
) -> tuple[Tensor, dict[str, float]]:
    """Clipped policy loss + vf_coef * mean (V - R)^2, means over the real tokens of the batch.

    `clip_frac` is the share of real tokens with |rho - 1| > clip_eps.
    """
    policy_loss = masked_mean(loss.clipped(logp, old_logp, advantages, clip_eps, clip_eps), mask)
    value_loss = 2 * masked_mean(loss.value(values, returns), mask)
    outside = ((loss.ratio(logp, old_logp) - 1).abs() > clip_eps).float()
    stats = {"policy_loss": policy_loss.item(), "value_loss": value_loss.item(),
             "clip_frac": masked_mean(outside, mask).item()}  # fmt: skip
    return policy_loss + vf_coef * value_loss, stats


# 4. The loop


def train_rlhf(
    sft_model: TinyLM,
    rm: DigitRM,
    *,
    iterations: int = 120,
    prompts: int = 64,
    beta: float = 0.1,
    lam: float = 0.95,
    clip_eps: float = 0.2,
    epochs: int = 4,
    lr: float = 3e-4,
    value_lr: float = 1e-3,
    ptx_coef: float = 0.0,
    target_kl: float | None = None,
    seed: int = 0,
) -> tuple[TinyLM, list[dict[str, float]]]:
    """PPO on the reward model, held near the start by beta; returns the policy and one row an iteration.

    `ptx_coef` adds the supervised loss to each update; `target_kl` lets beta follow the KL (Ziegler et al. 2019, with
    a tenth of the deviation an iteration).
    """
    torch.manual_seed(seed)
    rng = random.Random(seed)
    policy, value_model = copy.deepcopy(sft_model), ValueModel(sft_model)
    parts = [{"params": policy.parameters(), "lr": lr}, {"params": value_model.parameters(), "lr": value_lr}]
    optimizer = torch.optim.Adam(parts)
    history = []
    for _ in range(iterations):
        out = sample(policy, make_batch(prompts, rng)[0])
        mask = out["mask"]
        with torch.no_grad():
            old, ref = sequence_logprobs(policy, out), sequence_logprobs(sft_model, out)
            score = rm(digit_counts(out))
            rewards = kl_penalized_rewards(old, ref, score, mask, beta)
            advantages, returns = gae_per_token(rewards, value_model(out), mask, lam=lam)
            advantages = masked_whiten(advantages, mask)
            moved = kl.per_sequence(old, ref, mask.bool()).mean().item()
        for _ in range(epochs):
            total, stats = ppo_rlhf_loss(
                sequence_logprobs(policy, out), old, value_model(out), advantages, returns, mask, clip_eps
            )
            if ptx_coef:
                total = total + ptx_coef * sft_loss(policy, prompts, rng)
            optimizer.zero_grad()
            total.backward()
            optimizer.step()
        history.append({"score": score.mean().item(), "gold": gold_score(out).mean().item(), "kl": moved, "beta": beta,
                        "length": mask.sum(dim=1).mean().item(), **stats})  # fmt: skip
        if target_kl is not None:
            beta = kl.adapt(beta, moved, target_kl, prompts, 10 * prompts)
    return policy, history


# 5. What comes before it


def train_sft(steps: int = 500, batch: int = 128, lr: float = 3e-3, seed: int = 0) -> TinyLM:
    """A language model that mostly knows the sums."""
    torch.manual_seed(seed)
    model, rng = TinyLM(), random.Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    for _ in range(steps):
        optimizer.zero_grad()
        sft_loss(model, batch, rng).backward()
        optimizer.step()
    return model


def rank(gold: Tensor, rng: random.Random) -> list[int]:
    """Best first, each pair in the order that the labeler would choose: Gumbel noise on KAPPA * gold."""
    noisy = [KAPPA * g - math.log(-math.log(rng.random())) for g in gold.tolist()]
    return sorted(range(len(noisy)), key=lambda i: -noisy[i])


def collect(model: TinyLM, n: int, rng: random.Random, k: int = 4) -> list[dict[str, Any]]:
    """`n` ranked sets of `k` responses to one prompt each."""
    ranked = []
    for prompt in make_batch(n, rng)[0]:
        out = sample(model, [prompt] * k)
        gold = gold_score(out)
        ranked.append({"out": out, "ranking": rank(gold, rng), "gold": gold})
    return ranked


def train_rm(ranked: Sequence[dict[str, Any]], steps: int = 300, lr: float = 0.05) -> DigitRM:
    """The linear reward model, on all pairs of all rankings at once."""
    rm = DigitRM()
    counts = [digit_counts(row["out"]) for row in ranked]
    pairs = [ranking_to_pairs(row["ranking"]) for row in ranked]
    chosen = torch.stack([c[w] for c, own in zip(counts, pairs, strict=True) for w, _ in own])
    rejected = torch.stack([c[b] for c, own in zip(counts, pairs, strict=True) for _, b in own])
    optimizer = torch.optim.Adam(rm.parameters(), lr=lr)
    for _ in range(steps):
        optimizer.zero_grad()
        bt_loss(rm(chosen), rm(rejected)).backward()
        optimizer.step()
    return rm


def agreement_with(rm: DigitRM, ranked: Sequence[dict[str, Any]]) -> tuple[float, float]:
    """(accuracy, ceiling) over the pairs of some rankings."""
    scores = torch.cat([rm(digit_counts(row["out"])).detach() for row in ranked])
    names = torch.arange(len(ranked)).repeat_interleave(len(ranked[0]["ranking"]))
    ranks = torch.cat([torch.tensor(row["ranking"]).argsort() for row in ranked])
    gaps = [row["gold"][w] - row["gold"][b] for row in ranked for w, b in ranking_to_pairs(row["ranking"])]
    return agreement.accuracy(scores, names, ranks), agreement.noise_ceiling(torch.stack(gaps), KAPPA)


def main(seed: int, beta: float) -> list[dict[str, float]]:
    """The lab, start to end."""
    torch.set_num_threads(1)
    model, rng = train_sft(seed=seed), random.Random(seed + 1)
    rm, held_out = train_rm(collect(model, 600, rng)), collect(model, 300, rng)
    accuracy, ceiling = agreement_with(rm, held_out)
    print(f"reward model: accuracy {accuracy:.3f}, ceiling {ceiling:.3f}")
    print("weights of the digits: " + "  ".join(f"{d}: {w:+.2f}" for d, w in enumerate(rm.w.tolist())))
    _, history = train_rlhf(model, rm, beta=beta, seed=seed)
    for number in [*range(0, len(history), 20), len(history) - 1]:
        print(f"iteration {number + 1:3d}  " + "  ".join(f"{k} {v:.3f}" for k, v in history[number].items()))
    return history


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--beta", type=float, default=0.1)
    given = parser.parse_args()
    main(given.seed, given.beta)
