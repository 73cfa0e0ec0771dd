"""Pictures: comparisons, profiles, chosen metrics of runs. Needs the extra `tracking` (Matplotlib), imported when used.

curves → Matplotlib figures → PNG or SVG. Colours are those of Okabe and Ito, which colour-blind readers tell apart.
"""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hurtle.errors import HurtleError
from hurtle.experiments.statistics import Curve
from hurtle.tracking.curves import figure_class, simplify
from hurtle.tracking.whole_files import replacing

if TYPE_CHECKING:
    from hurtle.experiments.comparison import Comparison

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
DASHES = ("-", "--", "-.", ":")
"""After all colours, the next dash begins."""
TEXT, GRAY = "#1a202c", "#4a5568"
AS_TEXT: Any = {"svg.fonttype": "none"}
WORDS = {
    "episode_return": "return",
    "episode_length": "episode length",
    "eval_return": "return of evaluations",
    "steps_per_second": "steps per second",
}


@dataclass(frozen=True)
class Drawn:
    """One line of a picture: a label, and the curves of its runs."""

    label: str
    curves: Sequence[np.ndarray]
    joined: Curve | None


def draw_comparison(found: Comparison) -> Any:
    """One row per task: the metric against steps, and against seconds; then profiles, if there are several tasks."""
    tasks, has_profiles = found.tasks, bool(found.profiles)
    rows = len(tasks) + has_profiles
    figure, grid = _grid(rows, 2, height=3.1)
    styles = style_of(found.methods)
    for row, task in enumerate(tasks):
        beside = None
        for column, x in enumerate(("steps", "seconds")):
            beside = figure.add_subplot(grid[row, column], sharey=beside)
            draw_task(beside, found, task, x, styles)
    if has_profiles:
        draw_profiles(figure.add_subplot(grid[rows - 1, 0]), found, styles)
        draw_improvements(figure.add_subplot(grid[rows - 1, 1]), found, styles)
    _legend(figure, found, styles)
    return figure


def draw_task(axes: Any, found: Comparison, task: str, x: str, styles: dict[str, dict[str, Any]]) -> None:
    """One panel: each method's IQM with its band."""
    for group in found.groups:
        curve = group.curves[x]
        if group.task == task and curve is not None:
            _band(axes, curve, styles[group.method], several=len(group.runs) > 1)
    if found.target is not None and found.metric in ("return", "episode_return"):
        axes.axhline(found.target, color=GRAY, linewidth=1, linestyle=(0, (2, 3)))
    name = WORDS.get(found.metric, found.metric.replace("_", " "))
    dress(axes, task if x == "steps" else "", "steps" if x == "steps" else "seconds of training", name if x == "steps" else "")


def draw_profiles(axes: Any, found: Comparison, styles: dict[str, dict[str, Any]]) -> None:
    """The share of runs above each normalized score."""
    for method, curve in found.profiles.items():
        _band(axes, curve, styles[method], several=True, drawstyle="steps-post")
    dress(axes, "performance profile", "normalized score τ", "share of runs above τ")
    axes.set_ylim(-0.02, 1.02)


def draw_improvements(axes: Any, found: Comparison, styles: dict[str, dict[str, Any]]) -> None:
    """How likely the better one of each two methods beats the other."""
    both = found.improvements
    pairs = [((a, b), value) for (a, b), value in both.items() if (value.value, b) > (both[b, a].value, a)]
    for row, ((method, _), estimate) in enumerate(reversed(pairs)):
        colour = styles[method]["color"]
        axes.plot([estimate.low, estimate.high], [row, row], color=colour, linewidth=7, alpha=0.3, solid_capstyle="butt")
        axes.plot([estimate.value], [row], "o", color=colour, markersize=6)
    axes.set_yticks(range(len(pairs)), [f"{a} over {b}" for (a, b), _ in reversed(pairs)])
    axes.axvline(0.5, color=GRAY, linewidth=1, linestyle=(0, (2, 3)))
    axes.set_xlim(-0.02, 1.02)
    axes.set_ylim(-0.7, len(pairs) - 0.3)
    dress(axes, "probability of improvement", "a run of the first beats one of the second", "", is_count=False)


def draw_metrics(panels: dict[str, list[Drawn]], x: str) -> Any:
    """One panel per metric, with a line for each run, or for the seeds of one."""
    columns = min(2, len(panels))
    figure, grid = _grid(-(-len(panels) // columns), columns, height=3.3)
    styles = style_of([drawn.label for drawn in next(iter(panels.values()))])
    for index, (metric, lines) in enumerate(panels.items()):
        axes = figure.add_subplot(grid[index // columns, index % columns])
        for line in lines:
            style = styles[line.label]
            if len(line.curves) > 1:
                for curve in line.curves:
                    axes.plot(*curve.T, color=style["color"], linewidth=0.6, alpha=0.35)
                if line.joined is not None:
                    _band(axes, line.joined, style, several=True)
            elif line.curves:
                axes.plot(*line.curves[0].T, **style, linewidth=1.2)
        dress(axes, WORDS.get(metric, metric.replace("_", " ")), "steps" if x == "steps" else "seconds of training", "")
    _legend_of(figure, styles, "Bands: 95 % intervals of the IQM over seeds." if _has_bands(panels) else "")
    return figure


def _has_bands(panels: dict[str, list[Drawn]]) -> bool:
    return any(line.joined is not None and len(line.curves) > 1 for lines in panels.values() for line in lines)


def style_of(labels: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Colour, dash and, for the page's script, the id of each line."""
    return {
        label: {
            "color": COLOURS[k % len(COLOURS)],
            "linestyle": DASHES[k // len(COLOURS) % len(DASHES)],
            "gid": f"line-method-{k}",
        }
        for k, label in enumerate(dict.fromkeys(labels))
    }


def save(figure: Any, file: Path) -> Path:
    """Write a PNG; its folder is made if it is missing.

    Raises:
        HurtleError: The file cannot be written.
    """
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with replacing(file) as new:
            figure.savefig(new, dpi=150, format="png")
    except OSError as error:
        raise HurtleError(f"{file} could not be written: {error.strerror or error}.") from error
    return file


def as_svg(figure: Any, name: str) -> str:
    """The figure as an <svg> element; its ids begin with `name`, so that several fit into one page."""
    import matplotlib as mpl

    text = io.StringIO()
    with mpl.rc_context({**AS_TEXT, "svg.hashsalt": name}):
        figure.savefig(text, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    svg = text.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'\bid="', f'id="{name}-', svg)
    return re.sub(r'(url\(#|href="#)', rf"\g<1>{name}-", svg)


def new_figure(width: float, height: float) -> Any:
    """An empty figure with the layout made when it is drawn."""
    return figure_class()(figsize=(width, height), layout="constrained")


def _grid(rows: int, columns: int, height: float) -> tuple[Any, Any]:
    figure = new_figure(4.9 * columns if columns > 1 else 6.6, height * rows + 0.45)
    return figure, figure.add_gridspec(rows, columns)


def _band(axes: Any, curve: Curve, style: dict[str, Any], several: bool, **line: Any) -> None:
    axes.plot(curve.x, curve.middle, **style, linewidth=1.8, **line)
    if several:
        step = {"step": "post"} if line else {}
        band = axes.fill_between(curve.x, curve.low, curve.high, color=style["color"], alpha=0.18, linewidth=0, **step)
        band.set_gid(style["gid"].replace("line", "band"))


def dress(axes: Any, title: str, x: str, y: str, is_count: bool = True) -> None:
    """Title, labels and grid of a panel; `is_count`: x counts steps or seconds from 0."""
    axes.set_title(title, fontsize=11, loc="left", fontweight="bold", color=TEXT)
    axes.set_xlabel(x, fontsize=9, color=GRAY)
    axes.set_ylabel(y, fontsize=9, color=GRAY)
    axes.tick_params(labelsize=8, colors=GRAY)
    if is_count:
        simplify(axes)
        if axes.get_xlim()[1] < 1000:  # no "500m"
            axes.xaxis.set_major_formatter("{x:g}")
        return
    axes.grid(axis="x", color="#e2e8f0", linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _legend(figure: Any, found: Comparison, styles: dict[str, dict[str, Any]]) -> None:
    runs = {method: [len(group.runs) for group in found.groups if group.method == method] for method in styles}
    several = any(max(counts) > 1 for counts in runs.values())
    labels = {method: f"{method} ({_range(counts)} runs)" if max(counts) > 1 else method for method, counts in runs.items()}
    _legend_of(
        figure, {labels[method]: style for method, style in styles.items()}, "IQM and its 95 % interval." if several else ""
    )


def _range(counts: list[int]) -> str:
    return str(counts[0]) if min(counts) == max(counts) else f"{min(counts)}–{max(counts)}"


def _legend_of(figure: Any, styles: dict[str, dict[str, Any]], note: str) -> None:
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], **style, linewidth=1.8, label=label) for label, style in styles.items()]
    columns = max(1, min(len(handles), int(figure.get_figwidth() * 12 / max(12, max(map(len, styles))))))
    figure.legend(
        handles=handles, loc="outside upper left", ncols=columns, frameon=False, fontsize=9, labelcolor=TEXT,
        title=note or None, title_fontsize=8, alignment="left",
    )  # fmt: skip
