"""Recipes: what is refused, how it is said, and that what is read comes back."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from spaniel.algo.grpo import GRPO
from spaniel.algo.ppo import PPO
from spaniel.config import dump, known_recipes, load_recipe
from spaniel.errors import BadInput
from spaniel.recipe import RLRecipe, SFTRecipe
from spaniel.recipe_reward import RewardRecipe
from spaniel.rewards.rules import ExactMatch
from spaniel.rewards.sections import Function, Judge, Sum, Weighted

RECIPE = {
    "out": "runs/x",
    "steps": 3,
    "model": {"path": "model"},
    "data": {"train": "train.jsonl", "validation": ["a.jsonl", "b.jsonl"]},
    "env": {"name": "search", "topk": 2},
    "retriever": {"name": "bm25", "corpus": "corpus.jsonl"},
    "reward": "exact_match",
    "algorithm": {"name": "grpo", "group_size": 4},
}


def write(folder: Path, recipe: object) -> str:
    path = folder / "r.yaml"
    path.write_text(recipe if isinstance(recipe, str) else yaml.safe_dump(recipe), encoding="utf-8")
    return str(path)


def test_sections_defaults_and_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = load_recipe(write(tmp_path, RECIPE))
    assert isinstance(recipe, RLRecipe)
    assert isinstance(recipe.algorithm, GRPO)
    assert recipe.algorithm.group_size == 4
    assert recipe.model.path == str(tmp_path / "model")  # relative to the recipe
    assert recipe.data.validation == (str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl"))
    assert recipe.out == "runs/x"  # relative to where the command is given
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    recipe = load_recipe(str(tmp_path / "r.yaml"), ["model.path=mine", "data.train=[t.jsonl]", "seed=7"])
    assert recipe.model.path == str(tmp_path / "here" / "mine")
    assert recipe.data.train == (str(tmp_path / "here" / "t.jsonl"),)
    assert recipe.seed == 7


def test_overrides_change_sections_and_short_forms(tmp_path: Path) -> None:
    name = write(tmp_path, RECIPE)
    recipe = load_recipe(name, ["algorithm=ppo", "critic.optim.lr=1e-3", "reward.format_score=0.25", "threads=2"])
    assert isinstance(recipe, RLRecipe)
    assert isinstance(recipe.algorithm, PPO)
    assert recipe.critic is not None
    assert recipe.critic.optim.lr == 1e-3  # YAML alone reads 1e-3 as text
    assert recipe.reward.format_score == 0.25  # type: ignore[union-attr]


def test_what_is_dumped_reads_back_to_the_same(tmp_path: Path) -> None:
    recipe = load_recipe(write(tmp_path, RECIPE), ["algorithm.kl.place=reward", "algorithm.kl.beta=0.1"])
    again = tmp_path / "again"
    again.mkdir()
    assert load_recipe(write(again, dump(recipe))) == recipe


@pytest.mark.parametrize("name", known_recipes([Path("recipes")]))
def test_every_recipe_of_the_project_is_valid_and_has_the_common_keys(name: str) -> None:
    recipe = load_recipe(name)
    assert load_recipe(name) == recipe
    assert isinstance(recipe, RLRecipe | SFTRecipe | RewardRecipe)
    for key in ("out", "seed", "steps", "eval_every", "save_every"):
        assert hasattr(recipe, key)


BAD: list[tuple[list[str], str]] = [
    (["stepps=3"], r"unknown key stepps \(did you mean 'steps'\?\)"),
    (["algorithm.kl_coeff=0.1"], "unknown key algorithm.kl_coeff"),
    (["algorithm.cliplow=0.1"], r"algorithm.cliplow \(did you mean 'clip_low'\?\)"),
    (["policy.optim.learning_rate=1"], "unknown key policy.optim.learning_rate"),
    (["steps=many"], "steps: 'many'; expected a whole number"),
    (["steps=1.5"], r"steps: 1.5; expected a whole number"),
    (["steps=true"], "steps: True; expected a whole number"),
    (["seed=-1"], "seed: -1; expected 0 or more"),
    (["steps=0"], "steps: 0; expected 1 or more"),
    (["steps=null"], "steps: None; expected a whole number"),
    (["eval_every=-1"], "eval_every: -1; expected 0"),
    (["threads=0"], "threads: 0; expected 1 or more"),
    (["algorithm=grop"], r"'grop'; expected one of .*\(did you mean 'grpo'\?\)"),
    (["algorithm=3"], "algorithm: 3; expected a name"),
    (["algorithm.group_size=1"], "group_size is 1"),
    (["algorithm.kl.kind=k9"], "kl.kind"),
    (["reward=exactmatch"], "did you mean 'exact_match'"),
    (["env=single_turn"], "retriever: given, but env is single_turn"),
    (["retriever=null"], "retriever"),
    (["model=null"], "model: expected exactly one of path"),
    (["model=3"], "model: 3; expected a section"),
    (["data.batch_size=x"], "data.batch_size: 'x'; expected a whole number"),
    (["data.train=3"], "data.train: 3"),
    (["data.too_long=cut"], "data.too_long: 'cut'"),
    (["rollout.max_start_length=0"], "max_start_length: 0; expected a positive"),
    (["rollout.max_start_length=2000"], "max_start_length 2000 . max_response_length 64 exceed max_total_length 1024"),
    (["sampling.temperature=0"], "sampling.temperature: 0.0; expected > 0"),
    (["sampling.top_p=1.5"], "sampling.top_p: 1.5"),
    (["evaluation.samples=4"], "samples 4 at temperature 0"),
    (["policy.optim.lr=-1"], "optim.lr: -1.0; expected a number > 0"),
    (["policy.optim.warmup_steps=5", "policy.optim.warmup_ratio=0.5"], "expected one of them"),
    (["policy.learning.epochs=0"], "learning.epochs: 0; expected 1 or more"),
    (["critic.warmup_steps=1"], "critic: given, but the algorithm has no critic"),
    (["track=[wandb]"], "track"),
    (["track=[console]"], "expected jsonl among them"),
    (["max_failure_share=2"], "max_failure_share: 2.0; expected a number from 0 to 1"),
    (["kind=rll"], r"kind: 'rll'; expected one of .*\(did you mean 'rl'\?\)"),
    (["steps"], "override 'steps': expected key=value"),
    (["steps=["], "the value is not YAML"),
    (["steps.x=1"], "steps is int, not a section"),
]


@pytest.mark.parametrize(("overrides", "message"), BAD, ids=[" ".join(o) for o, _ in BAD])
def test_bad_values_name_key_value_and_expectation(tmp_path: Path, overrides: list[str], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        load_recipe(write(tmp_path, RECIPE), overrides)


def test_bad_files(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="file not found"):
        load_recipe(str(tmp_path / "none.yaml"))
    with pytest.raises(BadInput, match=r"did you mean 'search_tiny_grpo'"):
        load_recipe("search_tiny_gpro")
    with pytest.raises(BadInput, match="is list; expected a mapping"):
        load_recipe(write(tmp_path, "[1]"))
    with pytest.raises(BadInput, match="cannot be read as YAML"):
        load_recipe(write(tmp_path, "a: [1"))
    with pytest.raises(BadInput, match="key out is missing; expected text"):
        load_recipe(write(tmp_path, {k: v for k, v in RECIPE.items() if k != "out"}))
    (tmp_path / "r.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(BadInput, match="cannot be read"):
        load_recipe(str(tmp_path / "r.yaml"))


REWARD_RECIPE = {
    "kind": "reward",
    "out": "runs/rm",
    "steps": 3,
    "model": {"path": "model", "heads": 3, "combine": "min"},
    "data": {"train": "rankings.jsonl", "test": {"people": "p.parquet", "traps": ["a.jsonl", "b.jsonl"]}},
}


def test_a_reward_recipe_with_its_named_test_sets(tmp_path: Path) -> None:
    recipe = load_recipe(write(tmp_path, REWARD_RECIPE), ["loss.center=0.01", "data.test.more=here.jsonl"])
    assert isinstance(recipe, RewardRecipe)
    assert recipe.data.test == {
        "people": (str(tmp_path / "p.parquet"),),
        "traps": (str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")),
        "more": (str(Path("here.jsonl").resolve()),),
    }
    assert recipe.loss.center == 0.01
    again = tmp_path / "again"
    again.mkdir()
    assert load_recipe(write(again, dump(recipe))) == recipe


def test_a_composite_reward_nests_sections(tmp_path: Path) -> None:
    parts = {"judge": {"reward": {"name": "model", "path": "rm"}, "weight": 2},
             "rule": {"reward": "exact_match"}}  # fmt: skip
    both = {**RECIPE, "reward": {"name": "sum", "parts": parts}, "gold": {"name": "function", "file": "gold.py"}}
    recipe = load_recipe(write(tmp_path, both), ["reward.parts.rule.weight=0.5"])
    assert isinstance(recipe, RLRecipe)
    assert recipe.reward == Sum(
        {"judge": Weighted(Judge((str(tmp_path / "rm"),)), 2.0), "rule": Weighted(ExactMatch(), 0.5)}
    )
    assert recipe.gold == Function(str(tmp_path / "gold.py"))
    again = tmp_path / "again"
    again.mkdir()
    assert load_recipe(write(again, dump(recipe))) == recipe


BAD_REWARD: list[tuple[list[str], str]] = [
    (["loss.name=bradly_terry"], "loss.name: 'bradly_terry'"),
    (["loss.label_smoothing=0.5"], "label_smoothing: 0.5; expected a number from 0 to below 0.5"),
    (["loss.name=plackett_luce", "loss.average=pair"], "not read by plackett_luce"),
    (["model.heads=0"], "model.heads: 0; expected 1 or more"),
    (["model.heads=1"], "with one head; expected heads above 1"),
    (["model.combine=median"], "model.combine: 'median'"),
    (["model.subsample=0"], "model.subsample: 0"),
    (["data.held_out=1"], r"data.held_out: 1.0; expected a number from 0 to below 1"),
    (["data.max_length=1"], "data.max_length: 1; expected 2"),
    (["data.test=3"], "data.test: 3; expected"),
    (["data.test.people=3"], "data.test.people: 3"),
    (["normalise.to=zero"], "normalise.to: 'zero'"),
    (["normalise.responses=1"], "normalise.responses: 1"),
    (["micro_tokens=0"], "micro_tokens: 0"),
    (["algorithm=ppo"], "unknown key algorithm"),
]


@pytest.mark.parametrize(("overrides", "message"), BAD_REWARD, ids=[" ".join(o) for o, _ in BAD_REWARD])
def test_bad_values_of_a_reward_recipe(tmp_path: Path, overrides: list[str], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        load_recipe(write(tmp_path, REWARD_RECIPE), overrides)


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        ({"name": "sum", "parts": {}}, "reward.parts: empty"),
        ({"name": "sum", "parts": {"a": {"reward": "f2"}}}, r"reward.parts.a.reward.name: 'f2'; expected .*model, sum"),
        ({"name": "sum", "parts": {"a": {"wait": 1, "reward": "f1"}}}, r"reward.parts.a.wait \(did you mean 'weight'"),
        ({"name": "model"}, "reward.path"),
        ({"name": "model", "path": "m", "combine": "max"}, "reward.combine: 'max'"),
        ({"name": "model", "path": "m", "micro_tokens": 0}, "reward.micro_tokens: 0"),
        ({"name": "function"}, "reward.file"),
    ],
)
def test_bad_reward_sections(tmp_path: Path, reward: dict, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        load_recipe(write(tmp_path, {**RECIPE, "reward": reward}))
