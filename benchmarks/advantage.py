"""GAE and group statistics against loops over tokens and rows as verl 0.9 has them, in one run.

python benchmarks/advantage.py [--rows 512] [--width 4096]
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from collections.abc import Callable

import torch
from torch import Tensor

from spaniel.algo import advantage


def looped_gae(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float) -> Tensor:
    """One pass over the T positions, vectors over the rows; masked positions carry the running values on."""
    after, running = 0.0, 0.0
    out = []
    for t in reversed(range(rewards.shape[1])):
        delta = rewards[:, t] + gamma * after - values[:, t]
        fresh = delta + gamma * lam * running
        after = values[:, t] * mask[:, t] + (1 - mask[:, t]) * after
        running = fresh * mask[:, t] + (1 - mask[:, t]) * running
        out.append(running)
    return torch.stack(out[::-1], dim=1)


def looped_groups(scores: Tensor, groups: Tensor) -> Tensor:
    """Scores collected in lists by group, row by row."""
    members: dict[int, list[Tensor]] = defaultdict(list)
    for row in range(len(scores)):
        members[int(groups[row])].append(scores[row])
    stats = {g: (torch.stack(s).mean(), torch.stack(s).std()) for g, s in members.items()}
    out = scores.clone()
    for row in range(len(scores)):
        mean, std = stats[int(groups[row])]
        out[row] = (scores[row] - mean) / (std + 1e-6)
    return out


def median(call: Callable[[], Tensor], times: int = 5) -> float:
    call()
    seconds = []
    for _ in range(times):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return sorted(seconds)[times // 2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--width", type=int, default=4096)
    given = parser.parse_args()
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(1)
    rewards, values = (torch.randn(given.rows, given.width, generator=generator) for _ in range(2))
    mask = torch.rand(given.rows, given.width, generator=generator) < 0.7
    rewards = torch.where(mask, rewards, 0.0)
    scores, groups = torch.randn(8192, generator=generator), torch.arange(8192) // 8
    cases = {
        f"GAE {given.rows} x {given.width}": (
            lambda: advantage.gae(rewards, values, mask, 0.99, 0.95)[0],
            lambda: looped_gae(rewards, values, mask.float(), 0.99, 0.95) * mask,
        ),
        "group statistics, 8192 rows in groups of 8": (
            lambda: advantage.group_relative(scores, groups),
            lambda: looped_groups(scores, groups),
        ),
    }
    for name, (own, loops) in cases.items():
        gap = float((own() - loops()).abs().max())
        mine, theirs = median(own), median(loops)
        speed = f"{1000 * mine:.1f} ms, loops {1000 * theirs:.1f} ms, ratio {theirs / mine:.1f}"
        print(f"{name}: {speed} (difference {gap:.1e})")


if __name__ == "__main__":
    main()
