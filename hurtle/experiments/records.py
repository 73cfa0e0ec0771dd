"""`RunRecord`: what the folder of a run tells, also while it is being trained; and finding the folders that a user means.

names, folders, globs → run folders → records. Reads small files only: neither torch nor NumPy is imported.
"""

from __future__ import annotations

import datetime
import glob
import math
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hurtle.algorithms.algorithm import short_name
from hurtle.errors import HurtleError, did_you_mean
from hurtle.tracking.metrics_tail import last_metrics
from hurtle.tracking.run_folder import RunFolder, read_json
from hurtle.tracking.run_state import last_written, state_of

SEEDS_FILE = "seeds.toml"
"""In the folder of many seeds: their settings, and which seeds there are."""
POPULATION_FILE = "population.toml"
"""In the folder of a population: its settings, its rules, and what it searches."""
NAN = math.nan


@dataclass(frozen=True)
class RunRecord:
    """One run.

    Attributes:
        path: Its folder.
        env: The name of its env.
        algorithm: The name of its algorithm.
        seed: Its seed.
        state: "running", "finished", "stopped" or "crashed".
        steps: Steps so far.
        total_steps: Steps asked for.
        training_return: Mean of the newest 100 training episodes; NaN if none has ended.
        evaluation: Mean return of the newest evaluation; NaN if there is none.
        seconds: Training time.
        steps_per_second: Over the whole run.
        started: When it was started or resumed last, in seconds since 1970.
        settings: All of them, as config.toml has them.
    """

    path: Path
    env: str
    algorithm: str
    seed: int
    state: str
    steps: int
    total_steps: int
    training_return: float
    evaluation: float
    seconds: float
    steps_per_second: float
    started: float
    settings: dict[str, Any] = field(repr=False)

    @classmethod
    def read(cls, path: Path) -> RunRecord:
        """Read a run's folder.

        Raises:
            HurtleError: Its config.toml cannot be read.
        """
        folder = RunFolder(path)
        settings, summary, newest = folder.read_config(), folder.read_summary(), last_metrics(folder.metrics_file)
        try:
            env, algorithm, seed = str(settings["env"]), short_name(str(settings["algorithm"])), int(settings["seed"])
            total_steps = int(settings["total_steps"])
        except (KeyError, TypeError, ValueError) as error:
            raise HurtleError(f"{path / 'config.toml'} is not that of a run: {error!r}.") from None
        evaluation = summary.get("evaluation") or {}
        seconds = _number(summary.get("seconds", newest.get("seconds")))
        steps = _number(summary.get("steps", newest.get("steps", 0)))
        return cls(
            path=path,
            env=env,
            algorithm=algorithm,
            seed=seed,
            state=state_of(folder, summary),
            steps=int(steps) if math.isfinite(steps) else 0,
            total_steps=total_steps,
            training_return=_number(summary.get("mean_return", newest.get("episode_return"))),
            evaluation=_number(evaluation.get("mean", newest.get("eval_return"))),
            seconds=seconds,
            steps_per_second=_number(summary.get("steps_per_second")) if summary else steps / seconds if seconds else NAN,
            started=_started(folder),
            settings=settings,
        )

    @property
    def final_return(self) -> float:
        """The evaluation, or the training return if there is none."""
        return self.training_return if math.isnan(self.evaluation) else self.evaluation

    def to_dict(self) -> dict[str, Any]:
        """For JSON; without the settings."""
        names = ("env", "algorithm", "seed", "state", "steps", "total_steps", "training_return", "evaluation", "seconds")
        found = {name: getattr(self, name) for name in (*names, "steps_per_second")}
        return {"path": str(self.path), **found, "return": self.final_return, "age": time.time() - self.started}


def find_runs(place: str | Path, runs: str | Path = "runs") -> list[Path]:
    """The run folders that a place means, in order of their names.

    Args:
        place: A run folder, the folder of many seeds, a folder of either, a glob such as "runs/cartpole-*", a name in
            `runs`, or "latest".
        runs: The folder of all runs.

    Raises:
        HurtleError: There is no such folder, or no run in it.
    """
    if str(place) == "latest":
        return runs_in(latest(runs))
    for path in (Path(place), Path(runs) / place):
        if path.is_dir():
            if found := runs_in(path):
                return found
            raise HurtleError(f"There is no run in {path}.")
    if glob.has_magic(str(place)):
        matches = sorted(glob.glob(str(place), recursive=True))  # noqa: PTH207 (Path.glob takes no absolute patterns)
        matching = [path for match in matches for path in runs_in(Path(match))]
        if matching:
            return list(dict.fromkeys(matching))
        raise HurtleError(f"No run folder matches {str(place)!r}.")
    parent = Path(place).parent if Path(place).parent.is_dir() and Path(place).name != str(place) else Path(runs)
    names = [path.name for path in _folders(parent)]
    if Path(place) == Path(runs):
        raise HurtleError(f"There is no folder {place} yet: start a run with `hurtle train cartpole`.")
    if not names:
        raise HurtleError(f"There is no run {place}, and none in {parent}: start one with `hurtle train cartpole`.")
    raise HurtleError(f"There is no run {place}. {did_you_mean(Path(place).name, names)}")


def runs_in(folder: Path) -> list[Path]:
    """The run itself, or the runs in a folder and in its folders of seeds."""
    if (folder / "config.toml").is_file():
        return [folder]
    found = []
    for path in _folders(folder):
        found += [path] if (path / "config.toml").is_file() else _folders(path)
    return found


def latest(runs: str | Path) -> Path:
    """The run, or folder of many seeds, that was started or resumed last.

    Raises:
        HurtleError: There is none.
    """
    found = _folders(Path(runs))
    if not found:
        raise HurtleError(f"There is no run in {runs} yet: start one with `hurtle train cartpole`.")
    return max(found, key=_started_ns)


def latest_with(file: str, runs: str | Path = "runs") -> Path:
    """The newest folder in `runs` that holds such a file.

    Raises:
        HurtleError: There is none.
    """
    found = [path.parent for path in Path(runs).glob(f"*/{file}")]
    if not found:
        raise HurtleError(f"There is no folder with {file} in {runs}.")
    return max(found, key=lambda path: (path / file).stat().st_mtime_ns)


def _folders(folder: Path) -> list[Path]:
    """The runs, folders of seeds and populations directly in a folder, seed-2 before seed-10."""
    found = {file.parent for name in ("config.toml", SEEDS_FILE, POPULATION_FILE) for file in folder.glob(f"*/{name}")}
    return sorted(found, key=lambda path: [part.zfill(20) if part.isdecimal() else part for part in path.name.split("-")])


def _started_ns(path: Path) -> int:
    """Settings are rewritten when what is there is started or resumed."""
    files = (path / name for name in (SEEDS_FILE, POPULATION_FILE, "config.toml"))
    return next(file.stat().st_mtime_ns for file in files if file.is_file())


def _started(folder: RunFolder) -> float:
    about = read_json(folder.path / "about.json")
    resumed = about.get("resumed")
    newest = resumed[-1] if isinstance(resumed, list) and resumed and isinstance(resumed[-1], dict) else about
    try:
        return datetime.datetime.fromisoformat(newest["started"]).timestamp()
    except (KeyError, TypeError, ValueError):
        return last_written(folder.path)


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else NAN
