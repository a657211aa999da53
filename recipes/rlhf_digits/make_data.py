"""Additions of two numbers below 50, written as text: noisy demonstrations for the start, prompts for the rest.

A third of the demonstrated sums are wrong, as text from the world is. A network that learns from them knows the sums,
does not always write them, and must tell a right beginning from a wrong one to guess what follows: that is what a
reward model made from it can use.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

BELOW, NOISE, COPIES, HELD_OUT = 50, 0.35, 32, 300


def additions(seed: int) -> list[tuple[str, str]]:
    """(prompt, sum) of all 2,500 additions, shuffled."""
    every = [(f"{a}+{b}=", str(a + b)) for a in range(BELOW) for b in range(BELOW)]
    random.Random(seed).shuffle(every)
    return every


def demonstration(prompt: str, answer: str) -> dict:
    """A row for supervised learning."""
    return {"messages": [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]}


def question(prompt: str, answer: str) -> dict:
    """A row for reinforcement learning, in the schema of verl and Search-R1."""
    return {"prompt": prompt, "data_source": "digits", "reward_model": {"ground_truth": answer}}


def noisy(answer: str, rng: random.Random) -> str:
    """The sum, or (with the chance NOISE) any number that a sum could be."""
    return answer if rng.random() >= NOISE else str(rng.randrange(2 * BELOW - 1))


def main(out: Path, seed: int) -> None:
    """Write demonstrations (noisy, and true ones for PPO-ptx), training prompts and held-out ones."""
    every, rng = additions(seed), random.Random(seed)
    train, held_out = every[HELD_OUT:], every[:HELD_OUT]
    parts = {
        "demonstrations": [demonstration(p, noisy(s, rng)) for _ in range(COPIES) for p, s in train],
        "true_sums": [demonstration(*row) for row in train],
        "held_out": [demonstration(*row) for row in held_out],
        "train": [question(*row) for row in train],
        "validation": [question(*row) for row in held_out],
    }
    out.mkdir(parents=True, exist_ok=True)
    for name, content in parts.items():
        (out / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in content), encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    main(given.out, given.seed)
