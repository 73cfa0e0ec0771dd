"""`build_policy`: from a config and two spaces to a `Policy`, checked by one forward pass on zero observations.

PolicyConfig, spaces → network (ours or the user's) → memory, normalizer → Policy. Knows nothing of envs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn

from hurtle.emulation.flat_layout import SpaceLayout
from hurtle.errors import HurtleError, UnknownNameError, did_you_mean
from hurtle.policies.action_head import ActionHead
from hurtle.policies.cnn import NATURE_SIDE, GridCNN, NatureCNN, grid_body, image_shape, nature_body
from hurtle.policies.contract import check_distribution, check_network, checked_policy, kind_of_actions
from hurtle.policies.distributions import Distribution
from hurtle.policies.mlp import MLP, VectorBody
from hurtle.policies.normalizers import ObservationNormalizer
from hurtle.policies.policy import Policy
from hurtle.policies.policy_config import PolicyConfig
from hurtle.policies.recurrent import make_memory
from hurtle.policies.structured import Structured, StructuredBody
from hurtle.references import is_reference, load_reference

MakeNetwork = Callable[[ActionHead, Callable[[], nn.Module]], nn.Module]
"""Called as `make(head, make_body)`; a body maps observations to features and has the attribute `num_features`."""
NETWORKS = ("auto", "mlp", "grid_cnn", "nature_cnn", "structured")
_TRIAL_ROWS = 2


def build_policy(
    config: PolicyConfig,
    observation_space: spaces.Space,
    action_space: spaces.Space,
    layout: SpaceLayout | None = None,
    normalize_observations: bool = False,
    observation_clip: float = 10.0,
    module: nn.Module | Callable[..., nn.Module] | None = None,
    seed: int = 0,
    make_network: MakeNetwork | None = None,
) -> Policy:
    """Build the policy for one row.

    Args:
        config: Which network.
        observation_space: The space of one row, flat if emulated.
        action_space: The space of one row, flat if emulated.
        layout: How a flat observation encodes the structured one; None if there is no structure.
        normalize_observations: Give it an `ObservationNormalizer`.
        observation_clip: Bound that normalized observations are clipped to.
        module: The user's own network, see `TorchPolicy`: a module, which is trained in place, or a class, which is called
            with the two spaces.
        seed: Seed of the initial weights; torch's global generator is left as it was.
        make_network: The algorithm's own network around our bodies; None: an actor–critic.

    Raises:
        HurtleError: Spaces, config and network do not fit together; says what was expected and what was given.

    Example:
        >>> policy = build_policy(PolicyConfig(recurrent="lstm"), spaces.Box(-1, 1, (4,)), spaces.Discrete(2))
        >>> state = policy.initial_state(rows=3)
        >>> distribution, value, state = policy(torch.zeros(3, 4), state)
        >>> distribution.sample(torch.full((3, policy.num_uniforms), 0.9)), value.shape, state[0].shape
        (tensor([1, 1, 1]), torch.Size([3]), torch.Size([3, 64]))
    """
    _check_sizes(config.hidden_sizes)
    normalizer = _normalizer(observation_space, observation_clip) if normalize_observations else None
    is_users = module is not None or is_reference(config.policy)
    with torch.random.fork_rng(devices=[]), torch.inference_mode(False):
        torch.default_generator.manual_seed(seed)  # CPU only: networks are moved to a GPU later
        distribution = config.distribution
        if distribution == "auto" and make_network is not None and isinstance(action_space, spaces.Box):
            distribution = "squashed_gaussian"  # off-policy actors end in a tanh
        head = ActionHead(action_space, distribution)
        if is_users:
            users = load_reference(config.policy) if module is None else module
            network = _users_network(users, observation_space, action_space)
        else:
            network = _own_network(config, observation_space, head, layout, make_network)
        features, sampled = _trial(network, _zeros(observation_space, normalizer))
        if is_users:
            if isinstance(action_space, spaces.Box):  # the user's distribution defines what raw actions mean
                head = ActionHead(action_space, kind_of_actions(sampled))
            check_distribution(sampled, head, type(network).__name__)
        memory = make_memory(config.recurrent, features)
    return Policy(observation_space, action_space, network, head, memory, normalizer, sampled.num_uniforms)


def _users_network(given: Any, observation_space: spaces.Space, action_space: spaces.Space) -> nn.Module:
    """A module as is; a class or function is called with the two spaces."""
    is_maker = callable(given) and not isinstance(given, nn.Module)
    if not is_maker or (isinstance(given, type) and not issubclass(given, nn.Module)):
        return checked_policy(given)
    try:
        return checked_policy(given(observation_space, action_space))
    except HurtleError:
        raise
    except Exception as error:
        name = getattr(given, "__name__", type(given).__name__)
        raise HurtleError(f"{name}(observation_space, action_space) failed: {type(error).__name__}: {error}") from error


def _own_network(
    config: PolicyConfig, space: spaces.Space, head: ActionHead, layout: SpaceLayout | None, make_network: MakeNetwork | None
) -> nn.Module:
    if config.policy not in NETWORKS:
        raise UnknownNameError(
            f"No policy {config.policy!r}. {did_you_mean(config.policy, NETWORKS)} Your own: my_policy.py:Class."
        )
    if layout is not None and layout.is_plain and not isinstance(layout.space, spaces.Box):
        space = layout.space  # a Discrete or MultiDiscrete flattened to a Box of integers
    kind = config.policy if config.policy != "auto" else _network_for(space, layout)
    if kind == "structured" and layout is None:
        raise HurtleError(f"policy='structured' needs an emulated env, but its observations are {space}; use 'auto'.")
    if make_network is not None:
        if config.separate_networks or config.log_std_init:
            raise HurtleError("separate_networks and log_std_init are settings of an actor–critic: ppo's and a2c's.")
        return make_network(head, _body_maker(kind, config, space, layout))
    has_memory = config.recurrent != "none"
    if config.separate_networks and has_memory:
        raise HurtleError(
            f"separate_networks needs a policy without memory, but recurrent is {config.recurrent!r}: its state is shared by "
            "actor and critic. Set recurrent='none', or leave separate_networks unset."
        )
    separate = kind == "mlp" and not has_memory if config.separate_networks is None else config.separate_networks
    ends = (separate, config.orthogonal_init, config.log_std_init, config.layer_norm)
    if kind == "structured":
        assert layout is not None
        return Structured(layout, head, config.hidden_sizes, config.activation, *ends)
    if kind == "mlp":
        return MLP(space, head, config.hidden_sizes, config.activation, *ends)
    return (NatureCNN if kind == "nature_cnn" else GridCNN)(space, head, *ends)


def _body_maker(kind: str, config: PolicyConfig, space: spaces.Space, layout: SpaceLayout | None) -> Callable[[], nn.Module]:
    """What makes bodies for observations; each call makes a new one."""
    if kind in ("nature_cnn", "grid_cnn"):
        image_body = nature_body if kind == "nature_cnn" else grid_body
        return partial(image_body, space, config.orthogonal_init, config.layer_norm)
    settings = (config.hidden_sizes, config.activation, config.orthogonal_init, config.layer_norm)
    if kind == "mlp":
        return partial(VectorBody, space, *settings)
    assert layout is not None
    return partial(StructuredBody, layout, *settings)


def _network_for(space: spaces.Space, layout: SpaceLayout | None) -> str:
    if layout is not None and not layout.is_plain:
        return "structured"
    if isinstance(space, spaces.Box) and len(space.shape) == 3 and prod(space.shape) > 0:
        return "nature_cnn" if min(image_shape(space.shape)[1:]) >= NATURE_SIDE else "grid_cnn"
    return "mlp"


def _check_sizes(sizes: Sequence[int]) -> None:
    is_known = isinstance(sizes, Sequence) and not isinstance(sizes, str)
    if not is_known or not all(isinstance(size, int | np.integer) and size >= 1 for size in sizes):
        raise HurtleError(f"hidden_sizes must be a tuple of positive widths, such as (64, 64); got {sizes!r}.")


def _normalizer(space: spaces.Space, clip: float) -> ObservationNormalizer:
    if not isinstance(space, spaces.Box) or space.dtype.kind != "f":
        raise HurtleError(
            f"normalize_observations needs float observations, got {space}. Networks scale images and encode "
            "integers themselves: set normalize_observations=False."
        )
    return ObservationNormalizer(space.shape, clip)


def _zeros(space: spaces.Space, normalizer: ObservationNormalizer | None) -> Tensor:
    """A batch of zero observations, as the policy sees them."""
    if space.shape is None or space.dtype is None or isinstance(space, spaces.Text):
        raise HurtleError(f"A policy takes flat observations, got {space}; hurtle.emulate(env) flattens them.")
    obs = torch.from_numpy(np.zeros((_TRIAL_ROWS, *space.shape), space.dtype))
    if normalizer is not None:
        return normalizer.normalize(obs)
    return obs.float() if obs.is_floating_point() else obs  # rollouts store float32 whatever the space says


def _trial(network: nn.Module, obs: Tensor) -> tuple[int, Distribution]:
    """Run the network once, without changing its running statistics."""
    parameter = next(network.parameters(), None)
    was_training = network.training
    network.eval()
    try:
        with torch.no_grad():
            return check_network(network, obs if parameter is None else obs.to(parameter.device))
    finally:
        network.train(was_training)
