"""`replacing`: writes a file atomically, and never through a symbolic link.

block writes into a new file → rename over the old one. A run folder may come from someone else and contain links to anywhere.
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
    """A new file that replaces `path` when the block ends; if the block fails, `path` is unchanged.

    A link at `path` is replaced, not followed. To force the content to disk, flush and fsync in the block.
    """
    part = path.with_name(f".{secrets.token_hex(8)}.{path.name}.tmp")
    try:
        with part.open("x+b") as file:  # x: fails if anything exists there, even a link
            yield file
        part.replace(path)
    finally:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)


def open_without_links(path: str, flags: int) -> int:
    """An `opener` for `open` that refuses symbolic links."""
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)
