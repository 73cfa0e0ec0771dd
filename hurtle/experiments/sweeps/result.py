"""`SweepRun`: what a sweep has found, from its journal: the winner, its checks, the Pareto front; and its files.

journal → winner, checks, front, importance → best.toml, summary.json, sweep.html, the message at the end.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from hurtle.errors import HurtleError
from hurtle.experiments.space import Space
from hurtle.experiments.statistics import Estimate
from hurtle.experiments.sweeps.finalists import Check, checked, winner
from hurtle.experiments.sweeps.importance import importance
from hurtle.experiments.sweeps.plan import SweepPlan
from hurtle.experiments.sweeps.scores import Metric
from hurtle.experiments.sweeps.trials import Journal, Trial, pareto_front
from hurtle.runners.settings import settings_from_dict, settings_to_dict
from hurtle.runners.values import shown
from hurtle.tracking.formatting import duration, figure
from hurtle.tracking.json_text import to_json
from hurtle.tracking.run_folder import write_whole
from hurtle.tracking.toml_text import to_toml
from hurtle.trust import signed

NOT_IN_A_PRESET = {
    *(
        "seed",
        "runs",
        "name",
        "progress",
        "curve",
        "trackers",
        "keep_checkpoints",
        "checkpoint_every",
        "eval_every",
        "eval_episodes",
    ),
    *("preset", "env", "algorithm", "device", "num_workers", "threads"),
}


@dataclass(frozen=True)
class SweepRun:
    """A sweep.

    Attributes:
        path: Its folder.
        settings: Those that all trials share, flat.
        plan: How it went about it.
        space: What it searched.
        trials: Those of the search, and the runs that check the best ones.
        stopped_by: "Ctrl-C" or "SIGTERM", or an empty string.
    """

    path: Path
    settings: Mapping[str, Any] = field(repr=False)
    plan: SweepPlan
    space: Space = field(repr=False)
    trials: tuple[Trial, ...] = field(repr=False)
    stopped_by: str = ""

    @classmethod
    def of(
        cls, folder: Path, settings: Mapping[str, Any], plan: SweepPlan, space: Space, journal: Journal, stopped_by: str
    ) -> SweepRun:
        """What the journal says at this moment."""
        return cls(folder, dict(settings), plan, space, tuple(journal.select(lambda trial: True)), stopped_by)

    @property
    def searched(self) -> list[Trial]:
        """The trials of the search."""
        return [trial for trial in self.trials if not trial.is_check]

    @cached_property
    def best(self) -> Trial:
        """The winner.

        Raises:
            HurtleError: No trial was scored.
        """
        found = winner(self.trials)
        if found is None:
            raise HurtleError(f"No trial of {self.path} was trained to its end yet.")
        return found

    @cached_property
    def checks(self) -> dict[int, Check]:
        """What fresh seeds say of each finalist, by the number of the trial; empty if nothing was checked."""
        metric = Metric(self.plan.metric, self.plan.minimize)
        found = checked(self.trials)
        if not self.plan.minimize:
            return found
        return {
            number: replace(check, estimate=Estimate(*(metric.shown(check.estimate[k]) for k in (0, 2, 1))))
            for number, check in found.items()
        }

    @cached_property
    def front(self) -> list[Trial]:
        """The Pareto front of score and seconds, from the fastest to the best."""
        return pareto_front(self.searched)

    @cached_property
    def importance(self) -> dict[str, float]:
        """The share of each setting in what moves the score; empty after few trials."""
        return importance(self.space, self.searched)

    @property
    def counts(self) -> str:
        """How many trials there were, and how they ended."""
        states = [trial.state for trial in self.searched]
        each = [f"{states.count(state)} {state}" for state in ("finished", "pruned", "failed", "cut") if state in states]
        return f"{len(states)} trials" + (f" ({', '.join(each)})" if each else "")

    @property
    def policy(self) -> Path:
        """A run folder with a policy of the winner: its own, else that of its best check.

        Raises:
            HurtleError: None has a checkpoint.
        """
        checks = [trial for trial in self.trials if trial.checks == self.best.number and trial.has_score]
        for trial in (self.best, *sorted(checks, key=lambda trial: -trial.score)):
            if list((self.path / trial.name / "checkpoints").glob("*.pt")):
                return self.path / trial.name
        raise HurtleError(f"No run of {self.best.name} in {self.path} has a checkpoint: train with {self.path}/best.toml.")

    @property
    def best_settings(self) -> dict[str, Any]:
        """The winner's settings that are not defaults, as `hurtle.train(config=…)` takes them; no preset is added to them."""
        algorithm = str(self.settings["algorithm"])
        own = settings_to_dict(settings_from_dict({**self.settings, **self.best.values}))
        plain = settings_to_dict(settings_from_dict({"algorithm": algorithm, "env": self.settings["env"]}))
        named = {"env": self.settings["env"], "algorithm": algorithm, "preset": False}
        kept = {name for name in own if own[name] != plain[name] or name in self.best.values} - NOT_IN_A_PRESET
        return named | {name: own[name] for name in own if name in kept}

    def shown(self, score: float) -> float:
        """The metric's own value of a score."""
        return Metric(self.plan.metric, self.plan.minimize).shown(score)

    def write(self) -> None:
        """Write best.toml, summary.json and, with Matplotlib, the page."""
        write_whole(self.path / "summary.json", to_json(self.to_dict(), indent=2))
        if winner(self.trials) is None:
            return
        write_whole(self.path / "best.toml", self._preset())
        try:
            from hurtle.experiments.sweeps.page import write_sweep_page

            write_sweep_page(self, self.path / "sweep.html")
        except Exception as error:  # a page is no reason to lose a sweep
            if "Matplotlib" not in str(error):
                (self.path / "sweep.html").write_text(f"The page could not be drawn: {error!r}")

    def to_dict(self) -> dict[str, Any]:
        """For JSON: what summary.json holds."""
        found = winner(self.trials)
        states = [trial.state for trial in self.searched]
        return {
            "best": None if found is None else self._entry(found),
            "checks": {str(number): check.to_dict() for number, check in self.checks.items()},
            "front": [self._entry(trial) for trial in self.front],
            "importance": self.importance,
            "states": {state: states.count(state) for state in sorted(set(states))},
            "stopped_by": self.stopped_by,
        }

    def _entry(self, trial: Trial) -> dict[str, Any]:
        return asdict(trial) | {"score": self.shown(trial.score), "folder": trial.name}

    def _preset(self) -> str:
        about = [f"# Found by a sweep of {len(self.searched)} trials: {self.path.name}, {self.best.name}."]
        if self.best.number in self.checks:
            about.append(f"# {self.plan.metric}: {self.checks[self.best.number]}.")
        else:
            about.append(f"# {self.plan.metric}: {figure(self.shown(self.best.score))}, of one seed, not checked with others.")
        return "\n".join([*about, to_toml(signed(self.best_settings))])


def settings_in_words(trial: Trial) -> str:
    """The values of a trial on one line.

    Example:
        >>> settings_in_words(Trial(3, {"learning_rate": 0.001, "num_steps": 32}))
        'learning_rate=0.001 num_steps=32'
    """
    return " ".join(f"{name}={shown(value)}" for name, value in trial.values.items())


def closing_message(found: SweepRun, seconds: float) -> str:
    """The message at the end: what was tried, what won, what to do next."""
    how = f"Stopped by {found.stopped_by}" if found.stopped_by else "Done"
    lines = [f"{how} after {duration(seconds)}: {found.counts}."]
    if winner(found.trials) is None:
        path = shlex.quote(str(found.path))
        return "\n".join([*lines, "No trial was trained to its end yet.", f"next        hurtle sweep --resume {path}"])
    best, metric = found.best, found.plan.metric
    by_number = {trial.number: trial for trial in found.searched}
    others = [number for number in sorted(found.checks) if number != best.number]
    for number in [best.number, *others]:
        trial = by_number[number]
        name = "baseline" if trial.origin == "baseline" else trial.name
        scored = f"{figure(found.shown(trial.score))} in the search"
        if number in found.checks:
            scored = f"{found.checks[number]}, {scored}"
        label = "best" if number == best.number else "checked too" if number == others[0] else ""
        lines.append(f"{label:<12}{name}: {metric} {scored}, {trial.seconds:.1f} s of training")
    if found.importance:
        top = [f"{name} {100 * share:.0f} %" for name, share in list(found.importance.items())[:4]]
        lines.append(f"matters     {', '.join(top)}")
    lines.append(f"folder      {found.path}")
    if (found.path / "sweep.html").is_file():
        lines.append(f"page        {found.path / 'sweep.html'}")
    path = shlex.quote(str(found.path))
    lines.append(
        f"next        hurtle sweep --resume {path}"
        if found.stopped_by
        else f"next        hurtle train {shlex.quote(str(found.settings['env']))} --config {path}/best.toml"
    )
    return "\n".join(lines)
