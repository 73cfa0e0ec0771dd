"""`hurtle.train_population`: population-based training (Jaderberg et al. 2017), in one folder.

settings, ranges → members drawn at random → intervals of training (loop.py) → the best member and its schedule.
Imports no torch.
"""

from __future__ import annotations

import os
import shlex
import time
from pathlib import Path
from typing import Any

from hurtle.algorithms.algorithm import short_name
from hurtle.errors import HurtleError, did_you_mean
from hurtle.experiments.many_runs import (
    change_settings,
    check_counts,
    find_folder,
    given_values,
    make_shared_settings,
    reading,
)
from hurtle.experiments.populations.folders import member_folder
from hurtle.experiments.populations.lineage import LINEAGE_FILE, Lineage
from hurtle.experiments.populations.loop import EVALUATION, RETURN, Population, Rules
from hurtle.experiments.populations.result import README, SCHEDULE_FILE, PopulationRun, closing_message
from hurtle.experiments.populations.rules import first_generation
from hurtle.experiments.populations.search_space import Space, as_written, make_space
from hurtle.experiments.records import POPULATION_FILE
from hurtle.experiments.run_processes import GRACE, INSIDE, share_machine
from hurtle.experiments.seeds_display import SeedsDisplay, make_seeds_display
from hurtle.experiments.seeds_progress import Progress, watch
from hurtle.runners.settings import Settings, read_settings_file, settings_from_dict, settings_to_dict
from hurtle.tracking.json_text import to_json
from hurtle.tracking.run_folder import new_folder, write_whole
from hurtle.tracking.run_state import hold
from hurtle.tracking.toml_text import to_toml
from hurtle.trust import signed


def train_population(
    env: Any = None,
    size: int = 8,
    interval: int | None = None,
    algorithm: Any = None,
    total_steps: int | None = None,
    device: str | None = None,
    seed: int | None = None,
    *,
    search: Any = None,
    share: float = 0.25,
    score: str = RETURN,
    time_limit: float | None = None,
    memory_limit: float | None = None,
    parallel: int | None = None,
    config: str | Path | None = None,
    resume: str | Path | PopulationRun | None = None,
    trust: bool = False,
    **overrides: Any,
) -> PopulationRun:
    """Train a population: every `interval` steps the worst members copy the best and change their settings.

    Each member is a run folder of its own, trained in other processes. On CPUs, with envs that are saved exactly, the same seed
    gives the same population, however many train at a time. Ctrl-C saves all; a member that crashes copies another one.

    Args:
        env: As for `hurtle.train`, but something that another process can find: a name, or a class or function at the
            top level of a file.
        size: Number of members.
        interval: Steps between comparisons; None: a tenth of `total_steps`.
        algorithm: As for `hurtle.train`.
        total_steps: Steps of each member.
        device: As for `hurtle.train`; members take turns on a GPU, and several GPUs train one each.
        seed: That of member 0, and of all that is drawn; member 1 trains with the next seed, and so on.
        search: Which settings to search, and where: names, or a dict or TOML file as for sweeps, of
            `name = { low = 1e-4, high = 1e-2, scale = "log" }` or, for choices, `name = [a, b, c]`. None:
            learning_rate, entropy_coef and clip_range, as far as the algorithm has them.
        share: The share of members that copy after an interval, and of those that are copied; at least one, at most half.
        score: "return": the mean of the last 100 training episodes; "evaluation": that of an evaluation.
        time_limit: Seconds that a member may take for an interval; one that takes longer has failed.
        memory_limit: GiB that the process of a member may take.
        parallel: The most members at a time; None: as many as there are cores, memory or GPUs for.
        config: A TOML file of settings.
        resume: A folder of a population, or "latest": go on with it. `total_steps` may be raised.
        trust: See `hurtle.train`.
        **overrides: Any setting, as for `hurtle.train`.

    Raises:
        HurtleError: Settings are wrong, or every member failed; the message is that of the first.

    Example:
        >>> found = train_population(
        ...     "bandit", size=4, interval=1024, total_steps=4096, progress="quiet", trackers=(), runs=tmp
        ... )  # doctest: +SKIP
        >>> found.best.path.name, found.score > 0.9  # doctest: +SKIP
        ('member-2', True)
    """
    if INSIDE in os.environ:
        raise HurtleError('Members would train populations: call train_population under `if __name__ == "__main__":`.')
    values = given_values(overrides, algorithm=algorithm, total_steps=total_steps, device=device, seed=seed)
    check_counts(size=size, interval=interval, parallel=parallel)
    if resume is not None:
        if env is not None or config is not None or seed is not None or search is not None or interval is not None:
            raise HurtleError("resume goes on with the same env, settings and rules: leave out env, config, seed and search.")
        return _resume(resume.path if isinstance(resume, PopulationRun) else Path(resume), values, parallel, trust)
    _check_rules(size, share, score, time_limit=time_limit, memory_limit=memory_limit)
    settings = make_shared_settings(env, algorithm, values, config, trust, "member")
    train = settings.train
    space = make_space(search, train.algorithm, fixed=values.keys())
    rules = Rules(size, interval or max(1, train.total_steps // 10), share, score, time_limit, memory_limit)
    given = {*values, *(read_settings_file(config, train.algorithm) if config is not None else ())}
    settings = _adjusted(settings, space, rules, given)
    folder = new_folder(train.runs, train.env, short_name(train.algorithm), f"population-of-{size}", train.name or None)
    about = {"name": folder.name, "size": size, "env": train.env, "interval": rules.interval, "path": shlex.quote(str(folder))}
    write_whole(folder / "README.md", README.format(**about))
    with hold(folder):
        lineage = Lineage(folder, size)
        lineage.append(first_generation(space, size, train.seed))
        flat = settings_to_dict(settings)
        _write(folder, flat, rules, space)
        return _run(settings, Population(folder, flat, {}, rules, space, lineage), parallel)


def find_population(place: str | Path, runs: str | Path = "runs") -> Path | None:
    """The folder of a population that `--resume` means; None if it means something else."""
    return find_folder(place, POPULATION_FILE, runs)


def read_population(folder: Path) -> tuple[dict[str, Any], Rules, Space]:
    """The settings of population.toml, with their signature; its rules; what it searches."""
    with reading(folder / POPULATION_FILE) as values:
        rules = Rules(**values.pop("population"))
        search = values.pop("search")
        algorithm = values["algorithm"]
    return values, rules, make_space(search, algorithm)


def _check_rules(size: int, share: float, score: str, **limits: float | None) -> None:
    if size < 2:
        raise HurtleError(f"size must be at least 2, so that a member has another one to copy, got {size}.")
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 0.5:
        raise HurtleError(f"share must be more than 0 and at most 0.5, got {share!r}.")
    if score not in (RETURN, EVALUATION):
        raise HurtleError(f"No score {score!r}. {did_you_mean(str(score), (RETURN, EVALUATION))}")
    for name, limit in limits.items():
        if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int | float) or not limit > 0):
            raise HurtleError(f"{name} must be a number of more than 0, or None, got {limit!r}.")


def _adjusted(settings: Settings, space: Space, rules: Rules, given: set[str]) -> Settings:
    """Searched rates are not annealed too, and a score that is an evaluation needs evaluations, unless the user says so."""
    flat = settings_to_dict(settings)
    changed: dict[str, Any] = {f"anneal_{name}": False for name in space if f"anneal_{name}" in flat}
    if rules.score == EVALUATION:
        changed["eval_every"] = rules.interval
    return settings_from_dict({**flat, **{name: value for name, value in changed.items() if name not in given}})


def _write(folder: Path, flat: dict[str, Any], rules: Rules, space: Space) -> None:
    write_whole(folder / POPULATION_FILE, to_toml({**signed(flat), "population": vars(rules), "search": as_written(space)}))


def _resume(place: Path, values: dict[str, Any], parallel: int | None, trust: bool) -> PopulationRun:
    folder = find_population(place)
    if folder is None:
        raise HurtleError(f"{place} is not a folder of a population: it has no {POPULATION_FILE}.")
    saved, rules, space = read_population(folder)
    if searched := sorted(values.keys() & space.keys()):
        raise HurtleError(f"{', '.join(searched)}: this population searches it, so that it cannot be set.")
    values, settings = change_settings(folder / POPULATION_FILE, saved, values, trust, "Members go")
    flat = settings_to_dict(settings)
    changed = {name: flat[name] for name in values}
    with hold(folder):
        for member in range(rules.size):
            if (run := member_folder(folder, member)).is_dir():
                hold(run, patience=GRACE).close()  # members of a parent that was killed save and end
        if not (folder / LINEAGE_FILE).is_file():
            Lineage(folder, rules.size).append(first_generation(space, rules.size, settings.train.seed))
        lineage = Lineage.read(folder, rules.size)
        population = Population(folder, flat, changed, rules, space, lineage, trust)
        if population.is_done:
            raise HurtleError(f"The population in {folder} is finished. To continue, ask for more with --total-steps.")
        _write(folder, flat, rules, space)
        return _run(settings, population, parallel)


def _run(settings: Settings, population: Population, parallel: int | None) -> PopulationRun:
    train, began, folder, rules = settings.train, time.monotonic(), population.folder, population.rules
    title = f"{train.env} · {short_name(train.algorithm)} · population of {rules.size}"
    with make_seeds_display(train.progress, title, str(folder), noun="member") as display:
        members = list(range(rules.size))
        with share_machine(train.device, [], parallel, rules.size) as processes:
            processes.expects_more = True
            progress = Progress(folder, members, processes, train.total_steps, noun="member")
            stopped_by = watch(processes, progress, display, advance=lambda: population.advance(processes, progress, display))
        found = PopulationRun.of(folder, population.lineage, rules.score, time.monotonic() - began, stopped_by)
        write_whole(folder / "summary.json", to_json(found.to_dict(), indent=2))
        if found.schedule:
            write_whole(folder / SCHEDULE_FILE, found.schedule_text())
        display.stop()
        picture = _plot(folder, population, found, display)
        if train.progress != "quiet":
            display.message(closing_message(found, rules.size, picture))
    return found


def _plot(folder: Path, population: Population, found: PopulationRun, display: SeedsDisplay) -> Path | None:
    if not found.schedule:
        return None
    from hurtle.experiments.populations.figure import draw_population

    try:
        return draw_population(population.lineage, population.space, folder / "population.png")
    except HurtleError as error:  # no plot without matplotlib; the runs are fine
        display.message(f"No picture: {error}")
        return None
