"""The settings of A2C and where its learners are; separate from a2c.py, since `hurtle train --help` must not import torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from hurtle.algorithms.algorithm import Algorithm, AlgorithmConfig
from hurtle.ranges import at_least, between, positive


@dataclass(frozen=True)
class A2CConfig(AlgorithmConfig):
    """A2C."""

    num_steps: Annotated[int, at_least(1)] = 5
    """Steps per env and rollout."""
    learning_rate: Annotated[float, positive()] = 7e-4
    """Step size of the optimizer."""
    anneal_learning_rate: bool = False
    """Anneal it linearly to 0 over the run."""
    gamma: Annotated[float, between(0, 1)] = 0.99
    """Discount of future rewards."""
    gae_lambda: Annotated[float, between(0, 1)] = 1.0
    """Bias (0) against variance (1: n-step returns)."""
    entropy_coef: Annotated[float, at_least(0)] = 0.01
    """Weight of the entropy bonus (exploration)."""
    value_coef: Annotated[float, at_least(0)] = 0.5
    """Weight of the value loss."""
    max_grad_norm: Annotated[float, positive(allows_infinity=True)] = 0.5
    """Clip the global norm of the gradients to this."""
    normalize_advantages: bool = False
    """Scale to mean 0, std 1 in each rollout."""
    optimizer: Literal["adam", "adamw", "rmsprop", "muon"] = "rmsprop"
    """rmsprop, adam, adamw or muon."""
    adam_eps: Annotated[float, positive()] = 1e-5
    """Added to the optimizer's denominator."""
    weight_decay: Annotated[float, at_least(0)] = 0.0
    """Weight decay of the optimizer."""


ALGORITHM = Algorithm(
    A2CConfig,
    {
        "general": "hurtle.algorithms.a2c:A2C",
        "native": "hurtle.algorithms.a2c_native:NativeA2C",
        "device": "hurtle.algorithms.a2c_device:DeviceA2C",
    },
    side_by_side=True,
)
