"""`TorchPolicy`: what a torch module needs so that SB3's and CleanRL-style loops can train it.

obs → encode → features → decode → (distribution of actions, value). Knows nothing of the library that trains it.
"""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn
from torch.distributions import Distribution

from hurtle.errors import HurtleError


@runtime_checkable
class TorchPolicy(Protocol):
    """A `torch.nn.Module` with these two methods; a recurrent cell can later stand between them.

    `obs` comes as the env's observation space says, with a leading batch axis: uint8 images stay uint8, Dict observations are
    dicts of tensors, and emulated ones are flat, ready for `unflatten`. Casting and scaling are the module's own business.
    """

    def encode(self, obs: Any) -> torch.Tensor:
        """Features of a batch of observations, `[batch, features]`."""

    def decode(self, features: torch.Tensor) -> tuple[Distribution, torch.Tensor]:
        """The distribution of actions and the values, `[batch]` or `[batch, 1]`."""


def checked_policy(policy: Any) -> nn.Module:
    """`policy`, or an error that says what is missing in it."""
    if not isinstance(policy, nn.Module) or not isinstance(policy, TorchPolicy):
        raise HurtleError(
            f"A policy is a torch.nn.Module with two methods, encode(obs) -> features and decode(features) -> (distribution, "
            f"value); {type(policy).__name__} {_lacks(policy)}."
        )
    return policy


def _lacks(policy: Any) -> str:
    missing = [name for name in ("encode", "decode") if not hasattr(policy, name)]
    return f"has no {' and no '.join(missing)}" if missing else "is no torch.nn.Module"


def evaluate(policy: Any, obs: Any) -> tuple[Distribution, torch.Tensor]:
    """The distribution of actions and the values `[batch, 1]` for a batch of observations."""
    distribution, value = policy.decode(policy.encode(obs))
    if not isinstance(distribution, Distribution):
        raise HurtleError(
            f"{type(policy).__name__}.decode must return (torch.distributions.Distribution, value); the first is a "
            f"{type(distribution).__name__}. For logits: return Categorical(logits=logits), value."
        )
    return distribution, value.reshape(-1, 1)


def per_row(quantity: torch.Tensor) -> torch.Tensor:
    """Log-probabilities or entropies as `[batch]`: those of an action's independent parts are summed.

    Example:
        >>> per_row(torch.tensor([[-1.0, -2.0], [-3.0, -4.0]]))
        tensor([-3., -7.])
    """
    return quantity.flatten(1).sum(1) if quantity.ndim > 1 else quantity
