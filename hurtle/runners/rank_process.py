"""The process of a learner beside the first, started by rank_processes.py.

a pickle on standard input → `Follower` → exit code. When the input ends the parent is gone, and so is this process.
"""

from __future__ import annotations

import os
import select
import shutil
import sys
import threading
from pathlib import Path
from typing import Any

from hurtle.errors import HurtleError, LostRankError
from hurtle.runners.rank_processes import FAILED, LOST, ready_file

LOOK_SECONDS = 1.0
"""Time between looks at whether the parent lives, in case that somebody else holds the input open."""


def main() -> None:
    """Follow rank 0 of a run; arguments: rank, size, the file of the group's store."""
    rank, size, store = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    parent = os.getppid()
    content = _read(int.from_bytes(_read(8, store.parent), "little"), store.parent)
    threading.Thread(target=_end_with, args=(parent, store.parent), daemon=True).start()
    try:
        _follow(content, rank, size, store)
    except LostRankError:
        if _has_ended(parent):  # this thread may notice first
            _clear(store.parent)
        _end(LOST)
    except HurtleError as error:
        print(f"hurtle: error: {error}", file=sys.stderr)
        _end(FAILED)
    except KeyboardInterrupt:
        _end(LOST)


def _follow(content: bytes, rank: int, size: int, store: Path) -> None:
    from hurtle.algorithms.algorithm import algorithm_name
    from hurtle.runners.rank_group import Task, follow, joined
    from hurtle.runners.settings import settings_from_dict
    from hurtle.tracking.checkpoints import load_checkpoint
    from hurtle.vector.pickling import load

    told: dict[str, Any] = load(content)
    algorithm_name(told["settings"]["algorithm"])  # the first process has checked that it may run
    saved = None if told["file"] is None else load_checkpoint(told["file"])
    task = Task(**{**told, "settings": settings_from_dict(told["settings"]), "saved": saved})
    ready_file(store, rank).touch()
    with joined(task.settings, rank, size, store) as ranks:
        follow(task, ranks)


def _read(size: int, folder: Path) -> bytes:
    content = b""
    while len(content) < size:
        piece = os.read(0, size - len(content))
        if not piece:
            _clear(folder)
            _end(LOST)
        content += piece
    return content


def _end_with(parent: int, folder: Path) -> None:
    while not _has_ended(parent):
        pass
    _clear(folder)
    _end(LOST)


def _has_ended(parent: int) -> bool:
    """Whether the parent is gone: it closes the input of no process that lives. Waits for it for a moment."""
    return os.getppid() != parent or (bool(select.select([0], [], [], LOOK_SECONDS)[0]) and not os.read(0, 1))


def _clear(folder: Path) -> None:
    """Remove the folder of a parent that can no longer do so."""
    shutil.rmtree(folder, ignore_errors=True)


def _end(code: int) -> None:
    """End without waiting for other threads, which may be in somebody's code."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
