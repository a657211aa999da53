"""A recipe -> the parts of a run. Building is checking: whatever a recipe names is opened here, before any work."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from spaniel.cluster.local import LocalGroup
from spaniel.data.collate import collate
from spaniel.data.demonstrations import load_demonstrations
from spaniel.data.prompts import LoadedPrompts, PromptStream, load_prompts
from spaniel.data.template import Template, load_template
from spaniel.envs.base import Env
from spaniel.envs.search import CORRECTION, SearchEnv
from spaniel.envs.single_turn import SingleTurnEnv
from spaniel.errors import BadInput
from spaniel.launch_reward import open_reward
from spaniel.models.heads import load_value_model, new_value_model, save_value_model
from spaniel.models.hf import context_length, load_causal_lm, load_config, save_model, vocabulary
from spaniel.recipe import BM25Retriever, NoRetriever, RemoteRetriever, RLRecipe, Search
from spaniel.retrieval.base import Retriever
from spaniel.retrieval.bm25 import BM25
from spaniel.retrieval.corpus import read_corpus
from spaniel.retrieval.nothing import NothingRetriever
from spaniel.rewards.base import Reward, Transcript
from spaniel.rollout.torch_sampler import TorchSampler
from spaniel.train.rl import Parts
from spaniel.train.sft import nll
from spaniel.types import Failure, Prompt, Score
from spaniel.workers.checkpoint import load_optimizer, save_learner
from spaniel.workers.frozen import Frozen
from spaniel.workers.learner import Beside, Learner, policy_outputs_at, value_forward


@dataclass(frozen=True)
class Agent:
    """What answers questions: enough for evaluation and chat."""

    model: nn.Module
    template: Template
    env: Env
    sampler: TorchSampler
    reward: Reward


def open_retriever(spec: BM25Retriever | RemoteRetriever | NoRetriever) -> Retriever:
    """The retriever of a recipe; a remote one is asked for its health first."""
    if isinstance(spec, NoRetriever):
        return NothingRetriever()
    if isinstance(spec, RemoteRetriever):
        from spaniel.retrieval.client import HttpRetriever

        remote = HttpRetriever(
            spec.url,
            timeout_s=spec.timeout_s,
            tries=spec.tries,
            concurrency=spec.concurrency,
            batch_size=spec.batch_size,
            cache_size=spec.cache_size,
        )
        remote.health()
        return remote
    if spec.index is not None:
        BM25.build(spec.corpus, spec.index)
        return BM25.open(spec.index)
    return BM25.from_passages(list(read_corpus(spec.corpus)))


def open_env(recipe: RLRecipe) -> Env:
    """The environment of a recipe, with its retriever."""
    if not isinstance(recipe.env, Search):
        return SingleTurnEnv()
    assert recipe.retriever is not None
    return SearchEnv(
        open_retriever(recipe.retriever),
        topk=recipe.env.topk,
        max_turns=recipe.env.max_turns,
        on_retriever_failure=recipe.env.on_retriever_failure,
    )


def open_agent(recipe: RLRecipe, folder: str | Path | None = None, *, judged: bool = True) -> Agent:
    """Model (from `folder`, or the recipe's start), template, environment, sampler and (if `judged`) reward."""
    path = folder or recipe.model.path
    if path is None:
        raise BadInput("model.path: missing; expected the Hugging Face folder of the policy to start from")
    template = load_template(path)
    if isinstance(recipe.env, Search) and len(template.encode(CORRECTION)) > recipe.rollout.max_obs_length:
        raise BadInput(
            f"rollout.max_obs_length: {recipe.rollout.max_obs_length}; expected at least "
            f"{len(template.encode(CORRECTION))}, the tokens of the reply that corrects an invalid action"
        )
    model = load_causal_lm(path)
    check_lengths(recipe, context_length(model))
    sampler = TorchSampler(model, template.piece, template.eos_ids, recipe.sampler.max_rows)
    return Agent(
        model, template, open_env(recipe), sampler, open_reward(recipe.reward, recipe.gold) if judged else _unjudged
    )


def _unjudged(transcripts: Sequence[Transcript]) -> list[Score | Failure]:
    raise BadInput("the reward was not opened; nothing can be judged")


def open_training(recipe: RLRecipe, template: Template, env: Env) -> LoadedPrompts:
    """The training prompts, all rows checked."""
    return _open_prompts(recipe, recipe.data.train, recipe.data.train_data_num, template, env)


def open_validation(recipe: RLRecipe, template: Template, env: Env) -> LoadedPrompts | None:
    """The validation prompts, all rows checked; None for a recipe without."""
    data = recipe.data
    return _open_prompts(recipe, data.validation, data.val_data_num, template, env) if data.validation else None


def _open_prompts(
    recipe: RLRecipe, paths: tuple[str, ...], limit: int | None, template: Template, env: Env
) -> LoadedPrompts:
    """Prompts are counted in tokens by the renderer that rollouts use."""

    def length(prompt: Prompt) -> int:
        return len(template.render(env.start(prompt)))

    return load_prompts(
        paths,
        limit=limit,
        seed=recipe.seed,
        length=length,
        max_length=recipe.rollout.max_start_length,
        too_long=recipe.data.too_long,
    )


def check_lengths(recipe: RLRecipe, context: int | None) -> int:
    """The longest possible episode must fit the total, and the total the model. Returns that longest episode."""
    budget = recipe.rollout
    turns = recipe.env.max_turns if isinstance(recipe.env, Search) else 0
    longest = budget.max_start_length + turns * (budget.max_response_length + budget.max_obs_length)
    longest += budget.max_response_length
    if longest > budget.max_total_length:
        raise BadInput(
            f"rollout: max_start_length {budget.max_start_length} + {turns} search turns * (max_response_length "
            f"{budget.max_response_length} + max_obs_length {budget.max_obs_length}) + the last turn "
            f"{budget.max_response_length} = {longest}; expected at most max_total_length {budget.max_total_length}"
        )
    if context is not None and budget.max_total_length > context:
        raise BadInput(
            f"rollout.max_total_length: {budget.max_total_length}; expected at most {context}, the model's context"
        )
    return longest


@dataclass(frozen=True)
class RLRun:
    """A recipe made real."""

    recipe: RLRecipe
    agent: Agent
    training: LoadedPrompts
    validation: LoadedPrompts | None
    parts: Parts
    longest: int

    def write(self, folder: Path) -> None:
        """Weights and optimizers into a checkpoint folder."""
        template = self.agent.template
        self.parts.policy.broadcast(save_learner, folder, "policy", policy_writer(template))
        if self.parts.critic:
            self.parts.critic.broadcast(save_learner, folder, "critic", save_value_model)


def policy_writer(template: Template) -> Callable[[nn.Module, Path], None]:
    """Writes a policy as a Hugging Face folder: weights, config and tokenizer."""

    def write(model: nn.Module, folder: Path) -> None:
        save_model(model, folder)
        template.save(folder)

    return write


def build_rl(recipe: RLRecipe, checkpoint: Path | None = None) -> RLRun:
    """Open everything a recipe names; continue from `checkpoint` where one is given."""
    torch.set_num_threads(recipe.threads)
    agent = open_agent(recipe, checkpoint / "policy" if checkpoint else None)
    training = open_training(recipe, agent.template, agent.env)
    validation = open_validation(recipe, agent.template, agent.env)
    _check_batches(recipe)
    data = recipe.data
    stream = PromptStream(
        training.prompts, data.batch_size, recipe.seed, shuffle=data.shuffle, drop_last=data.drop_last
    )
    outputs = policy_outputs_at(recipe.sampling.temperature)
    policy = _learner(recipe, agent.model, outputs, recipe.policy, recipe.steps)
    parts = Parts(
        prompts=stream,
        env=agent.env,
        sampler=agent.sampler,
        template=agent.template,
        reward=agent.reward,
        algorithm=recipe.algorithm,
        policy=LocalGroup(policy),
        critic=_critic(recipe, checkpoint),
        reference=_reference(recipe),
        budget=recipe.rollout,
        sampling=recipe.sampling,
        seed=recipe.seed,
        ptx=_ptx(recipe, agent.template),
        critic_warmup=recipe.critic.warmup_steps if recipe.critic else 0,
        max_failure_share=recipe.max_failure_share,
    )
    if checkpoint:
        parts.policy.broadcast(load_optimizer, checkpoint, "policy")
        if parts.critic:
            parts.critic.broadcast(load_optimizer, checkpoint, "critic")
    return RLRun(recipe, agent, training, validation, parts, check_lengths(recipe, context_length(agent.model)))


def _check_batches(recipe: RLRecipe) -> None:
    rows = recipe.data.batch_size * recipe.algorithm.group_size
    for section, trainee in (("policy", recipe.policy), ("critic", recipe.critic)):
        size = trainee.learning.minibatch_rows if trainee else 0
        if size > rows:
            raise BadInput(
                f"{section}.learning.minibatch_rows: {size}; expected at most {rows}, the rollouts of a step "
                f"(data.batch_size {recipe.data.batch_size} * algorithm.group_size {recipe.algorithm.group_size})"
            )


def _learner(recipe: RLRecipe, model: nn.Module, outputs: Any, trainee: Any, steps: int) -> Learner:
    rows = recipe.data.batch_size * recipe.algorithm.group_size
    total = steps * trainee.learning.updates(rows)
    return Learner(model, outputs, trainee.optim, trainee.learning, total_updates=total, seed=recipe.seed)


def _critic(recipe: RLRecipe, checkpoint: Path | None) -> LocalGroup | None:
    if not recipe.algorithm.needs_critic:
        return None
    if recipe.critic is None:
        raise BadInput("critic: missing; expected a section (optim, learning), since the algorithm needs a critic")
    start = recipe.critic.path or recipe.model.path
    assert start is not None
    model = load_value_model(checkpoint / "critic") if checkpoint else new_value_model(start)
    policy, own = vocabulary(load_config(recipe.model.path or start)), vocabulary(model)
    if policy != own:
        raise BadInput(
            f"critic.path: {start} has a vocabulary of {own}; expected {policy}, that of the policy, whose ids it reads"
        )
    return LocalGroup(_learner(recipe, model, value_forward, recipe.critic, recipe.steps))


def _reference(recipe: RLRecipe) -> LocalGroup | None:
    """The reference is the policy that the run started from, also after a resume."""
    if not recipe.algorithm.needs_reference:
        return None
    assert recipe.model.path is not None
    outputs = policy_outputs_at(recipe.sampling.temperature, entropy=False)
    return LocalGroup(Frozen(load_causal_lm(recipe.model.path), outputs, recipe.policy.learning.micro_tokens))


def _ptx(recipe: RLRecipe, template: Template) -> Callable[[int], Beside | None]:
    """The demonstrations that go beside a step's updates: a random stream of their own, so that the order of the
    prompts does not depend on it."""
    spec = recipe.ptx
    if spec is None:
        return lambda step: None
    shown = load_demonstrations(spec.data, template, spec.max_length)
    stream = PromptStream(shown, spec.batch_size, recipe.seed, shuffle=True, drop_last=True)
    updates = recipe.policy.learning.updates(recipe.data.batch_size * recipe.algorithm.group_size)

    def drawn(step: int) -> Beside:
        rows = [row for update in range(updates) for row in stream.batch(step * updates + update)]
        return Beside(collate(rows), nll, spec.coef, spec.batch_size)

    return drawn
