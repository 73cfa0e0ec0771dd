"""`kind_of`: what can be known of an env before training, for the settings of envs that have no preset of their own.

env, parameters → spaces of one agent → kind. Makes one env that is not native; makes no vector and imports no torch.
"""

from __future__ import annotations

import contextlib
from typing import Any, Literal

import gymnasium
import numpy as np
from gymnasium import spaces

Kind = Literal["continuous", "discrete", "image", ""]
"""Numbers or choices as actions, for vectors of floats; images; "" for everything else, such as structured observations."""


def kind_of(env: Any, parameters: dict[str, Any]) -> Kind:
    """The kind of an env, "" also if it cannot be made: the training says why.

    Args:
        env: As `hurtle.train` takes it.
        parameters: Of the env.

    Example:
        >>> kind_of("pendulum", {}), kind_of("cartpole", {}), kind_of("breakout", {})
        ('continuous', 'discrete', 'image')
    """
    with contextlib.suppress(Exception):
        return _kind(*_spaces(env, parameters))
    return ""


def _spaces(env: Any, parameters: dict[str, Any]) -> tuple[spaces.Space, spaces.Space]:
    """Observations and actions of one agent."""
    from hurtle.envs.registry import make, resolve
    from hurtle.native.env import Env

    if isinstance(env, gymnasium.vector.VectorEnv):
        found: Any = env
        names = ("agent_observation_space", "single_observation_space"), ("agent_action_space", "single_action_space")
        observation, action = (getattr(found, own, None) or getattr(found, shared) for own, shared in names)
        return observation, action
    resolved: Any = resolve(env, parameters)
    if isinstance(resolved, Env):
        return resolved.observation_space, resolved.action_space
    made = make(env, **parameters)
    try:
        if callable(made.observation_space):
            agent = made.possible_agents[0]
            return made.observation_space(agent), made.action_space(agent)
        return made.observation_space, made.action_space
    finally:
        made.close()


def _kind(observation: spaces.Space, action: spaces.Space) -> Kind:
    if not isinstance(observation, spaces.Box):
        is_choice = isinstance(observation, spaces.Discrete | spaces.MultiDiscrete | spaces.MultiBinary)
        return "discrete" if is_choice and not isinstance(action, spaces.Box) else ""
    if len(observation.shape) == 3:
        return "image"
    if isinstance(action, spaces.Box):
        return "continuous" if np.issubdtype(observation.dtype, np.floating) else ""
    return "discrete"
