"""Looking at a policy: evaluation, chat, and the check of a recipe."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from spaniel.config import dump
from spaniel.envs.search import tagged
from spaniel.errors import BadInput
from spaniel.files import write_atomically
from spaniel.launch import Agent, build_rl, build_sft, open_agent, open_questions, open_retriever
from spaniel.recipe import RLRecipe, Search, SFTRecipe
from spaniel.rollout.episode import rollout
from spaniel.track.console import printable
from spaniel.track.rollouts import write_rollouts
from spaniel.train.evaluate import evaluate
from spaniel.train.recall import recall
from spaniel.train.record import record
from spaniel.types import Metrics, Prompt, Rollout, Sampled


def _table(title: str, metrics: Metrics) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("metric")
    table.add_column("value", justify="right")
    for name, value in metrics.items():
        table.add_row(Text(printable(name)), f"{value:.4g}")
    return table
