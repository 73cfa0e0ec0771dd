"""`hurtle.emulate`: takes any env and returns the same kind of env with flat spaces.

env or maker → detect its API → convert old or turn-based APIs → EmulatedEnv or EmulatedParallelEnv. APIs are detected by
their methods, so that no extra has to be imported.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import gymnasium

from hurtle.emulation.emulated_env import EmulatedEnv
from hurtle.emulation.hooks import Featurize, ShapeReward
from hurtle.errors import HurtleError

if TYPE_CHECKING:
    from hurtle.emulation.parallel_env import EmulatedParallelEnv

Maximum = int | Mapping[str, int] | None


def emulate(
    env: Any,
    *,
    featurize: Featurize | None = None,
    shape_reward: ShapeReward | None = None,
    observations: bool = True,
    actions: bool = True,
    pad_agents: bool = True,
    check: bool = True,
    capture_prints: bool = False,
    max_length: Maximum = None,
    max_nodes: Maximum = None,
    max_edges: Maximum = None,
    max_agents: int | None = None,
) -> EmulatedEnv | EmulatedParallelEnv:
    """Flatten an env with structured spaces: one flat observation, one flat action, agents in fixed rows.

    Args:
        env: A Gymnasium env, a PettingZoo env (parallel, or AEC, which is converted), an old Gym env, or a callable that
            makes one. An env that is already emulated is returned as it is.
        featurize: featurize(observation) → array, number, or a dict or tuple of those; runs before flattening, per agent.
            Its space is inferred from a sample; a function may declare it in its attribute `space`.
        shape_reward: shape_reward(reward, observation, action, info) → reward, with the env's own observation and action;
            the env's reward stays in `info["raw_reward"]`.
        observations: False leaves observations as they are.
        actions: False leaves actions as they are.
        pad_agents: False lists only the agents that are present in PettingZoo's dicts.
        check: False skips the checks of the first reset and steps.
        capture_prints: Keep what the env prints in `env.prints` instead of showing it.
        max_length: Maximum length of a Sequence, one for all or by leaf path.
        max_nodes: Maximum number of nodes of a Graph, likewise.
        max_edges: Maximum number of edges of a Graph, likewise.
        max_agents: Maximum number of agents at a time, for envs without `possible_agents`.

    Example:
        >>> from gymnasium.envs.toy_text import BlackjackEnv  # observation: Tuple(Discrete(32), Discrete(11), Discrete(2))
        >>> env = emulate(BlackjackEnv())
        >>> obs, info = env.reset(seed=0)
        >>> obs, env.observation_space.shape
        (array([11, 10,  0]), (3,))
        >>> env.unflatten(obs)
        (array(11), array(10), array(0))
    """
    if callable(env) and not _is_env(env):
        env = env()
    limits = {"max_length": max_length, "max_nodes": max_nodes, "max_edges": max_edges}
    hooks = {"featurize": featurize, "shape_reward": shape_reward, "capture_prints": capture_prints}
    options: dict[str, Any] = {"observations": observations, "actions": actions, "check": check, **hooks, **limits}
    if isinstance(env, EmulatedEnv) or hasattr(env, "reset_into"):
        return env
    if _is_aec(env):
        env = _from_aec(env)
    if _is_parallel(env):
        return _parallel_class()(env, pad_agents=pad_agents, max_agents=max_agents, **options)
    if not isinstance(env, gymnasium.Env) and _is_old_gym(env):
        env = _from_old_gym(env)
    if isinstance(env, gymnasium.Env):
        return EmulatedEnv(env, **options)
    hint = f" Make it first: hurtle.emulate(hurtle.make({env!r}))." if isinstance(env, str) else ""
    raise HurtleError(
        "emulate takes a Gymnasium env, a PettingZoo env, an old Gym env, or a callable that makes one, "
        f"got {type(env).__name__} {env!r}.{hint}"
    )


def _is_env(env: Any) -> bool:
    return not isinstance(env, type) and hasattr(env, "reset") and hasattr(env, "step")


def _is_aec(env: Any) -> bool:
    """Whether this is an AEC env: one agent acts at a time."""
    return _is_env(env) and hasattr(env, "agent_iter") and hasattr(env, "last")


def _is_parallel(env: Any) -> bool:
    """Whether this is a parallel env: all agents act at once, and spaces are functions of the agent."""
    return _is_env(env) and callable(getattr(env, "observation_space", None)) and callable(getattr(env, "action_space", None))


def _is_old_gym(env: Any) -> bool:
    """Whether this is an old Gym env: it has spaces as attributes, and a reset that needs no argument."""
    if not (_is_env(env) and hasattr(env, "observation_space") and hasattr(env, "action_space")):
        return False
    try:
        inspect.signature(env.reset).bind()
    except TypeError:
        return False
    return not isinstance(env, gymnasium.vector.VectorEnv)


def _from_aec(env: Any) -> Any:
    """Convert with PettingZoo: agents act at once if the env allows it, else actions out of turn are ignored."""
    _parallel_class()  # names the extra if PettingZoo is missing
    from pettingzoo.utils.conversions import aec_to_parallel, turn_based_aec_to_parallel

    return (aec_to_parallel if env.metadata.get("is_parallelizable") else turn_based_aec_to_parallel)(env)


def _parallel_class() -> type[EmulatedParallelEnv]:
    try:
        import pettingzoo  # noqa: F401 (only to see whether it is installed)
    except ImportError:
        raise HurtleError('Envs with several agents need PettingZoo: pip install "hurtle[pettingzoo]".') from None
    from hurtle.emulation.parallel_env import EmulatedParallelEnv

    return EmulatedParallelEnv


def _from_old_gym(env: Any) -> gymnasium.Env:
    """Convert an env of Gym 0.26 (whose reset takes a seed) or 0.21 (whose reset does not) with shimmy."""
    needed = f'{type(env).__name__} is an old Gym env, which needs gym and shimmy: pip install "hurtle[gym]".'
    try:
        import gym  # noqa: F401 (shimmy needs it, but reports it late)
        from shimmy import GymV21CompatibilityV0, GymV26CompatibilityV0
    except ImportError:
        raise HurtleError(needed) from None
    reset = getattr(env, "unwrapped", env).reset  # wrappers take **kwargs
    takes_seed = "seed" in inspect.signature(reset).parameters
    convert: Callable[..., gymnasium.Env] = GymV26CompatibilityV0 if takes_seed else GymV21CompatibilityV0
    return convert(env=env)
