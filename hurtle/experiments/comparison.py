"""`hurtle.compare`: runs → methods and tasks → curves, a table, settings that differ; over several tasks also profiles.

A method is what is compared: an algorithm with its settings; a task is an env with its parameters. Draws nothing itself:
pictures are figures.py, the page is page.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from hurtle.errors import HurtleError
from hurtle.experiments.curves_of_runs import X_AXES, RunCurves, check_metrics
from hurtle.experiments.methods import differences, method_names, task_names
from hurtle.experiments.records import RunRecord, find_runs
from hurtle.experiments.statistics import (
    Curve,
    Estimate,
    joined_curve,
    normalized,
    overall,
    performance_profile,
    probability_of_improvement,
)
from hurtle.tracking.formatting import figure, quantity

THRESHOLDS = np.linspace(0.0, 1.0, 101)
Place = str | Path | Any


@dataclass(frozen=True)
class Group:
    """The runs of one method on one task.

    Attributes:
        method: The method's name.
        task: The task's name.
        runs: Its runs that have metrics and did not crash.
        curves: The return against "steps" and "seconds"; None where the runs share no stretch.
        finals: The final return of each run that has one.
        seconds_to: Seconds of each run to the return asked for; NaN where it was not reached; None if none was asked for.
    """

    method: str
    task: str
    runs: tuple[RunRecord, ...]
    curves: dict[str, Curve | None]
    finals: tuple[float, ...]
    seconds_to: tuple[float, ...] | None = None

    @property
    def final(self) -> Estimate | None:
        """The IQM of the final returns."""
        return Estimate.of(self.finals) if self.finals else None

    @property
    def steps_per_second(self) -> float:
        """The median over the runs."""
        return float(np.median([run.steps_per_second for run in self.runs]))


@dataclass(frozen=True)
class Comparison:
    """What `hurtle.compare` returns.

    Attributes:
        groups: One for each method and task, by task, then by method.
        metric: What the curves show.
        is_evaluated: Whether final returns are those of evaluations; else of the last training episodes.
        target: The return asked for, or None.
        settings: The settings that differ between methods, on any task: name → the value of each method as text.
        profiles: Performance profile of each method, over the tasks that all of them have; empty for one task or method.
        overalls: IQM of the normalized scores of each method, over the same tasks.
        improvements: (method, other) → probability that a run of the first beats one of the other on the same task.
        notes: What was left out, and why.
    """

    groups: tuple[Group, ...]
    metric: str
    is_evaluated: bool
    target: float | None
    settings: dict[str, dict[str, str]]
    profiles: dict[str, Curve]
    overalls: dict[str, Estimate]
    improvements: dict[tuple[str, str], Estimate]
    notes: tuple[str, ...]

    @property
    def tasks(self) -> list[str]:
        """The names of the tasks."""
        return list(dict.fromkeys(group.task for group in self.groups))

    @property
    def methods(self) -> list[str]:
        """The names of the methods."""
        return list(dict.fromkeys(group.method for group in self.groups))

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Header and rows: one row for each method and task."""
        several = len(self.tasks) > 1
        what = "evaluation" if self.is_evaluated else "training return"
        header = ["task"] * several + ["method", "runs", f"{what}: IQM [95 %]", "steps", "steps/s", "seconds"]
        header += [] if self.target is None else [f"seconds to {self.target:g}"]
        rows = []
        for group in self.groups:
            row = [group.task] * several + [group.method, str(len(group.runs)), str(group.final or "-")]
            row += [quantity(float(np.median([run.steps for run in group.runs]))), quantity(group.steps_per_second)]
            row.append(figure(float(np.median([run.seconds for run in group.runs]))))
            if group.seconds_to is not None:
                row.append(_reached(group.seconds_to))
            rows.append(row)
        return header, rows

    def tasks_table(self) -> tuple[list[str], list[list[str]]]:
        """Header and rows over all tasks: normalized IQM, and the probability that a method beats each of the others."""
        others = list(self.overalls)
        header = ["method", "normalized IQM [95 %]", *(f"beats {other}" for other in others)]
        rows = []
        for method in others:
            row = [method, str(self.overalls[method])]
            rows.append(row + ["" if other == method else str(self.improvements[method, other]) for other in others])
        return header, rows

    def settings_table(self) -> tuple[list[str], list[list[str]]]:
        """Header and rows: one row for each setting that differs."""
        rows = [[name, *(values.get(method, "–") for method in self.methods)] for name, values in self.settings.items()]
        return ["setting", *self.methods], rows

    def to_dict(self) -> dict[str, Any]:
        """The numbers, for JSON; without the curves."""

        def plain(found: Estimate | None) -> Any:
            return None if found is None else found._asdict()

        return {
            "of": "evaluation" if self.is_evaluated else "training",
            "groups": [
                {
                    "task": group.task,
                    "method": group.method,
                    "runs": [str(run.path) for run in group.runs],
                    "final": plain(group.final),
                    "finals": list(group.finals),
                    "steps_per_second": group.steps_per_second,
                    "seconds_to": None if group.seconds_to is None else list(group.seconds_to),
                }
                for group in self.groups
            ],
            "settings": self.settings,
            "normalized": {method: plain(found) for method, found in self.overalls.items()},
            "improvements": [{"method": a, "over": b, **found._asdict()} for (a, b), found in self.improvements.items()],
            "notes": list(self.notes),
        }

    def write_png(self, file: str | Path) -> Path:
        """Draw the curves, and profiles if there are several tasks. Needs the extra `tracking` (Matplotlib)."""
        from hurtle.experiments.figures import draw_comparison, save

        return save(draw_comparison(self), Path(file))

    def write_html(self, file: str | Path) -> Path:
        """Write one page with everything in it: no other file, no network. Needs the extra `tracking` (Matplotlib)."""
        from hurtle.experiments.page import write_page

        return write_page(self, Path(file))

    def __str__(self) -> str:
        parts = [_text(*self.table())]
        if self.overalls:
            parts.append(_text(*self.tasks_table()))
        if self.settings:
            parts.append(_text(*self.settings_table()))
        return "\n\n".join([*parts, *self.notes])


def compare(
    runs: Sequence[Place] | Mapping[str, Place | Sequence[Place]],
    *,
    target: float | None = None,
    metric: str = "return",
    folder: str | Path = "runs",
) -> Comparison:
    """Compare runs: curves with intervals, final returns, speed, time to a return, settings.

    Runs of the same settings but the seed are one method on one task. On several tasks, the runs of an algorithm are one
    method, or you name the methods: `compare({"ours": "runs/ours-*", "theirs": "runs/theirs-*"})`.

    Args:
        runs: Run folders, folders of many seeds, folders of either, globs, names in `folder`, or "latest"; also what `train`
            and `train_seeds` return. Or a dict from the name of each method to its runs.
        target: A return: the table gets the seconds that each method took to reach it.
        metric: What the curves show: "return" (of training episodes), "evaluation", "length", or any name in metrics.jsonl.
        folder: The folder of all runs.

    Raises:
        HurtleError: There is no such run, or it has no metrics; or methods need names.
        UnknownNameError: No run has this metric; suggests the closest.

    Example:
        >>> found = compare([run, other])
        >>> found.methods, [len(group.runs) for group in found.groups]
        (['ppo'], [2])
    """
    records, names, notes = _read(runs, folder)
    curves = _curves(records, notes)
    if not curves:
        raise HurtleError("There is nothing to compare yet. " + " ".join(notes))
    check_metrics([metric], list(curves.values()))
    used = [record for record in records if record.path in curves]
    tasks = task_names(used)
    methods = method_names(used, tasks, names)
    is_evaluated = all(math.isfinite(record.evaluation) for record in used)
    members: dict[tuple[str, str], list[RunRecord]] = {}
    for record in used:
        members.setdefault((tasks[record.path], methods[record.path]), []).append(record)
    by_task = sorted(members, key=lambda key: list(dict.fromkeys(tasks.values())).index(key[0]))
    groups = tuple(
        _group(method, task, members[task, method], curves, metric, target, is_evaluated) for task, method in by_task
    )
    for group in groups:
        if group.curves["steps"] is None:
            notes.append(f"{group.method} on {group.task} has no curve: its runs share no stretch of steps with values.")
    profiles, overalls, improvements = _over_tasks(groups, notes)
    settings = differences(members)
    return Comparison(groups, metric, is_evaluated, target, settings, profiles, overalls, improvements, tuple(notes))


def _read(runs: Any, folder: str | Path) -> tuple[list[RunRecord], dict[Path, str], list[str]]:
    """The runs, each once; the names that the user gave; and notes."""
    named = runs if isinstance(runs, Mapping) else {"": runs}
    names: dict[Path, str] = {}
    records: list[RunRecord] = []
    notes: list[str] = []
    for name, places in named.items():
        for place in [places] if isinstance(places, str | Path) or hasattr(places, "path") else places:
            for path in find_runs(getattr(place, "path", place), folder):
                if names.get(path, name) != name:
                    raise HurtleError(f"{path} is in two methods: {names[path]} and {name}.")
                if path not in names:
                    names[path] = name
                    records.append(RunRecord.read(path))
    if not records:
        raise HurtleError("Compare which runs? Give run folders, folders of many seeds, or globs such as 'runs/cartpole-*'.")
    return records, {path: name for path, name in names.items() if name}, notes


def _curves(records: list[RunRecord], notes: list[str]) -> dict[Path, RunCurves]:
    """The curves of the runs to compare: those that have some, without crashed ones if there are others like them."""
    found = {}
    for record in records:
        try:
            curves = RunCurves(record.path)
        except HurtleError as error:
            notes.append(f"Left out: {error}")
            continue
        found[record.path] = curves
    crashed = [record for record in records if record.path in found and record.state == "crashed"]
    if len(crashed) < len(found):
        for record in crashed:
            notes.append(f"Left out: {record.path} crashed after {record.steps:,} of {record.total_steps:,} steps.")
            del found[record.path]
    running = [record for record in records if record.path in found and record.state == "running"]
    if running:
        notes.append(f"{len(running)} of the runs {'is' if len(running) == 1 else 'are'} still being trained.")
    return found


def _group(
    method: str,
    task: str,
    runs: list[RunRecord],
    curves: dict[Path, RunCurves],
    metric: str,
    target: float | None,
    is_evaluated: bool,
) -> Group:
    joined = {x: joined_curve([curves[run.path].curve(metric, x) for run in runs]) for x in X_AXES}
    finals = [run.evaluation if is_evaluated else run.training_return for run in runs]
    seconds_to = None if target is None else tuple(curves[run.path].seconds_to(target) for run in runs)
    return Group(method, task, tuple(runs), joined, tuple(value for value in finals if math.isfinite(value)), seconds_to)


def _over_tasks(
    groups: tuple[Group, ...], notes: list[str]
) -> tuple[dict[str, Curve], dict[str, Estimate], dict[tuple[str, str], Estimate]]:
    """Profiles, normalized IQMs and probabilities of improvement, if there are several tasks and methods."""
    methods = list(dict.fromkeys(group.method for group in groups))
    finals = {(group.task, group.method): group.finals for group in groups}
    tasks = list(dict.fromkeys(group.task for group in groups))
    common = [task for task in tasks if all(finals.get((task, method)) for method in methods)]
    if len(tasks) < 2 or len(methods) < 2:
        return {}, {}, {}
    if missing := [task for task in tasks if task not in common]:
        notes.append(f"Profiles leave out {', '.join(missing)}: not every method has returns there.")
    if len(common) < 2:
        return {}, {}, {}
    by_task = normalized([[finals[task, method] for method in methods] for task in common])
    scores = {method: [by_task[t][m] for t in range(len(common))] for m, method in enumerate(methods)}
    improvements = {}
    for a, b in combinations(methods, 2):
        found = probability_of_improvement(scores[a], scores[b])
        improvements[a, b] = found
        improvements[b, a] = Estimate(1 - found.value, 1 - found.high, 1 - found.low)
    profiles = {method: performance_profile(found, THRESHOLDS) for method, found in scores.items()}
    return profiles, {method: overall(found) for method, found in scores.items()}, improvements


def _reached(seconds: tuple[float, ...]) -> str:
    known = [value for value in seconds if math.isfinite(value)]
    if not known:
        return f"- (0 of {len(seconds)})"
    return f"{Estimate.of(known)}" + (f" ({len(known)} of {len(seconds)})" if len(known) < len(seconds) else "")


def _text(header: list[str], rows: list[list[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    return "\n".join(
        "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in [header, *rows]
    )
