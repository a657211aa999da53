"""A reward model whose every weight can be read, beside the network's: `python interpretable.py runs/.../reward`.

It learns from the same training rankings, by the same loss, but sees of a response only how often each digit stands in
it; both are then asked about the same held-out rankings. What it cannot see, the sums, shows in its accuracy; what the
labeler likes without need shows in its weights.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import torch
from prefs import DigitRM
from torch import Tensor

from spaniel.algo import agreement, preference
from spaniel.config import load_recipe
from spaniel.data.preferences import Rendered
from spaniel.launch_reward import build_reward


def rows_of(items: Sequence[Rendered]) -> tuple[Tensor, Tensor, Tensor]:
    """(digit counts f32[N, 10], number of the ranking, rank) of every response."""
    counts = [[float(text.count(d)) for d in "0123456789"] for item in items for text in item.ranking.responses]
    numbers = [number for number, item in enumerate(items) for _ in item.ranking.responses]
    ranks = [rank for item in items for rank in item.ranking.ranks]
    return torch.tensor(counts), torch.tensor(numbers), torch.tensor(ranks)


def fit(counts: Tensor, numbers: Tensor, ranks: Tensor) -> DigitRM:
    """The minimum of the Bradley-Terry loss (convex; a little ridge keeps the weights of rare digits finite)."""
    model = DigitRM()
    winners, losers = preference.pairs_of(numbers, ranks)
    solver = torch.optim.LBFGS(model.parameters(), max_iter=200, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        solver.zero_grad()
        loss = preference.bradley_terry(model(counts[winners]), model(counts[losers])) + 1e-4 * model.w.square().sum()
        loss.backward()
        return loss

    solver.step(closure)
    return model


def main(folder: Path) -> dict:
    """Accuracy on the run's held-out rankings, and the weight of each digit."""
    run = build_reward(load_recipe(str(folder / "recipe.yaml")))
    model = fit(*rows_of(run.training.stream.items))
    counts, numbers, ranks = rows_of(run.validation)
    scores = model(counts).detach()
    return {"accuracy": agreement.accuracy(scores, numbers, ranks), "weights": model.w.tolist()}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("--out", type=Path, help="also write the result as json")
    given = parser.parse_args()
    found = main(given.run)
    if given.out:
        given.out.write_text(json.dumps(found) + "\n", encoding="utf-8")
    print(f"digit counts alone: accuracy {found['accuracy']:.3f}")
    print("weights: " + "  ".join(f"{digit}: {weight:+.2f}" for digit, weight in enumerate(found["weights"])))
