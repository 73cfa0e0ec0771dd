"""Whether a run collects in its own thread or in actors' threads, and the vector of envs of each; says which and why.

settings → shares of the envs → a vector each → `Actors`. Knows no policy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

from hurtle.algorithms.algorithm import find_algorithm, short_name
from hurtle.errors import HurtleError
from hurtle.native.threads import free_cores
from hurtle.runners.settings import TrainConfig
from hurtle.vector.cuda_vec import CudaVecEnv
from hurtle.vector.mujoco_vec import MujocoVecEnv
from hurtle.vector.native_pool import NativePool
from hurtle.vector.native_vec import NativeVecEnv


class Share(NamedTuple):
    """The envs of one actor."""

    num_envs: int
    first_env: int
    backend: str
    num_workers: int | None
    pool_batch_size: int | None


@dataclass
class Actors:
    """The envs of a run.

    Attributes:
        vecs: One vector per actor; a single one in a local run.
        lag: The setting; empty in a local run.
        reason: Why they are collected from like this, for the user.
    """

    vecs: list[Any]
    lag: str = ""
    reason: str = ""

    @property
    def described(self) -> str:
        """A line for the user; empty where there was nothing to choose."""
        if not self.lag:
            return f"local: {self.reason}" if self.reason else ""
        envs, count = " + ".join(str(vec.num_envs) for vec in self.vecs), len(self.vecs)
        return f"async: {count} actor{'s' * (count > 1)} ({envs} envs), lag {self.lag}; {self.reason}"

    def close(self) -> None:
        """Close all vectors."""
        for vec in self.vecs:
            vec.close()


def local_or_actors(train: TrainConfig, make: Callable[[Share], Any]) -> Actors:
    """Make the envs of a run as its runner needs them.

    Args:
        train: The settings.
        make: Makes the vector of a share.

    Raises:
        HurtleError: There are more actors than envs.
    """
    whole = Share(train.num_envs, 0, train.backend, train.num_workers, train.pool_batch_size)
    if train.runner == "local":
        if train.actor_devices:
            raise HurtleError("actor_devices is for actors: set runner='async'.")
        return Actors([make(whole)])
    algorithm = find_algorithm(train.algorithm)
    if not algorithm.takes_lag and train.runner == "auto":
        return Actors([make(whole)], reason=f"{short_name(algorithm.name)} learns from steps of the newest policy only")
    count = train.num_actors or min(algorithm.num_actors, train.num_envs)
    if count > train.num_envs:
        raise HurtleError(f"num_actors={count} is more than num_envs={train.num_envs}: each actor needs an env.")
    warning = "" if algorithm.takes_lag or train.lag == "0" else f"; {short_name(algorithm.name)} does not correct for the lag"
    explores = algorithm.num_actors > 1
    backend = train.backend
    reason = "its actors explore differently" if explores else "envs step in processes of their own"
    if count == 1 or backend not in ("process", "ray"):
        vec = make(whole)
        if obstacle := _without_processes(vec):
            if train.runner == "auto" and (_is_on_gpu(vec) or not explores):
                return Actors([vec], reason=obstacle)
            reason = reason if explores else f"although {obstacle}"
        if count == 1:
            return Actors([vec], train.lag, reason + warning)
        vec.close()
        if not _is_compiled(vec):  # as it was chosen for the whole
            backend = "serial" if obstacle else "process"
    made = Actors([], train.lag, reason + warning)
    try:
        for share in _shares(train, count, backend):
            made.vecs.append(make(share))
    except BaseException:
        made.close()
        raise
    return made


def _shares(train: TrainConfig, count: int, backend: str) -> list[Share]:
    """The envs, workers and pool of each of `count` actors, as equal as they can be."""
    edges = [train.num_envs * k // count for k in range(count + 1)]
    all_workers = train.num_workers or min(free_cores(), train.num_envs)
    workers = None if backend == "serial" and train.num_workers is None else max(1, all_workers // count)
    pool = None if train.pool_batch_size is None else max(1, train.pool_batch_size // count)
    return [Share(last - first, first, backend, workers, pool) for first, last in pairwise(edges)]


def _is_compiled(vec: Any) -> bool:
    return isinstance(vec, NativeVecEnv | NativePool | MujocoVecEnv)


def _is_on_gpu(vec: Any) -> bool:
    return isinstance(vec, CudaVecEnv)


def _without_processes(vec: Any) -> str:
    """Why nothing is gained by collecting from a vector in another thread, or an empty string."""
    if _is_on_gpu(vec):
        return "envs run on the GPU"
    if getattr(vec, "steps_elsewhere", False):  # some are wrapped
        return ""
    if _is_compiled(vec):
        return "envs are compiled, and share the cores with the update"
    return "envs step in this process, since they are too fast for others"
