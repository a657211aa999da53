"""Looking at a policy: evaluation, chat, and the check of a recipe."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from spaniel.errors import BadInput
from spaniel.files import write_atomically
from spaniel.launch import Agent, RLRun, build_rl, open_agent, open_retriever, open_validation
from spaniel.launch_reward import build_reward
from spaniel.launch_sft import build_sft
from spaniel.recipe import RLRecipe, Search, SFTRecipe
from spaniel.recipe_reward import RewardRecipe
from spaniel.rewards.rules import contains_answer
from spaniel.rollout.episode import rollout
from spaniel.track.console import printable
from spaniel.track.rollouts import write_rollouts
from spaniel.train.evaluate import evaluate
from spaniel.train.recall import recall
from spaniel.train.record import record
from spaniel.types import Metrics, Prompt, Rollout, Sampled


def _show(title: str, metrics: Metrics) -> None:
    table = Table(title=title, title_justify="left")
    table.add_column("metric")
    table.add_column("value", justify="right")
    for name, value in metrics.items():
        table.add_row(Text(printable(name)), f"{value:.4g}")
    Console().print(table)


def _need_validation(recipe: RLRecipe) -> None:
    if not recipe.data.validation:
        raise BadInput("data.validation: missing; expected at least one file of questions to evaluate on")


def evaluate_policy(recipe: RLRecipe, checkpoint: Path | None, out: Path | None) -> Metrics:
    """Every validation question once; prints a table and, with `out`, writes metrics.json and rollouts.jsonl."""
    import torch

    _need_validation(recipe)
    torch.set_num_threads(recipe.threads)
    agent = open_agent(recipe, checkpoint / "policy" if checkpoint else None)
    questions = open_validation(recipe, agent.template, agent.env)
    assert questions is not None
    metrics, rollouts = evaluate(
        questions.prompts,
        agent.env,
        agent.sampler,
        agent.template,
        agent.reward,
        recipe.rollout,
        recipe.evaluation,
        recipe.seed,
    )
    metrics["val/skipped_too_long"] = float(questions.skipped_too_long)
    _show(f"policy {checkpoint or recipe.model.path}", metrics)
    if out:
        write_atomically(out / "metrics.json", json.dumps(metrics, indent=1))
        write_rollouts(out / "rollouts.jsonl", [record(r, 0, agent.template.decode) for r in rollouts])
    return metrics


def evaluate_retriever(recipe: RLRecipe, out: Path | None) -> Metrics:
    """Recall@1, 3, 5 of the recipe's retriever, asked the validation questions as they stand."""
    _need_validation(recipe)
    if recipe.retriever is None:
        raise BadInput("retriever: missing; expected one to measure its recall")
    from spaniel.data.prompts import load_prompts

    prompts = load_prompts(recipe.data.validation, limit=recipe.data.val_data_num, seed=recipe.seed).prompts
    metrics = recall(prompts, open_retriever(recipe.retriever), question_of, contains_answer)
    _show("retriever alone", metrics)
    if out:
        write_atomically(out / "recall.json", json.dumps(metrics, indent=1))
    return metrics


def question_of(prompt: Prompt) -> str:
    """The bare question: the row's own, or what follows the last `Question:` of its last message."""
    own = prompt.meta.get("question")
    if isinstance(own, str) and own:
        return own
    return prompt.messages[-1]["content"].rpartition("Question:")[2].strip()


def converse(recipe: RLRecipe, checkpoint: Path | None, question: str | None) -> None:
    """Answer one question, or every line that is typed, and show the whole episode."""
    import torch

    torch.set_num_threads(recipe.threads)
    agent = open_agent(recipe, checkpoint / "policy" if checkpoint else None)
    console = Console()
    if question is not None:
        show_episode(ask(agent, recipe, question), agent.template.text, console)
        return
    console.print("Ask a question; an empty line or Ctrl-D ends.", style="dim")
    while line := _read_line(console):
        show_episode(ask(agent, recipe, line), agent.template.text, console)


def _read_line(console: Console) -> str:
    try:
        return console.input("[bold]question>[/bold] ").strip()
    except EOFError:
        return ""


def ask(agent: Agent, recipe: RLRecipe, question: str) -> Rollout:
    """One greedy episode."""
    if not question.strip():
        raise BadInput("the question is empty; expected some text")
    prompt = Prompt("chat", ({"role": "user", "content": question},), ("",))
    length = len(agent.template.render(agent.env.start(prompt)))
    if length > recipe.rollout.max_start_length:
        raise BadInput(
            f"the question has {length} tokens; expected at most rollout.max_start_length = "
            f"{recipe.rollout.max_start_length}"
        )
    return rollout([prompt], agent.env, agent.sampler, agent.template, recipe.rollout, temperature=0.0)[0]


def show_episode(episode: Rollout, text: Callable[[Sequence[int]], str], console: Console) -> None:
    """Print an episode: the policy's text and the world's in different styles. Everything is escaped."""
    for span in episode.spans[1:]:
        by_policy = isinstance(span, Sampled)
        content = printable(text(span.tokens).strip())
        console.print(Text(content, style="bold cyan" if by_policy else "dim"))
    failures = [turn.failure for turn in episode.turns if turn.failure]
    console.print(Text(f"({episode.stop.value}, {episode.sampled_count} tokens written)", style="dim"))
    for failure in failures:
        console.print(Text(printable(f"{failure.where} failed: {failure.cause}"), style="red"))


def show_agreement(path: Path) -> None:
    """How a reward model agrees with the rankings of each set, from the `evaluation.json` of its run."""
    table = Table(title="agreement with the rankings", title_justify="left")
    for heading in ("set", "pairs", "accuracy", "+-95 %", "ceiling", "rank corr.", "longer wins", "calibration error"):
        table.add_column(heading, justify="left" if heading == "set" else "right")
    for name, found in json.loads(path.read_text(encoding="utf-8")).items():
        shown = ("accuracy", "accuracy_ci95", "ceiling", "spearman", "length_accuracy", "calibration_error")
        cells = [f"{found[f'test/{key}']:.3f}" if f"test/{key}" in found else "-" for key in shown]
        table.add_row(Text(printable(name)), f"{found['test/pairs']:.0f}", *cells)
    Console().print(table)


def check_recipe(recipe: RLRecipe | SFTRecipe | RewardRecipe) -> None:
    """Build everything that a recipe names, train nothing, and print what a step will be."""
    if isinstance(recipe, SFTRecipe):
        run = build_sft(recipe)
        rows: dict[str, object] = {"demonstrations": len(run.stream), "held out": len(run.validation)}
        rows |= {"vocabulary": len(run.template), "longest allowed": recipe.data.max_length}
    elif isinstance(recipe, RewardRecipe):
        made = build_reward(recipe)
        rows = {"rankings": len(made.training.stream), "held out": len(made.validation), "pairs": made.loaded.pairs}
        rows |= {f"left out: {kind}": count for kind, count in made.loaded.excluded.items()}
        rows |= {f"test set {name}": f"{len(test.items)} rankings" for name, test in made.tests.items()}
        rows["parameters"] = f"{sum(p.numel() for p in made.learner.model.parameters()):,}"
    else:
        rows = _report(build_rl(recipe))
    table = Table(title="recipe is valid", title_justify="left", show_header=False)
    for name, value in rows.items():
        table.add_row(name, str(value))
    Console().print(table)


def _report(run: RLRun) -> dict[str, object]:
    recipe, budget = run.recipe, run.recipe.rollout
    rows = recipe.data.batch_size * recipe.algorithm.group_size
    updates = recipe.policy.learning.updates(rows)
    validation = run.validation
    turns = recipe.env.max_turns if isinstance(recipe.env, Search) else 0
    return {
        "training prompts": f"{len(run.training.prompts)} ({run.training.skipped_too_long} too long)",
        "validation prompts": f"{len(validation.prompts)} ({validation.skipped_too_long} too long)"
        if validation
        else "none",
        "rollouts a step": f"{recipe.data.batch_size} prompts * {recipe.algorithm.group_size} = {rows}",
        "optimizer steps": f"{updates} a step * {recipe.steps} steps = {updates * recipe.steps}",
        "longest episode": f"{budget.max_start_length} + {turns} * ({budget.max_response_length} + "
        f"{budget.max_obs_length}) + {budget.max_response_length} = {run.longest} "
        f"(limit {budget.max_total_length})",
        "parameters": f"{sum(p.numel() for p in run.agent.model.parameters()):,}",
    }
