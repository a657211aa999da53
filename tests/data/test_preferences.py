"""Rankings: every format means the same, every bad row is named or counted, splits keep prompts whole."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spaniel.data.collate import collate_rankings
from spaniel.data.preferences import load_rankings, split_by_prompt
from spaniel.data.rankings import BadRow, dense, to_ranking
from spaniel.data.tokenizer import character_tokenizer
from spaniel.errors import BadInput

TEMPLATE = character_tokenizer("abcdefghijklmnopqrstuvwxyz ")
ROW: dict[str, Any] = {"prompt": "ask", "responses": ["one", "two", "six"], "ranking": [2, 0, 1]}


def load(tmp_path: Path, *rows: Any, max_length: int = 32, name: str = "r.jsonl", **how: Any) -> Any:
    path = tmp_path / name
    if name.endswith("parquet"):
        pq.write_table(pa.Table.from_pylist(list(rows)), path)
    else:
        path.write_text("\n".join(r if isinstance(r, str) else json.dumps(r) for r in rows), encoding="utf-8")
    return load_rankings([str(path)], TEMPLATE, max_length, **how)


@pytest.mark.parametrize(
    "order",
    [{"ranking": [2, 0, 1]}, {"ranks": [1, 2, 0]}, {"ranks": [2.0, 3.0, 1.0]}, {"scores": [0.2, -1, 5]}],
)
@pytest.mark.parametrize("name", ["r.jsonl", "r.parquet"])
def test_every_order_means_the_same(tmp_path: Path, order: dict, name: str) -> None:
    row = {"prompt": "ask", "responses": ["one", "two", "six"], **order}
    (item,) = load(tmp_path, row, name=name).items
    assert item.ranking.ranks == (1, 2, 0)
    assert item.ranking.pairs == ((2, 0), (2, 1), (0, 1))
    assert [TEMPLATE.text(ids) for ids in item.tokens] == ["askone", "asktwo", "asksix"]
    assert {ids[-1] for ids in item.tokens} == {TEMPLATE.eos_id}


def test_ties_have_no_pair() -> None:
    tied = to_ranking({"responses": ["a", "b", "c"], "ranking": [[0, 2], 1]}, "w", "n")
    assert tied.ranks == (0, 1, 0)
    assert tied.pairs == ((0, 1), (2, 1))
    assert dense([3.0, 1.0, 3.0, 2.0]) == (0, 2, 0, 1)


TALK = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
HH = "\n\nHuman: hi\n\nAssistant: so\n\nHuman: go\n\nAssistant: "


@pytest.mark.parametrize(
    ("row", "messages", "responses"),
    [
        ({"prompt": "hi", "chosen": "yes", "rejected": "no"}, ["hi"], ("yes", "no")),
        ({"chosen": TALK, "rejected": [TALK[0], {"role": "assistant", "content": "no"}]}, ["hi"], ("yes", "no")),
        ({"prompt": TALK[:1], "chosen": TALK[1:], "rejected": [{"role": "assistant", "content": "no"}]}, ["hi"],
         ("yes", "no")),
        ({"prompt": TALK[:1], "chosen": TALK, "rejected": [TALK[0], {"role": "assistant", "content": "no"}]}, ["hi"],
         ("yes", "no")),
        ({"chosen": HH + "yes", "rejected": HH + "no"}, ["hi", "so", "go"], ("yes", "no")),
        ({"chosen": "yes", "rejected": "no"}, [], ("yes", "no")),
    ],
)  # fmt: skip
def test_pairs_as_in_hh_rlhf_and_trl(row: dict, messages: list[str], responses: tuple) -> None:
    ranking = to_ranking(row, "w", "n")
    assert [m["content"] for m in ranking.messages] == messages
    assert ranking.responses == responses
    assert ranking.pairs == ((0, 1),)


BAD = {
    "missing response": ({**ROW, "ranking": [0, 1, 3]}, "bad_ranking", "response 3; there are 0 to 2"),
    "negative": ({**ROW, "ranking": [0, 1, -1]}, "bad_ranking", "response -1"),
    "boolean": ({**ROW, "ranking": [0, True, 2]}, "bad_ranking", "response True"),
    "left out": ({**ROW, "ranking": [0, 1]}, "bad_ranking", "leaves out response 2"),
    "twice": ({**ROW, "ranking": [0, 1, 1]}, "bad_ranking", "names response 1 twice"),
    "not a list": ({**ROW, "ranking": 3}, "bad_ranking", "ranking is 3"),
    "two orders": ({**ROW, "ranks": [0, 1, 2]}, "bad_ranking", "both ranking and ranks"),
    "no order": ({"responses": ["a", "b"]}, "bad_ranking", "one of ranking, ranks, scores"),
    "K = 1": ({"responses": ["a"], "ranking": [0]}, "too_few", "has 1 response"),
    "K = 0": ({"responses": [], "ranking": []}, "too_few", "has 0 response"),
    "empty": ({"responses": ["a", " \n"], "ranking": [0, 1]}, "empty_response", r"responses[1] is ' \n'"),
    "number": ({"responses": ["a", 7], "ranking": [0, 1]}, "not_text", "responses[1] is 7"),
    "null response": ({"responses": ["a", None], "ranking": [0, 1]}, "not_text", "responses[1] is missing"),
    "responses text": ({"responses": "ab", "ranking": [0, 1]}, "not_text", "responses is 'ab'"),
    "NaN margin": ({**ROW, "margin": float("nan")}, "bad_number", "margin is nan"),
    "infinite score": ({"responses": ["a", "b"], "scores": [0, float("inf")]}, "bad_number", "scores[1] is inf"),
    "few scores": ({"responses": ["a", "b"], "scores": [0]}, "bad_number", "expected 2 numbers"),
    "word score": ({"responses": ["a", "b"], "scores": [0, "x"]}, "bad_number", "scores[1] is 'x'"),
    "weight": ({**ROW, "weight": 0}, "bad_number", "weight is 0.0; expected a number above 0"),
    "prompt": ({**ROW, "prompt": 5}, "not_text", "prompt is 5"),
    "role": ({**ROW, "prompt": [{"role": "robot", "content": "x"}]}, "not_text", "prompt[0]"),
    "no chosen": ({"rejected": "a"}, "empty_response", "chosen is missing"),
    "empty rejected": ({"chosen": "a", "rejected": ""}, "empty_response", "rejected is ''"),
    "prompts differ": ({"chosen": TALK, "rejected": [{"role": "user", "content": "ho"}, TALK[1]]}, "prompts_differ",
                       "one prompt"),
    "ends with user": ({"chosen": TALK[:1], "rejected": TALK}, "no_answer", "chosen ends with user"),
    "nothing": ({"text": "a"}, "no_responses", "has keys text"),
    "a list": ([1], "not_a_row", "expected"),
    "source": ({**ROW, "data_source": 4}, "not_text", "data_source is 4"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_a_bad_row_is_named_or_counted(tmp_path: Path, name: str) -> None:
    row, kind, words = BAD[name]
    if not isinstance(row, dict):
        with pytest.raises(BadRow) as refused:
            to_ranking(row, "r.jsonl line 2", "n")
        assert refused.value.kind == kind
        return
    with pytest.raises(BadInput, match="line 2") as error:
        load(tmp_path, ROW, row)
    assert words in str(error.value)
    loaded = load(tmp_path, ROW, row, bad_rows="skip")
    assert (len(loaded.items), loaded.excluded) == (1, {kind: 1})


def test_what_teaches_nothing_is_left_out_and_counted(tmp_path: Path) -> None:
    loaded = load(
        tmp_path,
        ROW,
        {**ROW, "responses": ["six", "one", "two"], "ranking": [0, 1, 2]},  # the same, in another order
        {"prompt": "b", "responses": ["same", "same", "other"], "ranking": [0, 2, 1]},
        {"prompt": "c", "responses": ["same", "same"], "ranking": [0, 1]},
        {"prompt": "d", "responses": ["one", "two"], "scores": [1, 1]},
        {"chosen": "equal", "rejected": "equal"},
    )
    assert loaded.excluded == {"all_tied": 1, "duplicate_rows": 1, "repeated_responses": 3}
    assert [item.ranking.responses for item in loaded.items] == [("one", "two", "six"), ("same", "other")]
    assert loaded.items[1].ranking.ranks == (0, 1)
    assert loaded.pairs == 4


LONG = {"prompt": "p", "responses": ["aaaaaaaa", "aaaaaaab", "b"], "ranking": [0, 1, 2]}


def test_a_response_that_is_too_long(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="has 10 tokens with its prompt; expected at most max_length 6"):
        load(tmp_path, LONG, max_length=6)
    skipped = load(tmp_path, ROW, {**LONG, "prompt": "pppp"}, max_length=8, too_long="skip")
    assert (len(skipped.items), skipped.excluded) == (1, {"too_long": 1})
    cut = load(tmp_path, LONG, max_length=6, too_long="truncate")
    assert cut.excluded == {"identical_after_truncation": 1, "truncated_rankings": 1}
    assert [TEMPLATE.text(ids) for ids in cut.items[0].tokens] == ["paaaa", "pb"]
    assert all(ids[-1] == TEMPLATE.eos_id and len(ids) <= 6 for ids in cut.items[0].tokens)


def test_nothing_left_says_why(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"no ranking is left to learn from \(1 all_tied\)"):
        load(tmp_path, {"responses": ["a", "b"], "scores": [1, 1]})
    with pytest.raises(BadInput, match="no ranking is left"):
        load(tmp_path, {"responses": ["aaaaaaaa", "aaaaaaab"], "ranking": [0, 1]}, max_length=5, too_long="truncate")


@given(
    st.lists(st.tuples(st.integers(0, 6), st.integers(0, 3)), min_size=2, max_size=30, unique=True), st.integers(0, 5)
)
def test_a_split_keeps_prompts_whole(rows: list[tuple[int, int]], seed: int) -> None:
    import tempfile

    letters = "abcdefg"
    rankings = [
        {"prompt": f"q{letters[p]}", "responses": [f"x{letters[v]}", f"y{letters[v]}"], "ranking": [0, 1]}
        for p, v in rows
    ]
    with tempfile.TemporaryDirectory() as folder:
        items = load(Path(folder), *rankings).items
    names = {item.ranking.messages[0]["content"] for item in items}
    if len(names) < 2:
        with pytest.raises(BadInput, match="at least 2 prompts"):
            split_by_prompt(items, 0.3, seed)
        return
    train, held_out = split_by_prompt(items, 0.3, seed)
    assert sorted(map(id, [*train, *held_out])) == sorted(map(id, items))
    assert train
    assert held_out
    assert not {i.ranking.messages[0]["content"] for i in train} & {i.ranking.messages[0]["content"] for i in held_out}
    assert split_by_prompt(items, 0.3, seed)[1] == held_out


def test_rankings_as_tensors(tmp_path: Path) -> None:
    import torch

    items = load(tmp_path, {**ROW, "margin": 0.5}, {"responses": ["ab", "c"], "ranking": [1, 0]}).items
    batch = collate_rankings(items, torch.tensor([[0.5], [0.25]]), pad_id=0)
    assert batch.rankings.tolist() == [0, 0, 0, 1, 1]
    assert batch.ranks.tolist() == [1, 2, 0, 1, 0]
    assert batch.lengths.tolist() == [7, 7, 7, 3, 2]
    assert batch.margins.tolist() == [0.5, 0.5, 0.5, 0.0, 0.0]
    assert batch.weights.flatten().tolist() == [0.5, 0.5, 0.5, 0.25, 0.25]
    assert batch.take(torch.tensor([4, 3])).tokens.shape == (2, 3)
    for row, ids in enumerate(ids for item in items for ids in item.tokens):
        assert batch.tokens[row, : len(ids)].tolist() == list(ids)
