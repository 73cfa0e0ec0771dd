"""`Share`: the part of a run's envs that one actor or collector has; how they are divided. Knows no envs."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

from hurtle.runners.settings import TrainConfig


class Share(NamedTuple):
    """The envs of one actor."""

    num_envs: int
    first_env: int
    backend: str
    num_workers: int | None
    pool_batch_size: int | None


def whole(train: TrainConfig) -> Share:
    """All envs of a run."""
    return Share(train.num_envs, 0, train.backend, train.num_workers, train.pool_batch_size)


def shares_of(train: TrainConfig, count: int, backend: str, workers: int | None) -> list[Share]:
    """The envs and the pool of each of `count` actors, as equal as they can be.

    Args:
        train: The settings.
        count: How many there are.
        backend: Of all of them.
        workers: Of each one; None: as the back end thinks best.
    """
    edges = [train.num_envs * k // count for k in range(count + 1)]
    pool = None if train.pool_batch_size is None else max(1, train.pool_batch_size // count)
    return [Share(last - first, first, backend, workers, pool) for first, last in pairwise(edges)]
