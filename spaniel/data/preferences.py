"""Rankings from files: read, checked, rendered to ids, freed of what teaches nothing, split by prompt.

Nothing is left out in silence: whatever is excluded is counted by kind.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from spaniel.data.rankings import BadRow, to_ranking
from spaniel.data.rows import read_rows
from spaniel.data.template import Template
from spaniel.errors import BadInput
from spaniel.types import Ranking

TooLong = Literal["error", "skip", "truncate"]


@dataclass(frozen=True)
class Rendered:
    """A ranking with the ids of each response (prompt, response and end token)."""

    ranking: Ranking
    tokens: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class LoadedRankings:
    """What can be learned from, and how many of each kind cannot."""

    items: tuple[Rendered, ...]
    excluded: Mapping[str, int]

    @property
    def pairs(self) -> int:
        return sum(len(item.ranking.pairs) for item in self.items)


def load_rankings(
    paths: Sequence[str],
    template: Template,
    max_length: int,
    *,
    too_long: TooLong = "error",
    bad_rows: Literal["error", "skip"] = "error",
    keep_ties: bool = False,
) -> LoadedRankings:
    """All rankings of jsonl or parquet files, in order.

    A row that is wrong in itself (a ranking that names a missing response, a single response, an empty one, a margin
    that is not a number) is an error that names it, or (`bad_rows` skip) left out and counted. Left out and counted
    always: rankings without a pair (all tied), repeats of a whole row, responses repeated within a ranking, pairs
    that have the same ids after truncation. A response of more than `max_length` tokens, prompt included, is an
    error, or leaves its ranking (skip), or is cut before its end token (truncate).
    """
    excluded: Counter[str] = Counter()
    items: list[Rendered] = []
    seen: set[Hashable] = set()
    for path in paths:
        for number, (where, row) in enumerate(read_rows(path, "preferences")):
            try:
                ranking = to_ranking(row, where, f"{path}:{number}")
            except BadRow as error:
                if bad_rows == "error":
                    raise
                excluded[error.kind] += 1
                continue
            key = _identity(ranking)
            if key in seen:
                excluded["duplicate_rows"] += 1
                continue
            seen.add(key)
            item = _rendered(ranking, template, max_length, too_long, where, excluded)
            if item is not None and _teaches(item, keep_ties, excluded):
                items.append(item)
    if not items:
        found = ", ".join(f"{count} {kind}" for kind, count in sorted(excluded.items())) or "none at all"
        raise BadInput(f"preferences {', '.join(paths)}: no ranking is left to learn from ({found})")
    return LoadedRankings(tuple(items), dict(sorted(excluded.items())))


def _identity(ranking: Ranking) -> Hashable:
    messages = tuple((m["role"], m["content"]) for m in ranking.messages)
    return messages, tuple(sorted(zip(ranking.ranks, ranking.responses, strict=True)))


def _rendered(
    ranking: Ranking, template: Template, max_length: int, too_long: TooLong, where: str, excluded: Counter[str]
) -> Rendered | None:
    """The responses as ids, each once; None where too few are left."""
    ranking, tokens = _once(ranking, [template.judged(ranking.messages, r) for r in ranking.responses], excluded,
                            "repeated_responses")  # fmt: skip
    longest = max(map(len, tokens))
    if longest > max_length:
        if too_long == "error":
            raise BadInput(f"{where}: a response has {longest} tokens with its prompt; expected at most max_length "
                           f"{max_length}; raise it, or set data.too_long to skip or truncate")  # fmt: skip
        excluded["truncated_rankings" if too_long == "truncate" else "too_long"] += 1
        if too_long == "skip":
            return None
        cut = [ids if len(ids) <= max_length else (*ids[: max_length - 1], ids[-1]) for ids in tokens]
        ranking, tokens = _once(ranking, cut, excluded, "identical_after_truncation")
    return Rendered(ranking, tuple(tokens)) if len(tokens) > 1 else None


def _once(
    ranking: Ranking, tokens: Sequence[tuple[int, ...]], excluded: Counter[str], kind: str
) -> tuple[Ranking, list[tuple[int, ...]]]:
    """The ranking without the responses whose ids an earlier one has: a pair of equals can teach nothing."""
    first: dict[tuple[int, ...], int] = {}
    for number, ids in enumerate(tokens):
        first.setdefault(ids, number)
    kept = sorted(first.values())
    excluded[kind] += len(tokens) - len(kept)
    if not excluded[kind]:
        del excluded[kind]
    if len(kept) == len(tokens):
        return ranking, list(tokens)
    scores = ranking.scores
    fewer = replace(
        ranking,
        responses=tuple(ranking.responses[i] for i in kept),
        ranks=tuple(ranking.ranks[i] for i in kept),
        scores=None if scores is None else tuple(scores[i] for i in kept),
    )
    return fewer, [tokens[i] for i in kept]


def _teaches(item: Rendered, keep_ties: bool, excluded: Counter[str]) -> bool:
    if item.ranking.pairs or keep_ties:
        return True
    excluded["all_tied"] += 1
    return False


def split_by_prompt(items: Sequence[Rendered], share: float, seed: int) -> tuple[list[Rendered], list[Rendered]]:
    """(training, held out): about `share` of the prompts are held out, with all their rankings.

    Two rankings belong to one prompt where their messages are equal, or, without messages, their ids.
    """
    keys = [_prompt(item.ranking) for item in items]
    names = sorted(set(keys), key=repr)
    if len(names) < 2:
        raise BadInput(f"data.held_out: {share} of {len(names)} prompt(s); expected at least 2 prompts to split")
    random.Random(f"{seed} held out").shuffle(names)
    out = set(names[: min(len(names) - 1, max(1, round(share * len(names))))])
    train = [item for item, key in zip(items, keys, strict=True) if key not in out]
    return train, [item for item, key in zip(items, keys, strict=True) if key in out]


def _prompt(ranking: Ranking) -> Hashable:
    return tuple((m["role"], m["content"]) for m in ranking.messages) or ranking.id
