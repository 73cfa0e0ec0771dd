"""One cell of the learning grid: train (or play at random), evaluate, and keep the outcome in one JSON file.

task, library, seed → training → curve and evaluation → file. Knows nothing of the other cells.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from learning_tasks import ALL, TASKS, Task
from record import machine

from hurtle.runners.settings import settings_to_dict

NOT_SETTINGS = ("runs", "name", "progress", "trackers", "keep_checkpoints", "checkpoint_every")
"""Words of a run that have no effect on what is learned."""


class Job(NamedTuple):
    """A cell of the grid."""

    task: str
    library: str
    """hurtle, sb3 or random (a policy that plays at random, where the goal needs one)."""
    seed: int

    @property
    def file(self) -> str:
        """The name of its result file."""
        return f"{self.task}-{self.library}-{self.seed}.json"

    def __str__(self) -> str:
        return f"{self.task} {self.library} {self.seed}"


class Curve:
    """Mean return of the last 100 episodes against steps; tells the grid now and then, by a line on stdout."""

    def __init__(self, seconds: float = 5.0):
        self._points: list[tuple[int, float]] = []
        self._seconds, self._told = seconds, time.monotonic()

    def add(self, steps: int, mean_return: float) -> None:
        """Another point; NaN, before any episode has ended, is none."""
        if math.isnan(mean_return):
            return
        self._points.append((int(steps), float(mean_return)))
        if (now := time.monotonic()) - self._told >= self._seconds:
            self._told = now
            print(f"progress {steps} {mean_return:.6g}", flush=True)

    def points(self, most: int = 200) -> list[list[float]]:
        """At most so many points, evenly chosen, the first and the last among them."""
        if not self._points:
            return []
        chosen = np.unique(np.linspace(0, len(self._points) - 1, most).round().astype(int))
        return [list(self._points[k]) for k in chosen]


def run_job(job: Job, folder: Path, quick: bool = False) -> None:
    """Do what a job says and write its file, at once and whole.

    Raises:
        InterruptedError: The training was stopped; nothing is written.
    """
    task, curve = TASKS[job.task], Curve()
    if job.library == "hurtle":
        steps, seconds, evaluation = train_hurtle(task, job.seed, curve, quick)
    elif job.library == "sb3":
        from learning_sb3 import train_sb3

        steps, seconds, evaluation = train_sb3(task, job.seed, curve, quick)
    else:
        steps, seconds, evaluation = play_at_random(task, job.seed, quick)
    result = {
        **job._asdict(),
        "steps": steps,
        "seconds": seconds,
        "curve": curve.points(),
        "evaluation": evaluation,
        "settings": settings_of(job, quick),
        "machine": machine(),
    }
    folder.mkdir(parents=True, exist_ok=True)
    part = folder / f".{job.file}.{os.getpid()}"
    part.write_text(json.dumps(result) + "\n")
    part.replace(folder / job.file)


def settings_of(job: Job, quick: bool = False) -> dict[str, Any]:
    """What a job's result depends on, as the file has it."""
    words = settings_to_dict(ALL[job.task].settings(job.seed, quick))
    if job.library == "random":
        return {word: words[word] for word in ("env", "env_parameters", "seed")}
    return {word: value for word, value in words.items() if word not in NOT_SETTINGS}


def train_hurtle(task: Task, seed: int, curve: Curve, quick: bool) -> tuple[int, float, dict[str, Any]]:
    """`hurtle.train` in a folder that is thrown away; steps, seconds and the final evaluation."""
    import hurtle

    def record(trainer: Any) -> None:
        curve.add(trainer.steps, trainer.episodes.mean_return)

    with tempfile.TemporaryDirectory() as runs:
        kept = {"runs": runs, "progress": "quiet", "trackers": (), "keep_checkpoints": 1}
        run = hurtle.train(task.env, callbacks=[record], **task.overrides(seed, quick), **kept)
    if run.evaluation is None:
        raise InterruptedError(f"stopped by {run.stopped_by} after {run.steps} steps")
    return run.steps, run.seconds, evaluated(run.evaluation.returns, run.evaluation.deterministic)


def play_at_random(task: Task, seed: int, quick: bool) -> tuple[int, float, dict[str, Any]]:
    """Uniform actions, ten times the episodes of an evaluation."""
    import hurtle
    from hurtle.runners.evaluate import Tally
    from hurtle.runners.playing import eval_seed

    train = task.settings(seed, quick).train
    num_envs, began, steps = 16, time.perf_counter(), 0
    tally = Tally(10 * train.eval_episodes, num_envs, max_steps=100_000)
    vec = hurtle.make_vec(task.env, num_envs, backend=train.backend, seed=eval_seed(seed), **train.env_parameters)
    with vec:
        vec.reset(seed=eval_seed(seed))
        vec.action_space.seed(seed)
        while not tally.complete:
            *_, infos = vec.step(vec.action_space.sample())
            tally.add(infos, np.asarray(infos.get("_final_obs", np.zeros(num_envs, np.bool_))))
            steps += num_envs * vec.num_agents
    return steps, time.perf_counter() - began, evaluated(tally.episodes()[0], deterministic=False)


def evaluated(returns: np.ndarray, deterministic: bool) -> dict[str, Any]:
    """The statistics of an evaluation's episodes."""
    from hurtle.tracking.return_statistics import summarize

    return {**summarize(returns), "deterministic": deterministic}
