"""What the learning grid found: a curve per task, the table of docs/learning.md, IQM and 95 % intervals over seeds.

result files → seeds joined → PNG and Markdown. Runs nothing.
"""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from learning_tasks import ALL, Numbers, Task
from record import ROOT, table

from hurtle.experiments.statistics import Estimate, joined_curve

BEGIN, END = "<!-- learning:begin -->", "<!-- learning:end -->"
COLOURS = {"hurtle": "tab:orange", "sb3": "tab:gray"}
LABELS = {"hurtle": "Hurtle", "sb3": "SB3, same settings"}
Results = dict[str, dict[str, list[dict[str, Any]]]]
"""Task → library → what its seeds found, in the order of the seeds."""


@dataclass(frozen=True)
class Places:
    """Where the grid keeps things."""

    results: Path = ROOT / "benchmarks" / "results" / "learning"
    images: Path = ROOT / "docs" / "images" / "learning"
    page: Path = ROOT / "docs" / "learning.md"

    @classmethod
    def under(cls, folder: Path) -> Places:
        """All in one folder."""
        return cls(folder / "results", folder / "images" / "learning", folder / "learning.md")


@dataclass(frozen=True)
class Score:
    """The final evaluations of several seeds: each seed counts once, by the mean of its episodes."""

    means: list[float]
    iqm: float
    low: float
    high: float

    @classmethod
    def of(cls, results: list[dict[str, Any]]) -> Score:
        """Joins the seeds."""
        means = [result["evaluation"]["mean"] for result in results]
        return cls(means, *Estimate.of(means))

    def __str__(self) -> str:
        return f"{_number(self.iqm)} [{_number(self.low)}, {_number(self.high)}]"


def load_results(folder: Path) -> Results:
    """All result files of known tasks."""
    found: Results = defaultdict(lambda: defaultdict(list))
    for path in folder.glob("*.json"):
        result = json.loads(path.read_text())
        if result["task"] in ALL:
            found[result["task"]][result["library"]].append(result)
    for libraries in found.values():
        for results in libraries.values():
            results.sort(key=lambda result: result["seed"])
    return {name: {library: libraries[library] for library in sorted(libraries)} for name, libraries in found.items()}


def report(places: Places) -> str:
    """Draw every curve, rewrite the page's table, and return it."""
    results = load_results(places.results)
    if not any("hurtle" in libraries for libraries in results.values()):
        return "Nothing is finished yet."
    draw(results, places.images)
    text = f"{summary_table(results, places)}\n\n{_provenance(results)}"
    write_between_markers(places.page, text)
    return text


# The table ------------------------------------------------------------------------------------------------------------


def summary_table(results: Results, places: Places) -> str:
    """One row per task that has run."""
    header = [
        "task",
        "goal",
        "Hurtle: IQM [95 % CI]",
        "worst seed",
        "seeds there",
        "met",
        "SB3, same settings",
        "SB3 zoo",
        "CleanRL",
    ]
    rows = []
    for name, task in ALL.items():
        libraries = results.get(name, {})
        if "hurtle" not in libraries:
            continue
        random, score = random_of(libraries), Score.of(libraries["hurtle"])
        there = [_reached(task, result, random) for result in libraries["hurtle"]]
        worst = max(score.means) if task.goal.kind == "below" else min(score.means)
        known = task.goal.threshold(random) is not None
        met = task.goal.is_met(score.iqm, score.low, random)
        rows.append(
            [
                _linked(name, task, places),
                task.goal.text(random),
                str(score),
                _number(worst),
                f"{sum(there)} of {len(there)}" if known else f"– of {len(there)}",
                "–" if met is None else "yes" if met else "**no**",
                str(Score.of(libraries["sb3"])) if "sb3" in libraries else "–",
                *(task.zoo, task.cleanrl),
            ]
        )
    return table(header, rows)


def random_of(libraries: dict[str, list[dict[str, Any]]]) -> Numbers | None:
    """The random policy's evaluation, where it was measured."""
    return libraries["random"][0]["evaluation"] if "random" in libraries else None


def _reached(task: Task, result: dict[str, Any], random: Numbers | None) -> bool:
    evaluation = result["evaluation"]
    return bool(task.goal.is_met(evaluation["mean"], evaluation["low"], random))


def _linked(name: str, task: Task, places: Places) -> str:
    image = places.images / f"{name}.png"
    return f"[{task.about}]({image.relative_to(places.page.parent)})" if image.exists() else task.about


def _number(value: float) -> str:
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.3f}"


def _provenance(results: Results) -> str:
    """Machines, versions and commits that the figures come from, in one paragraph."""
    machines = [result["machine"] for libraries in results.values() for found in libraries.values() for result in found]
    hosts = sorted({f"{m['cpu']}, {m['cores']} cores, {m['system']}; Python {m['python']}" for m in machines})
    packages = ("torch", "numba", "gymnasium", "stable-baselines3")
    versions = sorted({f"{name} {m['versions'][name]}" for m in machines for name in packages if name in m["versions"]})
    commits = sorted({m["commit"] for m in machines})
    return f"Measured on {' and '.join(hosts)}, {', '.join(versions)}; commit {', '.join(commits)}."


def write_between_markers(page: Path, text: str) -> None:
    """Replace what stands between the page's markers; a page that does not exist is begun.

    Raises:
        SystemExit: The page has no markers, or not one pair in order.
    """
    old = page.read_text() if page.exists() else f"# What Hurtle learns\n\n{BEGIN}\n{END}\n"
    before, begin, rest = old.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end) or BEGIN in after or END in before + after:
        raise SystemExit(f"{page} must have one line {BEGIN} and one line {END} below it; the table goes between them.")
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{after}")


# Curves ---------------------------------------------------------------------------------------------------------------


def draw(results: Results, folder: Path) -> None:
    """One PNG per task."""
    try:
        import matplotlib as mpl
    except ImportError:
        return print("No curves: pip install matplotlib")
    mpl.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import EngFormatter

    folder.mkdir(parents=True, exist_ok=True)
    for name, libraries in results.items():
        task, figure = ALL[name], plt.figure(figsize=(6, 3.4), layout="constrained")
        axes, drawn = figure.gca(), False
        for library in COLOURS:
            seeds = libraries.get(library, [])
            joined = joined_curve([result["curve"] for result in seeds], points=60)
            if joined is None:
                continue
            steps, middle, low, high = joined
            label = f"{LABELS[library]}, {len(seeds)} seed{'s' if len(seeds) > 1 else ''}"
            axes.plot(steps, middle, color=COLOURS[library], label=label)
            axes.fill_between(steps, low, high, color=COLOURS[library], alpha=0.25, linewidth=0)
            drawn = True
        threshold = task.goal.threshold(random_of(libraries))
        if threshold is not None:
            axes.axhline(threshold, color="black", linestyle="--", linewidth=1, label=task.goal.text(random_of(libraries)))
        axes.set(title=task.about, xlabel="steps", ylabel="return of the last 100 episodes")
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        axes.legend(fontsize=8)
        if drawn:
            figure.savefig(folder / f"{name}.png", dpi=80)
        plt.close(figure)
