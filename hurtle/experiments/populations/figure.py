"""The picture of a population: the tree of scores, and every searched setting against steps, with the best lineage on top.

lineage → Matplotlib figure → PNG. Needs the extra `tracking` (Matplotlib), imported when used.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from hurtle.experiments.figures import GRAY, TEXT, new_figure, save
from hurtle.experiments.populations.lineage import Entry, Lineage
from hurtle.experiments.populations.search_space import Space
from hurtle.runners.values import shown
from hurtle.tracking.curves import simplify

COLOURS = "viridis"
BEST = "#d55e00"
"""The line of the best member's ancestors."""


def draw_population(lineage: Lineage, space: Space, file: Path) -> Path:
    """Draw a population that was compared at least once.

    Raises:
        HurtleError: Matplotlib is missing, or the file cannot be written.
    """
    panels = len(space) + 1
    columns = min(2, panels)
    rows = -(-panels // columns)
    figure = new_figure(4.6 * columns, 2.8 * rows + 0.3)
    grid = figure.add_gridspec(rows, columns)
    colours = _colours(lineage)
    best = _best(lineage)
    axes = figure.add_subplot(grid[0, 0])
    _draw_scores(axes, lineage, colours, best)
    for n, (name, part) in enumerate(space.items(), 1):
        _draw_setting(figure.add_subplot(grid[n // columns, n % columns]), lineage, name, part, colours, best)
    _legend(figure, colours, has_best=bool(best))
    return save(figure, file)


def _best(lineage: Lineage) -> list[int]:
    """Who trained the weights of the best member, from comparison to comparison; empty if no score is known."""
    known = [entry for entry in lineage.newest if math.isfinite(entry.score)]
    if not known:
        return []
    return lineage.ancestors(max(known, key=lambda entry: (entry.score, -entry.member)).member)


def _colours(lineage: Lineage) -> Any:
    """From scores to colours; failed and unknown ones are gray."""
    import matplotlib as mpl

    scores = [entry.score for entries in lineage.generations for entry in entries if math.isfinite(entry.score)]
    low, high = (min(scores), max(scores)) if scores else (0.0, 1.0)
    colours = mpl.colormaps[COLOURS].with_extremes(bad="#cbd5e0")
    return mpl.cm.ScalarMappable(mpl.colors.Normalize(low, high if high > low else low + 1), colours)


def _stretches(lineage: Lineage) -> list[tuple[int, Entry, Entry, Entry]]:
    """Every interval of every member: its number, whose weights it began with, who trained, and what came out."""
    found = []
    for generation, (before, after) in enumerate(zip(lineage.generations, lineage.generations[1:], strict=False)):
        for entry, result in zip(before, after, strict=True):
            source = before[entry.member if entry.copied_from is None else entry.copied_from]
            found.append((generation, source, entry, result))
    return found


def _draw_scores(axes: Any, lineage: Lineage, colours: Any, best: list[int]) -> None:
    """Each interval is a line from the score of whom its weights came from to its own."""
    for generation, source, entry, result in _stretches(lineage):
        x, y = [source.steps, result.steps], [source.score, result.score]
        if not math.isfinite(result.score):
            continue
        axes.plot(result.steps, result.score, "o", color=colours.to_rgba(result.score), markersize=3)
        if math.isfinite(source.score):
            is_best = bool(best) and best[generation] == entry.member
            style = {"color": BEST, "linewidth": 2, "zorder": 3} if is_best else {"color": "#a0aec0", "linewidth": 0.8}
            axes.plot(x, y, **style)
    _dress(axes, "score")


def _draw_setting(axes: Any, lineage: Lineage, name: str, part: Any, colours: Any, best: list[int]) -> None:
    """Each interval is a horizontal line in the colour of the score that it led to."""
    places = part.choices.index if part.choices else lambda value: value
    track: list[tuple[float, Any]] = []
    for generation, source, entry, result in _stretches(lineage):
        value, x = places(entry.settings[name]), (source.steps, max(source.steps, result.steps))
        axes.plot(x, (value, value), color=colours.to_rgba(result.score), linewidth=2.2, solid_capstyle="butt")
        if best and best[generation] == entry.member:
            track += [(step, value) for step in x]
    if track:
        axes.plot(*zip(*track, strict=True), color=BEST, linewidth=1.2)
    _dress(axes, name.replace("_", " "))
    if part.choices:
        axes.set_yticks(range(len(part.choices)), [shown(choice) for choice in part.choices])
    elif part.scale == "log":
        axes.set_yscale("log")
    elif part.scale == "near_one":
        from matplotlib.ticker import FixedLocator, FuncFormatter

        axes.set_yscale("function", functions=(lambda y: -_log(1 - y), lambda y: 1 - _exp(-y)))
        ticks = [tick for tick in (0, 0.5, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 0.998, 0.999) if part.low <= tick <= part.high]
        axes.yaxis.set_major_locator(FixedLocator(ticks))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))


def _log(values: Any) -> Any:
    import numpy as np

    return np.log(np.maximum(values, 1e-9))


def _exp(values: Any) -> Any:
    import numpy as np

    return np.exp(values)


def _dress(axes: Any, title: str) -> None:
    axes.set_title(title, fontsize=11, loc="left", fontweight="bold", color=TEXT)
    axes.set_xlabel("steps", fontsize=9, color=GRAY)
    axes.tick_params(labelsize=8, colors=GRAY)
    simplify(axes)


def _legend(figure: Any, colours: Any, has_best: bool) -> None:
    from matplotlib.lines import Line2D

    bar = figure.colorbar(colours, ax=figure.axes, fraction=0.025, pad=0.01)
    bar.set_label("score after the interval", fontsize=8, color=GRAY)
    bar.ax.tick_params(labelsize=7, colors=GRAY)
    bar.outline.set_visible(False)
    if has_best:
        line = Line2D([], [], color=BEST, linewidth=2, label="the best member and those it descends from")
        figure.legend(handles=[line], loc="outside upper left", frameon=False, fontsize=9, labelcolor=TEXT)
