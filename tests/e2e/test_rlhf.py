"""From rankings to a policy by the commands, small: start, samples, reward model, PPO with it, best-of-n, report."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from spaniel.track.names import unknown
from tests.e2e.conftest import command, metrics, weights

DIGITS = Path("recipes/rlhf_digits").resolve()
SMALL_RM = ["steps=6", "eval_every=3", "save_every=2", "data.batch_size=8", "track=[jsonl]"]
SMALL_PPO = ["steps=3", "eval_every=3", "save_every=1", "data.batch_size=8", "data.val_data_num=8", "track=[jsonl]",
             "policy.learning.minibatch_rows=16", "critic.learning.minibatch_rows=16",
             "critic.warmup_steps=1"]  # fmt: skip


class Lab:
    """A folder with data, start, rankings and a reward model, and the words that point a recipe at them."""

    def __init__(self, folder: Path) -> None:
        self.folder, data = folder, folder / "data"
        run(DIGITS / "make_data.py", data)
        sft = [f"data.train={data}/demonstrations.jsonl", f"data.validation={data}/held_out.jsonl"]
        assert command("sft", "rlhf_digits_sft", f"out={folder}/sft", "steps=20", "eval_every=0", *sft) == 0
        self.start = folder / "sft/checkpoints/step-000020/policy"
        self.policy = [f"model.path={self.start}", f"data.train={data}/train.jsonl",
                       f"data.validation={data}/validation.jsonl"]  # fmt: skip
        samples = folder / "samples.jsonl"
        assert command("sample", "rlhf_digits", str(samples), *self.policy, "--n=4", "--limit=40") == 0
        self.samples = [json.loads(line) for line in samples.read_text().splitlines()]
        run(DIGITS / "label.py", samples, folder / "rankings.jsonl")
        self.rankings = [f"model.path={self.start}", f"data.train={folder}/rankings.jsonl"]
        assert command("reward", "rlhf_digits_reward", f"out={folder}/reward", *self.rankings, *SMALL_RM) == 0
        self.reward_model = folder / "reward/checkpoints/step-000006/reward_model"
        self.judged = [*self.policy, f"reward.path={self.reward_model}", f"critic.path={self.reward_model}"]


def run(*words: str | Path) -> None:
    subprocess.run([sys.executable, *map(str, words)], check=True, capture_output=True)


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    return Lab(tmp_path_factory.mktemp("lab"))


def test_samples_are_what_people_rank(lab: Lab) -> None:
    assert len(lab.samples) == 40
    assert all(len(row["responses"]) == 4 and row["prompt"][-1]["role"] == "user" for row in lab.samples)


def test_a_reward_model_is_a_folder_of_transformers_with_its_evaluation(lab: Lab) -> None:
    assert AutoModelForSequenceClassification.from_pretrained(lab.reward_model).config.num_labels == 1
    assert AutoTokenizer.from_pretrained(lab.reward_model) is not None
    evaluation = json.loads((lab.folder / "reward/evaluation.json").read_text())
    assert 0 <= evaluation["validation"]["test/accuracy"] <= 1
    rows = metrics(lab.folder / "reward")
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4, 5, 6]
    named = {name for row in rows for name in row}
    assert "val/ceiling" in named
    assert unknown(named) == []


def test_a_reward_model_that_was_stopped_goes_on_as_if_it_was_not(lab: Lab) -> None:
    out = lab.folder / "stopped"
    assert command("reward", "rlhf_digits_reward", f"out={out}", *lab.rankings, *SMALL_RM[1:], "steps=6") == 0
    again = lab.folder / "again"
    shutil.copytree(out, again)
    for step in (4, 6):
        shutil.rmtree(again / f"checkpoints/step-{step:06d}")
    (again / "checkpoints/latest").write_text("step-000002")
    recipe = (again / "recipe.yaml").read_text().replace(str(out), str(again))
    (again / "recipe.yaml").write_text(recipe)
    assert command("reward", str(again / "recipe.yaml"), "--resume") == 0
    assert metrics(again) == metrics(out)
    one, other = (weights(folder, 6, "reward_model") for folder in (out, again))
    assert one.keys() == other.keys()
    assert all(bool((one[name] == other[name]).all()) for name in one)


def test_ppo_on_the_reward_model_and_its_report(lab: Lab, spaniel: Callable[..., Any]) -> None:
    out, best = lab.folder / "ppo", lab.folder / "best.json"
    code, said, err = spaniel("train", "rlhf_digits", f"out={out}", *lab.judged, *SMALL_PPO)
    assert code == 0, err
    assert re.fullmatch(r"score before=-?\d\.\d{3} after=-?\d\.\d{3}; gold score before=.+ after=.+",
                        said.splitlines()[-1])  # fmt: skip
    rows = [row for row in metrics(out) if "reward/gold" in row]
    assert len(rows) == 3
    assert all({"critic/score/mean", "critic/kl", "reward/gold/correct"} <= row.keys() for row in rows)
    code, said, err = spaniel("best-of-n", "rlhf_digits", *lab.judged, "--n=4", "--limit=8", f"--out={best}")
    assert code == 0, err
    table = json.loads(best.read_text())
    assert "gold" in json.dumps(table)
    code, said, err = spaniel("report", str(out), f"--best-of-n={best}")
    assert code == 0, err
    assert {path.name for path in (out / "report").iterdir()} >= {
        "over_optimisation.md", "over_optimisation.json", "over_optimisation.svg"
    }  # fmt: skip


@pytest.mark.parametrize("ptx", [False, True])
def test_ptx_changes_what_is_learned_and_not_what_is_asked(lab: Lab, ptx: bool) -> None:
    out = lab.folder / f"ptx-{ptx}"
    more = [f"ptx.data={lab.folder}/data/true_sums.jsonl", "ptx.batch_size=8"] if ptx else []
    assert command("train", "rlhf_digits", f"out={out}", *lab.judged, *SMALL_PPO, *more) == 0
    first = metrics(out)[1 if "reward/gold" not in metrics(out)[0] else 0]
    other = lab.folder / f"ptx-{not ptx}"
    if other.exists():
        theirs = metrics(other)[1 if "reward/gold" not in metrics(other)[0] else 0]
        assert first["critic/score/mean"] == theirs["critic/score/mean"], "the first rollouts are the same"
        assert any((weights(out, 3)[name] != weights(other, 3)[name]).any() for name in weights(out, 3))


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"prompt": "1+1=", "responses": ["2"], "ranking": [0]}, "2"),
        ({"prompt": "1+1=", "responses": ["2", "3"], "ranking": [0, 2]}, "ranking"),
        ({"prompt": "1+1=", "responses": ["2", ""], "ranking": [0, 1]}, "empty"),
        ({"prompt": "1+1=", "chosen": "2", "rejected": "3", "margin": "NaN"}, "margin"),
    ],
)
def test_bad_rankings_are_named_before_anything_is_trained(
    lab: Lab, spaniel: Callable[..., Any], tmp_path: Path, row: dict[str, Any], says: str
) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(json.dumps(row) + "\n")
    out = tmp_path / "run"
    words = [f"model.path={lab.start}", f"data.train={path}", "data.held_out=0"]
    code, _, err = spaniel("reward", "rlhf_digits_reward", f"out={out}", *words)
    assert code == 2, err
    assert "bad.jsonl" in err
    assert says in err
    assert not out.exists()
