"""Which runs belong together: the task and the method of each run, and the settings by which methods differ.

settings of runs → names. A method is an algorithm with its settings, a task an env with its parameters.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hurtle.errors import HurtleError
from hurtle.experiments.records import RunRecord
from hurtle.runners.values import shown

NOT_COMPARED = {
    *("env", "env_parameters", "seed", "signature", "runs", "name", "progress", "curve", "trackers", "keep_checkpoints"),
    *("checkpoint_every", "eval_every", "eval_episodes", "eval_sampled", "total_steps", "num_workers", "threads", "preset"),
}
"""Settings that do not make another method: the task, the seed, what is kept, how long it runs and where."""


def task_names(records: list[RunRecord]) -> dict[Path, str]:
    """A name for each run's task: the env, with the parameters that differ between tasks on the same env."""
    found = {}
    for record in records:
        parameters = record.settings.get("env_parameters") or {}
        same = [other.settings.get("env_parameters") or {} for other in records if other.env == record.env]
        differing = {name: value for name, value in parameters.items() if any(value != other.get(name) for other in same)}
        short = record.env.rpartition("/")[2] if ".py:" in record.env else record.env
        found[record.path] = " ".join([short, *(f"{name}={value}" for name, value in differing.items())])
    return found


def method_names(records: list[RunRecord], tasks: dict[Path, str], given: dict[Path, str]) -> dict[Path, str]:
    """The name of each run's method."""
    found = dict(given)
    unnamed = [record for record in records if record.path not in given]
    if len({tasks[record.path] for record in records}) == 1:
        kinds: dict[str, list[RunRecord]] = {}
        for record in unnamed:
            kinds.setdefault(_kind(record), []).append(record)
        for kind, name in _names_of(kinds).items():
            found |= {record.path: name for record in kinds[kind]}
        return found
    for record in unnamed:
        found[record.path] = record.algorithm
        others = {
            _kind(other) for other in unnamed if (tasks[other.path], other.algorithm) == (tasks[record.path], record.algorithm)
        }
        if len(others) > 1:
            raise HurtleError(
                f"{record.algorithm} has runs with {len(others)} different settings on {tasks[record.path]}, and there are "
                "several tasks: name the methods, such as fast='runs/fast-*' slow='runs/slow-*'."
            )
    return found


def _kind(record: RunRecord) -> str:
    return json.dumps({name: value for name, value in record.settings.items() if name not in NOT_COMPARED}, sort_keys=True)


def _names_of(kinds: dict[str, list[RunRecord]]) -> dict[str, str]:
    """The algorithm, and up to three settings by which it differs from the others of that algorithm."""
    found = {}
    for kind, records in kinds.items():
        algorithm = records[0].algorithm
        rivals = [others[0].settings for other, others in kinds.items() if other != kind and others[0].algorithm == algorithm]
        own = records[0].settings
        differing = [name for name in own if name not in NOT_COMPARED and any(own[name] != rival.get(name) for rival in rivals)]
        words = [f"{name}={_shown(own[name]) or 'none'}" for name in differing[:3]]
        found[kind] = " ".join([algorithm, *words])
    for name in {name for name in found.values() if list(found.values()).count(name) > 1}:  # they differ in a fourth setting
        for number, kind in enumerate([kind for kind in found if found[kind] == name], 1):
            found[kind] = f"{name} ({number})"
    return found


def differences(members: dict[tuple[str, str], list[RunRecord]]) -> dict[str, dict[str, str]]:
    """The settings that differ between methods on the same task; several values of one method are listed.

    A setting that only one of the algorithms has is no difference.
    """
    values: dict[str, dict[str, list[str]]] = {}
    differing = set()
    for task in {task for task, _ in members}:
        methods = {method: runs for (other, method), runs in members.items() if other == task}
        names = dict.fromkeys(name for runs in methods.values() for run in runs for name in run.settings)
        for name in names:
            if name in NOT_COMPARED - {"total_steps"}:
                continue
            seen = {
                method: list(dict.fromkeys(_shown(run.settings[name]) for run in runs if name in run.settings))
                for method, runs in methods.items()
            }
            if len({tuple(found) for found in seen.values() if found}) > 1:
                differing.add(name)
            for method, found in seen.items():
                known = values.setdefault(name, {}).setdefault(method, [])
                known += [value for value in found if value not in known]
    return {
        name: {method: " | ".join(found) or "–" for method, found in values[name].items()}
        for name in values
        if name in differing
    }


def _shown(value: Any) -> str:
    return shown(tuple(value) if isinstance(value, list) else value)
