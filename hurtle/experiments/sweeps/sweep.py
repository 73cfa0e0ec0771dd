"""`hurtle.sweep`: finds good settings for an env: many trials, then a check of the best ones with fresh seeds.

settings, space → search ⇄ trials in processes → best.toml, a page. Imports no torch. The loop itself is loop.py.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hurtle.algorithms.algorithm import short_name
from hurtle.errors import HurtleError
from hurtle.experiments.many_runs import change_settings, find_folder, given_values, make_shared_settings
from hurtle.experiments.records import latest_with
from hurtle.experiments.run_processes import INSIDE, RunProcesses, share_machine
from hurtle.experiments.space import Space, default_space, read_space
from hurtle.experiments.sweeps.cost_aware import CostAwareSearch
from hurtle.experiments.sweeps.display import State, make_sweep_display
from hurtle.experiments.sweeps.loop import SweepLoop
from hurtle.experiments.sweeps.plan import SPACE_FILE, SWEEP_FILE, SweepPlan, seconds, size
from hurtle.experiments.sweeps.result import SweepRun, closing_message
from hurtle.experiments.sweeps.search import IsValid, RandomSearch, Search
from hurtle.experiments.sweeps.trials import Journal, Trial, frozen
from hurtle.runners.settings import Settings, settings_from_dict, settings_to_dict
from hurtle.runners.signals import StopSignals
from hurtle.tracking.run_folder import new_folder, write_whole
from hurtle.tracking.run_state import hold
from hurtle.trust import SIGNATURE

if TYPE_CHECKING:
    from hurtle.experiments.sweeps.display import SweepDisplay

AS_IT_BEGAN = (None, "cost_aware", "return", False, True, 5, "inf", "inf")
"""The defaults of what a sweep that is resumed cannot change."""
POLL_SECONDS, SHOW_SECONDS, WRITE_SECONDS = 0.05, 0.5, 120.0
README = """\
# {name}

A search for settings of {algorithm} on {env}, by `hurtle sweep`.

| file | contents |
|---|---|
| `best.toml` | the winner's settings: `hurtle train {env} --config {path}/best.toml` |
| `sweep.html` | score against seconds with its Pareto front, importance of each setting, all trials |
| `summary.json` | the winner, its checks with fresh seeds, the Pareto front |
| `sweep.toml`, `space.toml` | how it was searched, and what |
| `trials.jsonl` | one line when a trial begins, one when it ends |
| `trial-0000/` … | the run folder of each trial; `trial-0000.log` has what its process printed, if anything |
| `check-0123/` … | the runs of the winners with fresh seeds |

```
hurtle sweep --resume {path}    # go on where it stopped
hurtle runs {path} --sort return
```
"""


def sweep(
    env: Any = None,
    algorithm: Any = None,
    budget: str | float | None = None,
    *,
    trials: int = 0,
    space: str | Path | Space | None = None,
    method: str = "cost_aware",
    metric: str = "return",
    minimize: bool = False,
    prune: bool = True,
    check_seeds: int = 5,
    parallel: int = 0,
    trial_seconds: str | float = "inf",
    trial_memory: str | float = "inf",
    ray: str = "",
    config: str | Path | None = None,
    resume: str | Path | SweepRun | None = None,
    trust: bool = False,
    **overrides: Any,
) -> SweepRun:
    """Search for settings that score well, and for those that do so in less time.

    Each trial is a run in another process, within limits of time and memory: a crash, a hang, a NaN or a full memory is a
    failed trial. The first one, the baseline, has the settings of a run without a sweep. The best are trained again with fresh
    seeds, beside the baseline, before one is called the winner. Ctrl-C saves; `resume` goes on, also after a kill.

    Args:
        env: As for `hurtle.train`, but something that another process can find: a name, or a class or function at the top
            level of a file.
        algorithm: As for `hurtle.train`.
        budget: Time in all, such as "1h" or seconds, of which a quarter is for checks; "inf" where `trials` ends the search.
            None: ten minutes.
        trials: The most trials of the search; 0: as many as the budget allows.
        space: What to search: a TOML file or a `Space`; None: what comes with the algorithm.
        method: "cost_aware", "random", "optuna_tpe" or "optuna_gp" (the extra `sweep`).
        metric: What to maximize: "return", of the final evaluation, or any name in metrics.jsonl.
        minimize: Minimize the metric instead.
        prune: Give up trials that learn worse than half of the others had after as many steps.
        check_seeds: Fresh seeds with which each finalist is trained again; 0: no check.
        parallel: Trials at a time; 0: one per core, or per GPU.
        trial_seconds: The most that a trial may take, by default a quarter of the budget.
        trial_memory: The most memory that a trial may take, such as "2G"; by default what is free.
        ray: Run trials on a Ray cluster: its address, or "local".
        config: A TOML file of settings.
        resume: The folder of a sweep, or "latest": go on where it stopped. `budget` and `trials` may be raised.
        trust: See `hurtle.train`.
        **overrides: Settings that all trials share; they are not searched. `total_steps` is the most steps of a trial.

    Raises:
        HurtleError: Settings are wrong, or every trial fails.

    Example:
        >>> found = sweep("bandit", trials=2, total_steps=4_000, check_seeds=1, progress="quiet", runs=tmp)
        >>> found.best.has_score, len(found.trials), sorted(found.checks)[0] in (0, 1)
        (True, 2, True)
    """
    if INSIDE in os.environ:
        raise HurtleError('A sweep would start sweeps: call sweep under `if __name__ == "__main__":`.')
    if resume is not None:
        progress = overrides.pop("progress", None)
        how = (space, method, metric, minimize, prune, check_seeds, trial_seconds, trial_memory)
        if env is not None or config is not None or overrides or algorithm is not None or how != AS_IT_BEGAN:
            raise HurtleError(
                "resume goes on with the same env, settings and rules: only budget, trials, parallel and ray may change."
            )
        place = resume.path if isinstance(resume, SweepRun) else Path(resume)
        return _resume(place, None if budget is None else seconds(budget), trials, parallel, ray, progress, trust)
    plan = SweepPlan(
        600.0 if budget is None else seconds(budget), trials, method, metric, minimize, prune, parallel,
        seconds(trial_seconds, "trial_seconds"), size(trial_memory), check_seeds, ray,
    )  # fmt: skip
    settings = make_shared_settings(env, algorithm, given_values(overrides, algorithm), config, trust, "trial")
    fixed = {name for name, value in overrides.items() if value is not None and name != "total_steps"}
    flat = settings_to_dict(settings)
    if space is None:
        found = default_space(flat, fixed)
    else:
        found = space if isinstance(space, Space) else read_space(space, flat)
        if both := sorted(fixed & set(found.names)):
            raise HurtleError(f"{', '.join(both)}: searched, and given a value. Take it out of the space, or give no value.")
    check_fits(settings)
    train = settings.train
    folder = new_folder(train.runs, train.env, short_name(train.algorithm), "sweep", train.name or None)
    plan.write(folder, flat)
    write_whole(folder / SPACE_FILE, found.to_toml())
    about = {"name": folder.name, "env": train.env, "algorithm": short_name(train.algorithm), "path": shlex.quote(str(folder))}
    write_whole(folder / "README.md", README.format(**about))
    with hold(folder):
        return _run(folder, settings, plan, found)


def find_sweep(place: str | Path) -> SweepRun:
    """What a sweep has found so far, from its folder.

    Raises:
        HurtleError: It is not the folder of a sweep.
    """
    plan, saved = SweepPlan.read(Path(place))
    settings = {name: value for name, value in saved.items() if name != SIGNATURE}
    space = read_space(Path(place) / SPACE_FILE, settings)
    return SweepRun.of(Path(place), settings, plan, space, Journal(Path(place) / "trials.jsonl"), "")


def check_fits(settings: Settings) -> None:
    """Raise if the settings of an algorithm do not fit the number of envs or the policy."""
    settings.algorithm.check(settings.train.num_envs, settings.policy.recurrent != "none")


def _resume(
    place: Path, budget: float | None, trials: int, parallel: int, ray: str, progress: str | None, trust: bool
) -> SweepRun:
    folder = latest_with(SWEEP_FILE) if str(place) == "latest" else find_folder(place, SWEEP_FILE) or place
    plan, saved = SweepPlan.read(folder)
    if plan.ray not in ("", "local", "auto", ray):  # nobody is to be led to a stranger's cluster by a file
        raise HurtleError(f"{folder} ran on the Ray cluster at {plan.ray!r}: give the address again, --ray {plan.ray}.")
    changes = {} if progress is None else {"progress": progress}
    _, settings = change_settings(folder / SWEEP_FILE, saved, changes, trust, "Sweeps go")
    given = {"budget": budget, "trials": trials, "parallel": parallel, "ray": ray}
    plan = replace(plan, **{name: value for name, value in given.items() if value})  # type: ignore[arg-type]
    with hold(folder):
        plan.write(folder, settings_to_dict(settings))
        return _run(folder, settings, plan, read_space(folder / SPACE_FILE, settings_to_dict(settings)))


def _run(folder: Path, settings: Settings, plan: SweepPlan, space: Space) -> SweepRun:
    flat, train, began = settings_to_dict(settings), settings.train, time.monotonic()
    journal = Journal(folder / "trials.jsonl")
    check_journal(journal, space, flat, folder)

    def is_valid(values: dict[str, Any]) -> bool:
        try:
            check_fits(settings_from_dict({**flat, **values}))
        except HurtleError:
            return False
        return True

    history = journal.select(lambda trial: not trial.is_check and trial.state != "running")
    search = make_search(plan.method, space, train.seed, is_valid, plan.seconds_of_trial, history)
    title = f"{train.env} · {short_name(train.algorithm)} · sweep"
    stopped_by = ""
    with make_sweep_display(train.progress, title, str(folder)) as display:
        try:
            with _processes(plan, train.device) as processes:  # none outlives the search, while a page is drawn
                loop = SweepLoop(folder, flat, plan, space, search, journal, processes)
                _watch(loop, display)
            stopped_by = loop.stopped_by
            if not stopped_by and not any(trial.has_score for trial in journal.trials.values()):
                raise loop.nothing_trained()
        finally:
            found = SweepRun.of(folder, flat, plan, space, journal, stopped_by)
            found.write()
        display.stop()
        if train.progress != "quiet":
            display.message(closing_message(found, time.monotonic() - began))
    return found


def make_search(method: str, space: Space, seed: int, is_valid: IsValid, most_seconds: float, history: list[Trial]) -> Search:
    """The search of that name; `history` are the trials of a sweep that is resumed."""
    if method == "cost_aware":
        return CostAwareSearch(space, seed, is_valid, most_seconds)
    if method == "random":
        return RandomSearch(space, seed, is_valid)
    from hurtle.experiments.sweeps.optuna_search import OptunaSearch

    return OptunaSearch(space, seed, is_valid, method.removeprefix("optuna_"), history)


def check_journal(journal: Journal, space: Space, settings: dict[str, Any], folder: Path) -> None:
    """Refuse trials with settings that the space does not have, of a folder that may have come from anybody."""
    known = {dimension.name: dimension for dimension in space.dimensions}
    for trial in journal.trials.values():
        for name in {*trial.values, *known}:
            value, own = trial.values.get(name), known.get(name)
            is_baseline = value is not None and value == frozen(settings.get(name))
            is_number = isinstance(value, int | float)
            if own is None or not (is_baseline or (value in own.choices if own.choices else is_number)):
                raise HurtleError(
                    f"{folder / 'trials.jsonl'} is damaged: {trial.name} has {name}={value!r}, which is not searched."
                )


def _watch(loop: SweepLoop, display: SweepDisplay) -> None:
    shown_at, write_at = -1e9, time.monotonic() + WRITE_SECONDS
    with StopSignals(loop.stop):
        while loop.step():
            now = time.monotonic()
            while loop.messages:
                display.message(loop.messages.pop(0))
            if now - shown_at >= SHOW_SECONDS:
                display.show(State.of(loop))
                shown_at = now
            if now >= write_at:  # the page of a long sweep can be looked at while it runs
                with contextlib.suppress(HurtleError):
                    SweepRun.of(loop.folder, loop.settings, loop.plan, loop.space, loop.journal, "").write()
                write_at = time.monotonic() + max(WRITE_SECONDS, 100 * (time.monotonic() - now))
            time.sleep(POLL_SECONDS)
    while loop.messages:
        display.message(loop.messages.pop(0))
    display.show(State.of(loop))


def _processes(plan: SweepPlan, device: str) -> RunProcesses:
    """How trials share the machine, or the cluster."""
    if plan.ray:
        from hurtle.experiments.sweeps.ray_workers import ray_processes

        return ray_processes(plan.ray, plan.parallel, device)
    return share_machine(device, [], plan.parallel or None)
