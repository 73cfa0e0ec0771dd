"""`SeedsCollector`: one vector of envs for many seeds; each seed's envs, actions, episodes and saved state are its own.

rows of the first seed, then of the second … → `GeneralCollector` → one rollout; episodes and states by seed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium.vector import VectorEnv

from hurtle.collect.general_collector import GeneralCollector
from hurtle.collect.rows import VecRows
from hurtle.collect.seeds_actor import SeedsActor
from hurtle.collect.seeds_states import state_of_all, states_of_seeds
from hurtle.contracts import Episodes, ListedEpisodes
from hurtle.errors import NonFiniteError
from hurtle.tracking.timing import Timer


class SeedsRows(VecRows):
    """Rows of many seeds: remembers the ended episodes of each.

    Args:
        vec: The envs of all seeds.
        names: Each seed's number, for messages.
    """

    def __init__(self, vec: VectorEnv, names: Sequence[int]):
        super().__init__(vec)
        self.names, self.envs_each = list(names), int(vec.num_envs) // len(names)
        self._ended: dict[int, list[ListedEpisodes]] = {}  # by the seed's place

    def name_of(self, row: int) -> str:
        """A row's seed, env and agent."""
        seed, own = divmod(row, self.envs_each * self.num_agents)
        return f"{super().name_of(own)} of seed {self.names[seed]}"

    def ended_episodes(
        self, infos: dict[str, Any], rewards: np.ndarray, ended: np.ndarray, stepped: np.ndarray | None
    ) -> ListedEpisodes | None:
        """See `VecRows.ended_episodes`."""
        found = super().ended_episodes(infos, rewards, ended, stepped)
        if found is None:
            return None
        returns, lengths, metrics = found
        over = np.asarray(infos["_episode"]).reshape(-1) if "_episode" in infos else ended
        seeds = over.nonzero()[0] // (self.envs_each * self.num_agents)
        reported = seeds
        if self.num_agents > 1 and "_metrics" in infos:
            reported = np.asarray(infos["_metrics"]).nonzero()[0] // self.envs_each
        for seed in np.unique(seeds).tolist():
            own = {name: values[reported == seed] for name, values in metrics.items()}
            self._ended.setdefault(seed, []).append((returns[seeds == seed], lengths[seeds == seed], own))
        return found

    def take_episodes(self) -> dict[int, Episodes]:
        """The episodes that have ended since the last call, by the places of their seeds; most steps end none."""
        found = {seed: Episodes.listed(parts) for seed, parts in self._ended.items()}
        self._ended.clear()
        return found


class SeedsCollector(GeneralCollector):
    """Fills rollouts for learners side by side. Each seed's envs and actions are seeded as those of a run of its own.

    Args:
        vec: As many envs for each seed, those of the first one first.
        actor: Acts for all.
        seeds: The base seed of each seed's envs: its env i gets that seed + i.
        names: Each seed's number, for messages; None: 0, 1 …
        timer: Records where the time goes.
    """

    def __init__(
        self,
        vec: VectorEnv,
        actor: SeedsActor,
        seeds: Sequence[int],
        names: Sequence[int] | None = None,
        timer: Timer | None = None,
    ):
        share = int(vec.num_envs) // len(seeds)
        super().__init__(vec, actor, (np.array(seeds)[:, None] + np.arange(share)).reshape(-1), timer)
        self.rows: SeedsRows = SeedsRows(vec, range(len(seeds)) if names is None else names)
        actor.name_of = self.rows.name_of

    def take_episodes(self) -> dict[int, Episodes]:
        """The episodes that have ended since the last call, by the places of their seeds."""
        return self.rows.take_episodes()

    def take_failures(self) -> dict[int, NonFiniteError]:
        """None: what is not finite is an error of all."""
        return {}

    def metrics_of(self, place: int) -> dict[str, float]:
        """See `GeneralCollector.metrics`: those of all seeds."""
        return self.metrics()

    def states(self, with_envs: bool = True) -> list[dict[str, Any]]:
        """The state of each seed, as a collector of its own would save it."""
        seeds, envs = len(self.rows.names), self.rows.envs_each
        return states_of_seeds(self.state_dict(with_envs), seeds, envs, envs * self.rows.num_agents)

    def load_states(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Continue from what `states` returned, or from the states of single runs."""
        self.load_state_dict(state_of_all(states, self.rows.envs_each))
