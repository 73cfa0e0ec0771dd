"""Makes envs of other packages by name: Gymnasium ids, Atari games, PettingZoo games.

name → its package imported → maker → the package's env. Makers also run in workers, where nothing is registered yet.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium
from gymnasium.envs.registration import EnvSpec

from hurtle.envs.extras import EXTRAS, load_module, load_package_of, missing_module, missing_package
from hurtle.errors import UnknownNameError, did_you_mean


def external_maker(name: str, parameters: dict[str, Any]) -> Callable[..., Any] | None:
    """A callable that makes the env `name` of another package, or None if no package has such a name.

    Raises:
        HurtleError: The package is not installed; the message names the extra.
    """
    family, _, rest = name.partition("/")
    if family == "atari":
        from hurtle.envs.atari import check_options, game_id, make_atari  # imports Numba

        check_options(parameters)
        return partial(make_atari, game_id(rest), **parameters)
    if family == "pettingzoo":
        _find_pettingzoo(rest)
        return partial(make_pettingzoo, rest, **parameters)
    if load_package_of(name) or "/" in name or name in gymnasium.registry or _looks_like_id(name):
        return partial(make_gymnasium, gymnasium.registry.get(name, name), **parameters)
    return None


def make_gymnasium(env: str | EnvSpec, **parameters: Any) -> gymnasium.Env:
    """`gymnasium.make` with our errors; takes an EnvSpec too, for envs that are registered only in another process.

    Example:
        >>> make_gymnasium("CartPole-v1").spec.id
        'CartPole-v1'
    """
    name = env if isinstance(env, str) else env.id
    try:
        return gymnasium.make(env, **parameters)
    except gymnasium.error.DependencyNotInstalled as error:
        if missing_module(error) != "mujoco":  # Gymnasium's message says what to install
            raise
        raise missing_package(name, "mujoco", EXTRAS["mujoco"]) from error
    except gymnasium.error.Error as error:  # not registered, malformed, or an outdated version
        near = difflib.get_close_matches(name, gymnasium.registry, n=3, cutoff=0.8)  # Gymnasium's hints lack the namespace
        raise UnknownNameError(f"No environment {name!r}. {did_you_mean(name, near) if near else error}") from error


def make_pettingzoo(name: str, **parameters: Any) -> Any:
    """Make the PettingZoo env `name`, such as "butterfly/pistonball_v6": a ParallelEnv if there is one, else an AECEnv."""
    make = _find_pettingzoo(name)
    try:
        return make(**parameters)
    except Exception as error:  # PettingZoo's errors hide the missing module in their cause
        missing = missing_module(error)
        if missing is None:
            raise
        family = name.split("/")[0]
        raise missing_package(f"pettingzoo/{name}", missing, EXTRAS.get(missing, f"pettingzoo[{family}]")) from error


def _find_pettingzoo(name: str) -> Callable[..., Any]:
    """The function that makes "family/game_v1"."""
    load_module("pettingzoo", f"pettingzoo/{name}")
    import pettingzoo

    games: dict[str, Callable[..., Any]] = {}
    for kind, known in (("aec", pettingzoo.aec_registry), ("parallel", pettingzoo.parallel_registry)):
        games |= {game.replace("-v", "_v"): partial(pettingzoo.make, kind, game) for game in known}
    if name.startswith("mpe/"):  # now a separate package
        load_module("mpe2", f"pettingzoo/{name}")
        from mpe2.all_modules import mpe_environments

        games |= {game: module.parallel_env for game, module in mpe_environments.items()}
    if name not in games:
        known = [f"pettingzoo/{game}" for game in games]
        raise UnknownNameError(f"No environment 'pettingzoo/{name}'. {did_you_mean(f'pettingzoo/{name}', known)}")
    return games[name]


def _looks_like_id(name: str) -> bool:
    head, _, version = name.rpartition("-v")
    return version.isdigit() and (":" in head or head in {known.rpartition("-v")[0] for known in gymnasium.registry})
