"""What `collect.py` and `train.py` share: rounds in which all take their turn, a table of ratios, and a plot.

An entrant is a job that does some steps and says how many they were and how long they took: making things ready does not count.
"""

from __future__ import annotations

import contextlib
import json
import random
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from record import RESULTS, short, table
from vector_jobs import Turns, make_jobs

Timed = Callable[[], tuple[int, float]]
"""Does some steps; how many, and in how many seconds."""
Makers = dict[str, Callable[[contextlib.ExitStack], Timed]]
"""Makes an entrant ready, once through, so that nothing compiles later; an entrant that cannot be made is left out."""

NATIVE, GENERAL = "hurtle native", "hurtle general"
HEADER = ["", "who", "steps/s", "native / it", "general / it"]


class Rounds(Turns):
    """Steps per second of each job in each round, by the jobs' own clocks; medians and ratios as in `Turns`."""

    def __init__(self, jobs: dict[str, Timed], rounds: int, case: str):
        shuffle = random.Random(0)
        self.rates: dict[str, list[float]] = {name: [] for name in jobs}
        for done in range(1, rounds + 1):
            order = list(jobs)
            shuffle.shuffle(order)  # whoever follows a job that heats the machine is another each time
            for name in order:
                steps, seconds = jobs[name]()
                self.rates[name].append(steps / seconds)
            speeds = ", ".join(f"{name} {short(rates[-1])}" for name, rates in self.rates.items())
            print(f"{case}, round {done} of {rounds}: {speeds}", flush=True)


def repeated(call: Callable[[], Any], steps: int, seconds: float) -> Timed:
    """A job that calls at least once and until some seconds are over; each call does so many steps."""

    def job() -> tuple[int, float]:
        done, elapsed, began = 0, 0.0, time.perf_counter()
        while not done or elapsed < seconds:
            call()
            done += steps
            elapsed = time.perf_counter() - began
        return done, elapsed

    return job


def compare(case: str, makers: Makers, rounds: int) -> tuple[dict[str, Any], list[list[str]]]:
    """All entrants of one case: the numbers, and the rows of the table."""
    print(f"{case}: making {', '.join(makers)} ready", flush=True)
    with contextlib.ExitStack() as stack:
        made, left_out = make_jobs(makers, stack)
        turns = Rounds(made, rounds, case)
    rows = []
    for name in makers:
        over = [f"{turns.ratio(us, name):.2f}x" if {us, name} <= made.keys() else "–" for us in (NATIVE, GENERAL)]
        rows.append([case, name, short(turns.rate(name)) if name in made else "left out", *over])
    return {"steps_per_second": turns.rates, "left_out": left_out}, rows


def report(title: str, rows: list[list[str]], note: str) -> str:
    """The section as Markdown."""
    return f"### {title}\n\n{table(HEADER, rows)}\n\n{note}"


def plot(name: str, title: str) -> None:
    """Draw the committed results: one panel for each case."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    found = json.loads((RESULTS / f"{name}.json").read_text())
    cases = {case: part["steps_per_second"] for case, part in found.items() if "steps_per_second" in part}
    columns = min(3, len(cases))
    rows = -(-len(cases) // columns)
    figure, panels = plt.subplots(rows, columns, figsize=(5 * columns, 3.2 * rows), layout="constrained", squeeze=False)
    for unused in panels.flat[len(cases) :]:
        unused.axis("off")
    for axes, (case, rates) in zip(panels.flat, cases.items(), strict=False):
        speeds = sorted((float(np.median(values)), who) for who, values in rates.items())
        colours = ["tab:orange" if who.startswith("hurtle") else "tab:gray" for _, who in speeds]
        bars = axes.barh([who for _, who in speeds], [speed for speed, _ in speeds], color=colours)
        axes.bar_label(bars, [short(speed) for speed, _ in speeds], padding=3, fontsize=8)
        axes.set(xscale="log", xlabel="steps/s", title=case)
        axes.set_xlim(speeds[0][0] / 10, 4 * speeds[-1][0])  # a bar for the slowest, and room for labels
    figure.suptitle(title)
    figure.savefig(RESULTS / f"{name}.png", dpi=110)
    plt.close(figure)
    print(f"saved benchmarks/results/{name}.png")
