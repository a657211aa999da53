"""Reward sections of a recipe -> rewards; the recipe of a reward model -> the parts of its run."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from spaniel.data.preferences import LoadedRankings, Rendered, load_rankings, split_by_prompt
from spaniel.data.prompts import PromptStream
from spaniel.data.template import Template, load_template
from spaniel.errors import BadInput
from spaniel.models.hf import context_length
from spaniel.models.reward import RewardModel, load_reward_model, new_reward_model, save_reward_model
from spaniel.recipe_reward import RewardRecipe
from spaniel.rewards.base import Reward
from spaniel.rewards.model import Judging, Measured, ModelReward
from spaniel.rewards.rules import Composite, FunctionReward, Guarded
from spaniel.rewards.sections import AnyReward, Function, Judge, Sum
from spaniel.train.reward_model import Training, reference_sample
from spaniel.workers.checkpoint import load_optimizer, save_learner
from spaniel.workers.scoring import RewardLearner, scores


def open_reward(spec: AnyReward, gold: AnyReward | None = None) -> Reward:
    """The reward of a recipe, behind its boundary, with the gold scorer beside it where there is one."""
    reward: Reward = Guarded(_open(spec))
    return reward if gold is None else Measured(reward, Guarded(_open(gold)))


def _open(spec: AnyReward) -> Reward:
    if isinstance(spec, Judge):
        models = tuple(open_judge(path, spec.micro_tokens) for path in spec.path)
        return ModelReward(models, spec.combine, spec.k, spec.missing_eos_penalty)
    if isinstance(spec, Function):
        return FunctionReward(_function(spec), spec.function)
    if isinstance(spec, Sum):
        return Composite(tuple((name, part.weight, _open(part.reward)) for name, part in spec.parts.items()))
    return spec


def open_judge(folder: str | Path, micro_tokens: int = 16_384) -> Judging:
    """A trained reward model with its own tokenizer, ready to score."""
    model = load_reward_model(folder)
    return Judging(load_template(folder), partial(_score, model, micro_tokens), context_length(model.network))


def _score(model: RewardModel, micro_tokens: int, sequences: Sequence[Sequence[int]]) -> Tensor:
    return model.combined(scores(model, sequences, micro_tokens))


def _function(spec: Function) -> Callable[..., float]:
    """The function that a recipe names, from the user's own file."""
    path = Path(spec.file)
    if not path.is_file():
        raise BadInput(f"reward.file: {path}: file not found; expected a Python file with a function {spec.function}")
    found: Any = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(found)
    try:
        found.loader.exec_module(module)
    except Exception as error:  # whatever the user's file does at import
        raise BadInput(f"reward.file: {path}: cannot be imported: {type(error).__name__}: {error}") from error
    function = getattr(module, spec.function, None)
    if not callable(function):
        raise BadInput(f"reward.function: {spec.function!r}: {path} has no such function")
    return function


@dataclass(frozen=True)
class RewardRun:
    """A recipe made real."""

    recipe: RewardRecipe
    template: Template
    training: Training
    loaded: LoadedRankings
    validation: list[Rendered]
    tests: dict[str, LoadedRankings]
    reference: list[tuple[int, ...]]

    @property
    def learner(self) -> RewardLearner:
        return self.training.learner

    def normalise(self) -> None:
        """Set the model's offset (and scale) by the reference responses, with the weights that it has now."""
        if self.recipe.normalise.to != "none":
            raw = self.learner.scores(self.reference)
            self.learner.model.normalise_on(raw, scale=self.recipe.normalise.to == "offset_and_scale")

    def write(self, folder: Path) -> None:
        """The model with its tokenizer, and the optimizer, into a checkpoint folder."""
        template = self.template
        pad_id = None if template.pad_id in template.eos_ids else template.pad_id

        def write_model(model: torch.nn.Module, into: Path) -> None:
            save_reward_model(model, into, pad_id=pad_id)
            template.save(into)

        self.normalise()
        save_learner(self.learner, folder, "reward_model", write_model)


def build_reward(recipe: RewardRecipe, checkpoint: Path | None = None) -> RewardRun:
    """Open everything the recipe names; continue from `checkpoint` where one is given."""
    torch.set_num_threads(recipe.threads)
    spec, data = recipe.model, recipe.data
    template = load_template(spec.path)
    if checkpoint:
        model = load_reward_model(checkpoint / "reward_model")
    else:
        model = new_reward_model(
            spec.path, heads=spec.heads, seed=recipe.seed, layers=spec.layers, combine=spec.combine, k=spec.k
        )
    context = context_length(model.network)
    if context is not None and data.max_length > context:
        raise BadInput(f"data.max_length: {data.max_length}; expected at most {context}, the model's context")
    load = partial(
        load_rankings, template=template, max_length=data.max_length, too_long=data.too_long, bad_rows=data.bad_rows
    )
    loaded = load(data.train)
    train, held_out = list(loaded.items), []
    if data.validation:
        held_out = list(load(data.validation).items)
    elif data.held_out:
        train, held_out = split_by_prompt(loaded.items, data.held_out, recipe.seed)
    learner = RewardLearner(model, recipe.optim, recipe.micro_tokens, recipe.steps, frozen=spec.freeze)
    if checkpoint:
        load_optimizer(learner, checkpoint, "reward_model")
    stream = PromptStream(train, data.batch_size, recipe.seed, shuffle=True, drop_last=True)
    return RewardRun(
        recipe,
        template,
        Training(learner, stream, recipe.loss, template.pad_id, recipe.seed, spec.subsample),
        loaded,
        held_out,
        {name: load(paths) for name, paths in data.test.items()},
        _reference(recipe, template, train),
    )


def _reference(recipe: RewardRecipe, template: Template, train: Sequence[Rendered]) -> list[tuple[int, ...]]:
    how = recipe.normalise
    if not how.reference:
        return reference_sample(train, how.responses, recipe.seed)
    given = load_rankings(how.reference, template, recipe.data.max_length, too_long="skip", keep_ties=True)
    return reference_sample(given.items, how.responses, recipe.seed)
