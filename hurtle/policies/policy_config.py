"""The settings of a policy's network, separate from the networks: `hurtle train --help` reads them without importing torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar, get_args, get_type_hints

from hurtle.ranges import at_least

Config = TypeVar("Config")


@dataclass(frozen=True)
class PolicyConfig:
    """Which network a policy has."""

    policy: str = "auto"
    """auto, mlp, grid_cnn, nature_cnn, structured, or my_policy.py:Class."""
    hidden_sizes: Annotated[tuple[int, ...], at_least(1)] = (64, 64)
    """Widths of the hidden layers (mlp, structured)."""
    activation: Literal["tanh", "relu"] = "tanh"
    """tanh or relu (mlp, structured; CNNs have relu)."""
    layer_norm: bool = False
    """Layer norm before each activation."""
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


def config_from_saved(cls: type[Config], settings: Mapping[str, Any]) -> Config:
    """A config among the flat settings of a checkpoint, which have lists for tuples and "none" for None.

    Example:
        >>> config_from_saved(PolicyConfig, {"hidden_sizes": [32], "separate_networks": "none", "gamma": 0.9}).hidden_sizes
        (32,)
    """
    saved = {}
    for name, kind in get_type_hints(cls).items():
        if name in settings:
            value = settings[name]
            is_none = value == "none" and type(None) in get_args(kind)
            saved[name] = None if is_none else tuple(value) if isinstance(value, list) else value
    return cls(**saved)
