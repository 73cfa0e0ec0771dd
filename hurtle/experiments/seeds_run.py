"""`SeedsRun`: what many seeds came to, from their run folders: IQM with its interval, and the message at the end."""

from __future__ import annotations

import math
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hurtle.experiments.records import RunRecord
from hurtle.experiments.statistics import Estimate
from hurtle.tracking.formatting import figure


@dataclass(frozen=True)
class SeedsRun:
    """Many seeds of one run.

    Attributes:
        path: The folder that holds the run folders.
        runs: What became of each seed that has a run folder, in order.
        returns: IQM over the seeds of the final evaluation's mean, else of the last 100 training episodes, with its 95 %
            interval; None if no seed has either.
        is_evaluated: Whether `returns` is of evaluations: every seed has one.
        seconds: Wall time.
        failed: What went wrong, by seed.
        stopped_by: "Ctrl-C" or "SIGTERM", or an empty string.
    """

    path: Path
    runs: tuple[RunRecord, ...]
    returns: Estimate | None
    is_evaluated: bool
    seconds: float
    failed: dict[int, str]
    stopped_by: str

    @classmethod
    def of(cls, folder: Path, seeds: list[int], seconds: float, failed: dict[int, str], stopped_by: str) -> SeedsRun:
        """The result of these seeds, from their folders."""
        paths = [folder / f"seed-{seed}" for seed in seeds]
        runs = tuple(RunRecord.read(path) for path in paths if (path / "config.toml").is_file())
        whole = [run for run in runs if run.state != "crashed"]
        is_evaluated = bool(whole) and all(math.isfinite(run.evaluation) for run in whole)
        known = [run.evaluation if is_evaluated else run.training_return for run in whole]
        known = [value for value in known if math.isfinite(value)]
        return cls(folder, runs, Estimate.of(known) if known else None, is_evaluated, seconds, failed, stopped_by)

    def to_dict(self) -> dict[str, Any]:
        """For JSON: what summary.json holds."""
        names = ("value", "low", "high")
        return {
            "iqm": None if self.returns is None else dict(zip(names, self.returns, strict=True)),
            "of": "evaluation" if self.is_evaluated else "training",
            "seconds": self.seconds,
            "stopped_by": self.stopped_by,
            "failed": {str(seed): text for seed, text in self.failed.items()},
            "seeds": [run.to_dict() | {"path": run.path.name} for run in self.runs],
        }


def closing_message(found: SeedsRun, seeds: int, curve: Path | None) -> str:
    """The message at the end: how it ended, what came out, what to do next."""
    finished = sum(run.state == "finished" for run in found.runs)
    how = f"Stopped by {found.stopped_by}," if found.stopped_by else "Done:"
    lines = [f"{how} {finished} of {seeds} seeds finished after {found.seconds:.1f} s."]
    if found.returns is not None:
        what = "evaluation" if found.is_evaluated else "return"
        lines.append(f"{what:<12}IQM {found.returns} over {sum(run.state != 'crashed' for run in found.runs)} seeds")
        each = "  ".join(
            f"{run.seed}: {figure(run.evaluation if found.is_evaluated else run.training_return)}" for run in found.runs
        )
        lines.append(f"seeds       {each}")
    if found.failed:
        lines.append(f"crashed     {', '.join(map(str, sorted(found.failed)))}; logs: {found.path}/seed-….log")
    lines.append(f"folder      {found.path}")
    if curve is not None:
        lines.append(f"curve       {curve}")
    path = shlex.quote(str(found.path))
    lines.append(f"next        hurtle {'train --resume' if finished < seeds else 'compare'} {path}")
    return "\n".join(lines)
