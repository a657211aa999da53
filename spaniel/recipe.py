"""What a recipe holds: the sections and their defaults, which run on a laptop."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Literal

from spaniel.algo import ALGORITHMS, Algorithm
from spaniel.data.tokenizer import NewTokenizer
from spaniel.errors import BadInput
from spaniel.models.hf import TinyLlama
from spaniel.rewards.sections import REWARDS, AnyReward
from spaniel.rollout.episode import Budget
from spaniel.train.evaluate import Evaluation
from spaniel.train.rl import Sampling
from spaniel.types import InputPath
from spaniel.workers.learner import Learning
from spaniel.workers.optim import Optim


@dataclass(frozen=True)
class Model:
    """The policy: a Hugging Face folder, or (for supervised learning from scratch) a new network."""

    path: InputPath | None = None
    new: TinyLlama | None = None
    tokenizer: NewTokenizer | None = None

    def __post_init__(self) -> None:
        if (self.path is None) == (self.new is None):
            raise BadInput("model: expected exactly one of path (a Hugging Face folder) and new (a network's shape)")
        if (self.new is None) != (self.tokenizer is None):
            raise BadInput("model: new and tokenizer go together (a new network needs a tokenizer, a folder has one)")


@dataclass(frozen=True)
class Data:
    """Questions. A prompt longer than rollout.max_start_length tokens is an error, or skipped and counted."""

    train: tuple[InputPath, ...]
    validation: tuple[InputPath, ...] = ()
    batch_size: int = 16
    """Prompts (not rollouts) per step."""
    train_data_num: int | None = None
    """A reproducible sample of this many training prompts."""
    val_data_num: int | None = None
    too_long: Literal["error", "skip"] = "error"
    shuffle: bool = True
    drop_last: bool = True


@dataclass(frozen=True)
class Search:
    """The search environment: think, query the retriever, read, answer."""

    topk: int = 3
    max_turns: int = 4
    """Search turns; after them one last turn may only answer."""
    on_retriever_failure: Literal["reply", "end"] = "reply"


@dataclass(frozen=True)
class SingleTurn:
    """One prompt, one response."""


@dataclass(frozen=True)
class BM25Retriever:
    """BM25 in this process, over a jsonl corpus; with `index`, persisted in that folder."""

    corpus: InputPath
    index: InputPath | None = None


@dataclass(frozen=True)
class RemoteRetriever:
    """A retrieval server (`spaniel serve-retriever`, or any with the same /retrieve)."""

    url: str = "http://127.0.0.1:8000"
    timeout_s: float = 10.0
    tries: int = 4
    concurrency: int = 4
    batch_size: int = 256
    cache_size: int = 100_000


@dataclass(frozen=True)
class NoRetriever:
    """Answers every query with nothing: the control that shows whether an agent truly searches."""


@dataclass(frozen=True)
class Trainee:
    """How a network learns."""

    optim: Optim = field(default_factory=Optim)
    learning: Learning = field(default_factory=Learning)


@dataclass(frozen=True)
class Critic:
    """The value model (algorithms without one ignore nothing: giving this section to them is an error)."""

    optim: Optim = field(default_factory=Optim)
    learning: Learning = field(default_factory=Learning)
    warmup_steps: int = 0
    """Steps at the start in which only the critic learns."""
    path: InputPath | None = None
    """The folder that it starts from: a reward model (with its head), or a language model (with a head of zeros).
    None: the policy's start."""


@dataclass(frozen=True)
class Pretraining:
    """PPO-ptx: every update of the policy also learns `batch_size` demonstrations, with the weight `coef`."""

    data: tuple[InputPath, ...]
    coef: float = 1.0
    batch_size: int = 32
    max_length: int = 1024

    def __post_init__(self) -> None:
        if self.coef <= 0 or self.batch_size < 1:
            raise BadInput(
                f"ptx: coef {self.coef}, batch_size {self.batch_size}; expected coef above 0, 1 or more rows"
            )


@dataclass(frozen=True)
class Local:
    """Everything in this process."""


@dataclass(frozen=True)
class TorchSampling:
    """The sampler on plain torch; at most `max_rows` rows share a forward pass."""

    max_rows: int = 128


Tracker = Literal["console", "jsonl"]


def check_run(seed: int, steps: int, eval_every: int, save_every: int, threads: int) -> None:
    """The numbers that every kind of run has."""
    if seed < 0:
        raise BadInput(f"seed: {seed}; expected 0 or more")
    if steps < 1:
        raise BadInput(f"steps: {steps}; expected 1 or more")
    for name, value in (("eval_every", eval_every), ("save_every", save_every)):
        if value < 0:
            raise BadInput(f"{name}: {value}; expected 0 (only at the end) or more")
    if threads < 1:
        raise BadInput(f"threads: {threads}; expected 1 or more torch threads")


@dataclass(frozen=True)
class RLRecipe:
    """Reinforcement learning of a policy on prompts, in an environment, by a reward."""

    out: str
    steps: int
    model: Model
    data: Data
    algorithm: Algorithm
    reward: AnyReward
    gold: AnyReward | None = None
    """A second reward that is only measured (`reward/gold`): what is truly wanted, beside what is learned from."""
    env: Search | SingleTurn = field(default_factory=SingleTurn)
    retriever: BM25Retriever | RemoteRetriever | NoRetriever | None = None
    seed: int = 1
    eval_every: int = 20
    save_every: int = 20
    rollout: Budget = field(default_factory=Budget)
    sampling: Sampling = field(default_factory=Sampling)
    policy: Trainee = field(default_factory=Trainee)
    critic: Critic | None = None
    ptx: Pretraining | None = None
    evaluation: Evaluation = field(default_factory=Evaluation)
    cluster: Local = field(default_factory=Local)
    sampler: TorchSampling = field(default_factory=TorchSampling)
    track: tuple[Tracker, ...] = ("console", "jsonl")
    threads: int = 1
    """Torch threads. Two can be slower than one when something else runs on the machine."""
    max_failure_share: float = 0.5
    keep_rollouts: int = 10
    """Write the rollouts of every n-th step (0: never); those of validation are always written."""

    def __post_init__(self) -> None:
        check_run(self.seed, self.steps, self.eval_every, self.save_every, self.threads)
        if isinstance(self.env, Search) and self.retriever is None:
            raise BadInput("retriever: missing; expected one, since env is search")
        if not isinstance(self.env, Search) and self.retriever is not None:
            raise BadInput("retriever: given, but env is single_turn, which never searches; remove one of them")
        if self.critic is not None and not self.algorithm.needs_critic:
            raise BadInput("critic: given, but the algorithm has no critic; remove it or choose ppo")
        if not 0 <= self.max_failure_share <= 1:
            raise BadInput(f"max_failure_share: {self.max_failure_share}; expected a number from 0 to 1")
        if "jsonl" not in self.track:
            raise BadInput(f"track: {list(self.track)}; expected jsonl among them: it is what a resume relies on")


@dataclass(frozen=True)
class Demonstrations:
    """Supervised examples (jsonl or parquet: `messages` with the roles user, assistant, environment)."""

    train: tuple[InputPath, ...]
    validation: tuple[InputPath, ...] = ()
    batch_size: int = 32
    max_length: int = 1024
    loss_on: Literal["assistant", "all"] = "assistant"
    """Learn the assistant's tokens only, or every token after the first."""


@dataclass(frozen=True)
class SFTRecipe:
    """Supervised fine-tuning on demonstrations."""

    out: str
    steps: int
    model: Model
    data: Demonstrations
    seed: int = 1
    eval_every: int = 0
    save_every: int = 0
    policy: Trainee = field(default_factory=Trainee)
    track: tuple[Tracker, ...] = ("console", "jsonl")
    threads: int = 1

    def __post_init__(self) -> None:
        check_run(self.seed, self.steps, self.eval_every, self.save_every, self.threads)


CHOICES: Mapping[str, Mapping[str, type]] = {
    "algorithm": ALGORITHMS,
    "reward": REWARDS,
    "gold": REWARDS,
    "*.parts.*.reward": REWARDS,
    "env": {"search": Search, "single_turn": SingleTurn},
    "retriever": {"bm25": BM25Retriever, "http": RemoteRetriever, "none": NoRetriever},
    "cluster": {"local": Local},
    "sampler": {"torch": TorchSampling},
}
"""The sections whose `name` picks a dataclass; `*` stands for any part of a key."""


def choices(key: str) -> Mapping[str, type] | None:
    """What a section may be, where its `name` decides."""
    return next((found for pattern, found in CHOICES.items() if fnmatchcase(key, pattern)), None)
