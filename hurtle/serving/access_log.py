"""`AccessLog`: a line of JSON for each request. Buffered; a thread of its own would cost more than it saves."""

from __future__ import annotations

import logging
import sys
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

import orjson

from hurtle.errors import HurtleError

log = logging.getLogger("hurtle.serving")


class AccessLog:
    """Where requests are written down.

    Args:
        path: A file, to be appended to; - is standard output.
    """

    def __init__(self, path: str):
        try:
            self._file = sys.stdout.buffer if path == "-" else open(path, "ab", buffering=1 << 16)  # noqa: SIM115, PTH123
        except OSError as error:
            raise HurtleError(f"Cannot write the access log {path}: {error.strerror}.") from None
        self._is_ours = path != "-"
        self._has_failed = False

    def write(self, **values: Any) -> None:
        """Add a line."""
        line = {"time": datetime.now(UTC).isoformat(timespec="milliseconds"), **values}
        try:
            self._file.write(orjson.dumps(line, default=str) + b"\n")
            if not self._is_ours:
                self._file.flush()
        except (OSError, ValueError) as error:
            self._note(error)

    def flush(self) -> None:
        """Let others read what was written."""
        try:
            self._file.flush()
        except (OSError, ValueError) as error:
            self._note(error)

    def close(self) -> None:
        """Write what is left."""
        self.flush()
        if self._is_ours:
            with suppress(OSError):
                self._file.close()

    def _note(self, error: Exception) -> None:
        """A full disk costs lines of the log, and no answers; say so once."""
        if not self._has_failed:
            log.error("the access log cannot be written: %s", error)
        self._has_failed = True
