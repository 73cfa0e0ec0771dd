"""Many seeds on one GPU: side by side as one learner, beside one seed by itself; whole runs of `hurtle train --seeds N`.

python benchmarks/seeds.py            # saves benchmarks/results/seeds-gpu.md and .json; about five minutes on an H200
python benchmarks/seeds.py --quick    # see that it runs, also without a GPU; nothing is saved
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import dataclass, field
from typing import Any

import torch
from record import save, short, table

import hurtle

NOTE = (
    "`hurtle train ENV --seeds N --device cuda`, settings of the presets unless named. Seconds: of training, which compiling, "
    "capturing and the last evaluation are no part of, and in brackets of the whole command. Steps/s are those of all seeds "
    "together. Gain: how many times faster than the same seeds one after the other, from the first column. IQM of the "
    "final evaluations."
)
COUNTS = (1, 64)


@dataclass(frozen=True)
class Task:
    """What to train."""

    env: str
    algorithm: str
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """For the table."""
        return " ".join([self.env, self.algorithm, *(f"{name}={value}" for name, value in self.options.items())])


TASKS = (
    Task("cartpole", "ppo"),
    Task("pendulum", "ppo"),
    Task("breakout", "ppo", {"total_steps": 1_000_000}),
)


def measure(task: Task, seeds: int, device: str, **options: Any) -> dict[str, float]:
    """Train once."""
    with tempfile.TemporaryDirectory() as runs:
        how = {"runs": runs, "progress": "quiet", "trackers": (), "side_by_side": seeds > 1}
        found = hurtle.train_seeds(task.env, seeds, task.algorithm, device=device, **how, **{**task.options, **options})
        training = max(run.seconds for run in found.runs)
        steps = sum(run.steps for run in found.runs)
        assert found.returns is not None
        return {"training": training, "whole": found.seconds, "rate": steps / training, "return": found.returns.value}


def main() -> None:
    """Measure and save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few steps, few seeds, on any device")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not args.quick:
        parser.error("this needs a GPU; --quick runs without")
    counts, options = ((1, 2), {"total_steps": 2_048}) if args.quick else (COUNTS, {})
    rows, measured = [], {}
    for task in TASKS[:1] if args.quick else TASKS:
        found = {count: measure(task, count, device, **options) for count in counts}
        one = found[counts[0]]
        for count, seen in found.items():
            gain = count * one["training"] / seen["training"]
            seconds = f"{seen['training']:.1f} ({seen['whole']:.1f})"
            rows.append([task.name, str(count), seconds, short(seen["rate"]), f"{gain:.1f}×", f"{seen['return']:.1f}"])
            print("  ".join(rows[-1]), flush=True)
        measured[task.name] = {str(count): seen for count, seen in found.items()}
    text = table(["task", "seeds", "seconds", "steps/s", "gain", "return"], rows)
    print(text)
    if not args.quick:
        save("seeds-gpu", {"runs": measured}, "\n\n".join(["# Many seeds on one GPU", NOTE, text]))


if __name__ == "__main__":
    main()
