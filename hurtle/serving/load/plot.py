"""Plots the throughput/latency curve of a load test. Does not know how the figures were measured."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hurtle.errors import HurtleError
from hurtle.serving.load.generator import Result

LINES = ((50.0, "#2b6cb0"), (99.0, "#dd6b20"), (99.9, "#c53030"))
_BEHIND = {"facecolor": "white", "edgecolor": "none", "alpha": 0.7, "pad": 1}


def plot_curve(results: Sequence[Result], path: Path, title: str) -> None:
    """Plot latencies over throughput, one point per setting.

    Raises:
        HurtleError: There is nothing to draw, matplotlib is missing, or the file cannot be written.
    """
    results = [result for result in results if len(result.latencies) and result.answers]
    if not results:
        raise HurtleError("No request was answered: there is no curve to draw.")
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise HurtleError("--plot needs matplotlib: pip install 'hurtle[tracking]'.") from None
    figure = Figure(figsize=(7.5, 4.5), layout="constrained")
    axes = figure.add_subplot()
    groups = [[r for r in results if r.setting.rate is None], [r for r in results if r.setting.rate is not None]]
    for group, style in zip(groups, ("-", "--"), strict=True):
        throughput = [result.requests_per_second for result in group]
        for percentile, colour in LINES if group else ():
            latencies = [result.latency_ms(percentile) for result in group]
            label = f"p{percentile:g}" + (", open loop" if style == "--" else "")
            axes.plot(throughput, latencies, style, color=colour, marker="o", markersize=4, label=label)
        for result, x in zip(group, throughput, strict=True):
            axes.annotate(
                _label(result),
                (x, result.latency_ms(LINES[-1][0])),
                (0, 6),
                textcoords="offset points",
                fontsize=8,
                ha="center",
                bbox=_BEHIND,
            )
    axes.set_yscale("log")
    axes.set_xlim(left=0, right=max(result.requests_per_second for result in results) * 1.08)
    low, high = axes.get_ylim()
    axes.set_ylim(low, high * 1.6)  # room for the labels
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.set_xlabel("requests per second that were answered")
    axes.set_ylabel("latency, ms")
    axes.set_title(title, fontsize=10)
    axes.grid(alpha=0.3, which="both", linewidth=0.5)
    axes.legend(fontsize=8, loc="upper left")
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise HurtleError(f"Cannot write {path}: {error}.") from None


def _label(result: Result) -> str:
    setting = result.setting
    if setting.rate is not None:
        return f"{setting.rate:,.0f}/s asked"
    return f"{setting.connections} conn."
