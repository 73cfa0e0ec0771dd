"""One cell of benchmarks/defaults.py: train a task with one library's defaults, evaluate, keep the outcome in one JSON file.

task, algorithm, library, seed → training, which can be stopped and continued → evaluation → file.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from record import machine

from hurtle.tracking.return_statistics import summarize

EPISODES = 20
"""Of the final evaluation, of the most likely actions."""
LIBRARIES = ("hurtle", "sb3", "cleanrl")


@dataclass(frozen=True)
class Task:
    """An env that nobody tuned."""

    env: str
    parameters: dict[str, Any] = field(default_factory=dict)
    is_continuous: bool = False

    @property
    def algorithms(self) -> tuple[str, ...]:
        """Those for its actions."""
        return ("ppo", "sac") if self.is_continuous else ("ppo", "dqn")


TASKS: dict[str, Task] = {
    "pusher": Task("Pusher-v5", is_continuous=True),
    "reacher": Task("Reacher-v5", is_continuous=True),
    "swimmer": Task("Swimmer-v5", is_continuous=True),
    "double_pendulum": Task("InvertedDoublePendulum-v5", is_continuous=True),
    "pendulum": Task("pendulum", is_continuous=True),
    "spread_continuous": Task("mpe/simple_spread_v3", {"continuous_actions": True}, is_continuous=True),
    "taxi": Task("Taxi-v4"),
    "frozen_lake": Task("FrozenLake-v1", {"is_slippery": False}),
    "acrobot": Task("acrobot"),
    "asterix": Task("asterix"),
    "space_invaders": Task("space_invaders"),
    "spread": Task("mpe/simple_spread_v3"),
}
"""Six with continuous actions, six with discrete ones; where we have a preset, it is off."""


class Job(NamedTuple):
    """A cell of the grid."""

    task: str
    """A task, an algorithm and a number of steps: pusher-ppo-100000."""
    library: str
    seed: int

    @classmethod
    def of(cls, task: str, algorithm: str, steps: int, library: str, seed: int) -> Job:
        """A cell by its parts."""
        return cls(f"{task}-{algorithm}-{steps}", library, seed)

    @property
    def parts(self) -> tuple[Task, str, int]:
        """What it is about: the task, the algorithm, the number of steps."""
        name, algorithm, steps = self.task.rsplit("-", 2)
        return TASKS[name], algorithm, int(steps)

    @property
    def file(self) -> str:
        """The name of its result file."""
        return f"{self.task}-{self.library}-{self.seed}.json"

    def __str__(self) -> str:
        return f"{self.task} {self.library} {self.seed}"


class Stop:
    """Whether SIGTERM has asked to save and end; tells the grid how far the job is."""

    def __init__(self) -> None:
        self.asked, self._told = False, time.monotonic()
        signal.signal(signal.SIGTERM, self._ask)

    def _ask(self, *_: Any) -> None:
        self.asked = True

    def __call__(self, steps: int, mean_return: float) -> bool:
        """Note progress; whether to go on."""
        if time.monotonic() - self._told >= 5.0:
            self._told = time.monotonic()
            print(f"progress {steps} {mean_return:.6g}", flush=True)
        return not self.asked


def run_job(job: Job, folder: Path) -> None:
    """Do what a job says and write its file; stopped by SIGTERM, it keeps what is needed to go on.

    Raises:
        InterruptedError: The training was stopped.
    """
    import torch

    torch.set_num_threads(1)
    part = folder / "unfinished" / job.file.removesuffix(".json")
    part.mkdir(parents=True, exist_ok=True)
    train = {"hurtle": train_hurtle, "sb3": train_sb3, "cleanrl": train_cleanrl}[job.library]
    clock = part / "seconds"
    before, began = float(clock.read_text()) if clock.exists() else 0.0, time.monotonic()
    try:
        returns = train(job, part)
    finally:
        clock.write_text(str(before + time.monotonic() - began))
    if returns is None:
        raise InterruptedError(f"{job} was stopped; the same command goes on")
    seconds = before + time.monotonic() - began
    result = {
        **job._asdict(),
        "steps": job.parts[2],
        "seconds": seconds,
        "evaluation": summarize(returns),
        "machine": machine(),
    }
    written = folder / f".{job.file}.{os.getpid()}"
    written.write_text(json.dumps(result) + "\n")
    written.replace(folder / job.file)
    shutil.rmtree(part)


def train_hurtle(job: Job, part: Path) -> np.ndarray | None:
    """`hurtle.train` with what an env without a preset gets; the returns of the evaluation, None if it was stopped."""
    import hurtle
    from hurtle.runners.kinds import kind_of
    from hurtle.runners.presets import preset_of_kind

    task, algorithm, steps = job.parts
    stop = Stop()

    def go_on(trainer: Any) -> bool:
        return stop(trainer.steps, trainer.episodes.mean_return)

    kept = {"callbacks": [go_on], "progress": "quiet"}
    if any((part / "run" / "checkpoints").glob("*.pt")):
        run = hurtle.train(resume=part / "run", **kept)
    else:
        shutil.rmtree(part / "run", ignore_errors=True)  # ended before it was saved
        words = {"runs": str(part), "name": "run", "trackers": (), "keep_checkpoints": 1, "curve": False}
        words |= {"preset": False, "num_workers": 1, "backend": "auto" if _has_threads(task) else "serial"}
        words |= {"env_parameters": task.parameters, "eval_episodes": EPISODES, "seed": job.seed}
        words |= preset_of_kind(kind_of(task.env, task.parameters), algorithm, {})
        run = hurtle.train(task.env, algorithm, steps, **kept, **words)
    return None if run.evaluation is None else run.evaluation.returns


def _has_threads(task: Task) -> bool:
    """Whether Hurtle steps it in threads of its own; other envs would get worker processes, and a job has one core."""
    return "/" not in task.env and not task.env.startswith(("Taxi", "FrozenLake"))


def make_vec(job: Job, num_envs: int, seed: int) -> Any:
    """The same envs for SB3 and CleanRL."""
    from hurtle.integrations.sb3 import make_sb3_vec

    task = job.parts[0]
    backend = "auto" if _has_threads(task) else "serial"
    vec = make_sb3_vec(task.env, num_envs, backend=backend, num_workers=1, **task.parameters)
    vec.seed(seed)
    return vec


def evaluate(model: Any, job: Job) -> np.ndarray:
    """The returns of fresh episodes."""
    from stable_baselines3.common.evaluation import evaluate_policy

    vec = make_vec(job, 4, seed=1_000_000 + job.seed)
    returns, _ = evaluate_policy(model, vec, EPISODES, deterministic=True, return_episode_rewards=True, warn=False)
    vec.close()
    return np.asarray(returns)


def train_sb3(job: Job, part: Path) -> np.ndarray | None:
    """Stable-Baselines3 with nothing but its defaults."""
    import stable_baselines3
    from stable_baselines3.common.callbacks import BaseCallback

    _, algorithm, steps = job.parts
    stop, vec, kept = Stop(), make_vec(job, 1, job.seed), part / "model.zip"

    class Watch(BaseCallback):
        """Ends the training when it shall stop."""

        def _on_step(self) -> bool:
            if self.n_calls % 100:
                return True
            ended = self.model.ep_info_buffer or []
            return stop(self.num_timesteps, float(np.mean([e["r"] for e in ended])) if ended else float("nan"))

    kind = getattr(stable_baselines3, algorithm.upper())
    if kept.exists():
        model = kind.load(kept, vec, device="cpu")
        if algorithm != "ppo":
            load_replay(model.replay_buffer, part / "replay.npz")
    else:
        model = kind("MlpPolicy", vec, seed=job.seed, device="cpu")
    model.learn(steps - model.num_timesteps, callback=Watch(), reset_num_timesteps=False)
    if stop.asked and model.num_timesteps < steps:
        model.save(part / "model.part.zip")
        if algorithm != "ppo":
            save_replay(model.replay_buffer, part / "replay.npz")
        (part / "model.part.zip").replace(kept)
        return None
    vec.close()
    return evaluate(model, job)


REPLAY = ("observations", "next_observations", "actions", "rewards", "dones", "timeouts")


def save_replay(buffer: Any, file: Path) -> None:
    """The transitions of SB3's buffer; its own function writes the empty rest too, which takes gigabytes."""
    np.savez(file, **{name: getattr(buffer, name)[: buffer.pos] for name in REPLAY})


def load_replay(buffer: Any, file: Path) -> None:
    """Fill SB3's buffer again."""
    with np.load(file) as saved:
        for name in REPLAY:
            getattr(buffer, name)[: len(saved[name])] = saved[name]
        buffer.pos = len(saved["rewards"])


def train_cleanrl(job: Job, part: Path) -> np.ndarray | None:
    """CleanRL's settings in our own code."""
    from defaults_cleanrl import ALGORITHMS, rows_of

    task, algorithm, steps = job.parts
    stop, kept = Stop(), part / "model.pt"
    vec = make_vec(job, rows_of(algorithm, task.is_continuous), job.seed)
    model = ALGORITHMS[algorithm](vec, steps, job.seed)
    if kept.exists():
        model.load(kept)
    if not model.learn(stop):
        model.save(part / "model.part")
        (part / "model.part").replace(kept)
        return None
    vec.close()
    return evaluate(model, job)
