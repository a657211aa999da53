"""Metrics on the console: live on a terminal, one line a step elsewhere."""

from __future__ import annotations

import time
import unicodedata
from collections.abc import Mapping

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

SHOWN = {
    "critic/score/mean": "score",
    "reward/gold": "gold score",
    "reward/exact_match": "exact match",
    "val/exact_match": "validation exact match",
    "val/searches_per_question": "validation searches/question",
    "env/number_of_valid_search": "searches/question",
    "env/ratio_of_valid_action": "valid actions",
    "response_length/mean": "tokens written",
    "critic/kl": "KL",
    "actor/entropy": "entropy",
    "sft/nll": "nll",
    "val/nll": "validation nll",
    "rm/loss": "loss",
    "rm/accuracy": "accuracy",
    "val/accuracy": "validation accuracy",
    "val/ceiling": "best possible",
    "timing_s/step": "seconds a step",
}


def printable(text: str) -> str:
    """`text` with every control and format character (ANSI escapes, right-to-left marks) shown as an escape;
    line ends and tabs stay."""
    return "".join(c if c in "\n\t" or unicodedata.category(c)[0] != "C" else _escaped(c) for c in text)


def _escaped(char: str) -> str:
    return f"\\u{ord(char):04x}"


class ConsoleTracker:
    """A progress bar with time left and the few numbers that matter, updated in place on a terminal; plain lines
    in a file or pipe, or where NO_COLOR or TERM=dumb asks for them."""

    def __init__(self, total: int, start: int = 0, console: Console | None = None) -> None:
        self.console = console or Console()
        self.total = total
        self._start, self._began = start, time.monotonic()
        self._latest: dict[str, float] = {}
        self._live: Live | None = None
        self._progress = Progress(
            TextColumn("step"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("left"),
            TimeRemainingColumn(), console=self.console,
        )  # fmt: skip
        self._task = self._progress.add_task("step", total=total, completed=start)
        # NO_COLOR only takes the colours from rich; updating in place would still send cursor sequences.
        if self.console.is_terminal and not self.console.is_dumb_terminal and not self.console.no_color:
            self._live = Live(self._view(), console=self.console, refresh_per_second=4)
            self._live.start()

    def log(self, metrics: Mapping[str, float]) -> None:
        step = int(metrics["step"])
        self._latest.update({name: value for name, value in metrics.items() if name in SHOWN})
        self._progress.update(self._task, completed=step)
        if self._live is not None:
            self._live.update(self._view())
        else:
            self.console.print(Text(self._line(step, metrics)), soft_wrap=True)

    def close(self) -> None:
        if self._live is not None:
            self._live.update(self._view(), refresh=True)
            self._live.stop()
            self._live = None

    def _view(self) -> Group:
        table = Table(show_header=False, box=None, padding=(0, 2))
        for name, title in SHOWN.items():
            if name in self._latest:
                table.add_row(Text(title), Text(_number(self._latest[name]), justify="right"))
        return Group(table, self._progress)

    def _line(self, step: int, metrics: Mapping[str, float]) -> str:
        numbers = [f"{title} {_number(metrics[name])}" for name, title in SHOWN.items() if name in metrics]
        return f"step {step}/{self.total}  " + "  ".join(numbers) + self._left(step)

    def _left(self, step: int) -> str:
        done = step - self._start
        if done < 1 or step >= self.total:
            return ""
        seconds = (time.monotonic() - self._began) / done * (self.total - step)
        return f"  left {int(seconds // 60)}:{int(seconds % 60):02d}"


def _number(value: float) -> str:
    return f"{value:.3f}" if abs(value) < 100 else f"{value:.0f}"
