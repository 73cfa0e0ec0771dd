"""`hurtle plot`: metrics of runs, chosen by name → one PNG. A run is a line, a folder of many seeds a line with a band."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hurtle.errors import UnknownNameError, did_you_mean
from hurtle.experiments.curves_of_runs import X_AXES, RunCurves, check_metrics
from hurtle.experiments.records import SEEDS_FILE, find_runs
from hurtle.experiments.statistics import joined_curve


def plot(
    runs: Sequence[str | Path | Any],
    file: str | Path = "plot.png",
    metrics: Sequence[str] = ("return",),
    x: str = "steps",
    smooth: int = 1,
    folder: str | Path = "runs",
) -> Path:
    """Plot metrics of runs, one panel each.

    Args:
        runs: As for `hurtle.compare`.
        file: The PNG to write.
        metrics: "return", "evaluation", "length", "speed", or names in metrics.jsonl.
        x: "steps" or "seconds".
        smooth: Mean over so many values.
        folder: The folder of all runs.

    Returns:
        The file.

    Raises:
        UnknownNameError: No run has such a metric; suggests the closest name.
        HurtleError: There is no such run, or it has no metrics yet.
    """
    from hurtle.experiments.figures import Drawn, draw_metrics, save

    if x not in X_AXES:
        raise UnknownNameError(f"No x axis {x!r}. {did_you_mean(x, X_AXES)}")
    lines = _lines(runs, folder)
    check_metrics(list(metrics), [run for members in lines.values() for run in members])
    panels: dict[str, list[Drawn]] = {}
    for metric in metrics:
        panels[metric] = []
        for label, members in lines.items():
            curves = [curve for run in members if len(curve := run.curve(metric, x, smooth))]
            joined = joined_curve(curves) if len(curves) > 1 else None
            panels[metric].append(Drawn(label, curves, joined))
    return save(draw_metrics(panels, x), Path(file))


def _lines(runs: Sequence[str | Path | Any], folder: str | Path) -> dict[str, list[RunCurves]]:
    """The runs of each line, by its label: the folder's name, with its parents where several have the same."""
    owners: dict[Path, list[Path]] = {}
    for place in runs:
        for path in find_runs(getattr(place, "path", place), folder):
            owner = path.parent if (path.parent / SEEDS_FILE).is_file() and not _is_run(place, path, folder) else path
            members = owners.setdefault(owner, [])
            members += [path] if path not in members else []
    names = [owner.name for owner in owners]
    return {
        owner.name if names.count(owner.name) == 1 else str(owner): [RunCurves(path) for path in members]
        for owner, members in owners.items()
    }


def _is_run(place: Any, path: Path, folder: str | Path) -> bool:
    """Whether the user named this run itself, not the folder around it."""
    named = getattr(place, "path", place)
    return Path(named) == path or Path(folder) / str(named) == path
