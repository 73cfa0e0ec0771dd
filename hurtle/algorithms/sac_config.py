"""The settings of SAC and where its learners are; separate from sac.py, since `hurtle train --help` must not import torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from hurtle.algorithms.algorithm import Algorithm
from hurtle.algorithms.replay_settings import ActorCriticConfig
from hurtle.ranges import positive


@dataclass(frozen=True)
class SACConfig(ActorCriticConfig):
    """SAC."""

    temperature: Annotated[float | None, positive()] = None
    """Weight of the entropy; none: adapted to target_entropy."""
    initial_temperature: Annotated[float, positive()] = 1.0
    """Where adapting starts."""
    target_entropy: float | None = None
    """None: −actions; for discrete ones 0.89 log(actions)."""


ALGORITHM = Algorithm(
    SACConfig,
    {
        "general": "hurtle.algorithms.sac:SAC",
        "native": "hurtle.algorithms.off_policy_native:NativeSAC",
        "device": "hurtle.algorithms.sac:SAC",
    },
    network="hurtle.algorithms.sac:make_network",
    defaults={"hidden_sizes": (256, 256), "activation": "relu", "orthogonal_init": False},
    takes_lag=True,
)
