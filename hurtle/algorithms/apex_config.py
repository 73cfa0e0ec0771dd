"""Ape-X: DQN with prioritized replay, fed by actors that explore differently (Horgan et al., 2018); only defaults differ."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

from hurtle.algorithms.dqn_config import ALGORITHM as DQN
from hurtle.algorithms.dqn_config import DQNConfig
from hurtle.ranges import at_least, between


@dataclass(frozen=True)
class ApexConfig(DQNConfig):
    """Ape-X DQN."""

    n_step: Annotated[int, at_least(1)] = 3
    """Rewards that are summed before bootstrapping."""
    dueling: bool = True
    """Q = state value + advantages."""
    priority_alpha: Annotated[float, at_least(0)] = 0.6
    """Draw by (TD error)^alpha; 0: uniformly."""
    epsilon_end: Annotated[float, between(0, 1)] = 0.4
    """… and at the end,"""
    epsilon_fraction: Annotated[float, between(0, 1)] = 0.0
    """after this part of the run."""
    epsilon_ladder: Annotated[float, at_least(0)] = 7.0
    """async: of N actors, number i takes ε^(1 + ladder · i / (N − 1))."""


ALGORITHM = replace(
    DQN,
    config=ApexConfig,
    defaults={**DQN.defaults, "runner": "auto"},
    num_actors=4,
    alone="its actors collect while it learns",
)
