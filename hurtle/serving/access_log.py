"""`AccessLog`: a line of JSON for each request. Buffered; a thread of its own would cost more than it saves."""

from __future__ import annotations

import sys
from datetime import UTC, datetime
from typing import Any

import orjson

from hurtle.errors import HurtleError


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

    def write(self, **values: Any) -> None:
        """Add a line."""
        line = {"time": datetime.now(UTC).isoformat(timespec="milliseconds"), **values}
        self._file.write(orjson.dumps(line, default=str) + b"\n")
        if not self._is_ours:
            self._file.flush()

    def flush(self) -> None:
        """Let others read what was written."""
        self._file.flush()

    def close(self) -> None:
        """Write what is left."""
        self._file.flush()
        if self._is_ours:
            self._file.close()
