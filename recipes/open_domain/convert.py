"""Open-domain question sets with passages -> corpus.jsonl and questions.jsonl, as Spaniel reads them.

    python recipes/open_domain/convert.py OUT --nq nq-open-oracle.jsonl.gz --hotpot FOLDER

`--nq`: Natural Questions (open) rows with their gold passage (`question`, `answers`, `ctxs` with title and text), from
"Lost in the Middle" (Liu et al. 2023). `--hotpot`: a folder with train_corpus.json ({title: [sentence, ..]}) and
qa_train.json (`question`, `answer`, `supporting_facts`), HotpotQA (Yang et al. 2018) as OpenSPG/KAG ships it. Passages
that stand several times are written once; `extra_info.gold_ids` names the passages that hold the answer.
"""

from __future__ import annotations

import argparse
import gzip
import json
from pathlib import Path
from typing import Any


class Corpus:
    """Passages with their ids; the same contents get the same id."""

    def __init__(self) -> None:
        self.ids: dict[str, str] = {}

    def add(self, title: str, text: str) -> str:
        contents = f'"{title}"\n{text}'
        return self.ids.setdefault(contents, str(len(self.ids)))


def row(source: str, question: str, answers: list[str], gold: list[str]) -> dict[str, Any]:
    """A question in the verl / Search-R1 schema."""
    return {
        "data_source": source,
        "prompt": [{"role": "user", "content": question}],
        "ability": "fact-reasoning",
        "reward_model": {"style": "rule", "ground_truth": {"target": answers}},
        "extra_info": {"split": "validation", "question": question, "gold_ids": gold},
    }


def natural_questions(path: Path, corpus: Corpus) -> list[dict[str, Any]]:
    rows = []
    with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else open(path, encoding="utf-8") as lines:
        for line in lines:
            item = json.loads(line)
            gold = [corpus.add(c["title"], c["text"]) for c in item["ctxs"] if c.get("isgold")]
            rows.append(row("nq", item["question"], item["answers"], gold))
    return rows


def hotpot(folder: Path, corpus: Corpus) -> list[dict[str, Any]]:
    passages = json.loads((folder / "train_corpus.json").read_text(encoding="utf-8"))
    by_title = {title: corpus.add(title, "".join(sentences)) for title, sentences in passages.items()}
    rows = []
    for item in json.loads((folder / "qa_train.json").read_text(encoding="utf-8")):
        titles = dict.fromkeys(title for title, _ in item["supporting_facts"])
        rows.append(row("hotpotqa", item["question"], [item["answer"]], [by_title[t] for t in titles if t in by_title]))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--nq", type=Path)
    parser.add_argument("--hotpot", type=Path)
    given = parser.parse_args()
    corpus = Corpus()
    rows = natural_questions(given.nq, corpus) if given.nq else []
    rows += hotpot(given.hotpot, corpus) if given.hotpot else []
    given.out.mkdir(parents=True, exist_ok=True)
    passages = [{"id": key, "contents": contents} for contents, key in corpus.ids.items()]
    for name, lines in (("corpus.jsonl", passages), ("questions.jsonl", rows)):
        text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
        (given.out / name).write_text(text, encoding="utf-8")
    print(f"{len(passages)} passages and {len(rows)} questions in {given.out}")


if __name__ == "__main__":
    main()
