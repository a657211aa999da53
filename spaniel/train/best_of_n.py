"""Best of n: take the highest-scored of n samples. The baseline that needs no training, on the same reward."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from spaniel.data.template import Template
from spaniel.envs.base import Env
from spaniel.rewards.base import Reward
from spaniel.rewards.grade import grade
from spaniel.rollout.episode import Budget, rollout
from spaniel.rollout.sampler import Sampler
from spaniel.train.metrics import mean
from spaniel.train.rl import Sampling
from spaniel.types import Prompt, Rollout, Score


@dataclass(frozen=True)
class BestOfN:
    """One row of the table: what the best of `n` is worth."""

    n: int
    kl: float
    """log n - (n-1)/n, in nats: an upper bound of the distance to the sampled policy, near it for long responses."""
    proxy: float
    gold: float | None
    """Means over prompts of the expected score, and gold score, of the best of n by the proxy."""
    length: float


def kl_of(n: int) -> float:
    """log n - (n-1)/n (Stiennon et al. 2020, arXiv:2009.01325, appendix G.3)."""
    return math.log(n) - (n - 1) / n


def chances(scores: Sequence[float], n: int) -> list[float]:
    """For each of N samples, the chance that it is the best of n drawn without replacement.

    C(r, n-1) / C(N, n) for the sample with r below it; samples of equal score share what they have together. The
    expected value of anything about the best of n is the sum of chance * value: unbiased, and from N samples instead of
    n (Nakano et al. 2021, arXiv:2112.09332, appendix I).
    """
    if not 1 <= n <= len(scores):
        raise ValueError(f"the best of {n} from {len(scores)} samples; expected 1 to {len(scores)}")
    order = sorted(range(len(scores)), key=lambda i: scores[i])
    each = [math.comb(below, n - 1) / math.comb(len(scores), n) for below in range(len(scores))]
    out = [0.0] * len(scores)
    start = 0
    while start < len(order):
        end = start
        while end < len(order) and scores[order[end]] == scores[order[start]]:
            end += 1
        for i in order[start:end]:
            out[i] = sum(each[start:end]) / (end - start)
        start = end
    return out


def table(groups: Sequence[Sequence[Rollout]]) -> list[BestOfN]:
    """Rows for n = 1, 2, 4, .. up to the samples of a prompt. `groups`: the graded samples of each prompt; failed ones
    are left out, and so are prompts that have fewer left than n."""
    judged = [[(r, r.score) for r in group if r.valid and isinstance(r.score, Score)] for group in groups]
    most = max((len(group) for group in judged), default=0)
    rows, n = [], 1
    while n <= most:
        enough = [group for group in judged if len(group) >= n]
        rows.append(_row(enough, n))
        n *= 2
    return rows


def _row(groups: list[list[tuple[Rollout, Score]]], n: int) -> BestOfN:
    proxy, gold, length = [], [], []
    for group in groups:
        weights = chances([score.value for _, score in group], n)
        weighed = list(zip(weights, group, strict=True))
        proxy.append(sum(w * score.value for w, (_, score) in weighed))
        length.append(sum(w * r.sampled_count for w, (r, _) in weighed))
        if all("gold" in score.parts for _, score in group):
            gold.append(sum(w * score.parts["gold"] for w, (_, score) in weighed))
    return BestOfN(n, kl_of(n), mean(proxy), mean(gold) if gold else None, mean(length))


def sample_groups(
    prompts: Sequence[Prompt],
    env: Env,
    sampler: Sampler,
    template: Template,
    reward: Reward | None,
    budget: Budget,
    how: Sampling,
    n: int,
    seed: int = 0,
    rows: int = 1024,
) -> list[list[Rollout]]:
    """`n` samples of each prompt as `how` samples training rollouts, graded where there is a reward; about `rows`
    at a time."""
    out: list[list[Rollout]] = []
    size = max(1, rows // n)
    for start in range(0, len(prompts), size):
        part = prompts[start : start + size]
        done = rollout(
            part, env, sampler, template, budget, group_size=n, seed=(seed, 0, 1),
            temperature=how.temperature, top_p=how.top_p, top_k=how.top_k,
        )  # fmt: skip
        graded = grade(done, reward, template.text) if reward else done
        out += [graded[i * n : (i + 1) * n] for i in range(len(part))]
    return out
