"""Does it learn? A grid of tasks × seeds, the returns reached beside SB3's and CleanRL's, and the curves.

python benchmarks/learning.py --jobs 2                          # everything that is not finished yet, then the report
python benchmarks/learning.py --tasks cartpole_100k breakout --seeds 5 --library both
python benchmarks/learning.py --list                            # tasks, goals, and what is finished
python benchmarks/learning.py --report                          # only draw the curves and rewrite docs/learning.md's table
python benchmarks/learning.py --quick --tasks cartpole_100k     # see that it runs: a few steps, nothing is kept

Each finished task, seed and library is one file in benchmarks/results/learning/; a rerun does what is missing. Ctrl-C keeps
what is finished. To run something again, delete its file.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from learning_jobs import Job, run_job, settings_of
from learning_report import Places, load_results, report
from learning_tasks import TASKS
from record import ROOT, table

from hurtle.runners.settings import settings_from_dict, settings_to_dict

LIBRARIES = {"hurtle": ("hurtle",), "sb3": ("sb3",), "both": ("hurtle", "sb3")}
TELL_SECONDS = 30.0
"""Between two lines of progress."""

Command = Callable[[Any], list[str]]
"""The program that does a job and writes its file."""


def plan(tasks: Iterable[str], seeds: int, libraries: Sequence[str]) -> list[Job]:
    """All jobs, seed by seed, so that every task has its first seed before any has its second."""
    jobs = [Job(name, "random", 0) for name in tasks if "hurtle" in libraries and TASKS[name].goal.needs_random]
    for seed in range(seeds):
        for name in tasks:
            jobs += [Job(name, library, seed) for library in libraries if library != "sb3" or TASKS[name].sb3]
    return jobs


def unfinished(jobs: Iterable[Job], folder: Path) -> list[Job]:
    """Those without a file."""
    return [job for job in jobs if not (folder / job.file).exists()]


def outdated(jobs: Iterable[Job], folder: Path) -> list[Job]:
    """Finished ones whose settings are not today's: a preset or a task has changed. Settings added since had their defaults."""
    found = []
    for job in jobs:
        if not (folder / job.file).exists():
            continue
        now, then = settings_of(job), json.loads((folder / job.file).read_text())["settings"]
        defaults = settings_to_dict(settings_from_dict({"algorithm": now.get("algorithm", "ppo")}))
        if now != {name: then.get(name, defaults.get(name)) for name in {*now, *then}}:
            found.append(job)
    return found


# Running jobs ---------------------------------------------------------------------------------------------------------


@dataclass
class Running:
    """A job under way, in a process of its own: a crash ends one job, and each has one thread of torch."""

    job: Job
    process: subprocess.Popen
    log: IO[bytes]
    began: float = field(default_factory=time.monotonic)

    @classmethod
    def start(cls, job: Job, command: list[str]) -> Running:
        """Start its process; what it prints goes to a file that vanishes with it."""
        log = tempfile.TemporaryFile()  # noqa: SIM115 (closed by `close`)
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        # A session of its own: Ctrl-C reaches the grid alone, which then ends its jobs.
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)
        return cls(job, process, log)

    @property
    def output(self) -> str:
        """What it has printed."""
        size = os.fstat(self.log.fileno()).st_size
        return os.pread(self.log.fileno(), size, 0).decode(errors="replace")

    def progress(self) -> tuple[int, float] | None:
        """Steps and mean return as it last told."""
        told = [line.split() for line in self.output.splitlines() if line.startswith("progress ")]
        return (int(told[-1][1]), float(told[-1][2])) if told else None

    def stop(self) -> None:
        """End it, kindly at first: a training ends its workers."""
        self.process.terminate()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def close(self) -> None:
        """Let go of its output."""
        self.log.close()


class Grid:
    """Runs jobs side by side, tells how far they are, and estimates when all will be done.

    Args:
        jobs: What to do, in this order.
        workers: How many at a time.
        command: The program of a job.
        folder: Where the result files go; finished ones there tell how long a step takes.
        steps: Of each job.
    """

    def __init__(self, jobs: Sequence[Any], workers: int, command: Command, folder: Path, steps: Mapping[Any, int]):
        self._waiting, self._workers, self._command, self._folder = list(jobs), workers, command, folder
        self._running: list[Running] = []
        self._total, self._finished = len(jobs), 0
        self._steps = steps
        self._speeds = Speeds(load_results(folder)) if folder.exists() else Speeds({})
        self.failed: list[Job] = []

    def run(self, seconds: float = 0.0) -> None:
        """Do all jobs. Ctrl-C ends those under way and is raised again; SIGTERM and `seconds`, unless 0, count as Ctrl-C."""
        before = signal.signal(signal.SIGTERM, signal.default_int_handler)
        told = began = time.monotonic()
        try:
            while self._waiting or self._running:
                while self._waiting and len(self._running) < self._workers:
                    job = self._waiting.pop(0)
                    self._running.append(Running.start(job, self._command(job)))
                time.sleep(0.1)
                if seconds and time.monotonic() - began >= seconds:
                    raise KeyboardInterrupt
                for ended in [running for running in self._running if running.process.poll() is not None]:
                    self._running.remove(ended)
                    self._take(ended)
                if self._running and time.monotonic() - told >= TELL_SECONDS:
                    told = time.monotonic()
                    self._tell("  ".join(map(self._status, self._running)))
        finally:
            for running in self._running:
                running.process.terminate()
            for running in self._running:
                running.stop()
                running.close()
            signal.signal(signal.SIGTERM, before)

    def _take(self, ended: Running) -> None:
        path = self._folder / ended.job.file
        if ended.process.returncode == 0 and path.exists():
            self._finished += 1
            result = json.loads(path.read_text())
            self._speeds.add(result)
            evaluation = result["evaluation"]
            self._tell(
                f"{ended.job}: {evaluation['mean']:.4g} [{evaluation['low']:.4g}, {evaluation['high']:.4g}] "
                f"after {result['steps']:,} steps in {duration(result['seconds'])}"
            )
        else:
            self.failed.append(ended.job)
            self._tell(f"{ended.job} failed (exit status {ended.process.returncode}):\n{ended.output[-3000:].rstrip()}")
        ended.close()

    def _status(self, running: Running) -> str:
        progress = running.progress()
        if progress is None:
            return f"[{running.job}: {duration(time.monotonic() - running.began)}]"
        return f"[{running.job}: {progress[0] / self._steps[running.job]:.0%}, return {progress[1]:.4g}]"

    def _tell(self, text: str) -> None:
        left = self._seconds_left()
        when = "" if left is None else f", about {duration(left)} left"
        print(f"{self._finished + len(self.failed)}/{self._total}{when}  {text}", flush=True)

    def _seconds_left(self) -> float | None:
        """Of all jobs; None while some have no known speed."""
        left = []
        for running in self._running:
            elapsed, progress = time.monotonic() - running.began, running.progress()
            if progress is not None and elapsed > 0:
                self._speeds.guess(running.job, progress[0] / elapsed)
            seconds = self._speeds.seconds(running.job, self._steps[running.job])
            left.append(None if seconds is None else max(0.0, seconds - elapsed))
        left += [self._speeds.seconds(job, self._steps[job]) for job in self._waiting]
        known = [seconds for seconds in left if seconds is not None]
        if len(known) < len(left):
            return None
        return max(sum(known) / self._workers, max(known, default=0.0))


class Speeds:
    """Steps per second of each task and library: of finished jobs, else of one under way, else of the library's slowest."""

    def __init__(self, results: dict[str, dict[str, list[dict]]]):
        self._known: dict[tuple[str, str], float] = {}
        self._guessed: dict[tuple[str, str], float] = {}
        for libraries in results.values():
            for found in libraries.values():
                for result in found:
                    self.add(result)

    def add(self, result: dict) -> None:
        """Learn from a finished job."""
        self._known[result["task"], result["library"]] = result["steps"] / max(result["seconds"], 1e-9)

    def guess(self, job: Job, rate: float) -> None:
        """Learn from a job under way."""
        self._guessed[job.task, job.library] = rate

    def seconds(self, job: Job, steps: int) -> float | None:
        """How long a job takes; None if nothing is known."""
        if job.library == "random":
            return 0.0  # a matter of seconds
        rates = {**self._guessed, **self._known}
        rate = rates.get((job.task, job.library))
        if rate is None:
            rate = min((rate for (_, library), rate in rates.items() if library == job.library), default=None)
        return None if rate is None else steps / rate


def duration(seconds: float) -> str:
    """For people: 45 s, 12 min, 3 h 20 min."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"


# The command ----------------------------------------------------------------------------------------------------------


def listing(folder: Path) -> str:
    """Every task: goal, steps, and which seeds are finished."""
    results, rows = load_results(folder) if folder.exists() else {}, []
    for name, task in TASKS.items():
        seeds = [
            f"{library} {' '.join(str(result['seed']) for result in found)}" for library, found in results.get(name, {}).items()
        ]
        steps = f"{task.settings().train.total_steps:,}"
        rows.append([name, task.about, steps, task.goal.text(), "yes" if task.sb3 else "–", "; ".join(seeds) or "–"])
    return table(["task", "about", "steps", "goal", "SB3", "finished seeds"], rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS), metavar="TASK", help="only these; see --list")
    parser.add_argument("--seeds", type=int, default=5, help="seeds 0 … N-1 of each task (5)")
    parser.add_argument("--library", choices=LIBRARIES, default="hurtle", help="who trains; SB3 has some of the tasks (hurtle)")
    parser.add_argument("--jobs", type=int, default=1, help="trainings at a time, each with one torch thread (1)")
    parser.add_argument("--seconds", type=float, default=0.0, help="end after that time, as by Ctrl-C")
    parser.add_argument("--list", action="store_true", help="show the tasks and what is finished")
    parser.add_argument("--report", action="store_true", help="run nothing; draw the curves and rewrite the table")
    parser.add_argument("--quick", action="store_true", help="see that it runs: a few steps, nothing is kept")
    parser.add_argument("--one", nargs=3, metavar=("TASK", "LIBRARY", "SEED"), help="what the grid calls for each job")
    parser.add_argument("--folder", type=Path, help="of the result files, with --one")
    chosen = parser.parse_args()
    if chosen.one:
        name, library, seed = chosen.one
        run_job(Job(name, library, int(seed)), chosen.folder or Places().results, chosen.quick)
        return 0
    if chosen.list:
        print(listing(Places().results))
        return 0
    if chosen.quick:
        with tempfile.TemporaryDirectory() as folder:
            return run(chosen, Places.under(Path(folder)))
    return run(chosen, Places())


def run(chosen: argparse.Namespace, places: Places) -> int:
    """The grid, then the report."""
    failed: list[Job] = []
    if not chosen.report:
        jobs = plan(chosen.tasks, chosen.seeds, LIBRARIES[chosen.library])
        if old := outdated(jobs, places.results):
            print("Settings have changed since these were run; delete their files to run them again:")
            print("\n".join(f"  {places.results.relative_to(ROOT) / job.file}" for job in old))
        missing = unfinished(jobs, places.results)
        print(f"{len(jobs) - len(missing)} of {len(jobs)} jobs are finished already.", flush=True)

        def command(job: Job) -> list[str]:
            words = [*map(str, job), "--folder", str(places.results), *(["--quick"] if chosen.quick else [])]
            return [sys.executable, __file__, "--one", *words]

        steps = {job: TASKS[job.task].settings(quick=chosen.quick).train.total_steps for job in missing}
        grid = Grid(missing, chosen.jobs, command, places.results, steps)
        try:
            grid.run(chosen.seconds)
        except KeyboardInterrupt:
            print("\nStopped. What is finished is kept; the same command goes on with the rest, --report shows it.")
            return 130
        failed = grid.failed
    print(f"\n{report(places)}")
    if failed:
        print(f"\nFailed: {', '.join(map(str, failed))}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
