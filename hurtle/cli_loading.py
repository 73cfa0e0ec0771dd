"""`loading`: says at once what the command line is waiting for, before imports that take seconds."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def loading(what: str) -> Iterator[None]:
    """Say on standard error that `what` is being loaded; on a terminal the line is erased when that is done."""
    print(f"hurtle: loading {what} …", end="" if sys.stderr.isatty() else "\n", file=sys.stderr, flush=True)
    try:
        yield
    finally:
        if sys.stderr.isatty():
            print("\r\033[2K", end="", file=sys.stderr, flush=True)
