"""Envs of other packages by name: which package a name needs, imported when first asked for, and who makes the env.

name → package imported → maker → its env, as it is. Makers run in workers too, where nothing has been registered.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium
from gymnasium.envs.registration import EnvSpec

from hurtle.errors import HurtleError, UnknownNameError, did_you_mean

# How ids begin → the module that registers them with Gymnasium when it is imported.
_REGISTERED_BY = {"ALE/": "ale_py", "MiniGrid-": "minigrid", "BabyAI-": "minigrid"}
_EXTRAS = {
    "ale_py": "hurtle[atari]",
    "minigrid": "hurtle[minigrid]",
    "mujoco": "hurtle[mujoco]",
    "pettingzoo": "hurtle[pettingzoo]",
    "mpe2": "hurtle[pettingzoo]",
    "pygame": "hurtle[pettingzoo]",
    "pymunk": "hurtle[pettingzoo]",
}


def external_maker(name: str, parameters: dict[str, Any]) -> Callable[..., Any] | None:
    """A callable that makes the env `name` of another package, or None where the name is none of theirs.

    Raises:
        HurtleError: The package is not installed; the message names the extra.
    """
    family, _, rest = name.partition("/")
    if family == "atari":
        from hurtle.envs.atari import game_id, make_atari

        return partial(make_atari, game_id(rest), **parameters)
    if family == "pettingzoo":
        _find_pettingzoo(rest)
        return partial(make_pettingzoo, rest, **parameters)
    if load_package_of(name) or "/" in name or name in gymnasium.registry or _looks_like_id(name):
        return partial(make_gymnasium, gymnasium.registry.get(name, name), **parameters)
    return None


def make_gymnasium(env: str | EnvSpec, **parameters: Any) -> gymnasium.Env:
    """`gymnasium.make` with our errors; an EnvSpec also makes envs that only another process has registered.

    Example:
        >>> make_gymnasium("CartPole-v1").spec.id
        'CartPole-v1'
    """
    name = env if isinstance(env, str) else env.id
    try:
        return gymnasium.make(env, **parameters)
    except gymnasium.error.DependencyNotInstalled as error:
        if _missing_module(error) != "mujoco":  # Gymnasium's own message says what to install
            raise
        raise _needs(name, "mujoco", _EXTRAS["mujoco"]) from error
    except gymnasium.error.Error as error:  # not registered, malformed, a version that is no more
        near = difflib.get_close_matches(name, gymnasium.registry, n=3, cutoff=0.8)  # Gymnasium's own lack the namespace
        raise UnknownNameError(f"No environment {name!r}. {did_you_mean(name, near) if near else error}") from error


def make_pettingzoo(name: str, **parameters: Any) -> Any:
    """The env `name` of PettingZoo, such as "butterfly/pistonball_v6": a ParallelEnv where there is one, else an AECEnv."""
    make = _find_pettingzoo(name)
    try:
        return make(**parameters)
    except Exception as error:  # PettingZoo's own class of errors hides what was missing in its cause
        missing = _missing_module(error)
        if missing is None:
            raise
        family = name.split("/")[0]
        raise _needs(f"pettingzoo/{name}", missing, _EXTRAS.get(missing, f"pettingzoo[{family}]")) from error


def load_package_of(name: str) -> bool:
    """Import the package that registers an id such as "ALE/Pong-v5"; False for ids of no package that is known here.

    Raises:
        HurtleError: It is not installed; the message names the extra.
    """
    for begin, module in _REGISTERED_BY.items():
        if name.startswith(begin):
            _load(module, name)
            return True
    return False


def _find_pettingzoo(name: str) -> Callable[..., Any]:
    """The function behind "family/game_v1"."""
    _load("pettingzoo", f"pettingzoo/{name}")
    import pettingzoo

    games: dict[str, Callable[..., Any]] = {}
    for kind, known in (("aec", pettingzoo.aec_registry), ("parallel", pettingzoo.parallel_registry)):
        games |= {game.replace("-v", "_v"): partial(pettingzoo.make, kind, game) for game in known}
    if name.startswith("mpe/"):  # moved out of PettingZoo into a package of its own
        _load("mpe2", f"pettingzoo/{name}")
        from mpe2.all_modules import mpe_environments

        games |= {game: module.parallel_env for game, module in mpe_environments.items()}
    if name not in games:
        known = [f"pettingzoo/{game}" for game in games]
        raise UnknownNameError(f"No environment 'pettingzoo/{name}'. {did_you_mean(f'pettingzoo/{name}', known)}")
    return games[name]


def _load(module: str, name: str) -> None:
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
        raise _needs(name, module, _EXTRAS[module]) from error


def _needs(name: str, module: str, install: str) -> HurtleError:
    return HurtleError(f'{name} needs {module.replace("_", "-")}: pip install "{install}"')


def _missing_module(error: BaseException | None) -> str | None:
    """The module whose absence is behind an error; None if nothing was missing."""
    while error is not None:
        if isinstance(error, ModuleNotFoundError):
            return error.name
        error = error.__cause__
    return None


def _looks_like_id(name: str) -> bool:
    head, _, version = name.rpartition("-v")
    return version.isdigit() and (":" in head or head in {known.rpartition("-v")[0] for known in gymnasium.registry})
