"""Prompts: every bad row is named, every stream is what its seed says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spaniel.data.prompts import PromptStream, load_prompts
from spaniel.errors import BadInput

ROW: dict[str, Any] = {
    "data_source": "nq",
    "prompt": [{"role": "user", "content": "Question: who?"}],
    "ability": "fact-reasoning",
    "reward_model": {"style": "rule", "ground_truth": {"target": ["Paris", "Lyon"]}},
    "extra_info": {"split": "test", "index": 0},
}


def write(path: Path, *rows: Any) -> Path:
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(list(rows)), path)
    else:
        path.write_text("\n".join(r if isinstance(r, str) else json.dumps(r) for r in rows), encoding="utf-8")
    return path


@pytest.mark.parametrize("name", ["d.parquet", "d.jsonl", "d.json"])
def test_the_search_r1_schema(tmp_path: Path, name: str) -> None:
    (prompt,) = load_prompts([write(tmp_path / name, ROW)]).prompts
    assert prompt.id == f"{name}:0"
    assert prompt.messages == ({"role": "user", "content": "Question: who?"},)
    assert prompt.reference == ("Paris", "Lyon")
    assert prompt.source == "nq"
    assert prompt.meta["index"] == 0
    assert prompt.meta["ability"] == "fact-reasoning"


@pytest.mark.parametrize(
    ("truth", "expected"),
    [("Paris", ("Paris",)), (["a", "b"], ("a", "b")), ({"target": ["a"]}, ("a",)), ({"target": "a b"}, ("a b",))],
)
def test_ground_truths(tmp_path: Path, truth: Any, expected: tuple[str, ...]) -> None:
    row = {"prompt": "plain text", "reward_model": {"ground_truth": truth}}
    (prompt,) = load_prompts([write(tmp_path / "d.jsonl", row)]).prompts
    assert prompt.reference == expected
    assert prompt.messages == ({"role": "user", "content": "plain text"},)


def without(*keys: str, **changes: Any) -> dict[str, Any]:
    return {k: v for k, v in ROW.items() if k not in keys} | changes


BAD: list[tuple[Any, str]] = [
    ("{", "not valid JSON"),
    ("[1]", "expected an object"),
    (without("prompt"), "prompt is missing"),
    (without(prompt=""), "prompt is ''"),
    (without(prompt=[]), r"prompt is \[\]"),
    (without(prompt=[{"role": "user"}]), r"prompt\[0\]"),
    (without(prompt=[{"role": "robot", "content": "x"}]), r"prompt\[0\] .* expected role \(one of"),
    (without(prompt=[{"role": "user", "content": 3}]), r"prompt\[0\]"),
    (without("reward_model"), "reward_model is missing"),
    (without(reward_model="Paris"), "reward_model is 'Paris'"),
    (without(reward_model={"ground_truth": []}), "non-empty text"),
    (without(reward_model={"ground_truth": ["a", " "]}), "non-empty text"),
    (without(reward_model={"ground_truth": {"target": None}}), "non-empty text"),
    (without(reward_model={"ground_truth": 42}), "non-empty text"),
    (without(data_source=3), "data_source is 3"),
    (without(extra_info="x"), "extra_info is 'x'"),
]


@pytest.mark.parametrize(("row", "message"), BAD)
def test_a_bad_row_names_file_line_value_and_expectation(tmp_path: Path, row: Any, message: str) -> None:
    path = write(tmp_path / "d.jsonl", ROW, row)
    with pytest.raises(BadInput, match=message) as caught:
        load_prompts([path])
    assert f"{path}, line 2" in str(caught.value)


def test_bad_files(tmp_path: Path) -> None:
    (tmp_path / "corrupt.parquet").write_bytes(b"PAR1 no")
    (tmp_path / "latin.jsonl").write_bytes(b'{"prompt": "\xe9"}')
    write(tmp_path / "empty.jsonl")
    write(tmp_path / "d.csv", "x")
    whole = write(tmp_path / "w.parquet", *[ROW] * 50).read_bytes()
    (tmp_path / "cut.parquet").write_bytes(whole[: len(whole) // 2])
    for name, message in {
        "none.jsonl": "not found",
        "corrupt.parquet": "not a readable parquet file",
        "cut.parquet": "not a readable parquet file",
        "latin.jsonl": "not UTF-8",
        "empty.jsonl": "is empty",
        "d.csv": "extension '.csv'",
    }.items():
        with pytest.raises(BadInput, match=message) as caught:
            load_prompts([tmp_path / name])
        assert name in str(caught.value)


def test_rows_of_two_files_that_share_an_index_stay_apart(tmp_path: Path) -> None:
    files = [write(tmp_path / "a.jsonl", ROW), write(tmp_path / "b.jsonl", ROW)]
    assert [p.id for p in load_prompts(files).prompts] == ["a.jsonl:0", "b.jsonl:0"]


def test_long_prompts_are_refused_or_skipped_and_counted_in_tokens(tmp_path: Path) -> None:
    rows = [without(prompt="x" * n) for n in (1, 5, 9)]
    path = write(tmp_path / "d.jsonl", *rows)

    def length(prompt: Any) -> int:
        return len(prompt.messages[0]["content"])

    with pytest.raises(BadInput, match=r"2 of 3 prompts are longer than max_start_length 4 tokens \(d.jsonl:1 has 5"):
        load_prompts([path], length=length, max_length=4)
    kept = load_prompts([path], length=length, max_length=5, too_long="skip")
    assert [p.id for p in kept.prompts] == ["d.jsonl:0", "d.jsonl:1"]
    assert kept.skipped_too_long == 1
    with pytest.raises(BadInput, match="none would be left"):
        load_prompts([path], length=length, max_length=0, too_long="skip")


def test_a_sample_of_the_rows_is_reproducible(tmp_path: Path) -> None:
    path = write(tmp_path / "d.jsonl", *[without(prompt=f"q{i}") for i in range(30)])
    first = load_prompts([path], limit=10, seed=3).prompts
    assert first == load_prompts([path], limit=10, seed=3).prompts
    assert first != load_prompts([path], limit=10, seed=4).prompts
    assert len({p.id for p in first}) == 10
    assert len(load_prompts([path], limit=99).prompts) == 30
    with pytest.raises(BadInput, match="sample of 0 rows"):
        load_prompts([path], limit=0)


streams = st.tuples(st.integers(1, 40), st.integers(1, 12), st.integers(0, 5), st.booleans(), st.booleans()).filter(
    lambda t: t[1] <= t[0]
)


@given(streams, st.integers(0, 3))
def test_every_epoch_is_a_permutation_without_skips_or_repeats(spec: tuple, epoch: int) -> None:
    count, size, seed, shuffle, drop = spec
    stream = PromptStream(list(range(count)), size, seed, shuffle=shuffle, drop_last=drop)
    per = stream.batches_per_epoch
    seen = [x for step in range(epoch * per, (epoch + 1) * per) for x in stream.batch(step)]
    assert len(seen) == len(set(seen)) == (count - count % size if drop else count)
    assert all(stream.epoch(step) == epoch for step in range(epoch * per, (epoch + 1) * per))
    if not shuffle:
        assert seen == list(range(len(seen)))


@given(streams, st.integers(0, 30))
def test_a_stream_resumed_anywhere_goes_on_as_it_would_have(spec: tuple, start: int) -> None:
    count, size, seed, shuffle, drop = spec
    whole = PromptStream(list(range(count)), size, seed, shuffle=shuffle, drop_last=drop)
    expected = [whole.batch(step) for step in range(start + 5)][start:]
    resumed = PromptStream(list(range(count)), size, seed, shuffle=shuffle, drop_last=drop)
    assert [resumed.batch(step) for step in range(start, start + 5)] == expected


def test_shuffles_differ_by_seed_and_epoch() -> None:
    items = list(range(20))
    one, two = PromptStream(items, 20, 1), PromptStream(items, 20, 2)
    assert one.batch(0) != two.batch(0)
    assert one.batch(0) != one.batch(1)


def test_batches_that_cannot_be_filled_are_refused() -> None:
    with pytest.raises(BadInput, match="batch_size: 5; expected at most 3"):
        PromptStream([1, 2, 3], 5, 0)
    with pytest.raises(BadInput, match="batch_size: 0"):
        PromptStream([1, 2, 3], 0, 0)
