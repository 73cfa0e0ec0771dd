"""The settings of PQN and where its learners are; separate from pqn.py, since `hurtle train --help` must not import torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from hurtle.algorithms.algorithm import Algorithm, AlgorithmConfig
from hurtle.algorithms.ppo_config import check_divides, segments_per_minibatch
from hurtle.algorithms.replay_settings import EpsilonConfig
from hurtle.ranges import at_least, between, positive


@dataclass(frozen=True)
class PQNConfig(EpsilonConfig, AlgorithmConfig):
    """PQN."""

    num_steps: Annotated[int, at_least(1)] = 32
    """Steps per env and rollout."""
    minibatch_size: Annotated[int, at_least(1)] = 256
    """Steps per gradient step; divides the batch."""
    num_epochs: Annotated[int, at_least(1)] = 2
    """Passes over each rollout."""
    learning_rate: Annotated[float, positive()] = 2.5e-4
    """Step size of Adam."""
    anneal_learning_rate: bool = True
    """Anneal it linearly to 0 over the run."""
    gamma: Annotated[float, between(0, 1)] = 0.99
    """Discount of future rewards."""
    return_lambda: Annotated[float, between(0, 1)] = 0.65
    """λ-returns: bias (0: one step) against variance (1)."""
    epsilon_fraction: Annotated[float, between(0, 1)] = 0.1
    """after this part of the run."""
    max_grad_norm: Annotated[float, positive(allows_infinity=True)] = 10.0
    """Clip the global norm of the gradients to this."""
    adam_eps: Annotated[float, positive()] = 1e-5
    """Added to Adam's denominator."""
    shuffle: bool = True
    """Draw minibatches at random, else in order."""
    dueling: bool = False
    """Q = state value + advantages."""
    priority_alpha = 0.0  # not a setting

    def check(self, num_rows: int, is_recurrent: bool) -> None:
        """See `AlgorithmConfig.check`."""
        check_divides(self.num_steps * num_rows, self.minibatch_size)
        if is_recurrent:
            segments_per_minibatch(self.minibatch_size, self.num_steps)


ALGORITHM = Algorithm(
    PQNConfig,
    {"general": "hurtle.algorithms.pqn:PQN", "device": "hurtle.algorithms.pqn_device:DevicePQN"},
    network="hurtle.algorithms.pqn:make_network",
    defaults={"activation": "relu", "hidden_sizes": (128, 128), "orthogonal_init": False, "layer_norm": True},
)
