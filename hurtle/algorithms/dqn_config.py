"""The settings of DQN and where its learners are; separate from dqn.py, since `hurtle train --help` must not import torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from hurtle.algorithms.algorithm import Algorithm
from hurtle.algorithms.replay_settings import EpsilonConfig, ReplayConfig
from hurtle.errors import HurtleError
from hurtle.ranges import at_least, between, positive


@dataclass(frozen=True)
class DQNConfig(EpsilonConfig, ReplayConfig):
    """DQN."""

    num_steps: Annotated[int, at_least(1)] = 4
    """Steps per env between updates."""
    replay_ratio: Annotated[float, positive()] = 0.25
    """Gradient steps per step of an env."""
    batch_size: Annotated[int, at_least(1)] = 64
    """Transitions per gradient step."""
    learning_rate: Annotated[float, positive()] = 5e-4
    """Step size of Adam."""
    target_rate: Annotated[float, between(0, 1)] = 1.0
    """How far target networks move toward the trained ones …"""
    target_every: Annotated[int, at_least(1)] = 250
    """… once every this many gradient steps."""
    max_grad_norm: Annotated[float, positive(allows_infinity=True)] = 10.0
    """Clip the global norm of the gradients to this."""
    capacity: Annotated[int, at_least(1)] = 100_000
    """Steps that the replay buffer holds."""
    double: bool = True
    """The trained network chooses, the target network evaluates."""
    dueling: bool = False
    """Q = state value + advantages."""
    noisy: bool = False
    """Noisy layers explore instead of random actions."""
    distributional: Literal["none", "c51", "qr"] = "none"
    """none, c51 (fixed values) or qr (quantiles)."""
    num_atoms: Annotated[int, at_least(2)] = 51
    """Atoms or quantiles per action."""
    value_low: float = -10.0
    """c51: the lowest value …"""
    value_high: float = 10.0
    """… and the highest."""
    rescale_values: bool = False
    """Learn roughly the square root of the value."""

    def check(self, num_rows: int, is_recurrent: bool) -> None:
        """See `AlgorithmConfig.check`."""
        super().check(num_rows, is_recurrent)
        if self.distributional == "c51" and not self.value_low < self.value_high:
            raise HurtleError(f"value_low={self.value_low:g} must be less than value_high={self.value_high:g}.")
        if self.rescale_values and self.distributional == "c51":
            raise HurtleError("rescale_values needs distributional='none' or 'qr': the values of c51's atoms are fixed.")


ALGORITHM = Algorithm(
    DQNConfig,
    {
        "general": "hurtle.algorithms.dqn:DQN",
        "native": "hurtle.algorithms.off_policy_native:NativeDQN",
        "device": "hurtle.algorithms.dqn:DQN",
    },
    network="hurtle.algorithms.dqn:make_network",
    defaults={"activation": "relu", "hidden_sizes": (120, 84), "orthogonal_init": False},
    takes_lag=True,
)
