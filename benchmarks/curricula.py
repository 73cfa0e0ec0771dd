"""What a curriculum gains: a spacecraft that learns to dock from far away, with and without one, over several seeds.

python benchmarks/curricula.py            # saves benchmarks/results/curricula.md and .json, and docs/images/curricula.png
python benchmarks/curricula.py --quick    # see that it runs: one short run of each, nothing is saved
python benchmarks/curricula.py --draw     # draw the picture again from the saved results
"""

from __future__ import annotations

import argparse
import io
import json
import math
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from PIL import Image
from record import RESULTS, ROOT, save, table

import hurtle
from hurtle.experiments.figures import COLOURS, GRAY
from hurtle.tracking.curves import figure_class

sys.path.insert(0, str(ROOT / "examples"))
from docking import SETTINGS, Docking

METHODS = {
    "none": "",
    "uniform": "uniform:0.5:16",
    "linear": "linear:0.5:16:0.5",
    "gated": "gated:0.5:16:0.8",
    "progress": "progress:0.5:16",
}
STEPS, EVERY, SEEDS, EPISODES = 200_000, 10_000, 5, 50
SOLVED = 0.9
PICTURE = ROOT / "docs" / "images" / "curricula.png"


def measure(rule: str, seed: int, steps: int) -> dict[str, Any]:
    """One run: every 10,000 steps the share of episodes from the full distance that dock, and the distance it played."""
    with tempfile.TemporaryDirectory() as runs:
        run = hurtle.train(
            Docking, total_steps=steps, seed=seed, eval_every=EVERY, eval_episodes=EPISODES, runs=runs, progress="quiet",
            trackers=(), checkpoint_every=10**12, curriculum={"distance": rule} if rule else {}, **SETTINGS,
        )  # fmt: skip
        lines = [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]
    found = {line["steps"]: line["eval_return"] for line in lines if "eval_return" in line}
    played = {line["steps"]: line["episode/distance"] for line in lines if line.get("episode/distance") is not None}
    near = [min(played, key=lambda at, step=step: abs(at - step)) for step in found]
    return {
        "steps": list(found),
        "docked": list(found.values()),
        "distance": [played[at] for at in near],
    }


def steps_to(run: dict[str, Any]) -> float:
    """Steps until an evaluation first reaches `SOLVED`; infinite if none does."""
    return next((step for step, share in zip(run["steps"], run["docked"], strict=True) if share >= SOLVED), math.inf)


def described(runs: dict[str, list[dict[str, Any]]]) -> str:
    """The results as Markdown."""
    rows = []
    for method, found in runs.items():
        last, needed = [run["docked"][-1] for run in found], [steps_to(run) for run in found]
        reached = sum(map(math.isfinite, needed))
        median = f"{statistics.median(needed):,.0f}" if reached > len(found) / 2 else "–"
        rule = f"`distance={METHODS[method]}`" if METHODS[method] else "none: always 16"
        rows.append([rule, f"{statistics.mean(last):.0%}", f"{min(last):.0%}", median, f"{reached} of {len(found)}"])
    head = ["curriculum", "docks, mean", "worst seed", f"steps to {SOLVED:.0%}, median", "seeds that got there"]
    return (
        f"# Docking from 16 away, with and without a curriculum\n\n"
        f"`examples/docking.py`: PPO, {STEPS:,} steps, {SEEDS} seeds. An evaluation plays {EPISODES} episodes from the full "
        f"distance every {EVERY:,} steps.\n\n{table(head, rows)}"
    )


def draw(runs: dict[str, list[dict[str, Any]]]) -> None:
    """Left: episodes that dock, evaluated at the full distance. Right: the distances that were played."""
    figure = figure_class()(figsize=(8.8, 3.3), dpi=100, layout="constrained")
    docked, distance = figure.subplots(1, 2)
    colours = dict(zip(METHODS, (GRAY, *COLOURS), strict=False))
    for method, found in runs.items():
        for axes, what in ((docked, "docked"), (distance, "distance")):
            for run in found:
                axes.plot([step / 1_000 for step in run["steps"]], run[what], color=colours[method], alpha=0.25, lw=0.8)
            columns = list(zip(*(run[what] for run in found), strict=True))
            steps = [step / 1_000 for step in found[0]["steps"]]
            axes.plot(steps, [statistics.mean(each) for each in columns], color=colours[method], lw=2, label=method)
    docked.set(ylabel="docks from 16 away", ylim=(-0.03, 1.03))
    distance.set(ylabel="distance played", ylim=(0, 17))
    for axes in (docked, distance):
        axes.set(xlabel="thousand steps", xlim=(0, STEPS / 1_000))
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(color="#e2e8f0", lw=0.6)
    figure.legend(*docked.get_legend_handles_labels(), loc="outside upper center", ncols=len(runs), frameon=False)
    drawn = io.BytesIO()
    figure.savefig(drawn)
    Image.open(drawn).convert("RGB").quantize(48).save(PICTURE, optimize=True)  # a third of the size
    print(f"saved {PICTURE.relative_to(ROOT)}, {PICTURE.stat().st_size:,} bytes")


def main() -> None:
    """Measure every method with every seed, in turns."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one short run of each; nothing is saved")
    parser.add_argument("--draw", action="store_true", help="only draw the saved results")
    options = parser.parse_args()
    if options.draw:
        draw(json.loads(Path(RESULTS / "curricula.json").read_text())["runs"])
        return
    steps, seeds = (EVERY, 1) if options.quick else (STEPS, SEEDS)
    runs: dict[str, list[dict[str, Any]]] = {method: [] for method in METHODS}
    for seed in range(seeds):
        for method, rule in METHODS.items():
            runs[method].append(measure(rule, seed, steps))
            print(f"seed {seed}  {method:<9} docks {runs[method][-1]['docked'][-1]:.0%}", flush=True)
    if not options.quick:
        save("curricula", {"runs": runs}, described(runs))
        draw(runs)


if __name__ == "__main__":
    main()
