"""`hurtle.train_seeds`: independent runs that differ only in their seeds, in one folder.

settings → one process per seed (run_processes.py) → run folders → IQM, curve, summary. Imports no torch.

How seeds share the machine is decided in one place, `plan`: on CPUs side by side in processes, on a GPU as one learner in one
process (together_process.py), or one after the other on each GPU where the algorithm cannot.
"""

from __future__ import annotations

import os
import shlex
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hurtle.algorithms.algorithm import short_name
from hurtle.errors import HurtleError
from hurtle.experiments.many_runs import (
    change_settings,
    check_counts,
    find_folder,
    given_values,
    make_shared_settings,
    reading,
)
from hurtle.experiments.records import SEEDS_FILE, RunRecord
from hurtle.experiments.run_processes import INSIDE, RunProcesses, Task, is_on_gpu, share_machine
from hurtle.experiments.seeds_display import SeedsDisplay, make_seeds_display
from hurtle.experiments.seeds_progress import Progress, watch
from hurtle.experiments.seeds_run import SeedsRun, closing_message
from hurtle.experiments.together_process import TogetherProcess
from hurtle.runners.seeds_obstacle import together_obstacle
from hurtle.runners.settings import Settings, settings_to_dict
from hurtle.tracking.json_text import to_json
from hurtle.tracking.run_folder import new_folder, write_whole
from hurtle.tracking.run_state import hold
from hurtle.tracking.toml_text import to_toml
from hurtle.trust import signed

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


def train_seeds(
    env: Any = None,
    seeds: int = 5,
    algorithm: Any = None,
    total_steps: int | None = None,
    device: str | None = None,
    seed: int | None = None,
    *,
    parallel: int | None = None,
    side_by_side: bool | None = None,
    config: str | Path | None = None,
    resume: str | Path | SeedsRun | None = None,
    trust: bool = False,
    **overrides: Any,
) -> SeedsRun:
    """Train the same with several seeds: `seed`, `seed + 1` …, each in a run folder of its own.

    On CPUs each has a process of its own, and one that crashes does not stop the others; on a GPU most algorithms train all of
    them as one learner, see `side_by_side`. Ctrl-C saves all of them.

    Args:
        env: As for `hurtle.train`, but something that another process can find: a name, or a class or function at the
            top level of a file.
        seeds: How many.
        algorithm: As for `hurtle.train`.
        total_steps: Steps of each seed.
        device: As for `hurtle.train`.
        seed: The first seed.
        parallel: The most seeds at a time; None: as many as there are cores and memory for.
        side_by_side: Train all seeds as one learner, in one process; see docs/experiments.md. None: on a GPU, where possible.
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
    values = given_values(overrides, algorithm=algorithm, total_steps=total_steps, device=device, seed=seed)
    check_counts(seeds=seeds, parallel=parallel)
    if resume is not None:
        if env is not None or config is not None or seed is not None:
            raise HurtleError("resume goes on with the same env, settings and seeds: leave out env, config and seed.")
        return _resume(resume.path if isinstance(resume, SeedsRun) else Path(resume), values, parallel, side_by_side, trust)
    settings = make_shared_settings(env, algorithm, values, config, trust, "seed")
    choose(settings, seeds, side_by_side)  # before there is a folder: it may be refused
    train = settings.train
    chosen = list(range(train.seed, train.seed + seeds))
    what = f"{seeds}-seeds" if train.seed == 0 else f"seeds-{chosen[0]}-to-{chosen[-1]}"
    folder = new_folder(train.runs, train.env, short_name(train.algorithm), what, train.name or None)
    _write_settings(folder, settings_to_dict(settings), chosen, side_by_side)
    about = {"name": folder.name, "count": seeds, "env": train.env, "path": shlex.quote(str(folder))}
    write_whole(folder / "README.md", README.format(**about))
    tasks = [_new_task(folder, settings_to_dict(settings), each) for each in chosen]
    with hold(folder):
        return _run(folder, settings, chosen, tasks, parallel, side_by_side)


def find_seeds(place: str | Path, runs: str | Path = "runs") -> Path | None:
    """The folder of many seeds that `--resume` means; None if it means something else."""
    return find_folder(place, SEEDS_FILE, runs)


def read_seeds(folder: Path) -> tuple[dict[str, Any], list[int]]:
    """The settings of seeds.toml, with their signature, and the seeds."""
    values, seeds, _ = _read(folder)
    return values, seeds


def _read(folder: Path) -> tuple[dict[str, Any], list[int], bool | None]:
    """What `read_seeds` returns, and whether the user wants them side by side."""
    with reading(folder / SEEDS_FILE) as values:
        seeds = [int(seed) for seed in values.pop("seeds")]
    return values, seeds, values.pop("side_by_side", None)


@dataclass(frozen=True)
class Choice:
    """Whether seeds train side by side as one learner, and a line for the user: how they train, and why."""

    together: bool
    on_gpu: bool
    message: str = ""


def choose(settings: Settings, seeds: int, side_by_side: bool | None = None) -> Choice:
    """How seeds train: side by side as one learner where the user asks for it, or on a GPU where nothing is in the way.

    Raises:
        HurtleError: The user asks for it, and it is impossible.
    """
    name, on_gpu = short_name(settings.train.algorithm), is_on_gpu(settings.train.device)
    why_not = together_obstacle(settings)
    if side_by_side and why_not:
        raise HurtleError(f"These seeds cannot train side by side: {why_not}. Leave out side_by_side, or --side-by-side.")
    if side_by_side or (side_by_side is None and on_gpu and seeds > 1 and not why_not):
        return Choice(True, on_gpu, f"{name}: {seeds} seeds side by side, as one learner")
    if not on_gpu or seeds == 1:
        return Choice(False, on_gpu)
    return Choice(False, on_gpu, f"{name}: one seed after the other on each GPU; {why_not or 'as asked for'}")


def plan(
    settings: Settings, tasks: list[Task], parallel: int | None, side_by_side: bool | None = None
) -> RunProcesses | TogetherProcess:
    """How the seeds share the machine."""
    if choose(settings, len(tasks), side_by_side).together:
        return TogetherProcess(tasks, parallel)
    return share_machine(settings.train.device, tasks, parallel, len(tasks))


def _new_task(folder: Path, values: dict[str, Any], seed: int) -> Task:
    name = f"seed-{seed}"
    own = {"seed": seed, "runs": str(folder), "name": name, "progress": "quiet"}
    return Task(seed, folder / name, {"settings": {**values, **own}, "resume": "", "trust": False})


def _write_settings(folder: Path, values: dict[str, Any], seeds: list[int], side_by_side: bool | None) -> None:
    own = {} if side_by_side is None else {"side_by_side": side_by_side}
    write_whole(folder / SEEDS_FILE, to_toml({"seeds": seeds, **own, **signed(values)}))


def _resume(place: Path, values: dict[str, Any], parallel: int | None, side_by_side: bool | None, trust: bool) -> SeedsRun:
    folder = find_seeds(place)
    if folder is None:
        raise HurtleError(f"{place} is not a folder of many seeds: it has no {SEEDS_FILE}.")
    saved, seeds, before = _read(folder)
    side_by_side = before if side_by_side is None else side_by_side
    values, settings = change_settings(folder / SEEDS_FILE, saved, values, trust, "Seeds go")
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
        if choose(settings, len(tasks), side_by_side).together:  # all settings: those of their own files are not read
            tasks = [Task(task.number, task.folder, {**task.words, **_all_settings(folder, flat, task)}) for task in tasks]
        _write_settings(folder, flat, seeds, side_by_side)
        return _run(folder, settings, seeds, tasks, parallel, side_by_side)


def _all_settings(folder: Path, flat: dict[str, Any], task: Task) -> dict[str, Any]:
    return {"settings": _new_task(folder, flat, task.number).words["settings"]}


def _is_unfinished(run: RunRecord, total_steps: int | None) -> bool:
    if run.state == "running":
        raise HurtleError(f"{run.path} is being trained at this moment: wait until it is done, or stop it.")
    return run.state != "finished" or (total_steps is not None and run.steps < total_steps)


def _run(
    folder: Path, settings: Settings, seeds: list[int], tasks: list[Task], parallel: int | None, side_by_side: bool | None
) -> SeedsRun:
    train, began = settings.train, time.monotonic()
    title = f"{train.env} · {short_name(train.algorithm)} · {len(seeds)} seeds"
    with make_seeds_display(train.progress, title, str(folder)) as display:
        if (message := choose(settings, len(tasks), side_by_side).message) and train.progress != "quiet":
            display.message(message)
        with plan(settings, tasks, parallel, side_by_side) as processes:
            stopped_by = watch(processes, Progress(folder, seeds, processes, train.total_steps), display)
            failed = dict(processes.failed)
        found = SeedsRun.of(folder, seeds, time.monotonic() - began, failed, stopped_by)
        write_whole(folder / "summary.json", to_json(found.to_dict(), indent=2))
        display.stop()
        if failed and not any(run.state != "crashed" for run in found.runs):
            raise HurtleError(f"Every seed failed; see {folder}. Seed {min(failed)}: {failed[min(failed)]}")
        curve = _plot(folder, display)
        if train.progress != "quiet":
            display.message(closing_message(found, len(seeds), curve))
    return found


def _plot(folder: Path, display: SeedsDisplay) -> Path | None:
    from hurtle.experiments.comparison import compare

    try:
        return compare([folder]).write_png(folder / "curve.png")
    except HurtleError as error:  # no plot without matplotlib, or without an episode; the runs are fine
        display.message(f"No curve: {error}")
        return None
