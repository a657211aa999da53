"""The two ways Spaniel refuses: input the user can mend, and a run that cannot go on."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class SpanielError(Exception):
    """A failure that has a message for the user; the command line prints it without a traceback."""

    exit_code = 1


class BadInput(SpanielError):
    """Something the user gave (recipe, data file, corpus, request) is wrong.

    The message names the file, row or key, the value found and what was expected. Exit code 2.
    """

    exit_code = 2


class RunStopped(SpanielError):
    """A run that cannot go on: too many failures, numbers that stay non-finite. Exit code 1."""


class Interrupted(SpanielError):
    """The user asked a run to stop. Exit code 130, as shells have it for Ctrl-C."""

    exit_code = 130


def nearest(name: str, known: Iterable[str]) -> str:
    """`" (did you mean 'x'?)"` for the known name closest to `name`, or `""` where none is close."""
    found = get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f" (did you mean {found[0]!r}?)" if found else ""
