"""The command line. Heavy imports happen inside the commands, so that `--help` answers at once."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from spaniel.errors import BadInput, SpanielError

if TYPE_CHECKING:
    from spaniel.config import Recipe
    from spaniel.recipe import RLRecipe
    from spaniel.types import Metrics

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Post-train language models with rewards: supervised start, PPO and GRPO, agents that search.",
)

RecipeName = Annotated[str, typer.Argument(help="A recipe: its path, or its NAME in recipes/.")]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Changes, for example steps=20 env.topk=1.")
]
Resume = Annotated[bool, typer.Option("--resume", help="Go on in `out` (or start, where there is nothing yet).")]


@app.command()
def train(recipe: RecipeName, overrides: Overrides = None, resume: Resume = False) -> None:
    """Train a policy by reinforcement learning."""
    from spaniel.recipe import RLRecipe

    loaded = _load(recipe, overrides)
    if not isinstance(loaded, RLRecipe):
        raise _other_kind(recipe, loaded)
    from spaniel.run import run_rl

    outcome = run_rl(loaded, resume=resume)
    _say_files(outcome.folder)
    if outcome.after:
        print(_progress(outcome.before, outcome.after))


@app.command()
def sft(recipe: RecipeName, overrides: Overrides = None, resume: Resume = False) -> None:
    """Fine-tune (or train from scratch) on demonstrations."""
    from spaniel.recipe import SFTRecipe

    loaded = _load(recipe, overrides)
    if not isinstance(loaded, SFTRecipe):
        raise _other_kind(recipe, loaded)
    from spaniel.run import run_sft

    _say_files(run_sft(loaded, resume=resume).folder)


@app.command()
def reward(recipe: RecipeName, overrides: Overrides = None, resume: Resume = False) -> None:
    """Train a reward model on rankings of responses, and evaluate it on held-out ones."""
    from spaniel.recipe_reward import RewardRecipe

    loaded = _load(recipe, overrides)
    if not isinstance(loaded, RewardRecipe):
        raise _other_kind(recipe, loaded)
    from spaniel.examine import show_agreement
    from spaniel.run import run_reward

    outcome = run_reward(loaded, resume=resume)
    show_agreement(outcome.folder / "evaluation.json")
    _say_files(outcome.folder)


@app.command(name="eval")
def evaluate(
    run: Annotated[str, typer.Argument(help="A run folder, or a recipe (then its start model is evaluated).")],
    overrides: Overrides = None,
    step: Annotated[int | None, typer.Option(help="The checkpoint of this step (default: the newest).")] = None,
    retriever_only: Annotated[bool, typer.Option("--retriever-only", help="Recall of the retriever alone.")] = False,
    out: Annotated[Path | None, typer.Option(help="Also write the metrics (json) and rollouts (jsonl) here.")] = None,
) -> None:
    """Evaluate a policy on its validation questions, greedy; or the retriever alone."""
    from spaniel.examine import evaluate_policy, evaluate_retriever

    recipe, checkpoint = _run_or_recipe(run, overrides, step)
    if retriever_only:
        evaluate_retriever(recipe, out)
    else:
        evaluate_policy(recipe, checkpoint, out)


@app.command()
def chat(
    run: Annotated[str, typer.Argument(help="A run folder, or a recipe (then its start model answers).")],
    question: Annotated[list[str] | None, typer.Argument(help="The question; without one, they are asked for.")] = None,
    step: Annotated[int | None, typer.Option(help="The checkpoint of this step (default: the newest).")] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change the recipe.")] = None,
) -> None:
    """Ask the trained agent and see its thinking, its searches and its answer."""
    from spaniel.examine import converse

    recipe, checkpoint = _run_or_recipe(run, set_, step)
    converse(recipe, checkpoint, " ".join(question) if question else None)


@app.command()
def sample(
    run: Annotated[str, typer.Argument(help="A run folder, or a recipe (then its start model writes).")],
    out: Annotated[Path, typer.Argument(help="A jsonl file: one row a prompt, with its responses.")],
    overrides: Overrides = None,
    n: Annotated[int, typer.Option(help="Responses to each prompt.")] = 4,
    split: Annotated[str, typer.Option(help="The prompts: train or validation.")] = "train",
    limit: Annotated[int | None, typer.Option(help="The first so many prompts only.")] = None,
    step: Annotated[int | None, typer.Option(help="The checkpoint of this step (default: the newest).")] = None,
) -> None:
    """Sample several responses to each prompt, for people to rank."""
    from spaniel.samples import write_samples

    if split not in ("train", "validation"):
        raise BadInput(f"--split {split}: expected train or validation")
    recipe, checkpoint = _run_or_recipe(run, overrides, step)
    count = write_samples(recipe, checkpoint, out, n, "train" if split == "train" else "validation", limit)
    print(f"{n} responses to each of {count} prompts in {out}")


@app.command(name="best-of-n")
def best_of_n(
    run: Annotated[str, typer.Argument(help="A run folder, or a recipe (then its start model is sampled).")],
    overrides: Overrides = None,
    n: Annotated[int, typer.Option(help="Samples of each prompt.")] = 64,
    limit: Annotated[int | None, typer.Option(help="The first so many prompts only.")] = None,
    step: Annotated[int | None, typer.Option(help="The checkpoint of this step (default: the newest).")] = None,
    out: Annotated[Path | None, typer.Option(help="Also write the table as json.")] = None,
) -> None:
    """What the best of 1, 2, 4, .. n samples by the recipe's reward is worth, on the validation prompts."""
    from spaniel.samples import best_of_n as measure

    recipe, checkpoint = _run_or_recipe(run, overrides, step)
    measure(recipe, checkpoint, n, limit, out)


@app.command()
def report(
    run: Annotated[Path, typer.Argument(help="The folder of a finished (or running) rl run.")],
    best_of_n: Annotated[Path | None, typer.Option(help="The json of `spaniel best-of-n`, as a baseline.")] = None,
) -> None:
    """Reward, gold score, KL and length over the run, and where the gold score turned down."""
    from spaniel.samples import report as write

    verdict = write(run, best_of_n)
    if verdict is not None:
        turn = verdict.turn
        print(f"over-optimised: gold turned down after step {turn.step}" if turn else "gold did not turn down")
    print(f"files: {run}/report/over_optimisation.md, .json, .svg")


@app.command()
def check(recipe: RecipeName, overrides: Overrides = None) -> None:
    """Validate a recipe and everything it names, without training."""
    from spaniel.examine import check_recipe

    check_recipe(_load(recipe, overrides))


@app.command()
def algorithms() -> None:
    """List the algorithms with equation, defaults and source."""
    from spaniel.algo import catalogue

    for entry in catalogue():
        print(f"{entry.name}\n  {entry.equation}\n  source: {entry.source}")
        print("  defaults: " + ", ".join(f"{key}={value}" for key, value in entry.defaults.items()))


@app.command()
def index(
    corpus: Annotated[Path, typer.Argument(help="A jsonl corpus with `id` and `contents`.")],
    folder: Annotated[Path, typer.Argument(help="Where the index is written.")],
) -> None:
    """Build a BM25 index of a corpus (nothing to do where it is up to date)."""
    from spaniel.retrieval.bm25 import BM25

    BM25.build(corpus, folder)
    print(f"index of {len(BM25.open(folder))} passages in {folder}")


@app.command(name="serve-retriever")
def serve_retriever(
    corpus: Annotated[Path, typer.Argument(help="A jsonl corpus, or an index folder made by `spaniel index`.")],
    host: Annotated[str, typer.Option(help="The address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="The port to listen on.")] = 8000,
) -> None:
    """Serve a corpus over HTTP: POST /retrieve, as Search-R1's retrieval server does."""
    from spaniel.retrieval.bm25 import BM25
    from spaniel.retrieval.corpus import read_corpus
    from spaniel.retrieval.server import serve

    opened = BM25.open(corpus) if corpus.is_dir() else BM25.from_passages(list(read_corpus(corpus)))
    print(f"serving {len(opened)} passages on http://{host}:{port}/retrieve", flush=True)
    serve(opened, host=host, port=port)


def _load(name: str, overrides: list[str] | None) -> Recipe:
    from spaniel.config import load_recipe

    return load_recipe(name, overrides or [])


def _run_or_recipe(name: str, overrides: list[str] | None, step: int | None) -> tuple[RLRecipe, Path | None]:
    """The recipe of a run folder with its checkpoint, or a recipe with none."""
    from spaniel.recipe import RLRecipe
    from spaniel.train.run_folder import choose_checkpoint

    folder = Path(name)
    loaded = _load(name, overrides)
    if not isinstance(loaded, RLRecipe):
        raise BadInput(f"{name}: trains no policy by reward; expected a run or recipe of kind rl")
    is_run = (folder / "checkpoints").is_dir() or (folder / "metrics.jsonl").is_file()
    if step is not None and not is_run:
        raise BadInput(f"--step {step}: {name} is a recipe, not a run folder; it has no checkpoints")
    return loaded, choose_checkpoint(folder, step) if is_run else None


def _other_kind(name: str, loaded: Recipe) -> BadInput:
    from spaniel.recipe import RLRecipe, SFTRecipe

    kind, command = (
        ("rl", "train") if isinstance(loaded, RLRecipe) else ("sft", "sft") if isinstance(loaded, SFTRecipe)
        else ("reward", "reward")
    )  # fmt: skip
    return BadInput(f"recipe {name}: is of kind {kind}; use `spaniel {command} {name}`")


def _say_files(folder: Path) -> None:
    print(f"files: {folder}/metrics.jsonl, {folder}/rollouts/, {folder}/checkpoints/ (recipe: {folder}/recipe.yaml)")


def _progress(before: Metrics, after: Metrics) -> str:
    """The last line of a run: what it was for, before the first step and after the last."""
    if "val/exact_match" in after:
        first, last = before.get("val/exact_match", 0.0), after["val/exact_match"]
        searches = after.get("val/searches_per_question", 0.0)
        return f"exact match before={first:.3f} after={last:.3f} searches/question={searches:.2f}"
    named = {"score": "val/score", "gold score": "val/gold"}
    return "; ".join(
        f"{said} before={before.get(name, float('nan')):.3f} after={after[name]:.3f}"
        for said, name in named.items()
        if name in after
    )


def main(arguments: list[str] | None = None) -> None:
    """Entry point: 0 done, 1 a run failed, 2 bad input, 130 interrupted."""
    # Idle OpenMP threads that spin starve whatever else runs; must be set before torch is loaded.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        app(arguments, standalone_mode=True)
    except SpanielError as error:
        print(f"spaniel: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
