"""The settings of the algorithms, apart from their code: `hurtle train --help` reads them without importing torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PPOConfig:
    """PPO."""

    num_steps: int = 128
    """Steps per env and rollout."""
    minibatch_size: int = 256
    """Steps per gradient step; divides the batch."""
    num_epochs: int = 4
    """Passes over each rollout."""
    learning_rate: float = 2.5e-4
    """Step size of the optimizer."""
    anneal_learning_rate: bool = True
    """Lower the rate linearly to 0 over the run."""
    gamma: float = 0.99
    """Discount of future rewards."""
    gae_lambda: float = 0.95
    """GAE's trade of bias (0) against variance (1)."""
    clip_range: float = 0.2
    """How far the probability ratio may leave 1."""
    anneal_clip_range: bool = False
    """Lower the range linearly to 0 over the run."""
    clip_values: bool = True
    """Clip the values' change by clip_range too."""
    entropy_coef: float = 0.01
    """Weight of the entropy bonus (exploration)."""
    value_coef: float = 0.5
    """Weight of the value loss."""
    max_grad_norm: float = 0.5
    """Bound of the global norm of the gradients."""
    normalize_advantages: bool = True
    """To mean 0 and std 1 in each minibatch."""
    target_kl: float | None = None
    """End an update's epochs early beyond this KL."""
    shuffle: bool = True
    """Draw minibatches at random, else in order."""
    priority_alpha: float = 0.0
    """Draw segments by (sum |advantage|)^alpha; 0: off."""
    priority_beta: float = 0.2
    """Their importance weights' exponent; rises to 1."""
    vtrace: bool = False
    """V-trace: correct steps of older policies."""
    rho_clip: float = 1.0
    """V-trace: bound of the ratio in the TD errors."""
    c_clip: float = 1.0
    """V-trace: bound of the ratio in the traces."""
    optimizer: str = "adam"
    """adam, adamw, rmsprop or muon."""
    adam_eps: float = 1e-5
    """Added to the optimizer's denominator."""
    weight_decay: float = 0.0
    """Weight decay of the optimizer."""


@dataclass(frozen=True)
class A2CConfig:
    """A2C."""

    num_steps: int = 5
    """Steps per env and rollout."""
    learning_rate: float = 7e-4
    """Step size of the optimizer."""
    anneal_learning_rate: bool = False
    """Lower the rate linearly to 0 over the run."""
    gamma: float = 0.99
    """Discount of future rewards."""
    gae_lambda: float = 1.0
    """Bias (0) against variance (1: n-step returns)."""
    entropy_coef: float = 0.01
    """Weight of the entropy bonus (exploration)."""
    value_coef: float = 0.5
    """Weight of the value loss."""
    max_grad_norm: float = 0.5
    """Bound of the global norm of the gradients."""
    normalize_advantages: bool = False
    """To mean 0 and std 1 in each rollout."""
    optimizer: str = "rmsprop"
    """rmsprop, adam, adamw or muon."""
    adam_eps: float = 1e-5
    """Added to the optimizer's denominator."""
    weight_decay: float = 0.0
    """Weight decay of the optimizer."""
