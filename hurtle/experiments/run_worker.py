"""The process that trains runs: `python -m hurtle.experiments.run_worker`, started by run_processes.py.

lines of JSON on standard input → `hurtle.train` → run folders; a line on standard output for each that is done. When the input
ends, so does the process: nothing more is to come, or the parent is gone. A run under way is saved.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import queue
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

from hurtle.errors import HurtleError
from hurtle.experiments.run_processes import DONE, ENDED_BADLY, INTERRUPTED, PATIENCE


def main() -> int:
    """Train as told until the input ends or a run fails; returns the exit code."""
    busy = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: os._exit(INTERRUPTED))  # while there is nothing to save; training has its own
    signal.signal(signal.SIGINT, lambda *_: os._exit(INTERRUPTED) if busy.is_set() else None)  # too late: it is done
    with contextlib.suppress(OSError):  # Linux: where memory is full, this process is ended before the one that started it
        Path("/proc/self/oom_score_adj").write_text("800")
    results = os.dup(1)
    os.dup2(2, 1)  # what training prints goes to the log
    tasks: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(tasks,), daemon=True).start()
    while True:
        task = tasks.get()
        busy.set()
        _log_to(task.pop("log"))
        try:
            train_run(**task)
        except HurtleError as error:
            print(f"hurtle: error: {error}", file=sys.stderr)
            return ENDED_BADLY
        busy.clear()
        sys.stdout.flush()
        with contextlib.suppress(BrokenPipeError):  # the parent is gone; so will this be
            os.write(results, DONE + b"\n")


def _read(tasks: queue.SimpleQueue[dict[str, Any]]) -> None:
    source, patience = io.FileIO(0), PATIENCE  # without a buffer, whose lock Python would wait for when it ends
    while line := source.readline():
        task = json.loads(line)
        patience = task.pop("patience", PATIENCE)
        tasks.put(task)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(patience)
    os.killpg(os.getpid(), signal.SIGKILL)  # it hangs in somebody's code, and nobody is there any more to end it


def _log_to(file: str) -> None:
    sys.stdout.flush()
    descriptor = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)


def train_run(settings: dict[str, Any], resume: str, trust: bool, until: int | None = None) -> None:
    """Train a new run, or go on with one.

    Args:
        settings: All settings of a new run, or those to change.
        resume: The folder of the run to go on with, or an empty string.
        trust: See `hurtle.train`.
        until: See `hurtle.train`.
    """
    from hurtle.runners.training import train

    if not resume:
        train(until=until, **settings)
    elif until is not None or not _only_needs_evaluation(Path(resume), settings):
        train(resume=resume, trust=trust, until=until, **settings)
    else:
        _evaluate(Path(resume), trust)


def _only_needs_evaluation(folder: Path, settings: dict[str, Any]) -> bool:
    """Whether all steps were done and saved when the run ended."""
    from hurtle.tracking.run_folder import RunFolder

    steps = [int(file.stem.partition("-")[2]) for file in (folder / "checkpoints").glob("step-*.pt")]
    wanted = settings.get("total_steps", RunFolder(folder).read_config()["total_steps"])
    return max(steps, default=0) >= wanted


def _evaluate(folder: Path, trust: bool) -> None:
    """Do what was left: the final evaluation, and the summary."""
    from hurtle.runners.evaluate import evaluate_run
    from hurtle.tracking.checkpoints import Checkpoints, load_checkpoint
    from hurtle.tracking.metrics_tail import last_metrics
    from hurtle.tracking.run_folder import RunFolder
    from hurtle.tracking.run_state import hold

    run = RunFolder(folder)
    with hold(folder):
        config, newest, file = run.read_config(), last_metrics(run.metrics_file), Checkpoints(run.checkpoints).latest()
        if file is None:
            raise HurtleError(f"{folder} has no checkpoint that is whole.")
        progress = load_checkpoint(file)["progress"]
        found = evaluate_run(
            file, config["eval_episodes"], config["eval_sampled"], seed=config["seed"], device=config["device"], trust=trust
        )
        run.write_summary(
            {
                "steps": progress["steps"],
                "seconds": progress["seconds"],
                "steps_per_second": progress["steps"] / max(progress["seconds"], 1e-9),
                "mean_return": newest.get("episode_return"),
                "episodes": int(newest.get("episodes", 0)),
                "stopped_by": "total_steps",
                "evaluation": found.summary(),
            }
        )


if __name__ == "__main__":
    sys.exit(main())
