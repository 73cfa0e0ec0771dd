"""The process that trains seeds side by side: `python -m hurtle.experiments.together_worker`, started by together_process.py.

a line of JSON on standard input → `SeedsTogether` → run folders; a line of JSON on standard output for what happens to each
seed. When the input ends, the parent is gone: all seeds are saved.
"""

from __future__ import annotations

import io
import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from hurtle.errors import HurtleError
from hurtle.experiments.run_processes import ENDED_BADLY, INTERRUPTED
from hurtle.experiments.run_worker import train_run


def main() -> int:
    """Train as told; returns the exit code."""
    for number in (signal.SIGINT, signal.SIGTERM):  # while there is nothing to save; training has its own handlers
        signal.signal(number, lambda *_: os._exit(INTERRUPTED))
    results = os.dup(1)
    os.dup2(2, 1)  # what training prints goes to the log
    source = io.FileIO(0)
    task = json.loads(source.readline())
    threading.Thread(target=_wait_for_the_end, args=(source,), daemon=True).start()
    try:
        train_together(task["runs"], task["most"], teller(results))
    except HurtleError as error:
        print(f"hurtle: error: {error}", file=sys.stderr)
        return ENDED_BADLY
    return 0


def teller(results: int) -> Callable[[str, int, str], None]:
    """A function that writes what happens to seeds to a pipe; if nobody reads it any more, all seeds are saved nevertheless."""

    def tell(what: str, seed: int, why: str) -> None:
        with suppress(BrokenPipeError):
            os.write(results, json.dumps([what, seed, why]).encode() + b"\n")

    return tell


def _wait_for_the_end(source: io.FileIO) -> None:
    source.readline()
    os.kill(os.getpid(), signal.SIGTERM)


def train_together(runs: list[dict[str, Any]], most: int | None, tell: Any) -> None:
    """Train the largest group of seeds that can go on together; the others are left for another turn.

    Args:
        runs: Of each seed: all its "settings", the folder of the run to "resume" or an empty string, and "trust", see
            `hurtle.train`.
        most: The most seeds at a time; None: as many as memory allows.
        tell: See `seeds_together.Tell`.
    """
    from hurtle.algorithms.algorithm import algorithm_name
    from hurtle.runners.seed_record import SeedStart
    from hurtle.runners.seeds_together import SeedsTogether, grouped
    from hurtle.runners.settings import settings_from_dict

    algorithm_name(runs[0]["settings"]["algorithm"])  # named by the user, or allowed when the seeds were resumed
    settings = [settings_from_dict(run["settings"]) for run in runs]
    folders = [Path(run["resume"]) if run["resume"] else None for run in runs]
    first, *others = grouped(folders)
    seeds = [each.train.seed for each in settings]
    first, rest = first[: most or len(first)], first[most or len(first) :]
    for k, _ in [pair for group in (rest, *others) for pair in group]:
        tell("left", seeds[k], "")
    file = first[0][1]
    if file is not None and int(file.stem.partition("-")[2]) >= settings[0].train.total_steps:
        for k, _ in first:
            train_run({"total_steps": settings[k].train.total_steps}, str(folders[k]), runs[k]["trust"])
            tell("ended", seeds[k], "")
        return
    SeedsTogether([SeedStart(settings[k], folders[k], file) for k, file in first], tell).run()


if __name__ == "__main__":
    sys.exit(main())
