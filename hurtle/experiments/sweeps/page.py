"""A sweep as one HTML page: score against seconds, the course of the search, importance, each setting, all trials.

SweepRun → Matplotlib → inline SVG → HTML that loads nothing. Needs the extra `tracking` (Matplotlib).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hurtle.experiments.figures import COLOURS, dress, new_figure
from hurtle.experiments.page import svg_figure, table, whole_page
from hurtle.experiments.sweeps.importance import importance
from hurtle.runners.values import shown
from hurtle.tracking.formatting import figure
from hurtle.tracking.run_folder import write_whole

if TYPE_CHECKING:
    from hurtle.experiments.space import Dimension
    from hurtle.experiments.sweeps.result import SweepRun
    from hurtle.experiments.sweeps.trials import Trial

BLUE, RED, GREEN = COLOURS[0], COLOURS[1], COLOURS[2]


def write_sweep_page(found: SweepRun, file: Path) -> None:
    """Write the page.

    Raises:
        HurtleError: Matplotlib is missing, or the file cannot be written.
    """
    write_whole(file, sweep_page(found))


def sweep_page(found: SweepRun) -> str:
    """The HTML."""
    env, algorithm = str(found.settings["env"]), str(found.settings["algorithm"])
    title = f"Sweep: {algorithm} on {env}"
    charts = svg_figure(_panel(draw_front, found), "front", "score against seconds, with the Pareto front")
    charts += svg_figure(_panel(draw_course, found), "course", "best score so far against time")
    parts = [f"<h1>{escape(title)}</h1>", _about(found), f'<div class="charts">{charts}</div>', _checks(found)]
    if found.importance:
        parts.append(
            f'<h2>What matters</h2><div class="charts">{svg_figure(_importance(found), "importance", "importance")}</div>'
            "<p>The share of each setting by itself in what moves a model of the score, and of the seconds. The rest is due to "
            "settings acting together.</p>"
        )
    parts.append(f'<h2>Each setting</h2><div class="charts">{svg_figure(_slices(found), "slices", "score by setting")}</div>')
    parts.append(f"<h2>The front, from the fastest to the best</h2>{_trials(found, found.front)}")
    by_score = sorted(found.searched, key=lambda trial: (not trial.has_score, -trial.score if trial.has_score else 0.0))
    parts.append(f"<h2>All trials</h2>{_trials(found, by_score)}")
    return whole_page(title, parts)


def _about(found: SweepRun) -> str:
    text = f"{found.counts}, searched by {found.plan.method.replace('_', ' ')}. Seconds are those of training."
    return f"<p>{escape(text)}</p>"


def _checks(found: SweepRun) -> str:
    if not found.checks:
        return "<p>Not checked with fresh seeds: the best of many scores is partly luck.</p>"
    rows = []
    for number, check in sorted(found.checks.items(), key=lambda item: item[0] != found.best.number):
        trial = next(other for other in found.searched if other.number == number)
        name = "baseline" if trial.origin == "baseline" else trial.name
        estimate = str(check.estimate) if check.is_known else "-"
        ended_well = f"{check.seeds - check.failed} of {check.seeds}"
        name += " (winner)" * (number == found.best.number)
        rows.append([name, figure(found.shown(trial.score)), estimate, ended_well, f"{trial.seconds:.1f}"])
    header = ["trial", f"{found.plan.metric} in the search", "with fresh seeds: IQM [95 %]", "seeds that ended well", "seconds"]
    return f"<h2>The winners, checked</h2>{table(header, rows)}"


def _trials(found: SweepRun, trials: list[Trial]) -> str:
    header = ["trial", "state", found.plan.metric, "seconds", *found.space.names]
    rows = []
    for trial in trials:
        values = [shown(trial.values.get(name, "")) for name in found.space.names]
        score, time = figure(found.shown(trial.score)), "-" if math.isnan(trial.seconds) else f"{trial.seconds:.1f}"
        rows.append([f"{trial.name}{' (baseline)' * (trial.origin == 'baseline')}", trial.state, score, time, *values])
    return table(header, rows)


def draw_front(axes: Any, found: SweepRun) -> None:
    """Score against seconds, with the Pareto front."""
    scored = [trial for trial in found.searched if trial.has_score]
    for trials, colour, label in (
        ([trial for trial in found.searched if trial.state == "pruned" and not math.isnan(trial.score)], "#cbd5e0", "given up"),
        ([trial for trial in scored if trial not in found.front], BLUE, "trials"),
    ):
        if trials:
            places = [(trial.seconds, found.shown(trial.score)) for trial in trials]
            axes.scatter(*zip(*places, strict=True), s=14, color=colour, alpha=0.6, linewidths=0, label=label)
    if found.front:
        x = [trial.seconds for trial in found.front]
        y = [found.shown(trial.score) for trial in found.front]
        axes.plot([*x, max(trial.seconds for trial in scored)], [*y, y[-1]], drawstyle="steps-post", color=RED, linewidth=1.2)
        axes.scatter(x, y, s=26, color=RED, linewidths=0, label="Pareto front", zorder=3)
        _logarithmic(axes)
    for trial in scored:
        if trial.origin == "baseline":
            place = [trial.seconds], [found.shown(trial.score)]
            axes.scatter(*place, s=70, marker="*", color=GREEN, label="baseline", zorder=4)
    dress(axes, "", "seconds of training", found.plan.metric, is_count=False)
    axes.legend(fontsize=8, frameon=False, loc="best")


def draw_course(axes: Any, found: SweepRun) -> None:
    """The score of each trial, and the best one so far."""
    scored = [trial for trial in found.searched if trial.has_score]
    if scored:
        x, y = [trial.number for trial in scored], [trial.score for trial in scored]
        colours = {"random": "#a0aec0", "baseline": GREEN}
        axes.scatter(
            x, [found.shown(value) for value in y], s=14, color=[colours.get(t.origin, BLUE) for t in scored], linewidths=0
        )
        axes.plot(x, [found.shown(value) for value in np.maximum.accumulate(y)], drawstyle="steps-post", color=RED)
    dress(axes, "", "trial (gray: at random)", found.plan.metric, is_count=False)


def _panel(draw: Callable[[Any, SweepRun], None], found: SweepRun) -> Any:
    drawing = new_figure(5.4, 3.6)
    draw(drawing.add_subplot(), found)
    return drawing


def _importance(found: SweepRun) -> Any:
    of_seconds = importance(found.space, found.searched, "seconds")
    names = list(found.importance)[::-1]
    drawing = new_figure(7.2, 0.5 + 0.3 * len(names))
    axes = drawing.add_subplot()
    places = np.arange(len(names))
    axes.barh(places + 0.18, [found.importance[name] for name in names], height=0.34, color=BLUE, label=found.plan.metric)
    axes.barh(places - 0.18, [of_seconds.get(name, 0.0) for name in names], height=0.34, color="#e69f00", label="seconds")
    axes.set_yticks(places, names)
    axes.legend(fontsize=8, frameon=False, loc="lower right")
    dress(axes, "", "share of the variance", "", is_count=False)
    return drawing


def _slices(found: SweepRun) -> Any:
    """The score against each setting."""
    scored = [trial for trial in found.searched if trial.has_score]
    columns = 4
    rows = -(-len(found.space.dimensions) // columns)
    drawing = new_figure(11.0, 2.1 * rows)
    grid = drawing.add_gridspec(rows, columns)
    for k, dimension in enumerate(found.space.dimensions):
        axes = drawing.add_subplot(grid[k // columns, k % columns])
        placed = [trial for trial in scored if _has_place(dimension, trial.values[dimension.name])]
        axes.scatter(
            [_place(dimension, trial.values[dimension.name]) for trial in placed],
            [found.shown(trial.score) for trial in placed],
            s=9, color=[RED if trial in found.front else BLUE for trial in placed], alpha=0.6, linewidths=0,
        )  # fmt: skip
        if dimension.choices:
            axes.set_xticks(range(len(dimension.choices)), [shown(choice) for choice in dimension.choices])
            axes.set_xlim(-0.5, len(dimension.choices) - 0.5)
        elif dimension.scale in ("log", "power_of_two"):
            _logarithmic(axes, base=2 if dimension.scale == "power_of_two" else 10)
        dress(axes, "", dimension.name, "", is_count=False)
    return drawing


def _logarithmic(axes: Any, base: int = 10) -> None:
    """A logarithmic x axis with plain numbers, which take a fraction of the time of powers to draw."""
    from matplotlib.ticker import LogLocator

    axes.set_xscale("log", base=base)
    low, high = axes.get_xlim()
    axes.xaxis.set_major_locator(LogLocator(base, (1.0,) if base == 2 or high > 200 * low else (1.0, 2.0, 5.0)))
    axes.xaxis.set_minor_formatter("")
    axes.xaxis.set_major_formatter("{x:g}")


def _has_place(dimension: Dimension, value: Any) -> bool:
    """The baseline's value may be none of the choices, or no number."""
    return value in dimension.choices if dimension.choices else isinstance(value, int | float)


def _place(dimension: Dimension, value: Any) -> float:
    return dimension.choices.index(value) if dimension.choices else float(value)
