"""The settings of R2D2 and where its learner is; separate from r2d2.py, since `hurtle train --help` must not import torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from hurtle.algorithms.algorithm import Algorithm
from hurtle.algorithms.replay_settings import EpsilonConfig, ReplayConfig
from hurtle.errors import HurtleError
from hurtle.ranges import at_least, between, positive


@dataclass(frozen=True)
class R2D2Config(EpsilonConfig, ReplayConfig):
    """R2D2."""

    num_steps: Annotated[int, at_least(1)] = 40
    """Steps per env between updates; sequences begin that far apart."""
    sequence_length: Annotated[int, at_least(2)] = 80
    """Steps of a sequence, those of the burn-in included."""
    burn_in: Annotated[int, at_least(0)] = 40
    """Steps that only bring the memory up to date."""
    stored_state: bool = True
    """Begin sequences with the memory's state at that time, else with zeros."""
    replay_ratio: Annotated[float, positive()] = 0.0125
    """Gradient steps per step of an env."""
    learning_starts: Annotated[int, at_least(0)] = 5_000
    """Random steps before the first gradient step."""
    batch_size: Annotated[int, at_least(1)] = 64
    """Sequences per gradient step."""
    learning_rate: Annotated[float, positive()] = 5e-4
    """Step size of Adam."""
    gamma: Annotated[float, between(0, 1)] = 0.997
    """Discount of future rewards."""
    n_step: Annotated[int, at_least(1)] = 5
    """Rewards that are summed before bootstrapping."""
    target_rate: Annotated[float, between(0, 1)] = 1.0
    """How far target networks move toward the trained ones …"""
    target_every: Annotated[int, at_least(1)] = 20
    """… once every this many gradient steps."""
    max_grad_norm: Annotated[float, positive(allows_infinity=True)] = 40.0
    """Clip the global norm of the gradients to this."""
    adam_eps: Annotated[float, positive()] = 1e-5
    """Added to Adam's denominator."""
    capacity: Annotated[int, at_least(1)] = 200_000
    """Steps that the replay buffer holds."""
    priority_alpha: Annotated[float, at_least(0)] = 0.9
    """Draw by (TD error)^alpha; 0: uniformly."""
    priority_beta: Annotated[float, between(0, 1)] = 0.6
    """Exponent of the importance weights; anneals to 1."""
    priority_max: Annotated[float, between(0, 1)] = 0.9
    """A sequence's TD error: this share of the largest, else the mean."""
    epsilon_ladder: Annotated[float, at_least(0)] = 7.0
    """async: of N actors, number i takes ε^(1 + ladder · i / (N − 1))."""
    double: bool = True
    """The trained network chooses, the target network evaluates."""
    dueling: bool = True
    """Q = state value + advantages."""
    rescale_values: bool = True
    """Learn roughly the square root of the value."""

    def check(self, num_rows: int, is_recurrent: bool) -> None:
        """See `AlgorithmConfig.check`."""
        if not is_recurrent:
            raise HurtleError("r2d2 learns with a memory: set recurrent='lstm', 'gru' or 'mingru', or use dqn.")
        if self.burn_in > self.sequence_length - 2:
            raise HurtleError(
                f"burn_in={self.burn_in} leaves nothing to learn from in sequences of {self.sequence_length} steps: at most "
                f"{self.sequence_length - 2}."
            )


ALGORITHM = Algorithm(
    R2D2Config,
    {"general": "hurtle.algorithms.r2d2:R2D2", "device": "hurtle.algorithms.r2d2:R2D2"},
    network="hurtle.algorithms.r2d2:make_network",
    defaults={
        "runner": "auto",
        "recurrent": "lstm",
        "activation": "relu",
        "hidden_sizes": (64, 64),
        "orthogonal_init": False,
    },
    takes_lag=True,
    num_actors=4,
)
