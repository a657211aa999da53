"""The retriever alone: does the question itself find the passage?"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

from spaniel.retrieval.base import Passage, Retriever
from spaniel.train.metrics import mean
from spaniel.types import Metrics, Prompt


def recall(
    prompts: Sequence[Prompt],
    retriever: Retriever,
    question: Callable[[Prompt], str],
    contains: Callable[[str, Sequence[str]], bool],
    ks: Sequence[int] = (1, 3, 5),
) -> Metrics:
    """Recall@k over all prompts and per source.

    `recall@k/answer`: share of questions with an accepted answer in one of the first k passages. For prompts
    whose `meta["gold_ids"]` lists passage ids also `recall@k/gold` (all of them among the first k) and
    `recall@k/any_gold` (at least one).
    """
    found = retriever.search([question(p) for p in prompts], max(ks))
    hits: dict[str, list[float]] = defaultdict(list)
    for prompt, passages in zip(prompts, found, strict=True):
        for k in ks:
            for name, hit in _hits(prompt, passages[:k], contains).items():
                hits[f"recall@{k}/{name}"].append(hit)
                hits[f"recall@{k}/{name}/{prompt.source or 'all'}"].append(hit)
    out: Metrics = {"questions": float(len(prompts))}
    return out | {name: mean(values) for name, values in sorted(hits.items())}


def _hits(prompt: Prompt, passages: Sequence[Passage], contains: Callable[[str, Sequence[str]], bool]) -> Metrics:
    out = {"answer": float(any(contains(p.contents, prompt.reference) for p in passages))}
    gold = {str(i) for i in prompt.meta.get("gold_ids") or ()}
    if gold:
        got = gold & {p.id for p in passages}
        out |= {"gold": float(got == gold), "any_gold": float(bool(got))}
    return out
