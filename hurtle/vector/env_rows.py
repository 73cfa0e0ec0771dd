"""`Rows`: the arrays that envs and learner exchange, one row per env, laid out in a single buffer.

The buffer is private memory for serial envs and shared memory for workers; `Rows` does not know which.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from dataclasses import dataclass
from typing import Any

import numpy as np

_CACHE_LINE = 64
ALL = slice(None)  # every row


@dataclass(frozen=True)
class Rows:
    """The arrays. With several agents, all but `over` and `current` have an agent axis after the env axis."""

    obs: np.ndarray  # uint8 [num_envs, (agents,) obs bytes]: records of a SpaceLayout
    final_obs: np.ndarray  # the same: last observations of ended episodes
    actions: np.ndarray  # uint8 [num_envs, (agents,) action bytes]
    rewards: np.ndarray  # float64 [num_envs, (agents)]
    terminated: np.ndarray  # bool
    truncated: np.ndarray  # bool
    over: np.ndarray  # bool [num_envs]: the episode of the whole env ended with this step
    agent_mask: np.ndarray  # bool [num_envs, agents]: which agents act next
    action_mask: np.ndarray  # bool [num_envs, (agents,) n]: legal next actions; n is 0 without masks
    current: np.ndarray  # int64 [num_workers]: the env that each worker is busy with


@dataclass(frozen=True)
class RowPlan:
    """The place of each array of `Rows` in a buffer of `nbytes`; small, so that it can be sent to workers."""

    num_envs: int
    num_agents: int | None
    obs_bytes: int
    action_bytes: int
    mask_size: int
    num_workers: int = 1

    @classmethod
    def of(cls, description: Any, num_envs: int, num_workers: int = 1) -> RowPlan:
        """The plan for envs of this `Description`."""
        layout, actions = description.layout, description.actions
        return cls(num_envs, description.num_agents, layout.nbytes, actions.nbytes, description.mask_size, num_workers)

    def _fields(self) -> dict[str, tuple[Any, tuple[int, ...]]]:
        lead: tuple[int, ...] = (self.num_envs,) if self.num_agents is None else (self.num_envs, self.num_agents)
        return {
            "obs": (np.uint8, (*lead, self.obs_bytes)),
            "final_obs": (np.uint8, (*lead, self.obs_bytes)),
            "actions": (np.uint8, (*lead, self.action_bytes)),
            "rewards": (np.float64, lead),
            "terminated": (np.bool_, lead),
            "truncated": (np.bool_, lead),
            "over": (np.bool_, (self.num_envs,)),
            "agent_mask": (np.bool_, (self.num_envs, self.num_agents or 0)),
            "action_mask": (np.bool_, (*lead, self.mask_size)),
            "current": (np.int64, (self.num_workers,)),
        }

    @property
    def nbytes(self) -> int:
        """Size of the buffer."""
        return self._place(None)[1]

    def rows(self, buffer: Any) -> Rows:
        """The arrays over `buffer`."""
        return Rows(**self._place(buffer)[0])

    def _place(self, buffer: Any) -> tuple[dict[str, np.ndarray], int]:
        arrays, offset = {}, 0
        for name, (dtype, shape) in self._fields().items():
            size = int(np.prod(shape)) * np.dtype(dtype).itemsize
            if buffer is not None:
                arrays[name] = np.ndarray(shape, dtype, buffer, offset)
            offset += -(-size // _CACHE_LINE) * _CACHE_LINE
        return arrays, max(offset, 1)


def private_rows(plan: RowPlan) -> Rows:
    """Rows in this process's own memory."""
    return plan.rows(np.zeros(plan.nbytes + 1, np.uint8).data)


def shared_file() -> int:
    """A descriptor of anonymous shared memory: it has no name, so nothing remains when all processes are gone."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("hurtle")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def map_shared(fd: int, plan: RowPlan) -> Rows:
    """Rows in shared memory; the first process to map it sets its size."""
    if os.fstat(fd).st_size < plan.nbytes:
        os.ftruncate(fd, plan.nbytes)
    return plan.rows(mmap.mmap(fd, plan.nbytes))
