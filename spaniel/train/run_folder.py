"""A run's folder: recipe.yaml, metrics.jsonl, rollouts/, checkpoints/."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml

from spaniel.errors import BadInput
from spaniel.files import folder_atomically, remove_leftovers, write_atomically

RESUMABLE = frozenset({"out", "steps", "eval_every", "save_every", "track", "threads", "keep_rollouts",
                       "max_failure_share", "evaluation"})  # fmt: skip
"""Keys that may change at a resume: they do not change what a step means."""


class RunFolder:
    """An opened run folder, locked against a second run for the life of this process."""

    def __init__(self, path: Path, lock: int) -> None:
        self.path = path
        self._lock = lock

    @classmethod
    def open(cls, out: str, recipe: str, *, resume: bool) -> RunFolder:
        """Start a run in `out`, or (`resume`) go on in it.

        A folder that holds a run is refused without `resume`; with it, a recipe that differs in a key that
        changes the meaning of a step is refused.
        """
        path = Path(out)
        refuse(out, recipe, resume)
        try:
            path.mkdir(parents=True, exist_ok=True)
            lock = os.open(path / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise BadInput(f"out: {path}: cannot be written: {error.strerror}") from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(lock)
            raise BadInput(f"out: {path}: another run is writing here; wait for it or choose another out") from error
        remove_leftovers(path)
        write_atomically(path / "recipe.yaml", recipe)
        return cls(path, lock)

    def close(self) -> None:
        """Give the folder free."""
        os.close(self._lock)

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    def rollouts(self, name: str, step: int) -> Path:
        return self.path / "rollouts" / f"{name}-{step:06d}.jsonl"

    def save(self, step: int, state: Mapping[str, Any], write: Callable[[Path], None]) -> Path:
        """A checkpoint, whole or not at all; only then does `latest` name it."""
        target = self.path / "checkpoints" / f"step-{step:06d}"
        with folder_atomically(target) as folder:
            write(folder)
            (folder / "state.json").write_text(json.dumps({"step": step, **state}), encoding="utf-8")
        write_atomically(self.path / "checkpoints" / "latest", target.name + "\n")
        return target

    def latest(self) -> tuple[Path, dict[str, Any]] | None:
        """The newest complete checkpoint and its state."""
        folder = latest_checkpoint(self.path)
        return None if folder is None else (folder, read_state(folder))


def refuse(out: str, recipe: str, resume: bool) -> None:
    """Raise `BadInput` where `RunFolder.open` would; touches nothing, so it can come before any work."""
    path = Path(out)
    if path.exists() and not path.is_dir():
        raise BadInput(f"out: {path}: is a file; expected a folder for the run")
    existing = path / "recipe.yaml"
    if existing.is_file() or (path / "metrics.jsonl").is_file():
        if not resume:
            raise BadInput(f"out: {path}: holds a run already; add --resume to go on with it, or choose another out")
        if existing.is_file():
            _same_meaning(existing, recipe)


def checkpoints(run: Path) -> list[Path]:
    """Complete checkpoints, oldest first, by number (step 10 is after step 9)."""
    found = [p for p in (run / "checkpoints").glob("step-*") if (p / "state.json").is_file()]
    return sorted(found, key=lambda p: int(p.name.removeprefix("step-")))


def latest_checkpoint(run: Path) -> Path | None:
    """The newest complete checkpoint of a run folder."""
    found = checkpoints(run)
    return found[-1] if found else None


def read_state(folder: Path) -> dict[str, Any]:
    """The numbers that a checkpoint holds beside weights and optimizers."""
    try:
        state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
        if not isinstance(state.get("step"), int):
            raise ValueError("has no step")
    except (OSError, ValueError, AttributeError) as error:
        raise BadInput(f"checkpoint {folder}: state.json cannot be read: {error}") from error
    return state


def _same_meaning(existing: Path, recipe: str) -> None:
    try:
        old = yaml.safe_load(existing.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise BadInput(f"{existing}: cannot be read as YAML: {error}") from error
    new = yaml.safe_load(recipe)
    changed = [key for key in sorted(old.keys() | new.keys()) if old.get(key) != new.get(key)]
    if forbidden := [key for key in changed if key not in RESUMABLE]:
        key = forbidden[0]
        raise BadInput(
            f"{existing}: the run was started with {key} = {old.get(key)!r}, now it is {new.get(key)!r}; "
            f"only {', '.join(sorted(RESUMABLE))} may change at a resume"
        )


def choose_checkpoint(run: Path, step: int | None) -> Path:
    """The checkpoint of `step`, or the newest."""
    found = checkpoints(run)
    if not found:
        raise BadInput(f"run {run}: has no checkpoint yet")
    if step is None:
        return found[-1]
    by_step = {int(p.name.removeprefix("step-")): p for p in found}
    if step not in by_step:
        raise BadInput(f"run {run}: no checkpoint of step {step}; there are {', '.join(map(str, by_step))}")
    return by_step[step]
