"""`hurtle plot`: metrics of runs as one PNG."""

from __future__ import annotations

from typing import Annotated

from hurtle.cli.options import POSITIONAL, Runs, option
from hurtle.errors import HurtleError


def plot(
    run: Annotated[
        tuple[str, ...], POSITIONAL, option("Run folders, folders of seeds, globs, or latest.", "RUN [RUN ...]", "")
    ],
    metrics: Annotated[
        tuple[str, ...], option("return, evaluation, length, speed, or names in metrics.jsonl.", "NAME [NAME ...]", "return")
    ] = ("return",),
    x: Annotated[str, option("steps or seconds.")] = "steps",
    smooth: Annotated[int, option("Mean over so many values.")] = 1,
    out: Annotated[str, option("The PNG to write.", "FILE")] = "plot.png",
    runs: Runs = "runs",
) -> None:
    """Plot metrics of runs as one PNG."""
    if not run:
        raise HurtleError("Plot which runs? For example: hurtle plot latest --metrics return value_loss")
    if not metrics:
        raise HurtleError("--metrics needs at least one name, such as return.")
    if smooth < 1:
        raise HurtleError(f"--smooth must be at least 1, got {smooth}.")
    from hurtle.experiments.plotting import plot as plot_runs

    print(f"written     {plot_runs(run, out, metrics, x, smooth, runs)}")
