"""`TorchPolicy`: the two methods a user's torch module has, for our trainer, SB3 and CleanRL-style loops alike.

obs → encode → features → decode → (action distribution, value). Knows nothing of the library that trains it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn
from torch import distributions as td

from hurtle.errors import HurtleError
from hurtle.policies.action_head import ActionHead
from hurtle.policies.distributions import (
    Beta,
    Categorical,
    Distribution,
    Gaussian,
    MultiCategorical,
    SquashedGaussian,
    TorchDistribution,
    adapted,
)


@runtime_checkable
class TorchPolicy(Protocol):
    """A `torch.nn.Module` with these two methods; a recurrent memory can sit between them.

    `obs` is what the env's observation space describes, with a leading batch axis: uint8 images stay uint8, Dict observations
    are dicts of tensors, and emulated ones are flat, ready for `unflatten`. Casting and scaling are up to the module.

    Example:
        >>> class Net(nn.Module):
        ...     def __init__(self, observation_space, action_space):
        ...         super().__init__()
        ...         self.body = nn.Linear(observation_space.shape[0], 8)
        ...         self.actor, self.critic = nn.Linear(8, int(action_space.n)), nn.Linear(8, 1)
        ...
        ...     def encode(self, obs):
        ...         return self.body(obs).tanh()
        ...
        ...     def decode(self, features):
        ...         return td.Categorical(logits=self.actor(features)), self.critic(features)
        >>> from gymnasium.spaces import Box, Discrete
        >>> isinstance(Net(Box(-1, 1, (4,)), Discrete(2)), TorchPolicy)
        True
    """

    def encode(self, obs: Any) -> Tensor:
        """Features of a batch of observations, `[batch, features]`."""

    def decode(self, features: Tensor) -> tuple[td.Distribution | Distribution, Tensor]:
        """The action distribution, torch's or ours, and the values, `[batch]` or `[batch, 1]`."""


def checked_policy(policy: Any) -> nn.Module:
    """`policy` itself; raises an error that says what it lacks."""
    if not isinstance(policy, nn.Module) or not isinstance(policy, TorchPolicy):
        name = policy.__name__ if isinstance(policy, type) else type(policy).__name__
        raise HurtleError(
            f"A policy is a torch.nn.Module with two methods, encode(obs) -> features and decode(features) -> (distribution, "
            f"value); {name} {_lacks(policy)}."
        )
    return policy


def _lacks(policy: Any) -> str:
    missing = [name for name in ("encode", "decode") if not hasattr(policy, name)]
    return f"has no {' and no '.join(missing)}" if missing else "is not a torch.nn.Module"


def evaluate(policy: Any, obs: Any) -> tuple[td.Distribution, Tensor]:
    """The torch action distribution and the values `[batch, 1]` for a batch of observations, for other libraries' loops."""
    distribution, value = policy.decode(policy.encode(obs))
    if not isinstance(distribution, td.Distribution):
        raise HurtleError(
            f"{type(policy).__name__}.decode must return (torch.distributions.Distribution, value); the first is a "
            f"{type(distribution).__name__}. For logits: return Categorical(logits=logits), value."
        )
    return distribution, value.reshape(-1, 1)


def per_row(quantity: Tensor) -> Tensor:
    """Log-probabilities or entropies as `[batch]`: summed over an action's independent parts.

    Example:
        >>> per_row(Tensor([[-1.0, -2.0], [-3.0, -4.0]]))
        tensor([-3., -7.])
    """
    return quantity.flatten(1).sum(1) if quantity.ndim > 1 else quantity


def check_network(network: nn.Module, obs: Tensor) -> tuple[int, Distribution]:
    """Run a network once and check its outputs against the contract.

    Args:
        network: A `TorchPolicy`.
        obs: A batch of at least two observations.

    Returns:
        The width of its features, and its distribution as one of ours.

    Raises:
        HurtleError: A wrong type or shape, or an exception inside the network; names the method.
    """
    rows, name = len(obs), type(network).__name__
    features = _called(network.encode, obs, f"{name}.encode")  # type: ignore[arg-type]
    if not isinstance(features, Tensor) or features.ndim != 2 or len(features) != rows:
        raise HurtleError(f"{name}.encode must return features [batch, features], here [{rows}, ...]; got {_kind(features)}.")
    decoded = _called(network.decode, features, f"{name}.decode")  # type: ignore[arg-type]
    if not isinstance(decoded, tuple) or len(decoded) != 2:
        raise HurtleError(f"{name}.decode must return a tuple (distribution, value); got {_kind(decoded)}.")
    distribution, value = decoded
    if not isinstance(distribution, td.Distribution | Distribution):
        raise HurtleError(
            f"{name}.decode must return (distribution, value); the first is {_kind(distribution)}, not a distribution of "
            "torch.distributions or hurtle.policies.distributions. For logits: return Categorical(logits=logits), value."
        )
    if not isinstance(value, Tensor) or tuple(value.shape) not in ((rows,), (rows, 1)):
        raise HurtleError(f"{name}.decode must return values [batch] or [batch, 1], here [{rows}]; got {_kind(value)}.")
    return features.shape[1], adapted(distribution)


def check_distribution(distribution: Distribution, head: ActionHead, name: str) -> None:
    """Check the distribution of a user's network against the action space.

    Raises:
        HurtleError: It covers other actions, or torch cannot compute its entropy.
    """
    if isinstance(distribution, TorchDistribution):
        _check_entropy(distribution, name)
    space, wanted, got = head.action_space, f"{head.num_outputs} logits", type(distribution).__name__
    if head.kind == "categorical":
        fits = isinstance(distribution, Categorical) and distribution.log_probs.shape[1] == head.num_outputs
    elif head.kind == "multi_categorical":
        fits = isinstance(distribution, MultiCategorical) and distribution.nvec == head.nvec
        wanted += f", a MultiCategorical with nvec={head.nvec}"
    else:
        wanted = f"{head.action_shape[0]} continuous numbers"
        fits = not isinstance(distribution, Categorical | MultiCategorical)
        fits = fits and distribution.mode().shape[1:] == head.action_shape and distribution.mode().is_floating_point()
    if isinstance(distribution, Categorical):
        got += f" over {distribution.log_probs.shape[1]} actions"
    elif isinstance(distribution, MultiCategorical):
        got += f" with nvec={distribution.nvec}"
    elif not fits:
        got += f" over actions of shape {tuple(distribution.mode().shape[1:])}"
    if not fits:
        raise HurtleError(f"{name}.decode: the action space {space} needs a distribution over {wanted}; got a {got}.")


def kind_of_actions(distribution: Distribution) -> str:
    """The `distribution` argument of the `ActionHead` that handles the raw actions of a user's network."""
    kinds = {Gaussian: "gaussian", SquashedGaussian: "squashed_gaussian", Beta: "beta"}
    return kinds.get(type(distribution), "auto")


def _check_entropy(distribution: TorchDistribution, name: str) -> None:
    try:
        distribution.entropy()
    except NotImplementedError:
        raise HurtleError(
            f"{name}.decode: torch has no entropy for {type(distribution.distribution).__name__}. Return one of "
            "hurtle.policies.distributions instead, such as SquashedGaussian(mean, log_std) for a tanh-squashed normal."
        ) from None


def _called(method: Callable[[Tensor], Any], argument: Tensor, name: str) -> Any:
    try:
        return method(argument)
    except HurtleError:
        raise
    except Exception as error:
        raise HurtleError(f"{name} failed on {_kind(argument)}: {type(error).__name__}: {error}") from error


def _kind(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor {list(value.shape)} of {str(value.dtype).removeprefix('torch.')}"
    if isinstance(value, tuple):
        return f"a tuple of {len(value)}"
    return f"a {type(value).__name__}"
