"""Start-up checks: compares what an env declares (spaces, types, seeding) with its first resets and steps.

env → two resets, a few random steps → nothing, a warning, or an error that names the leaf. Never on the hot path.
"""

from __future__ import annotations

import copy
import math
import time
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
from gymnasium import spaces
from gymnasium.utils.env_checker import data_equivalence

from hurtle.emulation.wrap import emulate

CHECK_SEED = 123
RANDOM_STEPS = 10
CHECK_SECONDS = 0.5  # a slow env takes fewer steps


def check_env(env: Any, **limits: Any) -> None:
    """Check an env before it is used many times: seeding, spaces, types, and a few random steps.

    Meant for a throw-away instance; reset the env afterwards if you keep it.

    Args:
        env: A Gymnasium or PettingZoo env, emulated or not.
        **limits: `max_length`, `max_nodes`, `max_edges` and `max_agents` for an env that is not emulated yet.

    Raises:
        EmulationError: A value contradicts the spaces; the message names the leaf, what was expected and what it got.

    Example:
        >>> import gymnasium
        >>> check_env(gymnasium.make("CartPole-v1"))
    """
    env = emulate(env, actions=False, **limits)
    check_seeding(env)
    env.checks_left = RANDOM_STEPS + 2
    (_check_agents if hasattr(env, "reset_into") else _check_single)(env)


def check_seeding(env: Any) -> None:
    """Warn if two resets with the same seed give different first observations, naming the first leaf that differs.

    Args:
        env: An emulated env; reset it before you step it.
    """
    differing = _differing_agent_leaf(env) if hasattr(env, "reset_into") else _differing_leaf(env)
    if differing is not None:
        warnings.warn(
            f"Two resets with seed={CHECK_SEED} gave different first observations: {differing} differs. Runs cannot be "
            "repeated. Draw all random numbers from self.np_random, which super().reset(seed=seed) seeds.",
            UserWarning,
            stacklevel=3,
        )


def _differing_leaf(env: Any) -> str | None:
    first, second = (copy.deepcopy(env.reset(seed=CHECK_SEED)[0]) for _ in range(2))
    if env.layout is None:
        return None if data_equivalence(first, second) else "observation"
    return _first_difference(env.layout, first, second)


def _differing_agent_leaf(env: Any) -> str | None:
    first, second = (env.reset(seed=CHECK_SEED)[0] for _ in range(2))
    for agent, observation in first.items():
        if agent not in second:
            return f'observation["{agent}"]'
        if env.layout is None:
            leaf = None if data_equivalence(observation, second[agent]) else "observation"
        else:
            leaf = _first_difference(env.layout, observation, second[agent])
        if leaf is not None:
            return leaf.replace("observation", f'observation["{agent}"]', 1)
    return None


def _first_difference(layout: Any, first: np.ndarray, second: np.ndarray) -> str | None:
    """The path of the first leaf in which two flat observations differ. Compares bytes, so NaN equals NaN."""
    one, other = (np.frombuffer(np.ascontiguousarray(flat).tobytes(), np.uint8) for flat in (first, second))
    for leaf in layout.leaves:
        part = slice(leaf.offset, leaf.offset + leaf.dtype.itemsize * math.prod(leaf.shape))
        if not np.array_equal(one[part], other[part]):
            return leaf.path
    return None


def _check_single(env: Any) -> None:
    actions = _sampler(env.action_space)
    observation, info = env.reset(seed=CHECK_SEED)
    for _ in _a_while():
        action = _legal_sample(actions, env.unflatten(observation), info)
        observation, _, terminated, truncated, info = env.step(action)
        if terminated or truncated:
            observation, info = env.reset()


def _check_agents(env: Any) -> None:
    actions = {agent: _sampler(env.action_space(agent)) for agent in env.possible_agents}
    observations, infos = env.reset(seed=CHECK_SEED)
    for _ in _a_while():
        chosen = {a: _legal_sample(actions[a], env.unflatten(observations[a]), infos[a]) for a in env.agents}
        observations, *_, infos = env.step(chosen)
        if not env.agents:
            observations, infos = env.reset()


def _a_while() -> Iterator[int]:
    """Indices of a few steps; fewer if they take long."""
    deadline = time.monotonic() + CHECK_SECONDS
    for step in range(RANDOM_STEPS):
        if step and time.monotonic() > deadline:
            return
        yield step


def _sampler(space: spaces.Space) -> spaces.Space:
    """A seeded copy of the space, so that the env's own space keeps its random stream."""
    sampler = copy.deepcopy(space)
    sampler.seed(CHECK_SEED)
    return sampler


def _legal_sample(space: spaces.Space, observation: Any, info: dict[str, Any]) -> Any:
    """A random action; a legal one if the space is Discrete and the info or the observation has a mask."""
    sources = [source for source in (info, observation) if isinstance(source, dict) and "action_mask" in source]
    mask = sources[0]["action_mask"] if sources else None
    if mask is None or not isinstance(space, spaces.Discrete):
        return space.sample()
    mask = np.asarray(mask)[: int(space.n)].astype(np.int8)
    return space.sample(mask) if mask.any() else space.sample()
