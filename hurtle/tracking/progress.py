"""A progress display on standard error: a transient bar on a terminal, an occasional line in a log."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic

EVERY = 5.0
"""Seconds between two lines in a log."""


@contextmanager
def progress_of(what: str, total: int, wanted: bool = True) -> Iterator[Callable[[int], None]]:
    """Show the progress of `total` units of work; yields a function that takes the number of units just done.

    Args:
        what: The activity, such as "evaluating".
        total: Number of units.
        wanted: False shows nothing.
    """
    if not wanted:
        yield lambda count: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        yield _Lines(what, total)
        return
    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=total)
        yield lambda count: bar.advance(task, count)


class _Lines:
    def __init__(self, what: str, total: int):
        self._what, self._total, self._done, self._printed_at = what, total, 0, monotonic()

    def __call__(self, count: int) -> None:
        self._done += count
        if monotonic() - self._printed_at >= EVERY:
            self._printed_at = monotonic()
            print(f"hurtle: {self._what}: {self._done:,} of {self._total:,} …", file=sys.stderr, flush=True)
