"""Population-based training beside as many independent runs with the same random settings, at equal steps.

    python benchmarks/population.py                  # results/population.{json,md} and docs/images/population-gain.png
    python benchmarks/population.py --seeds 1 --steps 20_000

Both begin with the same members: the same settings, drawn from deliberately wide ranges, and the same seeds. In the one, the
worst quarter copies the best after every interval; in the other, nobody ever copies.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from record import ROOT, save, table

import hurtle
from hurtle.experiments.curves_of_runs import RunCurves
from hurtle.experiments.figures import GRAY, TEXT, new_figure
from hurtle.tracking.curves import simplify

ENV = "pendulum"
SEARCH = {
    "learning_rate": {"low": 1e-5, "high": 1e-1},
    "gamma": {"low": 0.5, "high": 0.999},
    "entropy_coef": {"low": 1e-5, "high": 0.3},
    "clip_range": {"low": 0.02, "high": 0.6},
}
POPULATION, INDEPENDENT = "population", "independent runs"
COLOURS = {POPULATION: "#d55e00", INDEPENDENT: "#0072b2"}
PICTURE = ROOT / "docs" / "images" / "population-gain.png"
INTERVAL = 20_480
"""100 episodes, so that a score, the mean of the last 100, is of one interval; and ten of the preset's rollouts."""
SEED_STRIDE = 100
"""Between the seeds of two populations: members have seeds of their own."""


def train(kind: str, seed: int, size: int, steps: int, interval: int, folder: Path) -> dict[str, Any]:
    """One population, or as many runs that are never compared: its curves and its final evaluations."""
    began = time.perf_counter()
    found = hurtle.train_population(
        ENV, size, interval if kind == POPULATION else steps, total_steps=steps, seed=SEED_STRIDE * seed, search=SEARCH,
        trackers=(), runs=str(folder), progress="quiet",
    )  # fmt: skip
    returns = np.array([returns_at(run.path, np.arange(interval, steps + 1, interval)) for run in found.members])
    assert found.best is not None
    return {
        "kind": kind,
        "seed": seed,
        "best": np.nanmax(returns, 0).tolist(),
        "mean": np.nanmean(returns, 0).tolist(),
        "evaluations": [run.evaluation for run in found.members],
        "chosen": found.best.evaluation,
        "copies": found.copies,
        "failed": len(found.failed),
        "seconds": time.perf_counter() - began,
    }


def returns_at(run: Path, steps: np.ndarray) -> np.ndarray:
    """The mean return of the last 100 training episodes at the first update that reached each of these steps."""
    curve = RunCurves(run).curve("return")
    places = np.searchsorted(curve[:, 0], steps).clip(max=len(curve) - 1)
    return curve[places, 1]


def report(runs: list[dict[str, Any]], size: int, steps: int, interval: int) -> str:
    """The table, and what it shows."""
    seeds = sorted({run["seed"] for run in runs})
    rows = []
    for run in sorted(runs, key=lambda run: (run["seed"], run["kind"])):
        mean, median = np.mean(run["evaluations"]), np.median(run["evaluations"])
        numbers = [run["chosen"], mean, median, min(run["evaluations"])]
        rows.append([str(run["seed"]), run["kind"], *(f"{number:.0f}" for number in numbers), str(run["copies"])])
    for kind in COLOURS:
        own = [run for run in runs if run["kind"] == kind]
        columns = [[run["chosen"] for run in own], *([f(run["evaluations"]) for run in own] for f in (np.mean, np.median, min))]
        rows.append(["all", kind, *(f"{np.mean(column):.0f}" for column in columns), ""])
    ranges = ", ".join(f"{name} {low:g} to {high:g}" for name, (low, high) in SEARCH.items())
    return "\n".join(
        [
            f"# Population-based training beside independent runs, {ENV}",
            "",
            f"{size} members with the preset's PPO, {steps:,} steps each, {len(seeds)} seeds. Settings are drawn from wide",
            f"ranges: {ranges}. Both kinds begin with the same members; in a",
            f"population, the worst quarter copies the best every {interval:,} steps. Numbers are final evaluations of 100",
            "episodes: that of the member with the highest training return, which is the policy that one would take, and the",
            "mean, median and lowest of all members.",
            "",
            table(["seed", "", "chosen", "mean", "median", "lowest", "copies"], rows),
            "",
            "Steps are equal, so that the returns do not depend on the speed of the machine, nor on what else it did.",
            "`python benchmarks/population.py` measures again.",
        ]
    )


def draw(runs: list[dict[str, Any]], interval: int, size: int) -> None:
    """The best and the mean training return against steps, the mean over seeds with their range."""
    figure = new_figure(8.4, 3.3)
    beside = None
    for column, (what, title) in enumerate((("best", f"best of {size} members"), ("mean", f"mean of {size} members"))):
        axes = beside = figure.add_subplot(1, 2, column + 1, sharey=beside)
        for kind, colour in COLOURS.items():
            curves = np.array([run[what] for run in runs if run["kind"] == kind])
            x = interval * np.arange(1, curves.shape[1] + 1)
            axes.plot(x, curves.mean(0), color=colour, linewidth=1.8, label=kind)
            axes.fill_between(x, curves.min(0), curves.max(0), color=colour, alpha=0.16, linewidth=0)
        axes.set_title(title, fontsize=11, loc="left", fontweight="bold", color=TEXT)
        axes.set_xlabel("steps of each member", fontsize=9, color=GRAY)
        axes.tick_params(labelsize=8, colors=GRAY)
        simplify(axes)
        if column == 0:
            axes.set_ylabel("training return", fontsize=9, color=GRAY)
            axes.legend(frameon=False, fontsize=9, labelcolor=TEXT, loc="lower right")
    figure.savefig(PICTURE, dpi=96)


def main() -> None:
    """Measure, save, draw."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--size", type=int, default=8)
    parser.add_argument("--steps", type=int, default=6 * INTERVAL)
    parser.add_argument("--interval", type=int, default=INTERVAL)
    given = parser.parse_args()
    runs = []
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(given.seeds):
            for kind in COLOURS:
                runs.append(train(kind, seed, given.size, given.steps, given.interval, Path(folder)))
                print({name: value for name, value in runs[-1].items() if name not in ("best", "mean")}, flush=True)
    settings = {"env": ENV, "search": SEARCH, "size": given.size, "steps": given.steps, "interval": given.interval}
    text = report(runs, given.size, given.steps, given.interval)
    save("population", {**settings, "runs": runs}, text)
    draw(runs, given.interval, given.size)
    print(text)


if __name__ == "__main__":
    main()
