"""Status messages while the user waits: one line on standard error before each step that takes seconds."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def status() -> Iterator[StatusLine]:
    """Yields a function that shows the current step on standard error; on a terminal the line is erased at the end."""
    line = StatusLine()
    try:
        yield line
    finally:
        line.erase()


class StatusLine:
    """Shows one step at a time: `status("loading torch")` prints "hurtle: loading torch …"."""

    _is_shown = False

    def __call__(self, step: str) -> None:
        """Show a step; on a terminal it replaces the previous one."""
        self.erase()
        print(f"hurtle: {step} …", end="" if sys.stderr.isatty() else "\n", file=sys.stderr, flush=True)
        self._is_shown = True

    def erase(self) -> None:
        """Clear the line, if standard error is a terminal."""
        if self._is_shown and sys.stderr.isatty():
            print("\r\033[2K", end="", file=sys.stderr, flush=True)


@contextmanager
def loading(what: str) -> Iterator[None]:
    """Show that `what` is being imported, which can take seconds."""
    with status() as show:
        show(f"loading {what}")
        yield
