"""A run is repeatable, resumable, and its folder holds what it promises."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from spaniel.run import due
from tests.e2e.conftest import PPO_SMALL, SMALL, metrics, weights

RECIPES = {"search_tiny_grpo": SMALL, "search_tiny_ppo": PPO_SMALL}


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)


@pytest.mark.parametrize("name", RECIPES)
def test_the_same_seed_is_the_same_run_and_a_resumed_run_is_the_uninterrupted_one(
    name: str, spaniel: Callable[..., Any], tmp_path: Path
) -> None:
    whole, again, resumed = (tmp_path / n for n in ("whole", "again", "resumed"))
    for out in (whole, again):
        code, text, err = spaniel("train", name, *RECIPES[name], f"out={out}")
        assert code == 0, err
        assert text.splitlines()[-1].startswith("exact match before=")
    expected = metrics(whole)
    assert metrics(again) == expected
    assert [row["step"] for row in expected] == [0, 1, 2, 3, 4]
    assert any(row.get("actor/grad_norm", 0) > 0 for row in expected)  # something was learned from
    if "ppo" in name:
        assert len({row["critic/kl_coeff"] for row in expected[1:]}) == 4  # the controller moves
        assert "actor/lr" not in expected[1]  # only the critic learns in the first step
        assert "actor/lr" in expected[2]
    # killed after step 2, in the middle of writing a line of step 3
    assert spaniel("train", name, *RECIPES[name], f"out={resumed}")[0] == 0
    for step in (3, 4):
        folder = resumed / "checkpoints" / f"step-{step:06d}"
        folder.rename(resumed / f"gone-{step}")
    lines = (resumed / "metrics.jsonl").read_text().splitlines()
    (resumed / "metrics.jsonl").write_text("\n".join([*lines[:3], lines[3][:40]]))
    code, text, err = spaniel("train", name, *RECIPES[name], f"out={resumed}", "--resume")
    assert code == 0, err
    assert "resuming at step 2" in text
    assert metrics(resumed) == expected
    for kind in ("policy", "critic") if "ppo" in name else ("policy",):
        assert equal(weights(resumed, 4, kind), weights(whole, 4, kind))
        assert equal(weights(again, 4, kind), weights(whole, 4, kind))
        assert not equal(weights(whole, 4, kind), weights(whole, 1, kind))


def test_the_folder_of_a_run(spaniel: Callable[..., Any], tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    out = tmp_path / "run"
    assert spaniel("train", "search_tiny_grpo", *SMALL, f"out={out}")[0] == 0
    assert {p.name for p in out.iterdir()} == {"recipe.yaml", "metrics.jsonl", "rollouts", "checkpoints", ".lock"}
    assert (out / "checkpoints" / "latest").read_text() == "step-000004\n"
    names = {p.name for p in (out / "rollouts").iterdir()}
    assert names == {f"{kind}-{step:06d}.jsonl" for kind, step in
                     [("train", 1), ("validation", 0), ("validation", 2), ("validation", 4)]}  # fmt: skip
    row = json.loads((out / "rollouts" / "train-000001.jsonl").read_text().splitlines()[0])
    assert row["spans"][0]["by"] == "world"
    assert row["spans"][1]["by"] == "policy"
    assert row["stop"] in {"answered", "max_turns", "out_of_length"}
    folder = out / "checkpoints" / "step-000004" / "policy"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    ids = tokenizer("Which city does ICN airport serve?", return_tensors="pt")
    assert model(input_ids=ids["input_ids"]).logits.shape[-1] == len(tokenizer)
    last = metrics(out)[-1]
    for key in ("env/number_of_valid_search", "env/ratio_of_valid_action", "val/searches_per_question", "critic/kl",
                "val/test_score/airports_1hop", "actor/lr", "response_length/clip_ratio"):  # fmt: skip
        assert key in last
    assert not list(out.rglob("*.part"))


def test_a_folder_that_holds_a_run_is_refused_and_resume_starts_where_nothing_is(
    spaniel: Callable[..., Any], tmp_path: Path
) -> None:
    out = tmp_path / "run"
    run = ["train", "search_tiny_grpo", *SMALL, "steps=1", f"out={out}"]
    code, text, _ = spaniel(*run, "--resume")
    assert code == 0
    assert "starting" in text
    before = (out / "metrics.jsonl").read_bytes()
    code, _, err = spaniel(*run)
    assert code == 2
    assert "holds a run already; add --resume" in err
    code, _, err = spaniel(*run, "--resume", "seed=9")
    assert code == 2
    assert "started with seed = 1, now it is 9" in err
    assert (out / "metrics.jsonl").read_bytes() == before
    # finished: nothing to do, the same last line
    code, text, _ = spaniel(*run, "--resume")
    assert code == 0
    assert text.splitlines()[-1].startswith("exact match before=")
    # and longer is allowed
    assert spaniel(*run, "--resume", "steps=2")[0] == 0
    assert [row["step"] for row in metrics(out)] == [0, 1, 2]


def test_two_runs_never_write_in_one_folder(spaniel: Callable[..., Any], tmp_path: Path) -> None:
    from spaniel.errors import BadInput
    from spaniel.train.run_folder import RunFolder

    held = RunFolder.open(str(tmp_path / "run"), "a: 1\n", resume=False)
    with pytest.raises(BadInput, match="another run is writing here"):
        RunFolder.open(str(tmp_path / "run"), "a: 1\n", resume=True)
    held.close()
    RunFolder.open(str(tmp_path / "run"), "a: 1\n", resume=True).close()


def test_supervised_learning_resumes_and_its_result_is_a_policy(spaniel: Callable[..., Any], tmp_path: Path) -> None:
    demos = tmp_path / "demos.jsonl"
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"q{i}"},
                {"role": "assistant", "content": f"<answer> a{i} </answer>"},
            ]
        }
        for i in range(12)
    ]
    demos.write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "corpus.jsonl").write_text(json.dumps({"id": 1, "contents": "T\nq1 a1"}))
    (tmp_path / "r.yaml").write_text(
        "kind: sft\nout: x\nsteps: 6\nsave_every: 2\neval_every: 3\ntrack: [jsonl]\n"
        "model:\n  new: {hidden_size: 16, intermediate_size: 16, layers: 1, heads: 2, kv_heads: 1, context: 64}\n"
        "  tokenizer: {corpus: corpus.jsonl, vocab_size: 300}\n"
        "data: {train: demos.jsonl, validation: demos.jsonl, batch_size: 4, max_length: 60}\n"
        "policy: {optim: {lr: 0.01}}\n"
    )
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    recipe = str(tmp_path / "r.yaml")
    for out in (whole, resumed):
        assert spaniel("sft", recipe, f"out={out}")[0] == 0
    for step in (6, 4):
        (resumed / "checkpoints" / f"step-{step:06d}").rename(resumed / f"gone-{step}")
    code, text, err = spaniel("sft", recipe, f"out={resumed}", "--resume")
    assert code == 0, err
    assert "resuming at step 2" in text
    assert metrics(resumed) == metrics(whole)
    assert equal(weights(whole, 6), weights(resumed, 6))
    rows = metrics(whole)
    assert rows[-1]["sft/nll"] < rows[0]["sft/nll"]
    assert rows[2]["val/nll"] > rows[5]["val/nll"]
    code, _, err = spaniel("train", recipe)
    assert code == 2
    assert "use `spaniel sft" in err


def test_a_truncated_sampling_distribution_and_a_missing_validation_are_warned_of(
    spaniel: Callable[..., Any], tmp_path: Path
) -> None:
    small = [*SMALL, "steps=1", "sampling.top_p=0.95", "data.validation=[]", f"out={tmp_path / 'run'}"]
    code, text, err = spaniel("train", "search_tiny_grpo", *small)
    assert code == 0, err
    assert "warning: sampling.top_p 0.95" in text
    assert "warning: data.validation is empty" in text
    assert "exact match before" not in text


def test_when_validation_and_saving_are_due() -> None:
    at = due(2, 3, 7)
    assert [at(step) for step in range(1, 8)] == [
        (False, False), (True, False), (False, True), (True, False), (False, False), (True, True), (True, True),
    ]  # fmt: skip
    assert [due(0, 0, 2)(step) for step in (1, 2)] == [(False, False), (True, True)]
