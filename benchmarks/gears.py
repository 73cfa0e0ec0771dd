"""Do the gears learn alike? CartPole, as its preset trains it, on many seeds in both gears, evaluated at three checkpoints.

Prints IQM and 95 % interval of both at each checkpoint, and their ratio; they must be within 5 %.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from typing import Any

import numpy as np
from record import save, table

GEARS = ("general", "native")


def train_once(job: tuple[str, int, int]) -> list[float]:
    """Mean evaluated returns of one run at its checkpoints."""
    import hurtle

    gear, seed, steps = job
    with tempfile.TemporaryDirectory() as runs:
        run = hurtle.train(
            "cartpole", gear=gear, seed=seed, total_steps=steps, eval_every=steps // 3, eval_episodes=50,
            progress="quiet", trackers=(), runs=runs, num_workers=1,
        )  # fmt: skip
        lines = [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]
    return [line["eval_return"] for line in lines if "eval_return" in line][:3]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--jobs", type=int, default=2, help="trainings at a time")
    parser.add_argument("--quick", action="store_true", help="see that it runs; nothing is kept")
    chosen = parser.parse_args()
    seeds, steps = (2, 3 * 512) if chosen.quick else (chosen.seeds, 100_000)
    jobs = list(product(GEARS, range(seeds), [steps]))
    began, found = time.perf_counter(), {}
    with ProcessPoolExecutor(chosen.jobs) as pool:
        for done, (job, returns) in enumerate(zip(jobs, pool.map(train_once, jobs), strict=True), 1):
            found[job[:2]] = returns
            left = (time.perf_counter() - began) / done * (len(jobs) - done)
            print(f"{done}/{len(jobs)} {job[0]} seed {job[1]}: {[round(value) for value in returns]}  {left:.0f} s left")
    text, results = report(found, seeds, steps)
    print("\n" + text)
    if not chosen.quick:
        save("gears", results, text)


def report(found: dict[tuple[str, int], list[float]], seeds: int, steps: int) -> tuple[str, dict[str, Any]]:
    """The table, and the figures behind it."""
    from hurtle.tracking.return_statistics import bootstrap_interval, iqm

    rows, results = [], {"total_steps": steps, "checkpoints": []}
    for k in range(3):
        at = {gear: np.array([found[gear, seed][k] for seed in range(seeds)]) for gear in GEARS}
        middle = {gear: float(iqm(values)) for gear, values in at.items()}
        spans = {gear: bootstrap_interval(values, iqm) for gear, values in at.items()}
        ratio = middle["native"] / middle["general"]
        cells = [f"{middle[gear]:.1f} [{spans[gear][0]:.1f}, {spans[gear][1]:.1f}]" for gear in GEARS]
        rows.append([f"{steps * (k + 1) // 3:,}", *cells, f"{ratio:.3f}"])
        results["checkpoints"].append({gear: at[gear].tolist() for gear in GEARS} | {"ratio": ratio})
    text = f"# CartPole in both gears, {seeds} seeds\n\nIQM of the mean evaluated return, 95 % interval.\n\n"
    return text + table(["steps", *GEARS, "native / general"], rows), results


if __name__ == "__main__":
    main()
