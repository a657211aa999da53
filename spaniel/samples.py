"""Samples of a policy: to be ranked by people, and for best-of-n; and the report on over-optimisation."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console
from rich.table import Table

from spaniel.data.prompts import LoadedPrompts
from spaniel.errors import BadInput
from spaniel.files import write_atomically
from spaniel.launch import Agent, open_agent, open_training, open_validation
from spaniel.recipe import RLRecipe
from spaniel.track.plots import Line, Panel, draw
from spaniel.train.best_of_n import BestOfN, sample_groups, table
from spaniel.train.overoptimisation import Point, Verdict, judge, points_of, smoothed, window_of
from spaniel.types import Rollout

Split = Literal["train", "validation"]


def _questions(recipe: RLRecipe, agent: Agent, split: Split) -> LoadedPrompts:
    found = open_training(recipe, agent.template, agent.env) if split == "train" else None
    found = found or open_validation(recipe, agent.template, agent.env)
    if found is None:
        raise BadInput("data.validation: missing; expected at least one file of questions to sample for")
    return found


def _sampled(
    recipe: RLRecipe, checkpoint: Path | None, split: Split, n: int, limit: int | None, graded: bool
) -> tuple[Agent, list[list[Rollout]]]:
    if n < 1 or (limit is not None and limit < 1):
        raise BadInput(f"n {n}, limit {limit}; expected 1 or more")
    torch.set_num_threads(recipe.threads)
    agent = open_agent(recipe, checkpoint / "policy" if checkpoint else None, judged=graded)
    prompts = _questions(recipe, agent, split).prompts[:limit]
    reward = agent.reward if graded else None
    groups = sample_groups(
        prompts, agent.env, agent.sampler, agent.template, reward, recipe.rollout, recipe.sampling, n, recipe.seed
    )
    return agent, groups


def write_samples(
    recipe: RLRecipe, checkpoint: Path | None, out: Path, n: int, split: Split = "train", limit: int | None = None
) -> int:
    """`n` responses to each prompt as jsonl rows (id, prompt, responses): what people rank, and `spaniel reward` reads
    once each row also has a `ranking`, `ranks` or `scores`. Returns the number of prompts."""
    agent, groups = _sampled(recipe, checkpoint, split, n, limit, graded=False)
    rows = [_row(group, agent) for group in groups]
    write_atomically(out, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    return len(rows)


def _row(group: Sequence[Rollout], agent: Agent) -> dict[str, Any]:
    prompt = group[0].prompt
    texts = ["".join(agent.template.text(span.tokens) for span in r.spans[1:]) for r in group]
    return {"id": prompt.id, "prompt": [dict(m) for m in prompt.messages], "responses": texts,
            "data_source": prompt.source}  # fmt: skip


def best_of_n(
    recipe: RLRecipe, checkpoint: Path | None, n: int, limit: int | None = None, out: Path | None = None
) -> list[BestOfN]:
    """The table of best-of-1, 2, 4, .. `n` on the validation prompts, by the recipe's reward; printed and, with `out`,
    written as json."""
    _, groups = _sampled(recipe, checkpoint, "validation", n, limit, graded=True)
    rows = table(groups)
    shown = Table(title=f"best of n, {len(groups)} prompts", title_justify="left")
    for heading in ("n", "KL bound", "reward", "gold", "length"):
        shown.add_column(heading, justify="right")
    for row in rows:
        gold = "-" if row.gold is None else f"{row.gold:.3f}"
        shown.add_row(str(row.n), f"{row.kl:.3f}", f"{row.proxy:.3f}", gold, f"{row.length:.1f}")
    Console().print(shown)
    if out:
        write_atomically(out, json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    return rows


def report(run: Path, baseline: Path | None = None) -> Verdict | None:
    """Write RUN/report/: over_optimisation.json, .md and .svg from the run's metrics, with best-of-n beside it."""
    metrics = run / "metrics.jsonl"
    if not metrics.is_file():
        raise BadInput(f"run {run}: holds no metrics.jsonl; expected the folder of a run")
    points = points_of([json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()])
    if len(points) < 3:
        raise BadInput(f"run {run}: has {len(points)} training steps with a score; expected at least 3 for a report")
    rows = _baseline(baseline) if baseline else []
    verdict = judge(points)
    folder = run / "report"
    folder.mkdir(exist_ok=True)
    written = {"points": [asdict(p) for p in points], "best_of_n": [asdict(r) for r in rows],
               "verdict": None if verdict is None else asdict(verdict)}  # fmt: skip
    write_atomically(folder / "over_optimisation.json", json.dumps(written, indent=1) + "\n")
    write_atomically(folder / "over_optimisation.md", _words(points, verdict, rows))
    draw(_panels(points, verdict, rows), folder / "over_optimisation.svg")
    return verdict


def _baseline(path: Path) -> list[BestOfN]:
    try:
        return [BestOfN(**row) for row in json.loads(path.read_text(encoding="utf-8"))]
    except (OSError, ValueError, TypeError) as error:
        raise BadInput(f"best-of-n {path}: cannot be read: {error}; expected the file that best-of-n wrote") from error


def _panels(points: Sequence[Point], verdict: Verdict | None, rows: Sequence[BestOfN]) -> list[Panel]:
    window = window_of(len(points))
    steps = [float(p.step) for p in points]
    turn = verdict.turn if verdict else None
    named: dict[str, list[float]] = {"proxy (learned from)": smoothed([p.proxy for p in points], window)}
    gold = [p.gold for p in points if p.gold is not None]
    if verdict:
        named["gold (truly wanted)"] = smoothed(gold, window)
    mark, label = (None if turn is None else float(turn.step)), "gold turns down"
    panels = [Panel("scores", "step", [Line(name, steps, y) for name, y in named.items()], mark, label)]
    kls = [p.kl for p in points if p.kl is not None]
    if len(kls) == len(points):
        far = [p.distance or 0.0 for p in points]
        lines = [Line(name, far, y) for name, y in named.items()]
        if rows:
            out = [r.kl**0.5 for r in rows]
            lines.append(Line("best of n: proxy", out, [r.proxy for r in rows], dashed=True))
            if golds := [r.gold for r in rows if r.gold is not None]:
                lines.append(Line("best of n: gold", out, golds, dashed=True))
        at = None if turn is None else turn.distance
        panels.append(Panel("scores over distance", "sqrt(KL)", lines, at, label))
        panels.append(Panel("distance to the reference", "step", [Line("sequence KL (nats)", steps, kls)], mark, label))
    panels.append(
        Panel("length", "step", [Line("tokens of a response", steps, [p.length for p in points])], mark, label)
    )
    return panels


def _words(points: Sequence[Point], verdict: Verdict | None, rows: Sequence[BestOfN]) -> str:
    lines = ["# Over-optimisation report", "", f"{len(points)} steps. Figures: over_optimisation.svg", ""]
    if verdict is None:
        lines.append("No gold scorer was configured (`gold` in the recipe): what is truly wanted was not measured.")
    elif verdict.turn is None:
        lines.append(f"The gold score did not turn down: highest (smoothed) {verdict.peak:.3f}, last {verdict.end:.3f} "
                     f"(standard error {verdict.noise:.3f}).")  # fmt: skip
    else:
        turn = verdict.turn
        where = "" if turn.kl is None else f", at a KL of {turn.kl:.2f} nats"
        lines.append(f"**Over-optimised.** The gold score turned down after step {turn.step}{where}: from "
                     f"{verdict.peak:.3f} to {verdict.end:.3f} at the end (standard error {verdict.noise:.3f}), while "
                     f"the proxy changed by {verdict.proxy_rise:+.3f}.")  # fmt: skip
    lines += ["", "| step | proxy | gold | KL | length |", "|---:|---:|---:|---:|---:|"]
    every = max(1, len(points) // 12)
    for p in [*points[::every], points[-1]]:
        gold, kl = ("-" if x is None else f"{x:.3f}" for x in (p.gold, p.kl))
        lines.append(f"| {p.step} | {p.proxy:.3f} | {gold} | {kl} | {p.length:.1f} |")
    if rows:
        lines += ["", "Best of n by the same reward, without training:", "",
                  "| n | KL bound | proxy | gold |", "|---:|---:|---:|---:|"]  # fmt: skip
        lines += [
            f"| {r.n} | {r.kl:.3f} | {r.proxy:.3f} | {'-' if r.gold is None else f'{r.gold:.3f}'} |" for r in rows
        ]
    return "\n".join(lines) + "\n"
