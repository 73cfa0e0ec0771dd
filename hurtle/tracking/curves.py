"""Plots the learning curve of a run: metrics.jsonl → columns → curve.png. Needs the extra `tracking` (matplotlib)."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import numpy as np

from hurtle.errors import HurtleError
from hurtle.garbage import RARE_COLLECTIONS
from hurtle.tracking.run_folder import RunFolder
from hurtle.tracking.whole_files import replacing

PANELS = {
    "policy_loss": "policy loss",
    "value_loss": "value loss",
    "entropy": "entropy",
    "approx_kl": "KL divergence",
    "explained_variance": "explained variance",
    "q_value": "Q value",
    "td_error": "TD error",
    "temperature": "temperature",
    "steps_per_second": "steps per second",
}
RETURN, EVALUATION, OTHER, GRID = "#1f6fb2", "#d1495b", "#4a5568", "#e2e8f0"


def read_metrics(file: str | Path) -> dict[str, np.ndarray]:
    """The columns of a metrics.jsonl, each with one float per line; NaN if a line has no value.

    Lines truncated by a crash are skipped.
    """
    lines = []
    for line in Path(file).read_text(encoding="utf-8", errors="replace").splitlines():
        with contextlib.suppress(ValueError):
            if isinstance(found := json.loads(line), dict):
                lines.append(found)
    names = dict.fromkeys(name for line in lines for name in line)
    return {name: np.array([_number(line.get(name)) for line in lines]) for name in names}


def figure_class() -> Any:
    """Matplotlib's Figure, without pyplot: nothing global, no window.

    Raises:
        HurtleError: Matplotlib is not installed.
    """
    try:
        with RARE_COLLECTIONS:
            from matplotlib.figure import Figure
    except ImportError as error:
        raise HurtleError('Matplotlib is not installed: pip install "hurtle[tracking]".') from error
    return Figure


def plot_run(folder: str | Path | RunFolder) -> Path:
    """Plot the learning curve of a run: return over steps with evaluations, and small panels of learner metrics.

    Returns:
        The plot, `curve.png` in the run's folder.
    """
    make_figure = figure_class()
    run = folder if isinstance(folder, RunFolder) else RunFolder(Path(folder))
    if not run.metrics_file.is_file():
        raise HurtleError(f"There is nothing to plot: {run.metrics_file} does not exist.")
    columns = read_metrics(run.metrics_file)
    steps = columns.get("step", np.empty(0))
    panels = {name: label for name, label in PANELS.items() if np.isfinite(columns.get(name, np.nan)).any()}
    rows = -(-len(panels) // 3)
    height = 4 + 1.7 * rows
    figure = make_figure(figsize=(9, height))
    grid = figure.add_gridspec(  # an automatic layout would draw everything twice
        1 + rows, 3, height_ratios=[4] + [1.7] * rows, hspace=0.65 if rows > 1 else 0.4, wspace=0.24,
        left=0.085, right=0.98, top=1 - 0.4 / height, bottom=0.5 / height,
    )  # fmt: skip
    _plot_return(figure.add_subplot(grid[0, :]), steps, columns, run.path.name)
    for index, (name, label) in enumerate(panels.items()):
        axes = figure.add_subplot(grid[1 + index // 3, index % 3])
        axes.plot(*_thinned(steps, columns[name], points=200), color=OTHER, linewidth=1)
        if name == "explained_variance":  # may start far below 0, where its value means nothing
            axes.set_ylim(max(axes.get_ylim()[0], -1.0), 1.05)
        axes.set_title(label, fontsize=9, loc="left")
        axes.tick_params(labelsize=7)
        axes.locator_params(nbins=4)
        simplify(axes)
    file = run.path / "curve.png"
    with replacing(file) as new:
        figure.savefig(new, dpi=150, format="png")
    return file


def _plot_return(axes: Any, steps: np.ndarray, columns: dict[str, np.ndarray], title: str) -> None:
    nothing = np.full(len(steps), np.nan)
    returns, evaluated = columns.get("episode_return", nothing), columns.get("eval_return", nothing)
    axes.plot(*_thinned(steps, returns), color=RETURN, linewidth=1.6, label="training (mean of the last 100 episodes)")
    shown = np.isfinite(evaluated)
    if shown.any():
        low, high = (columns.get(f"eval_return_{side}", evaluated)[shown] for side in ("low", "high"))
        value = evaluated[shown]
        errors = np.nan_to_num(np.maximum([value - low, high - value], 0))  # [2, evaluations]
        label = "evaluation (mean and 95 % interval)"
        axes.errorbar(steps[shown], value, errors, fmt="o", markersize=4, capsize=3, color=EVALUATION, label=label, zorder=3)
    axes.set_title(title, fontsize=11, loc="left", fontweight="bold")
    axes.set_xlabel("steps", fontsize=9)
    axes.set_ylabel("return", fontsize=9)
    axes.tick_params(labelsize=8)
    axes.legend(frameon=False, fontsize=8, loc="best")
    simplify(axes)


def simplify(axes: Any) -> None:
    """Large numbers with K and M, a light grid, and only two sides of the frame."""
    from matplotlib.ticker import EngFormatter

    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.margins(x=0.02)
    axes.grid(color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _thinned(steps: np.ndarray, values: np.ndarray, points: int = 600) -> tuple[np.ndarray, np.ndarray]:
    """The finite values and their steps, averaged in groups to at most `points`."""
    known = np.isfinite(values)
    steps, values = steps[known], values[known]
    if len(values) <= points:
        return steps, values
    groups = np.array_split(np.arange(len(values)), points)
    return np.array([steps[group].mean() for group in groups]), np.array([values[group].mean() for group in groups])


def _number(value: Any) -> float:
    return float(value) if isinstance(value, (int, float)) else float("nan")
