"""`hurtle.train_seeds`: independent runs that differ only in their seeds, in one folder.

settings → one process per seed (run_processes.py) → run folders → IQM, curve, summary. Imports no torch.

How seeds share the machine is decided in one place, `plan`: on CPUs side by side in processes, on each GPU one after the other.
Training several as one learner (`algorithms/side_by_side.py`) would be another kind of task there.
"""

from __future__ import annotations

import os
import shlex
import shutil
import time
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
from hurtle.experiments.run_processes import INSIDE, RunProcesses, Task
from hurtle.experiments.seeds_display import SeedsDisplay, make_seeds_display
from hurtle.experiments.seeds_progress import Progress, watch
from hurtle.experiments.seeds_run import SeedsRun, closing_message
from hurtle.native.threads import free_cores
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
    values = given_values(overrides, algorithm=algorithm, total_steps=total_steps, device=device, seed=seed)
    check_counts(seeds=seeds, parallel=parallel)
    if resume is not None:
        if env is not None or config is not None or seed is not None:
            raise HurtleError("resume goes on with the same env, settings and seeds: leave out env, config and seed.")
        return _resume(resume.path if isinstance(resume, SeedsRun) else Path(resume), values, parallel, trust)
    settings = make_shared_settings(env, algorithm, values, config, trust, "seed")
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
    """The folder of many seeds that `--resume` means; None if it means something else."""
    return find_folder(place, SEEDS_FILE, runs)


def read_seeds(folder: Path) -> tuple[dict[str, Any], list[int]]:
    """The settings of seeds.toml, with their signature, and the seeds."""
    with reading(folder / SEEDS_FILE) as values:
        seeds = [int(seed) for seed in values.pop("seeds")]
    return values, seeds


def plan(settings: Settings, tasks: list[Task], parallel: int | None, count: int = 0) -> RunProcesses:
    """How runs share the machine: one per core; one after the other on a GPU; on several GPUs one each.

    Args:
        settings: Those of the runs.
        tasks: What to do.
        parallel: The most at a time; None: as many as fit.
        count: How many runs there are; 0: as many as tasks.
    """
    device = settings.train.device
    on_gpu = device.startswith("cuda") or (device == "auto" and Path("/dev/nvidia0").exists())
    several = gpus() if on_gpu and ":" not in device else []
    at_once = parallel or (max(1, len(several)) if on_gpu else free_cores())
    return RunProcesses(tasks, min(count or len(tasks), at_once), afresh=on_gpu, devices=several if len(several) > 1 else ())


def gpus() -> list[str]:
    """The GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them; found without torch."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return [name.strip() for name in named.split(",") if name.strip()]
    return [str(n) for n in range(sum(path.name[6:].isdecimal() for path in Path("/dev").glob("nvidia*")))]


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
        with plan(settings, tasks, parallel) as processes:
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
