"""`register_env`: registers Hurtle's envs with RLlib.

name → creator → a new env in each of RLlib's runners: a Gymnasium env as it is, a PettingZoo env in RLlib's wrapper.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import gymnasium

from hurtle.envs.registry import EnvLike, make
from hurtle.errors import HurtleError

_INSTALL = 'Registering an env with RLlib needs Ray with RLlib: pip install "hurtle[rllib]"'


def register_env(name: str, env: EnvLike | None = None, **parameters: Any) -> Callable[[Mapping[str, Any]], Any]:
    """Register an env with RLlib by name: `PPOConfig().environment(name)`.

    The entries of RLlib's `env_config` are env parameters too, and take precedence over `parameters`.

    Args:
        name: The name in RLlib's registry.
        env: An env as `hurtle.make` takes it; `name` by default.
        **parameters: Parameters of the env, such as `gravity=1.6`.

    Returns:
        The registered creator; `creator({})` makes the env.
    """
    try:
        from ray.tune.registry import register_env as ray_register_env
    except ImportError as error:
        raise HurtleError(f"{_INSTALL} ({error}).") from error
    creator = env_creator(name if env is None else env, **parameters)
    ray_register_env(name, creator)
    return creator


def env_creator(env: EnvLike, **parameters: Any) -> Callable[[Mapping[str, Any]], Any]:
    """A function of RLlib's `env_config` that makes the env; Ray pickles it to the runners."""

    def create(config: Mapping[str, Any]) -> Any:
        return _for_rllib(make(env, **{**parameters, **config}))

    return create


def _for_rllib(made: Any) -> Any:
    if isinstance(made, gymnasium.Env):
        agents = getattr(made.unwrapped, "num_agents", 1)
        if agents > 1:
            raise HurtleError(
                f"{made} has {agents} agents in one array; RLlib needs a dict with one entry per agent. "
                "Register a PettingZoo ParallelEnv instead."
            )
        return made
    try:
        from ray.rllib.env.wrappers.pettingzoo_env import ParallelPettingZooEnv, PettingZooEnv
    except ImportError as error:
        raise HurtleError(f"{_INSTALL} ({error}).") from error
    turn_based = hasattr(made, "agent_iter")
    return PettingZooEnv(made) if turn_based else ParallelPettingZooEnv(made)
