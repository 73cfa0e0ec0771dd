"""Callbacks: an extra file of metrics, and a reason to stop.

python examples/callback.py
"""

from __future__ import annotations

import csv
from pathlib import Path

import hurtle
from hurtle.runners.trainer import Trainer


class WriteCsv:
    """Appends a line per update to returns.csv in the run folder."""

    def __call__(self, trainer: Trainer) -> None:
        file = Path(trainer.folder.path) / "returns.csv"
        with file.open("a", newline="") as out:
            csv.writer(out).writerow([trainer.steps, trainer.episodes.mean_return])


class StopWithoutProgress:
    """Ends the run when the mean return has not improved for so many updates.

    Args:
        patience: How many updates to wait.
    """

    def __init__(self, patience: int):
        self.patience = patience
        self.best, self.since = float("-inf"), 0

    def __call__(self, trainer: Trainer) -> bool:
        """False ends the run."""
        self.since += 1
        if trainer.episodes.mean_return > self.best:
            self.best, self.since = trainer.episodes.mean_return, 0
            trainer.save()
        return self.since < self.patience


def main() -> None:
    """Train with both."""
    run = hurtle.train(
        "cartpole", total_steps=20_000, callbacks=[WriteCsv(), StopWithoutProgress(patience=20)], name="callbacks"
    )
    print(f"\nended by {run.stopped_by} after {run.steps:,} steps; see {run.path}/returns.csv")


if __name__ == "__main__":
    main()
