"""The settings of a policy's network, separate from the networks: `hurtle train --help` reads them without importing torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal

from hurtle.ranges import at_least


@dataclass(frozen=True)
class PolicyConfig:
    """Which network a policy has."""

    policy: str = "auto"
    """auto, mlp, grid_cnn, nature_cnn, structured, or my_policy.py:Class."""
    hidden_sizes: Annotated[tuple[int, ...], at_least(1)] = (64, 64)
    """Widths of the hidden layers (mlp, structured)."""
    activation: Literal["tanh", "relu"] = "tanh"
    """tanh or relu (mlp, structured; CNNs have relu)."""
    separate_networks: bool | None = None
    """Separate actor, critic; none: mlp without memory."""
    distribution: Literal["auto", "gaussian", "squashed_gaussian", "beta"] = "auto"
    """Box: auto, gaussian, squashed_gaussian or beta."""
    log_std_init: float = 0.0
    """Initial log standard deviation of a Gaussian."""
    orthogonal_init: bool = True
    """PPO's orthogonal weights and zero biases."""
    recurrent: Literal["none", "lstm", "gru", "mingru"] = "none"
    """Memory: none, lstm, gru, mingru."""

    @classmethod
    def from_saved(cls, settings: Mapping[str, Any]) -> PolicyConfig:
        """The config among the flat settings of a checkpoint, which have lists for tuples and "none" for None.

        Example:
            >>> PolicyConfig.from_saved({"hidden_sizes": [32], "separate_networks": "none", "gamma": 0.9}).hidden_sizes
            (32,)
        """
        saved: dict[str, Any] = {field.name: settings[field.name] for field in fields(cls) if field.name in settings}
        if saved.get("separate_networks") == "none":
            saved["separate_networks"] = None
        if "hidden_sizes" in saved:
            saved["hidden_sizes"] = tuple(saved["hidden_sizes"])
        return cls(**saved)
