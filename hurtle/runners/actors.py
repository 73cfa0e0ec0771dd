"""Whether a run collects in its own thread, in actors' threads or on a cluster, and the envs of each; says which and why.

settings → shares of the envs → a vector each → `Actors`. Knows no policy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hurtle.algorithms.algorithm import find_algorithm, short_name
from hurtle.errors import HurtleError
from hurtle.native.threads import free_cores
from hurtle.runners.settings import TrainConfig
from hurtle.runners.shares import Share, shares_of, whole
from hurtle.vector.cuda_vec import CudaVecEnv
from hurtle.vector.mujoco_vec import MujocoVecEnv
from hurtle.vector.native_pool import NativePool
from hurtle.vector.native_vec import NativeVecEnv

if TYPE_CHECKING:
    from hurtle.runners.ray_host import Recipe
    from hurtle.runners.ray_squad import Squad

MOST_LISTED = 8
"""Actors whose envs are listed one by one."""


@dataclass
class Actors:
    """The envs of a run.

    Attributes:
        vecs: One vector per actor; a single one in a local run. On a cluster they are only descriptions.
        lag: The setting; empty in a local run.
        reason: Why they are collected from like this, for the user.
        squad: The collectors on a cluster, or None.
    """

    vecs: list[Any]
    lag: str = ""
    reason: str = ""
    squad: Squad | None = None

    @property
    def described(self) -> str:
        """A line for the user; empty where there was nothing to choose."""
        if not self.lag:
            return f"local: {self.reason}" if self.reason else ""
        sizes, count = [int(vec.num_envs) for vec in self.vecs], len(self.vecs)
        envs = " + ".join(map(str, sizes)) if count <= MOST_LISTED else str(sum(sizes))
        who = "async: {} actor" if self.squad is None else "ray: {} collector"
        return f"{who.format(count)}{'s' * (count > 1)} ({envs} envs), lag {self.lag}; {self.reason}"

    def close(self) -> None:
        """Close all vectors."""
        if self.squad is not None:
            self.squad.close()
            return
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
    if train.runner == "local":
        if train.actor_devices:
            raise HurtleError("actor_devices is for actors: set runner='async'.")
        return Actors([make(whole(train))])
    algorithm = find_algorithm(train.algorithm)
    if not algorithm.takes_lag and train.runner == "auto":
        return Actors([make(whole(train))], reason=f"{short_name(algorithm.name)} learns from steps of the newest policy only")
    count = train.num_actors or min(algorithm.num_actors, train.num_envs)
    if count > train.num_envs:
        raise HurtleError(f"num_actors={count} is more than num_envs={train.num_envs}: each actor needs an env.")
    warning = _warning(train)
    explores = algorithm.num_actors > 1
    backend = train.backend
    reason = "its actors explore differently" if explores else "envs step in processes of their own"
    if count == 1 or backend not in ("process", "ray"):
        vec = make(whole(train))
        if obstacle := _without_processes(vec):
            if train.runner == "auto" and (_is_on_gpu(vec) or not explores):
                return Actors([vec], reason=obstacle)
            reason = reason if explores else f"although {obstacle}"
        if count == 1:
            return Actors([vec], train.allowed_lag, reason + warning)
        vec.close()
        if not _is_compiled(vec):  # as it was chosen for the whole
            backend = "serial" if obstacle else "process"
    made = Actors([], train.allowed_lag, reason + warning)
    try:
        for share in _shares(train, count, backend):
            made.vecs.append(make(share))
    except BaseException:
        made.close()
        raise
    return made


def actors_on_cluster(train: TrainConfig, recipe: Recipe) -> Actors:
    """Place the collectors of a run on a Ray cluster.

    Raises:
        HurtleError: Ray is missing, the cluster has no room, or settings do not fit.
    """
    from hurtle.runners.ray_squad import Squad

    squad = Squad(train, recipe)
    return Actors(squad.vecs, train.allowed_lag, squad.where + _warning(train), squad)


def _warning(train: TrainConfig) -> str:
    algorithm = find_algorithm(train.algorithm)
    learns_well = algorithm.takes_lag or train.allowed_lag == "0"
    return "" if learns_well else f"; {short_name(algorithm.name)} does not correct for the lag"


def _shares(train: TrainConfig, count: int, backend: str) -> list[Share]:
    """The share of each of `count` actors, which share the workers too."""
    all_workers = train.num_workers or min(free_cores(), train.num_envs)
    workers = None if backend == "serial" and train.num_workers is None else max(1, all_workers // count)
    return shares_of(train, count, backend, workers)


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
