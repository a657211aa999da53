"""A supervised recipe -> the parts of a run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from spaniel.cluster.local import LocalGroup
from spaniel.data.demonstrations import demonstrated_texts, load_demonstrations
from spaniel.data.prompts import PromptStream
from spaniel.data.template import Template, load_template
from spaniel.data.tokenizer import NewTokenizer, character_tokenizer, train_tokenizer
from spaniel.errors import BadInput
from spaniel.launch import policy_writer
from spaniel.models.hf import context_length, load_causal_lm, new_llama
from spaniel.recipe import SFTRecipe
from spaniel.retrieval.corpus import read_corpus
from spaniel.types import Rollout
from spaniel.workers.checkpoint import load_optimizer, save_learner
from spaniel.workers.learner import Learner, policy_outputs_at


@dataclass(frozen=True)
class SFTRun:
    """A supervised recipe made real."""

    recipe: SFTRecipe
    template: Template
    policy: LocalGroup
    stream: PromptStream[Rollout]
    validation: list[Rollout]

    def write(self, folder: Path) -> None:
        """Weights and optimizer into a checkpoint folder."""
        self.policy.broadcast(save_learner, folder, "policy", policy_writer(self.template))


def build_sft(recipe: SFTRecipe, checkpoint: Path | None = None) -> SFTRun:
    """Open everything a supervised recipe names; train its tokenizer where the network is new."""
    torch.set_num_threads(recipe.threads)
    model, template = _start(recipe, checkpoint / "policy" if checkpoint else None)
    data = recipe.data
    context = context_length(model)
    if context is not None and data.max_length > context:
        raise BadInput(f"data.max_length: {data.max_length}; expected at most {context}, the model's context")
    every = data.loss_on == "all"
    train = load_demonstrations(data.train, template, data.max_length, every_token=every)
    validation = load_demonstrations(data.validation, template, data.max_length)
    stream = PromptStream(train, data.batch_size, recipe.seed, shuffle=True, drop_last=True)
    total = recipe.steps * recipe.policy.learning.updates(data.batch_size)
    outputs = policy_outputs_at(1.0, entropy=False)
    learner = Learner(
        model, outputs, recipe.policy.optim, recipe.policy.learning, total_updates=total, seed=recipe.seed
    )
    if checkpoint:
        load_optimizer(learner, checkpoint, "policy")
    return SFTRun(recipe, template, LocalGroup(learner), stream, validation)


def _start(recipe: SFTRecipe, folder: Path | None) -> tuple[nn.Module, Template]:
    path = folder or recipe.model.path
    if path is not None:
        return load_causal_lm(path), load_template(path)
    new, tokenizer = recipe.model.new, recipe.model.tokenizer
    assert new is not None
    assert tokenizer is not None
    if tokenizer.characters:
        template = character_tokenizer(tokenizer.characters)
    else:
        template = _trained_tokenizer(recipe, tokenizer)
    model = new_llama(new, vocab_size=len(template), eos_id=template.eos_id, pad_id=template.pad_id, seed=recipe.seed)
    return model, template


def _trained_tokenizer(recipe: SFTRecipe, tokenizer: NewTokenizer) -> Template:
    """A BPE of all that the network will read and write."""
    assert tokenizer.corpus is not None
    passages = [passage.contents for passage in read_corpus(tokenizer.corpus)]
    shown = demonstrated_texts(recipe.data.train, at_most=len(passages))
    return train_tokenizer([*passages, *shown], tokenizer.vocab_size)
