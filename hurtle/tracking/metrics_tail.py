"""The newest value of every metric of a run, also while it is being trained: the end of metrics.jsonl → dict.

Reads a fixed number of bytes, however long the run. Lines that are half written, or damaged by a crash, are skipped.
"""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path

TAIL_BYTES = 1 << 14


def last_metrics(file: Path, size: int = TAIL_BYTES) -> dict[str, float]:
    """The newest known value of each metric in the last `size` bytes; empty if there is no such file yet."""
    try:
        with file.open("rb") as opened:
            end = opened.seek(0, os.SEEK_END)
            opened.seek(max(0, end - size))
            tail = opened.read()
    except OSError:
        return {}
    found: dict[str, float] = {}
    for line in tail.split(b"\n"):  # the first may have lost its beginning
        with contextlib.suppress(ValueError):  # also not UTF-8
            values = json.loads(line)
            if isinstance(values, dict):
                found |= {name: float(value) for name, value in values.items() if isinstance(value, int | float)}
    return found
