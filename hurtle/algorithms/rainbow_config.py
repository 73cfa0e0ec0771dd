"""Rainbow: DQN with all its extensions (Hessel et al., 2018); only the defaults differ."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Literal

from hurtle.algorithms.dqn_config import ALGORITHM as DQN
from hurtle.algorithms.dqn_config import DQNConfig
from hurtle.ranges import at_least, positive


@dataclass(frozen=True)
class RainbowConfig(DQNConfig):
    """Rainbow."""

    learning_rate: Annotated[float, positive()] = 2.5e-4
    """Step size of Adam."""
    n_step: Annotated[int, at_least(1)] = 3
    """Rewards that are summed before bootstrapping."""
    priority_alpha: Annotated[float, at_least(0)] = 0.5
    """Draw by (TD error)^alpha; 0: uniformly."""
    adam_eps: Annotated[float, positive()] = 1.5e-4
    """Added to Adam's denominator."""
    dueling: bool = True
    """Q = state value + advantages."""
    noisy: bool = True
    """Noisy layers explore instead of random actions."""
    distributional: Literal["none", "c51", "qr"] = "c51"
    """none, c51 (fixed values) or qr (quantiles)."""


ALGORITHM = replace(DQN, config=RainbowConfig)
