"""`SeedsDeviceCollector`: native envs of many seeds on the device, acting and stepping together in one CUDA graph.

rows of the first seed, then of the second … → `DeviceCollector` → one rollout; episodes and states by seed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from hurtle.buffers.rollout import Rollout
from hurtle.collect.device_collector import DeviceCollector
from hurtle.collect.seeds_states import state_of_all, states_of_seeds
from hurtle.contracts import Episodes
from hurtle.errors import NonFiniteError
from hurtle.policies.together import PoliciesTogether
from hurtle.vector.native_vec import NativeVecEnv


class SeedsDeviceCollector(DeviceCollector):
    """Fills rollouts for `EpochsTogether`. Each seed's envs and actions are seeded as those of a run of its own.

    A number that is not finite fails its seed, not the others.

    Args:
        vec: As many envs for each seed, those of the first one first.
        policy: Acts for all seeds.
        seeds: The base seed of each seed's envs and actions.
        names: Each seed's number, for messages.
        **options: As for `DeviceCollector`.
    """

    def __init__(self, vec: NativeVecEnv, policy: PoliciesTogether, seeds: Sequence[int], names: Sequence[int], **options: Any):
        super().__init__(vec, policy, seeds, **options)
        self._names, self._envs_each = list(names), vec.num_envs // len(seeds)
        self._ended: dict[int, list[Episodes]] = {}
        self._failed: dict[int, NonFiniteError] = {}
        self._untold: list[int] = []  # of the failed ones
        self._overflows = [0] * len(seeds)

    def prepare(self, rollout: Rollout) -> None:
        """See `DeviceCollector.prepare`."""
        super().prepare(rollout)
        for found in (self._ended, self._failed, self._untold):
            found.clear()
        self._overflows = [0] * len(self._overflows)

    def take_episodes(self) -> dict[int, Episodes]:
        """The episodes that were reported since the last call, by the places of their seeds."""
        found = {seed: Episodes.join(parts) for seed, parts in self._ended.items()}
        self._ended.clear()
        return found

    def take_failures(self) -> dict[int, NonFiniteError]:
        """Seeds whose policy or envs gave a number that is not finite since the last call; their rows mean nothing any more."""
        found = {seed: self._failed[seed] for seed in self._untold}
        self._untold.clear()
        return found

    def metrics_of(self, place: int) -> dict[str, float]:
        """See `DeviceCollector.metrics`; those of one seed."""
        return {"final_overflow": float(self._overflows[place])} if self._overflows[place] else {}

    def states(self, with_envs: bool = True) -> list[dict[str, Any]]:
        """The state of each seed, as a collector of its own would save it."""
        rows = self._envs_each * self.rows.num_agents
        return states_of_seeds(self.state_dict(with_envs), len(self._names), self._envs_each, rows)

    def load_states(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Continue from what `states` returned, or from the states of single runs."""
        self.load_state_dict(state_of_all(states, self._envs_each))

    def _read(self, numbers: np.ndarray, group: int) -> Episodes:
        if group in self._failed:
            return Episodes()
        before = self.overflow
        try:
            found = super()._read(numbers, group)
        except NonFiniteError as error:
            self._failed[group] = error
            self._untold.append(group)
            return Episodes()
        self._overflows[group] += self.overflow - before
        if found.count:
            self._ended.setdefault(group, []).append(found)
        return found

    def _step(self, rollout: Rollout, t: int) -> None:
        if self._actions.flat.is_floating_point():  # a seed that has diverged must not break its envs
            torch.nan_to_num_(self._actions.flat, nan=0.0)
        super()._step(rollout, t)

    def _name_of(self, env: int) -> str:
        seed, own = divmod(env, self._envs_each)
        return f"env {own} of seed {self._names[seed]}"
