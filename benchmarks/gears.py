"""Do the gears learn alike? The same tasks on many seeds in both gears, evaluated at three checkpoints.

python benchmarks/gears.py               # CartPole, as its preset trains it; saves benchmarks/results/gears.md and .json
python benchmarks/gears.py --networks    # a CNN and three memories; saves gears-networks

Prints IQM and 95 % interval of both at each checkpoint, and their ratio. CartPole's must be within 5 %.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import numpy as np
from record import save, table

GEARS = ("general", "native")


@dataclass(frozen=True)
class Task:
    """What is trained, and for how long."""

    about: str
    env: str
    steps: int
    seeds: int
    settings: dict[str, Any] = field(default_factory=dict)


CARTPOLE = (Task("CartPole", "cartpole", 100_000, 20),)
NETWORKS = (
    Task("Asterix, CNN", "asterix", 600_000, 6),
    *(Task(f"Memory, {name}", "memory", 45_000, 10, {"recurrent": name}) for name in ("lstm", "gru", "mingru")),
)


def train_once(job: tuple[Task, str, int]) -> list[float]:
    """Mean evaluated returns of one run at its checkpoints."""
    import hurtle

    task, gear, seed = job
    with tempfile.TemporaryDirectory() as runs:
        run = hurtle.train(
            task.env, gear=gear, seed=seed, total_steps=task.steps, eval_every=task.steps // 3, eval_episodes=50,
            progress="quiet", trackers=(), runs=runs, num_workers=1, **task.settings,
        )  # fmt: skip
        lines = [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]
    return [line["eval_return"] for line in lines if "eval_return" in line][:3]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", action="store_true", help="a CNN and memories instead of CartPole's MLP")
    parser.add_argument("--seeds", type=int, help="of each task, instead of its own number")
    parser.add_argument("--jobs", type=int, default=2, help="trainings at a time")
    parser.add_argument("--quick", action="store_true", help="see that it runs; nothing is kept")
    chosen = parser.parse_args()
    name, tasks = ("gears-networks", NETWORKS) if chosen.networks else ("gears", CARTPOLE)
    if chosen.quick:
        tasks = tuple(Task(task.about, task.env, 3 * 512, 2, {**task.settings, "num_envs": 8}) for task in tasks)
    elif chosen.seeds:
        tasks = tuple(Task(task.about, task.env, task.steps, chosen.seeds, task.settings) for task in tasks)
    jobs = [(task, gear, seed) for task in tasks for gear, seed in product(GEARS, range(task.seeds))]
    began, found = time.perf_counter(), {}
    with ProcessPoolExecutor(chosen.jobs) as pool:
        for done, ((task, gear, seed), returns) in enumerate(zip(jobs, pool.map(train_once, jobs), strict=True), 1):
            found[task.about, gear, seed] = returns
            left = (time.perf_counter() - began) / done * (len(jobs) - done)
            seen = [round(value, 2) for value in returns]
            print(f"{done}/{len(jobs)} {task.about}, {gear} seed {seed}: {seen}  {left:.0f} s left", flush=True)
    reports = [report(task, found) for task in tasks]
    text = "\n\n".join(part for part, _ in reports)
    print("\n" + text)
    if not chosen.quick:
        save(name, {task.about: results for task, (_, results) in zip(tasks, reports, strict=True)}, text)


def report(task: Task, found: dict[tuple[str, str, int], list[float]]) -> tuple[str, dict[str, Any]]:
    """The table of one task, and the figures behind it."""
    from hurtle.tracking.return_statistics import bootstrap_interval, iqm

    rows, results = [], {"total_steps": task.steps, "checkpoints": []}
    for k in range(3):
        at = {gear: np.array([found[task.about, gear, seed][k] for seed in range(task.seeds)]) for gear in GEARS}
        middle = {gear: float(iqm(values)) for gear, values in at.items()}
        spans = {gear: bootstrap_interval(values, iqm) for gear, values in at.items()}
        ratio = middle["native"] / middle["general"]
        cells = [f"{middle[gear]:.4g} [{spans[gear][0]:.4g}, {spans[gear][1]:.4g}]" for gear in GEARS]
        rows.append([f"{task.steps * (k + 1) // 3:,}", *cells, f"{ratio:.3f}"])
        results["checkpoints"].append({gear: at[gear].tolist() for gear in GEARS} | {"ratio": ratio})
    text = f"# {task.about} in both gears, {task.seeds} seeds\n\nIQM of the mean evaluated return, 95 % interval.\n\n"
    return text + table(["steps", *GEARS, "native / general"], rows), results


if __name__ == "__main__":
    main()
