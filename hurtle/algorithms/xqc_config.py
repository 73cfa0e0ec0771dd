"""The settings of XQC and where its learners are; separate from xqc.py, since `hurtle train --help` must not import torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from hurtle.algorithms.algorithm import Algorithm
from hurtle.algorithms.replay_settings import ActorCriticConfig
from hurtle.ranges import at_least, positive


@dataclass(frozen=True)
class XQCConfig(ActorCriticConfig):
    """XQC."""

    critic_sizes: Annotated[tuple[int, ...], at_least(1)] = (512, 512, 512, 512)
    """Widths of the critics' hidden layers."""
    num_atoms: Annotated[int, at_least(2)] = 101
    """Values that a critic gives probabilities of …"""
    value_bound: Annotated[float, positive()] = 5.0
    """… from −value_bound to this, of scaled rewards."""
    temperature: Annotated[float | None, positive()] = None
    """Entropy's weight; none: by target_entropy."""
    initial_temperature: Annotated[float, positive()] = 0.01
    """Where adapting starts."""
    target_entropy: float | None = None
    """None: −actions / 2."""
    policy_every: Annotated[int, at_least(1)] = 1
    """Critic steps per actor step."""


ALGORITHM = Algorithm(
    XQCConfig,
    {"general": "hurtle.algorithms.xqc:XQC", "device": "hurtle.algorithms.xqc:XQC"},
    network="hurtle.algorithms.xqc:make_network",
    defaults={"hidden_sizes": (256, 256, 256), "activation": "relu", "orthogonal_init": False},
    takes_lag=True,
    alone="batch norm needs the whole batch",
)
