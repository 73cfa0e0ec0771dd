"""The settings of TD3 and where its learners are; separate from td3.py, since `hurtle train --help` must not import torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from hurtle.algorithms.algorithm import Algorithm
from hurtle.algorithms.replay_settings import ActorCriticConfig
from hurtle.ranges import at_least, positive


@dataclass(frozen=True)
class TD3Config(ActorCriticConfig):
    """TD3."""

    exploration_noise: Annotated[float, at_least(0)] = 0.1
    """Noise of actions, relative to half their range."""
    target_noise: Annotated[float, at_least(0)] = 0.2
    """Noise of the actions in targets …"""
    target_noise_clip: Annotated[float, positive()] = 0.5
    """… and its bound."""
    policy_every: Annotated[int, at_least(1)] = 2
    """Critic steps per actor step."""


ALGORITHM = Algorithm(
    TD3Config,
    {
        "general": "hurtle.algorithms.td3:TD3",
        "native": "hurtle.algorithms.off_policy_native:NativeTD3",
        "device": "hurtle.algorithms.td3:TD3",
    },
    network="hurtle.algorithms.td3:make_network",
    defaults={"hidden_sizes": (256, 256), "activation": "relu", "orthogonal_init": False},
    takes_lag=True,
)
