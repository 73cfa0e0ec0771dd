"""The process that trains one seed: `python -m hurtle.experiments.seed_worker`, started by seed_processes.py.

one line of JSON on standard input → `hurtle.train` → run folder. When the input ends, the parent is gone: the run saves and
ends.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

from hurtle.errors import HurtleError
from hurtle.experiments.seed_processes import ENDED_BADLY, INTERRUPTED


def main() -> int:
    """Train as told; returns the exit code."""
    task = json.loads(sys.stdin.buffer.readline())
    for number in (signal.SIGINT, signal.SIGTERM):  # while there is nothing to save; training has its own handlers
        signal.signal(number, lambda *_: os._exit(INTERRUPTED))
    threading.Thread(target=_end_with_the_parent, daemon=True).start()
    try:
        train_seed(**task)
    except HurtleError as error:
        print(f"hurtle: error: {error}", file=sys.stderr)
        return ENDED_BADLY
    return 0


def train_seed(settings: dict[str, Any], resume: str, trust: bool) -> None:
    """Train a new run, or go on with one.

    Args:
        settings: All settings of a new run, or those to change.
        resume: The folder of the run to go on with, or an empty string.
        trust: See `hurtle.train`.
    """
    from hurtle.runners.training import train

    if not resume:
        train(**settings)
    elif not _only_needs_evaluation(Path(resume), settings):
        train(resume=resume, trust=trust, **settings)
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


def _end_with_the_parent() -> None:
    os.read(0, 1)  # nothing more is ever sent: it returns when the parent has ended, however that was
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main())
