"""What `vector.py` times: vectors of us and of our peers as jobs, and the turns that the jobs take.

A job steps some envs and returns how many steps that was. Peers are imported when they are asked for.
"""

from __future__ import annotations

import contextlib
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from record import Job

import hurtle

EnvMaker = Callable[[], Any]
Makers = dict[str, Callable[[contextlib.ExitStack], Job]]

SPINNING = "PufferLib Multiprocessing"
"""Its workers go on spinning for half a second after their turn; the next job waits for the end of that."""


class Turns:
    """Steps per second of each job in each of several rounds in which the jobs took turns.

    The machine may be slower in one minute than in the next, so ratios are made within a round and their median is taken.

    Args:
        jobs: At least one call of each makes a turn.
        seconds: Each turn.
        rounds: At most so many, and at least three of them …
        budget: … even if these seconds are over.
    """

    def __init__(self, jobs: dict[str, Job], seconds: float, rounds: int, budget: float = 30.0):
        end, shuffle = time.perf_counter() + budget, random.Random(0)
        self.rates: dict[str, list[float]] = {name: [] for name in jobs}
        for name, job in jobs.items():
            job()
            time.sleep(0.6 if name == SPINNING else 0)
        for done in range(rounds):
            if done >= 3 and time.perf_counter() > end:
                break
            order = list(jobs)
            shuffle.shuffle(order)  # whoever follows a pause, or a job that heats the machine, is another each time
            for name in order:
                job = jobs[name]
                steps, elapsed, began = 0, 0.0, time.perf_counter()
                while not steps or elapsed < seconds:
                    steps += job()
                    elapsed = time.perf_counter() - began
                self.rates[name].append(steps / elapsed)
                time.sleep(0.6 if name == SPINNING else 0)

    def rate(self, name: str) -> float:
        """The median over the rounds."""
        return statistics.median(self.rates[name])

    def micros(self, name: str) -> float:
        """The median time of a step in microseconds."""
        return 1e6 / self.rate(name)

    def ratio(self, name: str, over: str) -> float:
        """How many times faster one job is than another, in the same round."""
        return statistics.median(a / b for a, b in zip(self.rates[name], self.rates[over], strict=True))

    def extra_micros(self, name: str, over: str) -> float:
        """How much longer a step of one job takes than one of another, in the same round."""
        return statistics.median(1e6 / a - 1e6 / b for a, b in zip(self.rates[name], self.rates[over], strict=True))


def make_jobs(makers: Makers, stack: contextlib.ExitStack) -> tuple[dict[str, Job], dict[str, str]]:
    """The jobs that can be made here, and why the others cannot."""
    jobs, left_out = {}, {}
    for name, make in makers.items():
        try:
            jobs[name] = make(stack)
        except Exception as error:
            if name.startswith("hurtle") and not isinstance(error, ImportError | hurtle.HurtleError):
                raise
            left_out[name] = f"{type(error).__name__}: {str(error).splitlines()[0][:150] if str(error) else 'no message'}"
            print(f"{name} is left out: {left_out[name]}", flush=True)
    return jobs, left_out


# Us -------------------------------------------------------------------------------------------------------------------


def ours(env: Any, num_envs: int, calls: int = 10, **options: Any) -> Callable[[contextlib.ExitStack], Job]:
    """`hurtle.make_vec` and its `step`; with `batch_size` a pool and its `send` and `recv`."""

    def make(stack: contextlib.ExitStack) -> Job:
        vec = hurtle.make_vec(env, num_envs, **options)
        stack.callback(vec.close)
        if options.get("batch_size", num_envs) < num_envs:
            return _pool(vec, num_envs, options["batch_size"], calls)
        vec.reset(seed=0)
        return stepping(vec.step, num_envs, calls)

    return make


def stepping(step: Callable[[Any], Any], num_envs: int, calls: int, dtype: Any = np.int64, choices: int = 2) -> Job:
    """A job of so many calls of `step` with random actions."""
    actions = list(np.random.default_rng(0).integers(0, choices, (calls, num_envs)).astype(dtype))

    def job() -> int:
        for row in actions:
            step(row)
        return calls * num_envs

    return job


def _pool(vec: Any, num_envs: int, batch: int, calls: int) -> Job:
    """As many steps as `calls` calls of `step`. Every env begins and ends within the job, so that none works for free."""
    actions, everyone = np.zeros(num_envs, np.int64), np.arange(num_envs)
    receive = calls * num_envs // batch
    vec.async_reset(seed=0)
    for _ in range(num_envs // batch):
        vec.recv()

    def job() -> int:
        vec.send(actions, env_id=everyone)
        left_to_send = receive - num_envs // batch
        for k in range(receive):
            vec.recv()
            if k < left_to_send:
                vec.send(actions[:batch])
        return receive * batch

    return job


# Peers ----------------------------------------------------------------------------------------------------------------


def gymnasium_sync(maker: EnvMaker, num_envs: int, calls: int = 10) -> Callable[[contextlib.ExitStack], Job]:
    def make(stack: contextlib.ExitStack) -> Job:
        vec = gymnasium.vector.SyncVectorEnv([maker] * num_envs)
        stack.callback(vec.close)
        vec.reset(seed=0)
        return stepping(vec.step, num_envs, calls)

    return make


def gymnasium_async(maker: EnvMaker, num_envs: int, calls: int = 10, **options: Any) -> Callable[[contextlib.ExitStack], Job]:
    def make(stack: contextlib.ExitStack) -> Job:
        vec = gymnasium.vector.AsyncVectorEnv([maker] * num_envs, **{"shared_memory": True, **options})
        stack.callback(vec.close)
        vec.reset(seed=0)
        return stepping(vec.step, num_envs, calls)

    return make


def sb3(maker: EnvMaker, num_envs: int, subprocesses: bool, calls: int = 10) -> Callable[[contextlib.ExitStack], Job]:
    def make(stack: contextlib.ExitStack) -> Job:
        from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv

        fork = "fork" if sys.platform == "linux" else None  # its default imports torch in every worker
        vec = SubprocVecEnv([maker] * num_envs, start_method=fork) if subprocesses else DummyVecEnv([maker] * num_envs)
        stack.callback(vec.close)
        vec.seed(0)
        vec.reset()
        return stepping(vec.step, num_envs, calls)

    return make


def pufferlib(maker: EnvMaker, num_envs: int, workers: int | None, calls: int = 10) -> Callable[[contextlib.ExitStack], Job]:
    def make(stack: contextlib.ExitStack) -> Job:
        with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):  # its import leaves a link where one stands
            import pufferlib.vector as puffer
            from pufferlib.emulation import GymnasiumPufferEnv

        def make_env(buf: Any = None, seed: int = 0) -> Any:
            return GymnasiumPufferEnv(env_creator=maker, buf=buf, seed=seed)

        if workers is None:
            vec = puffer.make(make_env, backend=puffer.Serial, num_envs=num_envs)
        else:
            vec = puffer.make(make_env, backend=puffer.Multiprocessing, num_envs=num_envs, num_workers=workers)
        stack.callback(vec.close)
        vec.reset(seed=0)
        return stepping(vec.step, num_envs, calls)

    return make


def envpool(
    task: str, num_envs: int, cores: int, calls: int = 10, choices: int = 2, **options: Any
) -> Callable[[contextlib.ExitStack], Job]:
    def make(stack: contextlib.ExitStack) -> Job:
        import envpool

        vec = envpool.make(task, env_type="gymnasium", num_envs=num_envs, num_threads=cores, seed=0, **options)
        stack.callback(vec.close)
        vec.reset()
        return stepping(vec.step, num_envs, calls, np.int32, choices)

    return make


# The control ----------------------------------------------------------------------------------------------------------

_BARE = """
import sys
from vector_envs import work
for line in sys.stdin:
    work(int(line))
    print(flush=True)
"""


def bare_processes(count: int, loops: int, calls: int, steps: int) -> Callable[[contextlib.ExitStack], Job]:
    """Processes that each do the same counted work and nothing else: what so many cores can give at best."""

    def make(stack: contextlib.ExitStack) -> Job:
        folder = Path(__file__).resolve().parent
        processes = [
            stack.enter_context(
                subprocess.Popen(
                    [sys.executable, "-c", _BARE], cwd=folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
                )
            )
            for _ in range(count)
        ]
        for process in processes:
            stack.callback(process.kill)

        def job() -> int:
            for _ in range(calls):
                for process in processes:
                    os.write(process.stdin.fileno(), b"%d\n" % loops)
                for process in processes:
                    os.read(process.stdout.fileno(), 16)
            return steps * calls

        return job

    return make
