"""Runs: consume a training loop and write what it yields into the run folder."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from spaniel.config import dump
from spaniel.errors import Interrupted
from spaniel.files import write_atomically
from spaniel.launch import RLRun, build_rl
from spaniel.launch_reward import RewardRun, build_reward
from spaniel.launch_sft import SFTRun, build_sft
from spaniel.recipe import RLRecipe, SFTRecipe
from spaniel.recipe_reward import RewardRecipe
from spaniel.track.base import Tracker, Trackers
from spaniel.track.console import ConsoleTracker
from spaniel.track.jsonl import JsonlTracker
from spaniel.track.rollouts import write_rollouts
from spaniel.train.evaluate import evaluate
from spaniel.train.record import record
from spaniel.train.reward_model import evaluate_rankings, fit
from spaniel.train.rl import State, train
from spaniel.train.run_folder import RunFolder, latest_checkpoint, read_state, refuse
from spaniel.train.sft import teach
from spaniel.types import Metrics, Rollout

Say = Callable[[str], None]


@dataclass(frozen=True)
class Outcome:
    """What a finished run says about itself: validation before the first update and after the last one."""

    folder: Path
    before: Metrics
    after: Metrics


def due(eval_every: int, save_every: int, steps: int) -> Callable[[int], tuple[bool, bool]]:
    """(validate, save) after a finished step: every n-th (0: never) and always after the last."""

    def at(step: int) -> tuple[bool, bool]:
        last = step == steps
        return (
            last or (bool(eval_every) and step % eval_every == 0),
            last or (bool(save_every) and step % save_every == 0),
        )

    return at


def _trackers(names: Sequence[str], folder: RunFolder, steps: int, start: int, say: Say) -> Trackers:
    """The metrics file, always and essential; the console where the recipe names it."""
    file = JsonlTracker(folder.metrics)
    file.truncate_after(start if start else -1)
    made: list[Tracker] = [ConsoleTracker(total=steps, start=start)] if "console" in names else []
    return Trackers(made, report=say, essential=[file])


def _checkpoint(out: str, resume: bool) -> tuple[Path | None, dict]:
    found = latest_checkpoint(Path(out)) if resume else None
    return found, read_state(found) if found else {"step": 0}


def run_rl(recipe: RLRecipe, *, resume: bool = False, say: Say = print) -> Outcome:
    """Train from the recipe's start, or (`resume`) from the newest checkpoint in `out`, if there is one."""
    refuse(recipe.out, dump(recipe), resume)
    checkpoint, saved = _checkpoint(recipe.out, resume)
    run = build_rl(recipe, checkpoint)
    state = State(saved["step"], saved.get("algorithm", recipe.algorithm.initial_state()))
    folder = RunFolder.open(recipe.out, dump(recipe), resume=resume)
    for warning in warnings(recipe):
        say(f"warning: {warning}")
    say(f"{'resuming at step ' + str(state.step) if checkpoint else 'starting'}; files are in {folder.path}")
    trackers = _trackers(recipe.track, folder, recipe.steps, state.step, say)
    with _closing(folder, trackers):
        _rl_steps(run, state, folder, trackers)
    return _outcome(folder)


def warnings(recipe: RLRecipe) -> list[str]:
    """What is allowed but probably not meant."""
    out = []
    if recipe.sampling.top_p < 1 or recipe.sampling.top_k > 0:
        out.append(
            f"sampling.top_p {recipe.sampling.top_p}, top_k {recipe.sampling.top_k}: rollouts come from a truncated "
            "distribution, while log-probabilities are those of the whole one; ratios and KL are then biased"
        )
    if not recipe.data.validation:
        out.append("data.validation is empty: nothing will say how the policy does on questions it was not trained on")
    return out


@contextmanager
def _closing(folder: RunFolder, trackers: Trackers) -> Iterator[None]:
    """Close trackers and folder however the run ends; Ctrl-C becomes a message that says how to go on."""
    try:
        yield
    except KeyboardInterrupt as stopped:
        found = latest_checkpoint(folder.path)
        where = f"go on from {found.name} with --resume" if found else "there is no checkpoint yet; start it again"
        raise Interrupted(f"interrupted; {where}") from stopped
    finally:
        trackers.close()
        folder.close()


def _rl_steps(run: RLRun, state: State, folder: RunFolder, trackers: Trackers) -> None:
    recipe = run.recipe
    if state.step == 0:
        trackers.log({"step": 0.0, **_validate(run, folder, 0)})

    def save(done: State) -> None:
        folder.save(done.step, {"algorithm": done.algorithm}, run.write)

    loop = train(
        run.parts,
        state,
        recipe.steps,
        save,
        partial(_validate, run, folder),
        due(recipe.eval_every, recipe.save_every, recipe.steps),
    )
    for done in loop:
        step = done.state.step
        trackers.log(done.metrics)
        if recipe.keep_rollouts and (step == 1 or step % recipe.keep_rollouts == 0):
            _write(folder, "train", step, done.rollouts, run)


def _validate(run: RLRun, folder: RunFolder, step: int) -> Metrics:
    """All validation prompts once, with the weights that the sampler holds."""
    questions = run.validation
    if questions is None:
        return {}
    p = run.parts
    metrics, rollouts = evaluate(
        questions.prompts, p.env, p.sampler, p.template, p.reward, p.budget, run.recipe.evaluation, run.recipe.seed
    )
    _write(folder, "validation", step, rollouts, run)
    return metrics


def _write(folder: RunFolder, name: str, step: int, rollouts: Sequence[Rollout], run: RLRun) -> None:
    rows = [record(r, step, run.agent.template.decode) for r in rollouts]
    write_rollouts(folder.rollouts(name, step), rows)


def _outcome(folder: RunFolder) -> Outcome:
    """First and last validation, as the metrics file has them (a resumed run has not seen the first itself)."""
    lines = [json.loads(line) for line in folder.metrics.read_text(encoding="utf-8").splitlines()]
    validated = [line for line in lines if any(key.startswith("val/") for key in line)] or [{}]
    return Outcome(folder.path, validated[0], validated[-1])


def run_sft(recipe: SFTRecipe, *, resume: bool = False, say: Say = print) -> Outcome:
    """Supervised fine-tuning; the policy of the last checkpoint is a Hugging Face folder."""
    refuse(recipe.out, dump(recipe), resume)
    checkpoint, saved = _checkpoint(recipe.out, resume)
    run = build_sft(recipe, checkpoint)
    folder = RunFolder.open(recipe.out, dump(recipe), resume=resume)
    say(f"{'resuming at step ' + str(saved['step']) if checkpoint else 'starting'}; files are in {folder.path}")
    trackers = _trackers(recipe.track, folder, recipe.steps, saved["step"], say)
    with _closing(folder, trackers):
        _sft_steps(run, saved["step"], folder, trackers)
    return _outcome(folder)


def _sft_steps(run: SFTRun, start: int, folder: RunFolder, trackers: Trackers) -> None:
    recipe = run.recipe

    def save(step: int) -> None:
        folder.save(step, {}, run.write)

    when = due(recipe.eval_every, recipe.save_every, recipe.steps)
    for done in teach(run.policy, run.stream, run.validation, start, recipe.steps, save, when):
        trackers.log(done.metrics)


def run_reward(recipe: RewardRecipe, *, resume: bool = False, say: Say = print) -> Outcome:
    """Train a reward model; evaluate the finished one on the recipe's test sets (`evaluation.json`)."""
    refuse(recipe.out, dump(recipe), resume)
    checkpoint, saved = _checkpoint(recipe.out, resume)
    run = build_reward(recipe, checkpoint)
    folder = RunFolder.open(recipe.out, dump(recipe), resume=resume)
    excluded = ", ".join(f"{count} {kind.replace('_', ' ')}" for kind, count in run.loaded.excluded.items())
    say(f"{len(run.loaded.items)} rankings, {run.loaded.pairs} pairs; left out: {excluded or 'none'}")
    say(f"{'resuming at step ' + str(saved['step']) if checkpoint else 'starting'}; files are in {folder.path}")
    trackers = _trackers(recipe.track, folder, recipe.steps, saved["step"], say)
    with _closing(folder, trackers):
        _reward_steps(run, saved["step"], folder, trackers)
        _test(run, folder)
    return _outcome(folder)


def _reward_steps(run: RewardRun, start: int, folder: RunFolder, trackers: Trackers) -> None:
    recipe = run.recipe

    def save(step: int) -> None:
        folder.save(step, {}, run.write)

    def validate() -> Metrics:
        return evaluate_rankings(run.learner, run.validation) if run.validation else {}

    if start == 0:
        trackers.log({"step": 0.0, **validate()})
    when = due(recipe.eval_every, recipe.save_every, recipe.steps)
    for done in fit(run.training, start, recipe.steps, save, validate, when):
        trackers.log(done.metrics)


def _test(run: RewardRun, folder: RunFolder) -> None:
    """What the finished model, offset and scale included, makes of the test sets."""
    run.normalise()
    found = {
        name: evaluate_rankings(run.learner, loaded.items, "test")
        | {f"test/excluded/{kind}": float(count) for kind, count in loaded.excluded.items()}
        for name, loaded in run.tests.items()
    }
    if run.validation:
        found = {"validation": evaluate_rankings(run.learner, run.validation, "test"), **found}
    write_atomically(folder.path / "evaluation.json", json.dumps(found, indent=1) + "\n")
