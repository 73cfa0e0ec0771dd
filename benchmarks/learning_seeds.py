"""Learn the MuJoCo tasks of learning_tasks.py on one GPU, all seeds of a task side by side: curves and final evaluations.

    python benchmarks/learning_seeds.py sac_halfcheetah sac_hopper --seconds 500
    python benchmarks/learning_seeds.py xqc_ant xqc_humanoid --seeds 3

Each task is one `hurtle train --side-by-side`; several are trained at the same time, each in a process of its own, between
which the GPU takes turns. A task ends when its steps are done, when the time is up or on Ctrl-C; the same command goes on from
there. The outcome is one file per task and seed, as learning.py writes them.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from learning_jobs import Job, settings_of
from learning_report import Places
from learning_tasks import MUJOCO
from record import machine

from hurtle.experiments.curves_of_runs import RunCurves
from hurtle.experiments.records import RunRecord, find_runs
from hurtle.runners.settings import make_settings, settings_to_dict
from hurtle.runners.signals import StopSignals
from hurtle.tracking.run_folder import RunFolder
from hurtle.tracking.toml_text import to_toml

POINTS = 120
"""Of a curve, at most."""
POLL_SECONDS = 0.2


class SeedsOfTask:
    """The training of one task, in a process.

    Args:
        name: The task's.
        args: The command's.
    """

    def __init__(self, name: str, args: argparse.Namespace):
        self.name, self.args = name, args
        overrides = {**MUJOCO[name].overrides(args.first_seed), "device": args.device}
        if args.device == "cpu":
            overrides |= {"compile": False, "precision": "float32"}
        if args.steps:
            overrides["total_steps"] = args.steps
        self.settings = make_settings(MUJOCO[name].env, overrides)
        self.folder: Path = args.folder / f"{name}{f'-{args.first_seed}' * (args.first_seed > 0)}"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Begin, or go on; does nothing if all seeds are done."""
        total = self.settings.train.total_steps
        if (self.folder / "seeds.toml").is_file():
            if len(self.finished()) == self.args.seeds:
                return
            words = ["--resume", self.folder, "--total-steps", total]
        else:
            file = self.folder.with_suffix(".toml")
            own = {"runs": str(self.args.folder), "name": self.folder.name, "trackers": [], "keep_checkpoints": 1}
            file.write_text(to_toml({**settings_to_dict(self.settings), **own, "progress": "plain"}))
            words = ["--config", file, "--seeds", self.args.seeds, "--side-by-side"]
        command = [sys.executable, "-m", "hurtle", "train", *map(str, words)]
        self.process = subprocess.Popen(command, start_new_session=True)  # Ctrl-C reaches this process alone

    def finished(self) -> list[RunRecord]:
        """The seeds whose steps are done and that have been evaluated."""
        runs = [RunRecord.read(path) for path in find_runs(self.folder)] if any(self.folder.glob("seed-*/config.toml")) else []
        return [run for run in runs if run.state == "finished" and run.steps >= self.settings.train.total_steps]

    def is_running(self) -> bool:
        """Whether its process has not ended."""
        return self.process is not None and self.process.poll() is None

    def stop(self) -> None:
        """Ask it to save and end."""
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)

    def report(self, is_stopped: bool) -> bool:
        """Write the files of finished seeds, and say what became of the others; returns whether all is well."""
        runs = self.finished()
        for run in runs:
            self._write(run)
        if len(runs) == self.args.seeds:
            print(f"{self.name}: {runs[0].steps:,} steps in {runs[0].seconds:.0f} s", flush=True)
            return True
        print(f"{self.name}: {len(runs)} of {self.args.seeds} seeds are done, to be continued", flush=True)
        return is_stopped

    def _write(self, run: RunRecord) -> None:
        curve = np.asarray(RunCurves(run.path).curve("return", "steps"))
        chosen = np.unique(np.linspace(0, len(curve) - 1, min(POINTS, len(curve))).astype(int))
        job = Job(self.name, "hurtle", run.seed)
        result: dict[str, Any] = {
            **job._asdict(),
            "steps": run.steps,
            "seconds": run.seconds,
            "side_by_side": self.args.seeds,
            "curve": [[int(curve[k][0]), float(curve[k][1])] for k in chosen],
            "evaluation": RunFolder(run.path).read_summary()["evaluation"],
            "settings": settings_of(job),
            "machine": machine(),
        }
        self.args.results.mkdir(parents=True, exist_ok=True)
        (self.args.results / job.file).write_text(json.dumps(result) + "\n")
        print(f"{self.name}, seed {run.seed}: {run.evaluation:.1f}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tasks", nargs="+", choices=MUJOCO, metavar="task", help=", ".join(MUJOCO))
    parser.add_argument("--seeds", type=int, default=5, help="how many (5)")
    parser.add_argument("--first-seed", type=int, default=0, help="the first of them (0)")
    parser.add_argument("--steps", type=int, help="of each seed, instead of the task's")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop and save after that time")
    parser.add_argument("--device", default="cuda", help="of the networks (cuda)")
    parser.add_argument("--folder", type=Path, default=Path("learning-seeds"), help="of the runs (learning-seeds)")
    parser.add_argument("--results", type=Path, default=Places().results, help="of the result files")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    tasks, stopped_by = [SeedsOfTask(name, args) for name in args.tasks], list[str]()
    began, is_stopping = time.monotonic(), False
    with StopSignals(stopped_by.append):
        for task in tasks:
            task.start()
        while any(task.is_running() for task in tasks):
            if not is_stopping and (stopped_by or time.monotonic() - began >= args.seconds):
                is_stopping = True
                for task in tasks:
                    task.stop()
            time.sleep(POLL_SECONDS)
    return sum(not task.report(is_stopping) for task in tasks)


if __name__ == "__main__":
    sys.exit(main())
