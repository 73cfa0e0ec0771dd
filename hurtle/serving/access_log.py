"""`AccessLog`: one JSON line per request, in a file that is rotated by size. Several processes may share the file.

request → line → buffer → file. No thread: handing lines over would cost more than it saves.
"""

from __future__ import annotations

import logging
import os
import stat
import sys
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import orjson

from hurtle.errors import HurtleError

try:
    import fcntl
except ImportError:  # Windows, where a single process serves
    fcntl = None  # type: ignore[assignment]

log = logging.getLogger("hurtle.serving")
CLOSE_SECONDS = 1.0
"""Seconds that `close` waits for a lock of another program."""
BUFFER = 1 << 16
"""Bytes that are collected before a write."""
MOST_WAITING = 16 << 20
"""Bytes of lines that are kept while another program locks the file; further lines are lost."""


class AccessLog:
    """Writes one line per request.

    Args:
        path: File to append to; - is standard output.
        max_bytes: Size at which the file becomes `path.1`, that one `path.2`, and so on. Only regular files are rotated.
        files: Number of rotated files that are kept.
    """

    def __init__(self, path: str, max_bytes: int = 1 << 26, files: int = 4):
        self._path = None if path == "-" else Path(path)
        if self._path is not None and self._path.is_file():
            self._path = self._path.resolve()  # rotate the file, not a link to it
        self._max_bytes, self._files = max_bytes, files
        self._lines: list[bytes] = []
        self._size = self._unflushed = 0
        """Bytes of all lines, and of those added since the last attempt to write."""
        self._has_failed = False
        try:
            self._file = -1 if self._path is None else _open(self._path)
        except OSError as error:
            raise HurtleError(f"Cannot write the access log {path}: {error.strerror}.") from None

    def write(self, **values: Any) -> None:
        """Add a line."""
        line = {"time": datetime.now(UTC).isoformat(timespec="milliseconds"), **values}
        if self._size >= MOST_WAITING:
            self._note(BlockingIOError("another program holds a lock on the file; lines are lost"))
            return
        self._lines.append(orjson.dumps(line, default=str) + b"\n")
        self._size += len(self._lines[-1])
        self._unflushed += len(self._lines[-1])
        if self._unflushed >= BUFFER or self._path is None:
            self.flush()

    def flush(self) -> None:
        """Write the collected lines; rotate the file first if it would become too large.

        While another program locks the file, the lines wait for the next flush.
        """
        self._unflushed = 0
        if not self._lines:
            return
        data = b"".join(self._lines)
        try:
            if self._path is None:
                sys.stdout.buffer.write(data)
                sys.stdout.buffer.flush()
            else:
                self._append(self._path, data)
        except BlockingIOError:
            self._lines = [data]
            return
        except (OSError, ValueError) as error:
            self._note(error)
        self._lines.clear()
        self._size = 0

    def close(self) -> None:
        """Write the remaining lines, unless the file stays locked for `CLOSE_SECONDS`."""
        end = monotonic() + CLOSE_SECONDS
        self.flush()
        while self._lines and monotonic() < end:
            sleep(0.01)
            self.flush()
        if self._lines:
            self._note(BlockingIOError("another program holds a lock on the file; lines are lost"))
        if self._path is not None:
            with suppress(OSError):
                os.close(self._file)

    def _append(self, path: Path, data: bytes) -> None:
        """Append under a lock: other processes append to the file, and may rotate it."""
        while True:
            _lock(self._file)
            try:
                found = os.fstat(self._file)
                if stat.S_ISREG(found.st_mode):
                    if not _is_at(path, found):  # another process or program has rotated it
                        self._reopen(path)
                        continue
                    if found.st_size and found.st_size + len(data) > self._max_bytes:
                        self._rotate(path)
                        self._reopen(path)
                        continue
                _write(self._file, data)
                return
            finally:
                _unlock(self._file)

    def _rotate(self, path: Path) -> None:
        kept = [path, *(path.with_name(f"{path.name}.{number}") for number in range(1, self._files + 1))]
        last = next((n for n in range(1, self._files) if not kept[n].exists()), self._files)
        for number in range(last, 0, -1):
            with suppress(FileNotFoundError):  # another program has moved it
                kept[number - 1].replace(kept[number])

    def _reopen(self, path: Path) -> None:
        """Open the file now at the path; closing the old one releases its lock."""
        old, self._file = self._file, _open(path)
        os.close(old)

    def _note(self, error: Exception) -> None:
        """Log the first error: a full disk costs log lines, never answers."""
        if not self._has_failed:
            log.error("the access log cannot be written: %s", error)
        self._has_failed = True


def _open(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | getattr(os, "O_BINARY", 0), 0o666)


def _write(file: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(file, view) :]


def _is_at(path: Path, found: os.stat_result) -> bool:
    try:
        there = path.stat()
    except FileNotFoundError:
        return False
    return (there.st_ino, there.st_dev) == (found.st_ino, found.st_dev)


def _lock(file: int) -> None:
    """Raises BlockingIOError if the file is locked: waiting would hold up every request."""
    if fcntl is not None:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise
        except OSError:
            pass  # not every kind of file supports locks


def _unlock(file: int) -> None:
    if fcntl is not None:
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_UN)
