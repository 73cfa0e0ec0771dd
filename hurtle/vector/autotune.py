"""`autotune`: measures an env over back ends, workers and batch sizes; `hurtle bench vector` prints the table.

env → settings, simplest first → each made, stepped with random actions for a while and closed → steps per second → the best.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter, thread_time
from typing import Any

import numpy as np
from gymnasium.vector import VectorEnv

from hurtle.envs.registry import EnvLike, resolve
from hurtle.errors import HurtleError, UnknownNameError, did_you_mean
from hurtle.native.env import Env
from hurtle.native.threads import free_cores
from hurtle.vector.factory import BACKENDS, make_vec, task_of
from hurtle.vector.options import check_count
from hurtle.vector.random_actions import batch_actions

NEGLIGIBLE = 0.97
"""The simplest setting with at least this fraction of the top speed counts as the best."""
_WARM_UP = 5


@dataclass(frozen=True)
class Setting:
    """One way to run the envs."""

    backend: str
    num_envs: int
    num_workers: int
    batch_size: int

    def options(self) -> dict[str, Any]:
        """The arguments of `make_vec`, without those that are at their defaults."""
        given: dict[str, Any] = {"num_envs": self.num_envs, "backend": self.backend}
        if self.backend != "serial":
            given["num_workers"] = self.num_workers
        if self.batch_size < self.num_envs:
            given["batch_size"] = self.batch_size
        return given

    def call(self, env: EnvLike, **more: Any) -> str:
        """The call of `make_vec` as code to paste.

        Example:
            >>> Setting("process", 8, 2, 4).call("CartPole-v1")
            'hurtle.make_vec("CartPole-v1", num_envs=8, backend="process", num_workers=2, batch_size=4)'
        """
        named = _quoted(env) if isinstance(env, str) else getattr(env, "__name__", type(env).__name__)
        given = {**self.options(), **more}
        return f"hurtle.make_vec({', '.join([named, *(f'{name}={_quoted(value)}' for name, value in given.items())])})"


@dataclass(frozen=True)
class Result:
    """The measured speed of one setting."""

    setting: Setting
    steps_per_second: float
    """Steps of all envs together."""
    speed_up: float | None
    """Speed relative to serial with the same number of envs; None if serial was not measured."""


def autotune(
    env: EnvLike,
    num_envs: int | Sequence[int] = (8, 64),
    *,
    seconds: float = 1.0,
    backends: Sequence[str] | None = None,
    policy_ms: float = 0.0,
    emulate: bool = False,
    **parameters: Any,
) -> list[Result]:
    """Measure an env in every sensible setting; `best` picks from the results.

    Args:
        env: An env as `make_vec` takes it.
        num_envs: Numbers of envs to try.
        seconds: Duration of each measurement.
        backends: Back ends to try; None tries serial and process, and native or mujoco where they apply.
        policy_ms: Milliseconds of policy work between receiving a batch and sending its actions. This is where pools pay off:
            workers step some envs while the policy works on others.
        emulate: As in `make_vec`.
        **parameters: Parameters of the env.

    Raises:
        UnknownNameError: No such env or back end.
        EnvFailedError: The env raised.

    Example:
        >>> results = autotune("CartPole-v1", 4, seconds=0.05, backends=["serial"])
        >>> results[0].speed_up
        1.0
    """
    settings = settings_for(env, num_envs, backends, **parameters)
    return list(measure_all(env, settings, seconds=seconds, policy_ms=policy_ms, emulate=emulate, **parameters))


def best(results: Sequence[Result]) -> Result:
    """The simplest of the fastest settings; expects `results` in order of complexity."""
    top = max(result.steps_per_second for result in results)
    return next(result for result in results if result.steps_per_second >= NEGLIGIBLE * top)


def settings_for(
    env: EnvLike, num_envs: int | Sequence[int] = (8, 64), backends: Sequence[str] | None = None, **parameters: Any
) -> list[Setting]:
    """The settings worth trying, simplest first, for each number of envs."""
    sizes = [num_envs] if isinstance(num_envs, int | np.integer) else list(num_envs)
    if not sizes:
        raise HurtleError("num_envs is empty: pass at least one number of envs.")
    for size in sizes:
        check_count("num_envs", size)
    found = resolve(env, parameters)
    threads = "native" if isinstance(found, Env) else "mujoco" if task_of(found)[0] is not None else None
    known = [name for name in BACKENDS if name not in ("auto", "native", "mujoco") or name == threads]
    chosen = list(backends) if backends else [name for name in (threads, "serial", "process") if name is not None]
    for name in chosen:
        if name not in known:
            raise UnknownNameError(f"No back end {name!r} for {env!r}. {did_you_mean(name, known)}")
    order = sorted(set(chosen), key=lambda name: (name != "serial", known.index(name)))
    return [setting for size in dict.fromkeys(sizes) for name in order for setting in _settings_of(name, int(size))]


def _settings_of(backend: str, num_envs: int) -> list[Setting]:
    if backend == "serial":
        return [Setting(backend, num_envs, 1, num_envs)]
    cores = free_cores()
    wanted = (1, cores) if backend in ("native", "mujoco") else (1, cores // 2, cores, 2 * cores)
    workers = sorted({count for count in wanted if 1 <= count <= num_envs})
    if backend in ("native", "mujoco"):  # no pools: compiled envs are faster than waiting for some of them
        return [Setting(backend, num_envs, count, num_envs) for count in workers]
    batches = [num_envs] + [num_envs // part for part in (2, 4) if num_envs % part == 0]
    return [Setting(backend, num_envs, count, batch) for count in workers for batch in batches]


def measure_all(
    env: EnvLike,
    settings: Sequence[Setting],
    *,
    seconds: float = 1.0,
    policy_ms: float = 0.0,
    emulate: bool = False,
    **parameters: Any,
) -> Iterator[Result]:
    """Measure the settings one after the other and yield each result as soon as it is known.

    Raises:
        HurtleError: `seconds` or `policy_ms` is out of range; raised before anything is measured.
    """
    if not (seconds > 0 and math.isfinite(seconds)):
        raise HurtleError(f"seconds must be positive, got {seconds}.")
    if not (policy_ms >= 0 and math.isfinite(policy_ms)):
        raise HurtleError(f"policy_ms must be 0 or more, got {policy_ms}.")
    more = {**parameters, "emulate": True} if emulate else parameters
    return _measured(env, settings, seconds, policy_ms / 1000, more)


def _measured(
    env: EnvLike, settings: Sequence[Setting], seconds: float, policy_seconds: float, more: dict[str, Any]
) -> Iterator[Result]:
    serial: dict[int, float] = {}
    for setting in settings:
        vec = make_vec(env, **setting.options(), **more)
        try:
            rate = steps_per_second(vec, setting.batch_size, seconds, policy_seconds)
        finally:
            vec.close()
        if setting.backend == "serial":
            serial[setting.num_envs] = rate
        base = serial.get(setting.num_envs)
        yield Result(setting, rate, rate / base if base else None)


def steps_per_second(vec: VectorEnv, batch_size: int, seconds: float, policy_seconds: float = 0.0) -> float:
    """Step a vector with random actions for a while; a batch smaller than the vector is stepped as a pool."""
    actions, turn = batch_actions(vec), 0
    pool: Any = vec if batch_size < vec.num_envs else None
    if pool is not None:
        pool.async_reset(seed=0)
        obs, *_, infos = pool.recv()
    else:
        obs, infos = vec.reset(seed=0)

    def batch(obs: Any, infos: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        nonlocal turn
        turn += 1
        _work(policy_seconds)
        chosen = actions(turn, obs, infos)
        if pool is None:
            obs, *_, infos = vec.step(chosen)
        else:
            pool.send(chosen)
            obs, *_, infos = pool.recv()
        return obs, infos

    batches, elapsed = 0, 0.0
    for most in (_WARM_UP, math.inf):  # the first, checked steps count only if they use up all the time
        if elapsed < seconds:
            began, batches, elapsed = perf_counter(), 0, 0.0
            while elapsed < seconds and batches < most:
                obs, infos = batch(obs, infos)
                batches, elapsed = batches + 1, perf_counter() - began
    return batches * batch_size / elapsed


def _work(seconds: float) -> None:
    """Keep a core busy, as a policy would; time in which other threads have the core does not count."""
    if seconds:
        end = thread_time() + seconds
        while thread_time() < end:
            pass


def _quoted(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) else repr(value)
