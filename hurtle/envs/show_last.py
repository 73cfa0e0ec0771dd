"""`show_last=True`: shows the last action and reward beside the observation, for policies with a memory.

A parameter of every env with one agent and Discrete actions: adds numbers to a flat observation, and planes to a grid.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from hurtle.errors import HurtleError
from hurtle.native.dtypes import float32, int32
from hurtle.native.env import Env

NAME = "show_last"
"""The parameter."""


def with_last(env: Env | Callable[..., Any], parameters: dict[str, Any]) -> Env | Callable[..., Any]:
    """An env, or what makes one, that shows its last action and reward.

    Args:
        env: As `resolve` finds it with these parameters.
        parameters: Those of a native env.

    Raises:
        HurtleError: Its observations or actions are of other kinds.
    """
    return _made(type(env), parameters) if isinstance(env, Env) else partial(_wrapped, env)


def _shown(observation: Any, action: Any, num_agents: int = 1) -> spaces.Box:
    """The space with room for the last action and reward after the observation, or after its channels."""
    flat_or_grid = isinstance(observation, spaces.Box) and len(observation.shape) in (1, 3)
    if num_agents > 1 or not flat_or_grid or not isinstance(action, spaces.Discrete) or action.start:
        raise HurtleError(
            "show_last=True needs one agent, Discrete actions from 0 on, and a Box of numbers or a grid of (height, "
            f"width, channels); this env has {observation} and {action}."
        )
    dtype, added = observation.dtype, int(action.n) + 1
    low, high = np.zeros((*observation.shape[:-1], added), dtype), np.ones((*observation.shape[:-1], added), dtype)
    if dtype.kind == "f":  # rewards as they are; grids of bytes show whether they are positive
        low[..., -1], high[..., -1] = -np.inf, np.inf
    return spaces.Box(np.concatenate([observation.low, low], -1), np.concatenate([observation.high, high], -1), dtype=dtype)


# Native envs: a class derived from the author's, whose methods call the author's and then write what is shown.


@cache
def _native(cls: Any, parameters: tuple[tuple[str, Any], ...]) -> type[Env]:
    base: Any = cls(**dict(parameters))
    space = _shown(base.observation_space, base.action_space, base.num_agents)

    class State(cls.State):
        shown_action: int32
        shown_reward: float32

    shape = base.observation_space.shape
    is_grid, is_whole = len(shape) == 3, space.dtype.kind != "f"
    members = {
        "State": State,
        "observation_space": space,
        "author_step": cls.step,
        "author_reset": cls.reset,
        "author_observe": cls.observe,
        "step": _step,
        "reset": _reset,
        "observe": (_observe_signs if is_whole else _observe_grid) if is_grid else _observe,
        "shown_at": shape[-1],
        "shown_actions": int(base.action_space.n),
        "shown_rows": shape[0],
        "shown_columns": shape[1] if is_grid else 1,
        "__module__": cls.__module__,
        "__doc__": cls.__doc__,
        "__reduce__": lambda env: (_made, (cls, env.changed_parameters())),
    }
    return type(cls.__name__, (cls,), members)


def _made(cls: Any, parameters: dict[str, Any]) -> Env:
    return _native(cls, tuple(parameters.items()))(**parameters)


def _step(self: Any, state: Any, action: Any, rng: Any) -> Any:
    reward, terminated = self.author_step(state, action, rng)
    state.shown_action = action
    state.shown_reward = reward
    return reward, terminated


def _reset(self: Any, state: Any, rng: Any) -> None:
    self.author_reset(state, rng)
    state.shown_action = -1
    state.shown_reward = 0.0


def _observe(self: Any, state: Any, obs: Any) -> None:
    self.author_observe(state, obs)
    if state.shown_action >= 0:
        obs[self.shown_at + state.shown_action] = 1.0
    obs[self.shown_at + self.shown_actions] = state.shown_reward


def _observe_grid(self: Any, state: Any, obs: Any) -> None:
    self.author_observe(state, obs)
    for y in range(self.shown_rows):
        for x in range(self.shown_columns):
            if state.shown_action >= 0:
                obs[y, x, self.shown_at + state.shown_action] = 1.0
            obs[y, x, self.shown_at + self.shown_actions] = state.shown_reward


def _observe_signs(self: Any, state: Any, obs: Any) -> None:
    self.author_observe(state, obs)
    for y in range(self.shown_rows):
        for x in range(self.shown_columns):
            if state.shown_action >= 0:
                obs[y, x, self.shown_at + state.shown_action] = 1
            if state.shown_reward > 0.0:
                obs[y, x, self.shown_at + self.shown_actions] = 1


# Gymnasium's envs.


def _wrapped(maker: Callable[..., Any], **words: Any) -> gymnasium.Env:
    made = maker(**words)
    if not isinstance(made, gymnasium.Env):
        raise HurtleError(f"show_last=True is for single agents; this env is a {type(made).__name__}.")
    return ShowLast(made)


class ShowLast(gymnasium.Wrapper):
    """Shows the last action and reward beside the observation.

    Args:
        env: With a Box of numbers or a grid as observations, and Discrete actions.

    Example:
        >>> env = ShowLast(gymnasium.make("CartPole-v1"))
        >>> obs, info = env.reset(seed=0)
        >>> env.step(1)[0][4:]  # action 0, action 1, reward
        array([0., 1., 1.], dtype=float32)
    """

    def __init__(self, env: gymnasium.Env):
        super().__init__(env)
        self.observation_space = _shown(env.observation_space, env.action_space)

    def reset(self, **words: Any) -> tuple[np.ndarray, dict[str, Any]]:
        """As ever; no action yet, and no reward."""
        obs, info = self.env.reset(**words)
        return self._with(obs, None, 0.0), info

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """As ever."""
        obs, reward, terminated, truncated, info = self.env.step(action)
        return self._with(obs, action, float(reward)), float(reward), terminated, truncated, info

    def _with(self, obs: Any, action: Any, reward: float) -> np.ndarray:
        obs = np.asarray(obs)
        shown = np.zeros((*obs.shape[:-1], self.observation_space.shape[-1] - obs.shape[-1]), obs.dtype)
        if action is not None:
            shown[..., int(action)] = 1
        shown[..., -1] = reward if obs.dtype.kind == "f" else reward > 0
        return np.concatenate([obs, shown], -1)
