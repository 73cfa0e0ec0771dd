"""`Levels`: the returns of episodes by the value of an option that they were played with, summed on the envs' device.

results of a step → level of each env → counts and sums. For rules of curricula that listen to returns, see curriculum.py.
"""

from __future__ import annotations

import numpy as np
import torch

from hurtle.kernels.device_rows import Step
from hurtle.vector.native_vec import NativeVecEnv


class Levels:
    """Counts the episodes that end at each level of a drawn option, and sums their returns; the same launches every time."""

    def __init__(self, vec: NativeVecEnv, outcome: Step, name: str, edges: np.ndarray):
        self._metric, self._outcome = vec.native_spec.env.metrics.index(name), outcome
        device = outcome.reward.device
        self._edges = torch.from_numpy(edges[1:].astype(np.float32)).to(device)
        self._numbers = torch.arange(len(edges), device=device)
        self.sums = torch.zeros((len(edges), 2), dtype=torch.float64, device=device)

    def add(self) -> None:
        """Add the episodes that ended in the last step."""
        step = self._outcome
        level = torch.bucketize(step.episode_metrics[:, self._metric].contiguous(), self._edges, right=True)
        is_own = (level.unsqueeze(1) == self._numbers) & step.ended.unsqueeze(1)  # [envs, levels]
        returns = step.episode_return[:, :1].double()
        self.sums[:, 0].add_(is_own.sum(0))
        self.sums[:, 1].add_(torch.where(is_own, returns, 0.0).sum(0))
