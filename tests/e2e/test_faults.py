"""Runs whose retriever misbehaves: recorded, counted, survived, or stopped with the cause."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from spaniel.config import load_recipe
from spaniel.launch import build_rl
from spaniel.recipe import RLRecipe
from spaniel.retrieval.bm25 import BM25
from spaniel.retrieval.corpus import read_corpus
from spaniel.retrieval.server import running
from spaniel.train.rl import State, train
from tests.e2e.conftest import SMALL, metrics
from tests.fakes.retriever import FailingRetriever, FakeRetriever

CORPUS = "recipes/search_tiny/corpus.jsonl"


class Flaky:
    """Passes every query on, but each `every`-th request is an error inside the server (HTTP 500)."""

    def __init__(self, every: int) -> None:
        self.index, self.every, self.count = BM25.from_passages(read_corpus(CORPUS)), every, 0

    def search(self, queries: Any, k: int) -> Any:
        self.count += 1
        if self.count % self.every == 0:
            raise RuntimeError("once in a while")
        return self.index.search(queries, k)


def test_a_500_once_in_three_changes_nothing(spaniel: Callable[..., Any], tmp_path: Path) -> None:
    small = [*SMALL, "steps=2"]
    assert spaniel("train", "search_tiny_grpo", *small, f"out={tmp_path / 'a'}")[0] == 0
    with running(Flaky(3)) as url:
        remote = f"retriever={{name: http, url: '{url}', batch_size: 4, concurrency: 1, tries: 6}}"
        code, _, err = spaniel("train", "search_tiny_grpo", *small, remote, f"out={tmp_path / 'b'}")
    assert code == 0, err
    assert metrics(tmp_path / "a") == metrics(tmp_path / "b")


def run(recipe: RLRecipe, retriever: Any) -> list[dict[str, float]]:
    made = build_rl(recipe)
    made.agent.env.retriever = retriever  # type: ignore[attr-defined]
    start = State(0, recipe.algorithm.initial_state())
    return [
        done.metrics
        for done in train(made.parts, start, recipe.steps, lambda s: None, lambda s: {}, lambda s: (False, False))
    ]


@pytest.mark.parametrize("how", ["reply", "end"])
def test_failed_searches_are_counted_and_the_run_goes_on(how: str) -> None:
    recipe = load_recipe("search_tiny_grpo", [*SMALL, f"env.on_retriever_failure={how}", "max_failure_share=1.0"])
    assert isinstance(recipe, RLRecipe)
    inner = FakeRetriever(list(read_corpus(CORPUS)))
    rows = run(recipe, FailingRetriever(inner, every=2))
    assert len(rows) == 4
    assert sum(row["failures/retriever"] for row in rows) > 0
    if how == "end":
        # an episode that ended by the failure is no wrong answer: it is no part of any mean
        assert all(row["failures/environment"] > 0 for row in rows if row["failures/retriever"])
        assert all(row["failures/share"] == row["failures/environment"] / 16 for row in rows)
    else:
        assert all(row["failures/share"] == 0 for row in rows)


def test_a_retriever_that_dies_for_good_stops_the_run_with_the_cause(
    spaniel: Callable[..., Any], tmp_path: Path
) -> None:
    with running(BM25.from_passages(read_corpus(CORPUS))) as url:
        remote = f"retriever={{name: http, url: '{url}', tries: 1, timeout_s: 0.5, cache_size: 1}}"
        small = [*SMALL, "steps=1", remote]
        assert spaniel("train", "search_tiny_grpo", *small, f"out={tmp_path / 'run'}")[0] == 0
        recipe = load_recipe("search_tiny_grpo", [*SMALL, remote])
        assert isinstance(recipe, RLRecipe)
        made = build_rl(recipe)
    start = State(0, recipe.algorithm.initial_state())
    from spaniel.errors import RunStopped

    loop = train(made.parts, start, 4, lambda s: None, lambda s: {}, lambda s: (False, False))
    with pytest.raises(RunStopped, match=r"searches of this step failed.*no connection"):
        list(loop)


@pytest.mark.parametrize("name", ["dr_grpo", "rloo", "reinforce_plus_plus", "remax", "opo", "gspo", "cispo", "dapo"])
def test_every_algorithm_trains(name: str, spaniel: Callable[..., Any], tmp_path: Path) -> None:
    small = [x for x in SMALL if not x.startswith("algorithm")]
    # REINFORCE++ and ReMax need no groups
    size = [] if name in ("reinforce_plus_plus", "remax") else [f"algorithm.group_size={4}"]
    out = tmp_path / "run"
    code, _, err = spaniel("train", "search_tiny_grpo", *small, f"algorithm={name}", *size, "steps=2", f"out={out}")
    assert code == 0, err
    rows = metrics(out)[1:]
    assert all(row["actor/skipped_updates"] == 0 for row in rows)
    assert any(row["actor/grad_norm"] > 0 for row in rows)


def test_the_mismatch_of_sampler_and_learner_is_measured(spaniel: Callable[..., Any], tmp_path: Path) -> None:
    out = tmp_path / "run"
    small = [*SMALL, "steps=1", "algorithm.mismatch.mode=truncate", f"out={out}"]
    code, _, err = spaniel("train", "search_tiny_grpo", *small)
    assert code == 0, err
    found = {k: v for k, v in metrics(out)[-1].items() if "mismatch" in k}
    assert found
