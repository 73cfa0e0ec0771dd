"""The settings of a policy's network, apart from the networks: `hurtle train --help` reads them without importing torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PolicyConfig:
    """What network a policy has."""

    policy: str = "auto"
    """auto, mlp, grid_cnn, nature_cnn, structured, or my_policy.py:Class."""
    hidden_sizes: tuple[int, ...] = (64, 64)
    """Widths of the hidden layers (mlp, structured)."""
    activation: str = "tanh"
    """tanh or relu (mlp, structured; CNNs have relu)."""
    separate_networks: bool | None = None
    """Actor, critic apart; none: mlp without memory."""
    distribution: str = "auto"
    """Box: auto, gaussian, squashed_gaussian or beta."""
    log_std_init: float = 0.0
    """Where a Gaussian's log standard deviation begins."""
    orthogonal_init: bool = True
    """PPO's orthogonal weights and zero biases."""
    recurrent: str = "none"
    """Memory: none, lstm, gru, mingru."""
