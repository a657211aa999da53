"""The published files -> rows that `spaniel reward` reads: `python make_data.py FOLDER`.

FOLDER holds `sorted_scores.json`, `testset-v1.json` (PandaLM) and LLMBar's five sets. What came out of it is shipped
in `data/`, with NOTICE.txt.

Summaries: one row an article, the summaries alone, in the order of their human `overall` score. The two others: one
row a pair, the responses alone; `ceiling` of PandaLM's is the share of the three people who agree with the majority.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

HERE = Path(__file__).resolve().parent
LLMBAR = ("Natural", "Adversarial-Neighbor", "Adversarial-GPTInst", "Adversarial-GPTOut", "Adversarial-Manual")


def summaries(published: dict) -> list[dict]:
    """One ranking an article; empty summaries are left out."""
    rows = []
    for article, entries in sorted(published.items()):
        kept = [entry for entry in entries if entry["sys_summ"].strip()]
        if len(kept) > 1:
            rows.append({"id": article, "responses": [entry["sys_summ"] for entry in kept],
                         "scores": [float(entry["scores"]["overall"]) for entry in kept]})  # fmt: skip
    return rows


def pandalm(published: list[dict]) -> list[dict]:
    """Pairs on which at least two of three people agree that one is better."""
    rows = []
    for pair in published:
        votes = [pair[f"annotator{number}"] for number in (1, 2, 3)]
        best, count = Counter(votes).most_common(1)[0]
        both = [pair["response1"], pair["response2"]]
        if best in (1, 2) and count > 1 and all(isinstance(r, str) and r.strip() for r in both) and both[0] != both[1]:
            rows.append({"id": f"pandalm-{pair['idx']}", "responses": both, "ranking": [best - 1, 2 - best],
                         "ceiling": count / 3})  # fmt: skip
    return rows


def llmbar(name: str, published: list[dict]) -> list[dict]:
    """Pairs with the label of LLMBar's authors."""
    return [{"id": f"{name}-{number}", "responses": [pair["output_1"], pair["output_2"]], "data_source": name,
             "ranking": [pair["label"] - 1, 2 - pair["label"]]} for number, pair in enumerate(published)]  # fmt: skip


def main(folder: Path, out: Path) -> None:
    """Write the three parquet files."""

    def read(name: str) -> list | dict:
        return json.loads(next(folder.rglob(name)).read_text(encoding="utf-8"))

    sets = {"summaries": summaries(read("sorted_scores.json")), "pandalm": pandalm(read("testset-v1.json")),
            "llmbar": [row for name in LLMBAR for row in llmbar(name, read(f"{name}.json"))]}  # fmt: skip
    out.mkdir(parents=True, exist_ok=True)
    for name, rows in sets.items():
        pq.write_table(pa.Table.from_pylist(rows), out / f"{name}.parquet", compression="zstd", compression_level=19)
        print(f"{name}: {len(rows)} rankings")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", type=Path, default=HERE / "data")
    given = parser.parse_args()
    main(given.folder, given.out)
