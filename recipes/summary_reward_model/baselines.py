"""What a reward model must beat: plain features (TF-IDF and length) and length alone, on a run's own split.

`python recipes/summary_reward_model/baselines.py runs/summary_reward_model`
"""

from __future__ import annotations

import argparse
import math
import re
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

from spaniel.algo import agreement, preference
from spaniel.config import load_recipe
from spaniel.data.preferences import Rendered
from spaniel.launch_reward import build_reward


def words(text: str) -> list[str]:
    """Lower-case words, and pairs of neighbours."""
    single = re.findall(r"[a-z0-9']+", text.lower())
    return single + [" ".join(pair) for pair in pairwise(single)]


class PlainFeatures:
    """Terms of at least two training responses, (1 + log tf) idf, rows of length 1; log length beside them."""

    def __init__(self, texts: Sequence[str]) -> None:
        counts = Counter(word for text in texts for word in set(words(text)))
        kept = sorted(word for word, count in counts.items() if count > 1)
        self.column = {word: number for number, word in enumerate(kept)}
        self.idf = torch.tensor([math.log((1 + len(texts)) / (1 + counts[word])) + 1 for word in kept])

    def __call__(self, texts: Sequence[str]) -> Tensor:
        out = torch.zeros(len(texts), len(self.column) + 1)
        for row, text in enumerate(texts):
            for word, count in Counter(words(text)).items():
                if word in self.column:
                    out[row, self.column[word]] = 1 + math.log(count)
            out[row, -1] = math.log(1 + len(text.split()))
        out[:, :-1] = torch.nn.functional.normalize(out[:, :-1] * self.idf, dim=1)
        return out


def rows_of(items: Sequence[Rendered]) -> tuple[list[str], Tensor, Tensor]:
    """(responses, number of the ranking, rank) of all rankings."""
    texts = [text for item in items for text in item.ranking.responses]
    numbers = torch.tensor([number for number, item in enumerate(items) for _ in item.ranking.responses])
    return texts, numbers, torch.tensor([rank for item in items for rank in item.ranking.ranks])


def fit(features: Tensor, numbers: Tensor, ranks: Tensor, ridge: float = 3e-4) -> Tensor:
    """The weights of a linear Bradley-Terry model, penalised by ridge * |w|^2 (convex: L-BFGS to its minimum)."""
    winners, losers = preference.pairs_of(numbers, ranks)
    weights = torch.zeros(features.shape[1], requires_grad=True)
    solver = torch.optim.LBFGS([weights], max_iter=200, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        solver.zero_grad()
        scores = features @ weights
        loss = preference.bradley_terry(scores[winners], scores[losers]) + ridge * weights.square().sum()
        loss.backward()
        return loss

    solver.step(closure)
    return weights.detach()


def show(name: str, scores: Tensor, numbers: Tensor, ranks: Tensor) -> None:
    accuracy, half = agreement.accuracy(scores, numbers, ranks), agreement.accuracy_interval(scores, numbers, ranks)
    rho = agreement.spearman(scores, numbers, ranks)
    print(f"{name:24s} accuracy {accuracy:.3f} +- {half:.3f}  spearman {rho:.3f}")


def main(folder: Path) -> None:
    """Fit on the run's training rankings; compare on its held-out ones and its test sets."""
    run = build_reward(load_recipe(str(folder / "recipe.yaml")))
    texts, numbers, ranks = rows_of(run.training.stream.items)
    plain = PlainFeatures(texts)
    weights = fit(plain(texts), numbers, ranks)
    sets = {"held out": run.validation, **{name: loaded.items for name, loaded in run.tests.items()}}
    for name, items in sets.items():
        texts, numbers, ranks = rows_of(items)
        show(f"{name}: TF-IDF + length", plain(texts) @ weights, numbers, ranks)
        show(f"{name}: longer wins", torch.tensor([float(len(text.split())) for text in texts]), numbers, ranks)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    main(parser.parse_args().run)
