"""The summaries' recipe: what is shipped, how it was made, and the plain features it must beat."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch

from spaniel.data.tokenizer import train_tokenizer
from spaniel.models.hf import TinyLlama, new_llama, save_model
from tests.e2e.conftest import command

DATA = Path("recipes/summary_reward_model/data")
Script = Callable[[str], ModuleType]


def rows(name: str) -> list[dict[str, Any]]:
    return pq.read_table(DATA / f"{name}.parquet").to_pylist()


def test_what_is_shipped() -> None:
    summaries, pandalm, llmbar = rows("summaries"), rows("pandalm"), rows("llmbar")
    assert (len(summaries), len(pandalm), len(llmbar)) == (503, 836, 419)
    assert all(len(row["responses"]) == len(row["scores"]) >= 2 for row in summaries)
    assert all(text.strip() for row in summaries for text in row["responses"])
    assert {round(row["ceiling"] * 3) for row in pandalm} == {2, 3}
    assert all(sorted(row["ranking"]) == [0, 1] for row in pandalm + llmbar)
    assert Counter(row["data_source"] for row in llmbar) == {
        "Natural": 100, "Adversarial-Neighbor": 134, "Adversarial-GPTInst": 92, "Adversarial-GPTOut": 47,
        "Adversarial-Manual": 46,
    }  # fmt: skip
    assert "MIT License" in (DATA.parent / "NOTICE.txt").read_text()


def test_what_the_published_files_become(script: Script) -> None:
    make_data = script("summary_reward_model/make_data.py")
    entry = [{"sys_summ": text, "scores": {"overall": score}} for text, score in (("a", 0.5), (" ", 1), ("b", "1.5"))]
    assert make_data.summaries({"x": entry, "y": entry[:2]}) == [
        {"id": "x", "responses": ["a", "b"], "scores": [0.5, 1.5]}
    ]
    votes = [(2, 2, 1), (0, 0, 1), (1, 1, 1), (1, 2, 0)]
    pairs = [
        {"idx": n, "response1": "a", "response2": "b", "annotator1": v[0], "annotator2": v[1], "annotator3": v[2]}
        for n, v in enumerate(votes)
    ] + [{"idx": 9, "response1": "a", "response2": "a", "annotator1": 1, "annotator2": 1, "annotator3": 1}]
    made = make_data.pandalm(pairs)
    assert [(row["id"], row["ranking"]) for row in made] == [("pandalm-0", [1, 0]), ("pandalm-2", [0, 1])]
    assert [row["ceiling"] for row in made] == pytest.approx([2 / 3, 1])
    assert make_data.llmbar("Natural", [{"output_1": "a", "output_2": "b", "label": 2}])[0]["ranking"] == [1, 0]


def test_plain_features_learn_what_plain_words_say(script: Script) -> None:
    baselines = script("summary_reward_model/baselines.py")
    texts = [f"{word} {filler}" for filler in ("one", "two", "three", "four") for word in ("good", "bad")]
    plain = baselines.PlainFeatures(texts)
    numbers, ranks = torch.arange(4).repeat_interleave(2), torch.tensor([0, 1] * 4)
    weights = baselines.fit(plain(texts), numbers, ranks)
    seen, other = plain(["good five", "bad five"]), plain(["bad six", "good six"])
    assert (seen @ weights)[0] > (seen @ weights)[1]
    assert (other @ weights)[0] < (other @ weights)[1]


def test_at_its_minimum_the_gradient_of_the_plain_model_is_none(script: Script) -> None:
    """Against the derivative in float64, written out here."""
    baselines = script("summary_reward_model/baselines.py")
    generator = torch.Generator().manual_seed(0)
    features, ranks = torch.randn(40, 5, generator=generator), torch.tensor([0, 1] * 20)
    weights = baselines.fit(features, torch.arange(20).repeat_interleave(2), ranks, ridge=0.1).double()
    difference = (features[0::2] - features[1::2]).double()
    gradient = -(torch.sigmoid(-difference @ weights)[:, None] * difference).mean(dim=0) + 2 * 0.1 * weights
    assert gradient.abs().max().item() < 1e-3


def test_the_recipe_and_its_baselines_run_on_any_backbone(
    script: Script, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a tiny network in the place of SmolLM2."""
    template = train_tokenizer([text for row in rows("summaries")[:50] for text in row["responses"]], 300)
    shape = TinyLlama(hidden_size=16, intermediate_size=32, layers=2, heads=2, kv_heads=2, context=512)
    network = new_llama(
        shape, vocab_size=len(template.tokenizer), eos_id=template.eos_id, pad_id=template.pad_id, seed=1
    )
    save_model(network, tmp_path / "backbone")
    template.save(tmp_path / "backbone")
    out = tmp_path / "run"
    words = [f"out={out}", f"model.path={tmp_path}/backbone", "model.layers=1", "steps=2", "threads=1", "data.test={}"]
    assert command("reward", "summary_reward_model", *words, "track=[jsonl]") == 0
    evaluation = json.loads((out / "evaluation.json").read_text())["validation"]
    assert 0 < evaluation["test/accuracy"] < 1
    assert evaluation["test/rankings"] == 100
    capsys.readouterr()
    script("summary_reward_model/baselines.py").main(out)
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("held out: TF-IDF + length accuracy 0.598 +- 0.046"), "as the recipe's README says"
    assert " ".join(said[1].split()).startswith("held out: longer wins accuracy 0.535 +- 0.050")
