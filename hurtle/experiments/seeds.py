"""`hurtle.train_seeds`: independent runs that differ only in their seeds, in one folder.

settings → one process per seed (seed_processes.py) → run folders → IQM, curve, summary. Imports no torch.

How seeds share the machine is decided in one place, `plan`: on CPUs side by side in processes, on a GPU one after the other.
Training several as one learner (`algorithms/side_by_side.py`) would be another kind of task there.
"""

from __future__ import annotations

import math
import os
import shlex
import shutil
import time
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hurtle.algorithms.algorithm import algorithm_name, allow_algorithm, short_name
from hurtle.errors import HurtleError
from hurtle.experiments.records import SEEDS_FILE, RunRecord, latest
from hurtle.experiments.seed_processes import INSIDE, SeedProcesses, Task
from hurtle.experiments.seeds_display import Line, SeedsDisplay, make_seeds_display
from hurtle.experiments.statistics import Estimate
from hurtle.native.threads import free_cores
from hurtle.references import absolute_reference
from hurtle.runners.settings import (
    Settings,
    check_settings,
    check_settings_file,
    make_settings,
    settings_from_dict,
    settings_to_dict,
)
from hurtle.runners.signals import StopSignals
from hurtle.tracking.formatting import figure
from hurtle.tracking.json_text import to_json
from hurtle.tracking.metrics_tail import last_metrics
from hurtle.tracking.run_folder import RunFolder, new_folder, write_whole
from hurtle.tracking.run_state import STOPPED_BY, hold
from hurtle.tracking.toml_text import to_toml
from hurtle.trust import SIGNATURE, check_code, is_signed, signed

POLL_SECONDS, SHOW_SECONDS = 0.1, 0.5
README = """\
# {name}

{count} training runs of Hurtle on {env} that differ only in their seeds.

| file | contents |
|---|---|
| `seeds.toml` | the seeds and every setting |
| `seed-0/` … | the run folder of each seed |
| `seed-0.log` … | what its process printed, if anything: warnings, errors |
| `summary.json` | the result: IQM over the seeds with its 95 % interval, and each seed's own |
| `curve.png` | the IQM of the returns against steps |

```
hurtle runs {path}             # the runs
hurtle compare {path} OTHER …  # beside others
hurtle train --resume {path}   # go on with seeds that are not finished
```
"""


@dataclass(frozen=True)
class SeedsRun:
    """Many seeds of one run.

    Attributes:
        path: The folder that holds the run folders.
        runs: What became of each seed that has a run folder, in order.
        returns: IQM over the seeds of the final evaluation's mean, else of the last 100 training episodes, with its 95 %
            interval; None if no seed has either.
        is_evaluated: Whether `returns` is of evaluations: every seed has one.
        seconds: Wall time.
        failed: What went wrong, by seed.
        stopped_by: "Ctrl-C" or "SIGTERM", or an empty string.
    """

    path: Path
    runs: tuple[RunRecord, ...]
    returns: Estimate | None
    is_evaluated: bool
    seconds: float
    failed: dict[int, str]
    stopped_by: str

    def to_dict(self) -> dict[str, Any]:
        """For JSON: what summary.json holds."""
        names = ("value", "low", "high")
        return {
            "iqm": None if self.returns is None else dict(zip(names, self.returns, strict=True)),
            "of": "evaluation" if self.is_evaluated else "training",
            "seconds": self.seconds,
            "stopped_by": self.stopped_by,
            "failed": {str(seed): text for seed, text in self.failed.items()},
            "seeds": [run.to_dict() | {"path": run.path.name} for run in self.runs],
        }


def train_seeds(
    env: Any = None,
    seeds: int = 5,
    algorithm: Any = None,
    total_steps: int | None = None,
    device: str | None = None,
    seed: int | None = None,
    *,
    parallel: int | None = None,
    config: str | Path | None = None,
    resume: str | Path | SeedsRun | None = None,
    trust: bool = False,
    **overrides: Any,
) -> SeedsRun:
    """Train the same with several seeds: `seed`, `seed + 1` …, each in a process and a run folder of its own.

    Ctrl-C saves all of them. One that crashes does not stop the others.

    Args:
        env: As for `hurtle.train`, but something that another process can find: a name, or a class or function at the
            top level of a file.
        seeds: How many.
        algorithm: As for `hurtle.train`.
        total_steps: Steps of each seed.
        device: As for `hurtle.train`; on a GPU one seed is trained after the other.
        seed: The first seed.
        parallel: The most seeds at a time; None: as many as there are cores and memory for.
        config: A TOML file of settings.
        resume: A folder of many seeds, or "latest": go on with those that are not finished. `total_steps` may be raised.
        trust: See `hurtle.train`.
        **overrides: Any setting, as for `hurtle.train`.

    Raises:
        HurtleError: Settings are wrong, or every seed failed; the message is that of the first.

    Example:
        >>> found = train_seeds("bandit", seeds=2, total_steps=20_000, progress="quiet", trackers=(), runs=tmp)
        >>> found.returns.value > 0.9, [run.seed for run in found.runs]
        (True, [0, 1])
    """
    if INSIDE in os.environ:
        raise HurtleError('Seeds would train seeds: call train_seeds under `if __name__ == "__main__":`.')
    given: dict[str, Any] = {
        "algorithm": None if algorithm is None else algorithm_name(algorithm),
        "total_steps": total_steps,
        "device": device,
    }
    values = {name: value for name, value in {**given, "seed": seed, **overrides}.items() if value is not None}
    for name, number in (("seeds", seeds), ("parallel", parallel)):
        if number is not None and (isinstance(number, bool) or not isinstance(number, int) or number < 1):
            raise HurtleError(f"{name} must be a whole number of at least 1, got {number!r}.")
    if resume is not None:
        if env is not None or config is not None or seed is not None:
            raise HurtleError("resume goes on with the same env, settings and seeds: leave out env, config and seed.")
        return _resume(resume.path if isinstance(resume, SeedsRun) else Path(resume), values, parallel, trust)
    env = _name(env)
    if config is not None:
        check_settings_file(config, values if env is None else {*values, "env"}, trust, given["algorithm"])
    settings = make_settings(env, values, config)
    train = settings.train
    chosen = list(range(train.seed, train.seed + seeds))
    what = f"{seeds}-seeds" if train.seed == 0 else f"seeds-{chosen[0]}-to-{chosen[-1]}"
    folder = new_folder(train.runs, train.env, short_name(train.algorithm), what, train.name or None)
    _write_settings(folder, settings_to_dict(settings), chosen)
    about = {"name": folder.name, "count": seeds, "env": train.env, "path": shlex.quote(str(folder))}
    write_whole(folder / "README.md", README.format(**about))
    tasks = [_new_task(folder, settings_to_dict(settings), each) for each in chosen]
    with hold(folder):
        return _run(folder, settings, chosen, tasks, parallel)


def find_seeds(place: str | Path, runs: str | Path = "runs") -> Path | None:
    """The folder of many seeds that `--resume` means; None if it means a run."""
    if str(place) == "latest":
        newest = latest(runs)
        return newest if (newest / SEEDS_FILE).is_file() else None
    return next((path for path in (Path(place), Path(runs) / place) if (path / SEEDS_FILE).is_file()), None)


def read_seeds(folder: Path) -> tuple[dict[str, Any], list[int]]:
    """The settings of seeds.toml, with their signature, and the seeds."""
    file = folder / SEEDS_FILE
    try:
        values = tomllib.loads(file.read_text(encoding="utf-8"))
        seeds = [int(seed) for seed in values.pop("seeds")]
    except OSError as error:
        raise HurtleError(f"{file} could not be read: {error.strerror}.") from None
    except (ValueError, TypeError, KeyError) as error:
        raise HurtleError(f"{file} is damaged: {error!r}.") from None
    return values, seeds


def plan(settings: Settings, seeds: int, parallel: int | None) -> int:
    """How many seeds are trained at a time."""
    device = settings.train.device
    if parallel is None and (device.startswith("cuda") or (device == "auto" and Path("/dev/nvidia0").exists())):
        return 1
    return min(seeds, parallel or free_cores())


def _name(env: Any) -> str | None:
    """The name by which another process finds the env."""
    if env is None or isinstance(env, str):
        return absolute_reference(env)
    from hurtle.envs.registry import name_of

    try:
        return name_of(env)
    except HurtleError as error:
        raise HurtleError(f"Each seed has its own process, which cannot find this env: {error}.") from None


def _new_task(folder: Path, values: dict[str, Any], seed: int) -> Task:
    name = f"seed-{seed}"
    own = {"seed": seed, "runs": str(folder), "name": name, "progress": "quiet"}
    return Task(seed, folder / name, {"settings": {**values, **own}, "resume": "", "trust": False})


def _write_settings(folder: Path, values: dict[str, Any], seeds: list[int]) -> None:
    write_whole(folder / SEEDS_FILE, to_toml({"seeds": seeds, **signed(values)}))


def _resume(place: Path, values: dict[str, Any], parallel: int | None, trust: bool) -> SeedsRun:
    folder = find_seeds(place)
    if folder is None:
        raise HurtleError(f"{place} is not a folder of many seeds: it has no {SEEDS_FILE}.")
    saved, seeds = read_seeds(folder)
    if "algorithm" in values:
        raise HurtleError("Seeds go on with the algorithm that they began with: leave out algorithm.")
    allow_algorithm(folder / SEEDS_FILE, saved, trust)
    signature = saved.pop(SIGNATURE, None)
    check_code(folder / SEEDS_FILE, saved, trust or is_signed(saved, signature), signature)
    values = check_settings(values, saved.get("algorithm", "ppo"))
    settings = settings_from_dict({**saved, **values})
    flat, tasks = settings_to_dict(settings), []
    with hold(folder):
        changed = {name: flat[name] for name in values}
        for seed in seeds:
            path = folder / f"seed-{seed}"
            if not (path / "config.toml").is_file() or not any((path / "checkpoints").glob("step-*.pt")):
                with hold(path):
                    shutil.rmtree(path, ignore_errors=True)  # it ended before it had saved anything
                tasks.append(_new_task(folder, flat, seed))
            elif _is_unfinished(RunRecord.read(path), values.get("total_steps")):
                own = {**changed, "progress": "quiet"}
                tasks.append(Task(seed, path, {"settings": own, "resume": str(path), "trust": trust}))
        if not tasks:
            raise HurtleError(f"All {len(seeds)} seeds in {folder} are finished. To continue, ask for more with --total-steps.")
        _write_settings(folder, flat, seeds)
        return _run(folder, settings, seeds, tasks, parallel)


def _is_unfinished(run: RunRecord, total_steps: int | None) -> bool:
    if run.state == "running":
        raise HurtleError(f"{run.path} is being trained at this moment: wait until it is done, or stop it.")
    return run.state != "finished" or (total_steps is not None and run.steps < total_steps)


def _run(folder: Path, settings: Settings, seeds: list[int], tasks: list[Task], parallel: int | None) -> SeedsRun:
    train, began = settings.train, time.monotonic()
    title = f"{train.env} · {short_name(train.algorithm)} · {len(seeds)} seeds"
    with make_seeds_display(train.progress, title, str(folder)) as display:
        with SeedProcesses(tasks, plan(settings, len(tasks), parallel)) as processes:
            stopped_by = _watch(processes, _Progress(folder, seeds, processes, train.total_steps), display)
            failed = dict(processes.failed)
        found = _result(folder, seeds, time.monotonic() - began, failed, stopped_by)
        write_whole(folder / "summary.json", to_json(found.to_dict(), indent=2))
        display.stop()
        if failed and not any(run.state != "crashed" for run in found.runs):
            raise HurtleError(f"Every seed failed; see {folder}. Seed {min(failed)}: {failed[min(failed)]}")
        curve = _plot(folder, display)
        if train.progress != "quiet":
            display.message(closing_message(found, len(seeds), curve))
    return found


def _watch(processes: SeedProcesses, progress: _Progress, display: SeedsDisplay) -> str:
    """Train until nothing is left to do; returns the signal that ended it before, or an empty string."""
    signals: list[str] = []
    told: set[int] = set()
    shown_at, is_stopping = -math.inf, False
    with StopSignals(signals.append):
        while processes.poll():
            if signals and not is_stopping:
                is_stopping = True
                display.message(f"{signals[0]}: saving {len(processes.running)} runs …")
                processes.stop()
            for seed in processes.failed.keys() - told:
                told.add(seed)
                display.message(f"seed {seed} crashed: {processes.failed[seed]}")
            if time.monotonic() - shown_at >= SHOW_SECONDS:
                display.show(progress.lines())
                shown_at = time.monotonic()
            time.sleep(POLL_SECONDS)
    for seed in processes.failed.keys() - told:
        display.message(f"seed {seed} crashed: {processes.failed[seed]}")
    display.show(progress.lines())
    return signals[0] if signals else ""


class _Progress:
    """Where each seed is, from the ends of their metrics files; those that have ended are read once."""

    def __init__(self, folder: Path, seeds: list[int], processes: SeedProcesses, total_steps: int):
        self._folder, self._seeds, self._processes, self._total_steps = folder, seeds, processes, total_steps
        self._ended: dict[int, Line] = {}

    def lines(self) -> list[Line]:
        """One per seed."""
        return [self._line(seed) for seed in self._seeds]

    def _line(self, seed: int) -> Line:
        if seed in self._ended:
            return self._ended[seed]
        folder, waiting = RunFolder(self._folder / f"seed-{seed}"), self._processes.waiting
        newest, is_running = last_metrics(folder.metrics_file), seed in self._processes.running
        summary = {} if is_running else folder.read_summary()
        if is_running:
            state = "training" if "steps" in newest else "starting"
        elif seed in waiting:
            state = "waiting"
        elif seed in self._processes.failed:
            state = "crashed"
        else:
            state = "finished" if summary and summary.get("stopped_by") not in STOPPED_BY else "stopped"
        line = Line(
            seed, state, int(newest.get("steps", 0)), self._total_steps,
            newest.get("steps_per_second", math.nan) if state == "training" else math.nan,
            newest.get("episode_return", math.nan),
        )  # fmt: skip
        if not is_running and seed not in waiting:
            self._ended[seed] = line
        return line


def _result(folder: Path, seeds: list[int], seconds: float, failed: dict[int, str], stopped_by: str) -> SeedsRun:
    paths = [folder / f"seed-{seed}" for seed in seeds]
    runs = tuple(RunRecord.read(path) for path in paths if (path / "config.toml").is_file())
    whole = [run for run in runs if run.state != "crashed"]
    is_evaluated = bool(whole) and all(math.isfinite(run.evaluation) for run in whole)
    known = [run.evaluation if is_evaluated else run.training_return for run in whole]
    known = [value for value in known if math.isfinite(value)]
    return SeedsRun(folder, runs, Estimate.of(known) if known else None, is_evaluated, seconds, failed, stopped_by)


def _plot(folder: Path, display: SeedsDisplay) -> Path | None:
    from hurtle.experiments.comparison import compare

    try:
        return compare([folder]).write_png(folder / "curve.png")
    except HurtleError as error:  # no plot without matplotlib, or without an episode; the runs are fine
        display.message(f"No curve: {error}")
        return None


def closing_message(found: SeedsRun, seeds: int, curve: Path | None) -> str:
    """The message at the end: how it ended, what came out, what to do next."""
    finished = sum(run.state == "finished" for run in found.runs)
    how = f"Stopped by {found.stopped_by}," if found.stopped_by else "Done:"
    lines = [f"{how} {finished} of {seeds} seeds finished after {found.seconds:.1f} s."]
    if found.returns is not None:
        what = "evaluation" if found.is_evaluated else "return"
        lines.append(f"{what:<12}IQM {found.returns} over {len(found.runs) - len(found.failed)} seeds")
        each = "  ".join(
            f"{run.seed}: {figure(run.evaluation if found.is_evaluated else run.training_return)}" for run in found.runs
        )
        lines.append(f"seeds       {each}")
    if found.failed:
        lines.append(f"crashed     {', '.join(map(str, sorted(found.failed)))}; logs: {found.path}/seed-….log")
    lines.append(f"folder      {found.path}")
    if curve is not None:
        lines.append(f"curve       {curve}")
    path = shlex.quote(str(found.path))
    lines.append(f"next        hurtle {'train --resume' if finished < seeds else 'compare'} {path}")
    return "\n".join(lines)
