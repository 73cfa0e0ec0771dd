"""Sweeps from default settings: what each method finds in the same time, beside the presets that come with Hurtle.

    python benchmarks/sweeps.py                          # three envs, three methods, four minutes each
    python benchmarks/sweeps.py --envs pendulum --minutes 15

All methods search the space that comes with the algorithm, around its defaults: no preset is used. What they find, and the
preset, is trained with the same fresh seeds. An env that is in the results already is not searched again, unless named.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
from pathlib import Path

from record import RESULTS, save, table

import hurtle
from hurtle.experiments.records import RunRecord
from hurtle.experiments.statistics import Estimate
from hurtle.experiments.sweeps.result import SweepRun
from hurtle.runners.settings import make_settings

ENVS = ("pendulum", "acrobot", "mountain_car")
METHODS = ("cost_aware", "random", "optuna_tpe")
SEEDS, FIRST_SEED = 5, 9_000
IMAGE = RESULTS.parents[1] / "docs" / "images" / "sweep.png"


def trained(folder: Path, name: str, **settings: object) -> dict[str, object]:
    """Final returns and seconds over fresh seeds."""
    shutil.rmtree(folder / name, ignore_errors=True)
    found = hurtle.train_seeds(
        seeds=SEEDS, seed=FIRST_SEED, runs=str(folder), name=name, progress="quiet", trackers=(), curve=False, **settings
    )
    runs: list[RunRecord] = list(found.runs)
    return {"returns": [run.evaluation for run in runs], "seconds": sorted(run.seconds for run in runs)[len(runs) // 2]}


def measured(env: str, minutes: float, folder: Path) -> dict[str, object]:
    """All methods on one env, then their winners and the preset with fresh seeds."""
    steps = make_settings(env, {}).train.total_steps
    rows: dict[str, dict[str, object]] = {}
    for method in METHODS:
        found = hurtle.sweep(
            env, budget=60 * minutes, method=method, preset=False, total_steps=steps, runs=str(folder), name=f"{env}-{method}"
        )
        if method == "cost_aware":
            picture(found, env)
        states = [trial.state for trial in found.searched]
        rows[method] = {
            "trials": len(states), "given up": states.count("pruned"), "failed": states.count("failed"),
            "steps": found.best.values["total_steps"],
            **trained(folder, f"{env}-{method}-fresh", config=found.path / "best.toml"),
        }  # fmt: skip
    rows["preset"] = {"steps": steps, **trained(folder, f"{env}-preset", env=env)}
    rows["defaults"] = {"steps": steps, **trained(folder, f"{env}-defaults", env=env, preset=False, total_steps=steps)}
    return {"minutes": minutes, "rows": rows}


def picture(found: SweepRun, env: str) -> None:
    """The two charts of a sweep's page, for docs/experiments.md."""
    if env != ENVS[0]:
        return
    from hurtle.experiments.figures import new_figure
    from hurtle.experiments.figures import save as save_figure
    from hurtle.experiments.sweeps.page import draw_course, draw_front

    drawing = new_figure(9.6, 3.2)
    draw_front(drawing.add_subplot(1, 2, 1), found)
    draw_course(drawing.add_subplot(1, 2, 2), found)
    save_figure(drawing, IMAGE)


def report(results: dict[str, dict]) -> str:
    """The results as Markdown."""
    header = ["env", "settings", "trials (given up, failed)", "steps", "seconds", "return: IQM [95 %]", "met"]
    rows = []
    for env, found in results.items():
        preset = Estimate.of(found["rows"]["preset"]["returns"])
        for name, row in found["rows"].items():
            estimate = Estimate.of(row["returns"])
            trials = f"{row['trials']} ({row['given up']}, {row['failed']})" if "trials" in row else "–"
            # At least as good: the interquartile mean is not below the preset's interval.
            met = "–" if name in ("preset", "defaults") else "yes" if estimate.value >= preset.low else "no"
            rows.append([env, name, trials, f"{row['steps']:,}", f"{row['seconds']:.1f}", str(estimate), met])
    first = next(iter(results.values()))
    about = (
        f"Each search had {first['minutes']:g} minutes on all cores, a quarter of them for its own checks, and began from the "
        "algorithm's defaults; `total_steps` may be up to that of the preset. What it found was then trained with "
        f"{SEEDS} seeds that no search had seen, as were the presets and the defaults. Seconds are the median time of one "
        "training, two side by side. Met: the IQM is not below the interval of the preset's."
    )
    return "\n\n".join(["# Sweeps", table(header, rows), about])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--envs", nargs="+", default=[], help=f"which ({' '.join(ENVS)})")
    parser.add_argument("--minutes", type=float, default=4.0, help="of each search (4)")
    parser.add_argument("--folder", type=Path, default=Path("runs/benchmark-sweeps"), help="of the runs")
    args = parser.parse_args()
    file = RESULTS / "sweeps.json"
    results = json.loads(file.read_text())["envs"] if file.exists() else {}
    for env in args.envs or [env for env in ENVS if env not in results]:
        shutil.rmtree(args.folder, ignore_errors=True)
        results[env] = measured(env, args.minutes, args.folder)
        save("sweeps", {"envs": results}, report(results))
    print(report(results))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
