"""Whether a run collects in its own thread or in actors' threads, and the vector of envs of each; says which and why.

settings → shares of the envs → a vector each → `Actors`. Knows no policy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

from hurtle.errors import HurtleError
from hurtle.native.threads import free_cores
from hurtle.runners.settings import TrainConfig
from hurtle.vector.native_pool import NativePool
from hurtle.vector.native_vec import NativeVecEnv
from hurtle.vector.serial_vec import SerialVecEnv

PYTHON_ACTORS = 1
"""Actors whose envs are in processes, by default: a second one would compete with the first for the GIL."""


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
        return Actors([make(whole)])
    count = train.num_actors or min(PYTHON_ACTORS, train.num_envs)
    if count > train.num_envs:
        raise HurtleError(f"num_actors={count} is more than num_envs={train.num_envs}: each actor needs an env.")
    backend, reason = train.backend, ""
    if backend not in ("process", "ray"):
        vec = make(whole)
        reason = _without_processes(vec)
        if reason and train.runner == "auto":
            return Actors([vec], reason=reason)
        if reason and (train.num_actors is None or count == 1):  # more would only share this process
            return Actors([vec], train.lag, reason)
        vec.close()
        backend = backend if reason else "process"
    made = Actors([], train.lag, reason or "envs step in processes of their own")
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
    workers = max(1, (train.num_workers or free_cores()) // count)
    pool = None if train.pool_batch_size is None else max(1, train.pool_batch_size // count)
    return [Share(last - first, first, backend, workers, pool) for first, last in pairwise(edges)]


def _without_processes(vec: Any) -> str:
    """Why the envs of a vector share the learner's process, or an empty string if they do not."""
    if isinstance(vec, NativeVecEnv | NativePool):
        return "envs are compiled, and share the cores with the update"
    if isinstance(vec, SerialVecEnv):
        return "envs step in this process, since they are too fast for others"
    return ""
