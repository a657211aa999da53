"""The other commands, and what bad input gets: a clear message, exit code 2, no traceback, nothing left behind."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.conftest import SMALL, metrics

CORPUS = "recipes/search_tiny/corpus.jsonl"


def test_help_is_everywhere_and_quick() -> None:
    for arguments in (
        [],
        ["train"],
        ["sft"],
        ["eval"],
        ["chat"],
        ["check"],
        ["index"],
        ["serve-retriever"],
        ["algorithms"],
    ):
        done = subprocess.run(
            [sys.executable, "-c", "from spaniel.cli import main; main()", *arguments, "--help"],
            capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert "Usage:" in done.stdout


def test_check_validates_and_prints_the_arithmetic(spaniel: Callable[..., Any], tmp_path: Path) -> None:
    code, text, err = spaniel("check", "search_tiny_grpo", f"out={tmp_path / 'never'}")
    assert code == 0, err
    assert "recipe is valid" in text
    assert "16 prompts * 8 = 128" in text or "= " in text
    assert not (tmp_path / "never").exists()


def test_eval_of_a_recipe_and_of_a_run(spaniel: Callable[..., Any], tmp_path: Path) -> None:
    out = tmp_path / "eval"
    code, text, err = spaniel("eval", "search_tiny_grpo", "data.val_data_num=30", "threads=1", "--out", str(out))
    assert code == 0, err
    found = json.loads((out / "metrics.json").read_text())
    assert found["val/count"] == 30
    assert "val/exact_match" in text
    assert len((out / "rollouts.jsonl").read_text().splitlines()) == 30
    run = tmp_path / "run"
    assert spaniel("train", "search_tiny_grpo", *SMALL, "steps=2", f"out={run}")[0] == 0
    code, text, err = spaniel("eval", str(run), "--step", "1", "--out", str(out))
    assert code == 0, err
    code, _, err = spaniel("eval", str(run), "--step", "7")
    assert code == 2
    assert "no checkpoint of step 7; there are 1, 2" in err
    code, text, err = spaniel("eval", str(run), "--out", str(out))
    assert json.loads((out / "metrics.json").read_text())["val/exact_match"] == metrics(run)[-1]["val/exact_match"]


def test_eval_of_the_retriever_alone(spaniel: Callable[..., Any], tmp_path: Path) -> None:
    code, text, err = spaniel("eval", "search_tiny_grpo", "--retriever-only", "--out", str(tmp_path))
    assert code == 0, err
    found = json.loads((tmp_path / "recall.json").read_text())
    assert found["questions"] == 300
    assert 0 < found["recall@1/answer"] <= found["recall@3/answer"] <= found["recall@5/answer"] <= 1


def test_chat_shows_thinking_searches_and_answer(spaniel: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    code, text, err = spaniel("chat", "search_tiny_grpo", "Which city does ICN airport serve?")
    assert code == 0, err
    for tag in ("<think>", "<search>", "<information>", "<answer>"):
        assert tag in text
    assert "Seoul" in text
    lines = iter(["Which city does ICN airport serve?", ""])
    monkeypatch.setattr("builtins.input", lambda *_: next(lines))
    code, text, err = spaniel("chat", "search_tiny_grpo")
    assert code == 0, err
    assert "Seoul" in text
    code, _, err = spaniel("chat", "search_tiny_grpo", "why " * 200)
    assert code == 2
    assert "expected at most rollout.max_start_length" in err


def test_index_and_server(spaniel: Callable[..., Any], tmp_path: Path) -> None:
    code, text, err = spaniel("index", CORPUS, str(tmp_path / "index"))
    assert code == 0, err
    assert "index of 2758 passages" in text
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = subprocess.Popen(
        [sys.executable, "-c", "from spaniel.cli import main; main()", "serve-retriever", str(tmp_path / "index"),
         "--port", str(port)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert server.stdout is not None
        assert "serving 2758 passages" in server.stdout.readline()
        deadline = time.monotonic() + 20
        while True:
            try:
                assert httpx.get(f"http://127.0.0.1:{port}/health", trust_env=False).json()["passages"] == 2758
                break
            except httpx.TransportError:
                assert time.monotonic() < deadline
                time.sleep(0.05)
        # the same agent over HTTP gives what it gives with the index in process
        overrides = ["data.val_data_num=20", "threads=1"]
        code, _, err = spaniel("eval", "search_tiny_grpo", *overrides, "--out", str(tmp_path / "a"))
        assert code == 0, err
        remote = f"retriever={{name: http, url: 'http://127.0.0.1:{port}'}}"
        code, _, err = spaniel("eval", "search_tiny_grpo", *overrides, remote, "--out", str(tmp_path / "b"))
        assert code == 0, err
        one, other = (json.loads((tmp_path / n / "metrics.json").read_text()) for n in "ab")
        assert one == other
    finally:
        server.send_signal(signal.SIGINT)
        assert server.wait(20) in (0, 130, -signal.SIGINT)


def nowhere() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{free.getsockname()[1]}"


BAD: list[tuple[list[str], str]] = [
    (["train", "search_tiny_gpro"], "did you mean 'search_tiny_grpo'"),
    (["train", "search_tiny_grpo", "stepps=1"], "did you mean 'steps'"),
    (["train", "search_tiny_grpo", "steps=soon"], "steps: 'soon'"),
    (["train", "search_tiny_grpo", "algorithm.group_size=1"], "group_size is 1"),
    (["train", "search_tiny_grpo", "data.train=nowhere.parquet"], "nowhere.parquet: file not found"),
    (["train", "search_tiny_grpo", "data.batch_size=5000"], "batch_size: 5000; expected at most 1912"),
    (["train", "search_tiny_grpo", "model.path=nowhere"], "nowhere: not found"),
    (["train", "search_tiny_grpo", "retriever.corpus=nowhere.jsonl"], "nowhere.jsonl: file not found"),
    (["train", "search_tiny_grpo", "rollout.max_start_length=5"], "prompts are longer than max_start_length 5"),
    (["train", "search_tiny_grpo", "rollout.max_total_length=300"], "expected at most max_total_length 300"),
    (["train", "search_tiny_grpo", "rollout.max_total_length=5000"], "the model's context"),
    (["train", "search_tiny_grpo", "rollout.max_obs_length=20"], "max_obs_length: 20; expected at least"),
    (["train", "search_tiny_grpo", "policy.learning.minibatch_rows=999"], "expected at most 128"),
    (["train", "search_tiny_grpo", "critic.optim.lr=1"], "critic: given, but the algorithm has no critic"),
    (["train", "search_tiny_ppo", "critic=null"], "critic: missing"),
    (["sft", "search_tiny_grpo"], "use `spaniel train search_tiny_grpo`"),
    (["eval", "search_tiny_grpo", "data.validation=[]"], "data.validation: missing"),
    (["eval", "search_tiny_grpo", "--step", "3"], "is a recipe, not a run folder"),
    (["eval", "search_tiny_start"], "trains no policy by reward"),
    (["index", "nowhere.jsonl", "{tmp}/index"], "nowhere.jsonl: file not found"),
    (["serve-retriever", "nowhere.jsonl"], "nowhere.jsonl: file not found"),
    (["serve-retriever", CORPUS, "--port", "99999"], "cannot listen on 127.0.0.1:99999"),
    (["chat", "search_tiny_grpo", " "], "the question is empty"),
    (["train", "search_tiny_grpo", "data.train=3"], "data.train: 3; expected a path or a list of paths"),
    (["check", "{tmp}"], "neither a file"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD, ids=[" ".join(a[1:]) for a, _ in BAD])
def test_bad_input_is_said_before_any_work(
    arguments: list[str], message: str, spaniel: Callable[..., Any], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    arguments = [a.replace("{tmp}", str(tmp_path)) for a in arguments]
    extra = [f"out={out}"] if arguments[0] == "train" else []
    code, _, err = spaniel(*arguments, *extra)
    assert code == 2
    assert message in err
    assert "Traceback" not in err
    assert not out.exists()


def test_an_unreachable_retriever_is_named_before_training(spaniel: Callable[..., Any], tmp_path: Path) -> None:
    url = nowhere()
    remote = f"retriever={{name: http, url: '{url}'}}"
    code, _, err = spaniel("train", "search_tiny_grpo", remote, f"out={tmp_path / 'out'}")
    assert code == 2
    assert url in err
    assert "serve-retriever" in err


GOOD_ROW = '{"prompt": "q", "reward_model": {"ground_truth": "a"}}'
FILES: list[tuple[str, str, bytes, str]] = [
    ("data.train", "d.parquet", b"PAR1 garbage", "not a readable parquet file"),
    ("data.train", "d.jsonl", b"", "is empty"),
    ("data.train", "d.jsonl", b'{"reward_model": {"ground_truth": "a"}}', "line 1: prompt is missing"),
    ("data.train", "d.jsonl", GOOD_ROW.encode() + b'\n{"prompt": "q"}', "line 2: reward_model is missing"),
    ("data.validation", "d.jsonl", GOOD_ROW.encode() + b'\n{"prompt": "q"}', "line 2: reward_model is missing"),
    ("retriever.corpus", "c.jsonl", b"", "is empty"),
    (
        "retriever.corpus",
        "c.jsonl",
        b'{"id": 1, "contents": "x"}\n{"id": 1, "contents": "y"}',
        "line 2: id '1' stands in line 1",
    ),
    ("retriever.corpus", "c.jsonl", b'{"id": 1}', "line 1: contents is None"),
]


@pytest.mark.parametrize(("key", "name", "content", "message"), FILES)
def test_bad_files_are_said_before_any_work(
    key: str, name: str, content: bytes, message: str, spaniel: Callable[..., Any], tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(content)
    out = tmp_path / "out"
    code, _, err = spaniel("train", "search_tiny_grpo", f"{key}={tmp_path / name}", f"out={out}")
    assert code == 2
    assert message in err
    assert str(tmp_path / name) in err
    assert not out.exists()


def test_damaged_runs_are_named(spaniel: Callable[..., Any], tmp_path: Path) -> None:
    out = tmp_path / "run"
    go_on = ["train", "search_tiny_grpo", *SMALL, "steps=2", f"out={out}", "--resume"]
    assert spaniel("train", "search_tiny_grpo", *SMALL, "steps=1", f"out={out}")[0] == 0
    folder = out / "checkpoints" / "step-000001"

    def fails(message: str) -> None:
        code, _, err = spaniel(*go_on)
        assert code == 2
        assert message in err
        assert "Traceback" not in err

    for name, message in {
        "policy.optimizer.pt": "policy.optimizer.pt is damaged",
        "policy/model.safetensors": "cannot be loaded",
        "policy/tokenizer.json": "cannot be loaded",
        "policy/config.json": "cannot be loaded",
    }.items():
        good = (folder / name).read_bytes()
        (folder / name).write_bytes(good[:100])
        fails(message)
        (folder / name).write_bytes(good)
    (folder / "policy.optimizer.pt").rename(tmp_path / "aside")
    fails("holds no policy.optimizer.pt")
    (tmp_path / "aside").rename(folder / "policy.optimizer.pt")
    (folder / "state.json").write_text("{")
    fails("state.json cannot be read")
    (folder / "state.json").write_text('{"step": 1}')
    (out / "recipe.yaml").write_text("a: [1")
    fails("cannot be read as YAML")


def test_an_out_that_cannot_be_written(spaniel: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    code, _, err = spaniel("train", "search_tiny_grpo", *SMALL, f"out={tmp_path / 'file'}")
    assert code == 2
    assert "is a file; expected a folder" in err
    code, _, err = spaniel("train", "search_tiny_grpo", *SMALL, f"out={tmp_path / 'file' / 'below'}")
    assert code == 2
    assert "cannot be written" in err


def test_interrupted_runs_say_how_to_go_on(tmp_path: Path) -> None:
    run = subprocess.Popen(
        [sys.executable, "-c", "from spaniel.cli import main; main()", "train", "search_tiny_grpo", *SMALL,
         "steps=500", f"out={tmp_path / 'run'}"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )  # fmt: skip
    deadline = time.monotonic() + 90
    while not (tmp_path / "run" / "checkpoints" / "latest").exists():
        assert time.monotonic() < deadline
        time.sleep(0.1)
    run.send_signal(signal.SIGINT)
    _, err = run.communicate(timeout=60)
    assert run.returncode == 130
    assert "--resume" in err
    assert "Traceback" not in err
