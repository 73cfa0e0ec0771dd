"""`SeedsDeviceCollector`: native envs of many seeds on the device, acting and stepping together in one CUDA graph.

rows of the first seed, then of the second … → `DeviceCollector` → one rollout; episodes and states by seed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hurtle.buffers.rollout import Rollout
from hurtle.collect.device_collector import DeviceCollector
from hurtle.collect.seeds_states import state_of_all, states_of_seeds
from hurtle.contracts import Episodes
from hurtle.policies.together import PoliciesTogether
from hurtle.vector.native_vec import NativeVecEnv


class SeedsDeviceCollector(DeviceCollector):
    """Fills rollouts for `EpochsTogether`. Each seed's envs and actions are seeded as those of a run of its own.

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

    def prepare(self, rollout: Rollout) -> None:
        """See `DeviceCollector.prepare`."""
        super().prepare(rollout)
        self._ended.clear()

    def take_episodes(self) -> dict[int, Episodes]:
        """The episodes that were reported since the last call, by the places of their seeds."""
        found = {seed: Episodes.join(parts) for seed, parts in self._ended.items()}
        self._ended.clear()
        return found

    def states(self, with_envs: bool = True) -> list[dict[str, Any]]:
        """The state of each seed, as a collector of its own would save it."""
        rows = self._envs_each * self.rows.num_agents
        return states_of_seeds(self.state_dict(with_envs), len(self._names), self._envs_each, rows)

    def load_states(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Continue from what `states` returned, or from the states of single runs."""
        self.load_state_dict(state_of_all(states, self._envs_each))

    def _read(self, numbers: np.ndarray, group: int) -> Episodes:
        found = super()._read(numbers, group)
        if found.count:
            self._ended.setdefault(group, []).append(found)
        return found

    def _name_of(self, env: int) -> str:
        seed, own = divmod(env, self._envs_each)
        return f"env {own} of seed {self._names[seed]}"
