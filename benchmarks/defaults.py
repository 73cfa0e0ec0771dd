"""How good are defaults? PPO, SAC and DQN on twelve tasks that nobody tuned, beside SB3's and CleanRL's defaults.

    python benchmarks/defaults.py --jobs 16                             # PPO, SAC and DQN, 100K steps, five seeds
    python benchmarks/defaults.py --algorithms ppo --steps 1_000_000    # another number of steps
    python benchmarks/defaults.py --tasks pusher taxi --libraries hurtle --seeds 2 --jobs 2
    python benchmarks/defaults.py --report                              # only the tables

Each cell is one file in benchmarks/results/defaults/. Ctrl-C, SIGTERM or --seconds ends it; cells under way are saved, and the
same command goes on with them. Where SB3 and CleanRL have settings of their own for continuous actions, those are used.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

from defaults_jobs import LIBRARIES, TASKS, Job, run_job
from learning import Grid
from record import RESULTS, table

from hurtle.experiments.statistics import Estimate, normalized, overall, probability_of_improvement

FOLDER = RESULTS / "defaults"
ALGORITHMS = ("ppo", "sac", "dqn")
Found = dict[tuple[str, int], dict[str, dict[str, list[float]]]]
"""(Algorithm, steps) → task → library → the mean return of each seed."""


def plan(tasks: list[str], algorithms: list[str], libraries: list[str], steps: int, seeds: int) -> list[Job]:
    """All cells, seed by seed; of a seed those that take longest first."""
    order = ("sac", "dqn", "ppo")
    return [
        Job.of(name, algorithm, steps, library, seed)
        for seed in range(seeds)
        for algorithm in order
        if algorithm in algorithms
        for library in libraries
        for name in tasks
        if algorithm in TASKS[name].algorithms
    ]


def load(folder: Path) -> Found:
    """All result files, by the seeds' means."""
    found: Found = defaultdict(lambda: defaultdict(lambda: defaultdict(list)))
    for path in sorted(folder.glob("*.json")):
        result = json.loads(path.read_text())
        name, algorithm, steps = result["task"].rsplit("-", 2)
        found[algorithm, int(steps)][name][result["library"]].append(result["evaluation"]["mean"])
    return found


def report(folder: Path) -> str:
    """A table for each algorithm and number of steps: the IQM of each task, and all tasks together."""
    texts = []
    for (algorithm, steps), tasks in sorted(load(folder).items()):
        libraries = [library for library in LIBRARIES if any(library in found for found in tasks.values())]
        rows = [
            [name, *(str(Estimate.of(found[library])) if library in found else "–" for library in libraries)]
            for name, found in tasks.items()
        ]
        complete = [found for found in tasks.values() if all(library in found for library in libraries)]
        if complete and len(libraries) > 1:
            rows += _together(complete, libraries)
        texts.append(f"## {algorithm}, {steps:,} steps\n\n{table(['task', *libraries], rows)}")
    return "\n\n".join(texts) or "Nothing is finished yet."


def _together(tasks: list[dict[str, list[float]]], libraries: list[str]) -> list[list[str]]:
    scores = normalized([[found[library] for library in libraries] for found in tasks])
    by_library = [[task[k] for task in scores] for k in range(len(libraries))]
    better = ["–", *(str(probability_of_improvement(by_library[0], other)) for other in by_library[1:])]
    number = f"{len(tasks)} task{'s' * (len(tasks) > 1)}"
    return [
        [f"all {number}, from 0 (worst run) to 1 (best)", *(str(overall(each)) for each in by_library)],
        [f"{libraries[0]} is better, probability", *better],
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS), metavar="TASK", help=", ".join(TASKS))
    parser.add_argument("--algorithms", nargs="+", choices=ALGORITHMS, default=list(ALGORITHMS), help="only these")
    parser.add_argument("--libraries", nargs="+", choices=LIBRARIES, default=list(LIBRARIES), help="only these")
    parser.add_argument("--steps", type=int, default=100_000, help="of each run (100,000)")
    parser.add_argument("--seeds", type=int, default=5, help="seeds 0 … N-1 (5)")
    parser.add_argument("--jobs", type=int, default=1, help="trainings at a time, each with one thread (1)")
    parser.add_argument("--seconds", type=float, default=0.0, help="save and end after that time")
    parser.add_argument("--report", action="store_true", help="run nothing")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="of the result files")
    parser.add_argument("--one", nargs=3, metavar=("TASK", "LIBRARY", "SEED"), help="what the grid calls for each cell")
    args = parser.parse_args()
    if args.one:
        run_job(Job(args.one[0], args.one[1], int(args.one[2])), args.folder)
        return 0
    failed = [] if args.report else run(args)
    print(f"\n{report(args.folder)}")
    return 1 if failed else 0


def run(args: argparse.Namespace) -> list[Job]:
    """Do what has no file yet; returns what failed."""
    jobs = plan(args.tasks, args.algorithms, args.libraries, args.steps, args.seeds)
    missing = [job for job in jobs if not (args.folder / job.file).exists()]
    print(f"{len(jobs) - len(missing)} of {len(jobs)} cells are finished already.", flush=True)

    def command(job: Job) -> list[str]:
        return [sys.executable, __file__, "--one", *map(str, job), "--folder", str(args.folder)]

    grid: Any = Grid(missing, args.jobs, command, args.folder, steps={job: job.parts[2] for job in missing})
    try:
        grid.run(args.seconds)
    except KeyboardInterrupt:
        print("\nStopped. What is finished is kept, what was under way is saved; the same command goes on.")
    return grid.failed


if __name__ == "__main__":
    sys.exit(main())
