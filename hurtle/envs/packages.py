"""Makes envs of other packages by name: Gymnasium ids, short names of families, Atari games, PettingZoo games.

name → its package imported → maker → the package's env. Makers also run in workers, where nothing is registered yet.
"""

from __future__ import annotations

import difflib
import importlib.util
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
from gymnasium.envs.registration import EnvSpec

from hurtle.envs.adapters import ADAPTERS, find_adapter
from hurtle.envs.extras import (
    EXTRAS,
    FAMILIES,
    family_of,
    load_family,
    load_module,
    load_package_of,
    missing_module,
    missing_package,
    wrong_mujoco,
)
from hurtle.errors import UnknownNameError, did_you_mean

_OF_PETTINGZOO = ("butterfly", "classic", "mpe", "sisl")
"""Its folders, which may stand without "pettingzoo/"."""


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
    if family in ("pettingzoo", *_OF_PETTINGZOO):
        game = rest if family == "pettingzoo" else name
        _find_pettingzoo(game)
        return partial(make_pettingzoo, game, **parameters)
    if family in ADAPTERS:
        return partial(find_adapter(name), **parameters)
    if family in FAMILIES and rest:
        name = _id_in_family(family, rest)
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
    family = family_of(env)
    adapt = None if family is None or family.adapter is None else _load_adapter(family.adapter, name)
    if adapt is not None:
        parameters = {"disable_env_checker": True, **parameters}  # it checks what the adapter changes
    try:
        made = gymnasium.make(env, **parameters)
    except gymnasium.error.DependencyNotInstalled as error:
        missing = missing_module(error)
        if missing not in ("mujoco", "Box2D"):  # Gymnasium's message says what to install
            raise
        raise missing_package(name, missing, EXTRAS[missing]) from error
    except gymnasium.error.Error as error:  # not registered, malformed, or an outdated version
        near = difflib.get_close_matches(name, gymnasium.registry, n=3, cutoff=0.8)  # Gymnasium's hints lack the namespace
        raise UnknownNameError(f"No environment {name!r}. {did_you_mean(name, near) if near else error}") from error
    except (AttributeError, AssertionError) as error:
        wrong = wrong_mujoco(family, name)
        if wrong is None:
            raise
        raise wrong from error
    return made if adapt is None else adapt(made)


def _load_adapter(reference: str, name: str) -> Callable[[gymnasium.Env], Any]:
    module, attribute = reference.split(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except ModuleNotFoundError as error:  # agents need PettingZoo
        if error.name not in EXTRAS:
            raise
        raise missing_package(name, error.name, EXTRAS[error.name]) from error


def _id_in_family(family: str, rest: str) -> str:
    """The Gymnasium id behind "minigrid/Empty-5x5": without its prefix, its version (then the newest), or both."""
    found = FAMILIES[family]
    load_family(found, f"{family}/{rest}")
    prefixes = found.prefixes
    ids = sorted((known for known in gymnasium.registry if known.startswith(prefixes)), key=_version)
    short = {known.removeprefix(prefixes[0]) if len(prefixes) == 1 else known: known for known in ids}
    unversioned = {other.rpartition("-v")[0]: known for other, known in short.items()}
    names = {known: known for known in ids} | {known.rpartition("-v")[0]: known for known in ids} | unversioned | short
    if rest not in names:
        known = [f"{family}/{name}" for name in names]
        raise UnknownNameError(f"No environment {f'{family}/{rest}'!r}. {did_you_mean(f'{family}/{rest}', known)}")
    return names[rest]


def _version(name: str) -> int:
    version = name.rpartition("-v")[2]
    return int(version) if version.isdigit() else -1


def make_pettingzoo(name: str, **parameters: Any) -> Any:
    """Make the PettingZoo env `name`, such as "butterfly/pistonball_v6": a ParallelEnv if there is one, else an AECEnv."""
    make = _find_pettingzoo(name)
    if name.startswith("atari/") and importlib.util.find_spec("ale_py") is not None:  # it carries the games
        import ale_py

        parameters.setdefault("auto_rom_install_path", str(Path(ale_py.__file__).parent / "roms"))
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
    newest = {game.rpartition("_v")[0]: game for game in games}
    name = newest.get(name, name)
    if name not in games:
        known = [f"pettingzoo/{game}" for game in games]
        raise UnknownNameError(f"No environment 'pettingzoo/{name}'. {did_you_mean(f'pettingzoo/{name}', known)}")
    return games[name]


def _looks_like_id(name: str) -> bool:
    head, _, version = name.rpartition("-v")
    return version.isdigit() and (":" in head or head in {known.rpartition("-v")[0] for known in gymnasium.registry})
