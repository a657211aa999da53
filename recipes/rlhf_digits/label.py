"""Rank sampled responses as the hidden labeler does: `python label.py samples.jsonl rankings.jsonl`.

It reads what `spaniel sample` wrote and adds `ranking` (best first) and `ceiling` (the best possible accuracy on that
ranking's pairs). Responses that repeat are shown once, as one would show them to people.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

from labeler import ceiling, gold_score, rank


def label(row: dict, rng: random.Random) -> dict | None:
    """The row with its ranking; None where all responses are the same."""
    responses = list(dict.fromkeys(row["responses"]))
    responses = [text for text in responses if text.strip()]
    if len(responses) < 2:
        return None
    gold = [gold_score(row["prompt"][-1]["content"], text) for text in responses]
    return {**row, "responses": responses, "ranking": rank(gold, rng), "ceiling": ceiling(gold)}


def main(samples: Path, out: Path, seed: int, k: int = 4) -> None:
    """Label every `k` responses of a row as one ranking, leave out those without two different ones, say how many."""
    rng = random.Random(seed)
    rows = [json.loads(line) for line in samples.read_text(encoding="utf-8").splitlines()]
    shown = [{**row, "responses": row["responses"][i : i + k]} for row in rows
             for i in range(0, len(row["responses"]), k)]  # fmt: skip
    ranked = [labelled for row in shown if (labelled := label(row, rng)) is not None]
    out.write_text("".join(json.dumps(row) + "\n" for row in ranked), encoding="utf-8")
    print(f"{len(ranked)} rankings in {out}; {len(shown) - len(ranked)} had a single response")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("samples", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    main(given.samples, given.out, given.seed)
