"""`replacing`: write a file that is whole or not there, and never through a link that somebody put in its place.

block writes into a new file → rename over the old one. Run folders may come from others: a link in one could lead anywhere.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A new file that takes the place of `path` when the block ends; if it fails, `path` is as it was.

    A link at `path` is replaced, not followed. To have the content on the disk, flush and fsync in the block.
    """
    part = path.with_name(f".{secrets.token_hex(8)}.{path.name}.tmp")
    try:
        with part.open("x+b") as file:  # x: fails if anything is there, a link included
            yield file
        part.replace(path)
    finally:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)


def open_without_links(path: str, flags: int) -> int:
    """An `opener` for `open` that refuses a link."""
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)
