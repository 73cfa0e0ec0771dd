"""Finds environments by name and makes them: `hurtle.make`.

short name, id of another package, "file.py:Class", class or callable → env. The zoo is a table of names, so that listing it
imports no env. packages.py covers other packages.
"""

from __future__ import annotations

import difflib
import importlib
import re
from collections.abc import Callable
from copy import copy
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium

from hurtle.envs.adapters import ADAPTERS
from hurtle.envs.extras import FAMILIES
from hurtle.envs.packages import external_maker
from hurtle.envs.show_last import NAME, with_last
from hurtle.errors import HurtleError, UnknownNameError, did_you_mean
from hurtle.mujoco.task import Task
from hurtle.native.env import Env
from hurtle.references import is_reference, load_reference, reference_to

_ZOO: dict[str, str | type[Env]] = {
    "cartpole": "hurtle.envs.cartpole:CartPole",
    "mountain_car": "hurtle.envs.mountain_car:MountainCar",
    "mountain_car_continuous": "hurtle.envs.mountain_car_continuous:MountainCarContinuous",
    "acrobot": "hurtle.envs.acrobot:Acrobot",
    "pendulum": "hurtle.envs.pendulum:Pendulum",
    "memory": "hurtle.envs.memory:Memory",
    "stochastic": "hurtle.envs.stochastic:Stochastic",
    "password": "hurtle.envs.password:Password",
    "bandit": "hurtle.envs.bandit:Bandit",
    "squared": "hurtle.envs.squared:Squared",
    "snake": "hurtle.envs.snake:Snake",
    "asterix": "hurtle.envs.asterix:Asterix",
    "breakout": "hurtle.envs.breakout:Breakout",
    "freeway": "hurtle.envs.freeway:Freeway",
    "seaquest": "hurtle.envs.seaquest:Seaquest",
    "space_invaders": "hurtle.envs.space_invaders:SpaceInvaders",
}

EnvLike = str | type[Env] | Env | type[Task] | Task | Callable[..., Any]


def names() -> list[str]:
    """The short names of all native envs.

    Example:
        >>> "cartpole" in names()
        True
    """
    return list(_ZOO)


def register(name: str, env: type[Env]) -> None:
    """Give a native env class a short name for `make` and the command line."""
    if not (isinstance(env, type) and issubclass(env, Env)):
        raise HurtleError(f"register takes a subclass of hurtle.native.Env, got {env!r}.")
    if name in _ZOO and _ZOO[name] is not env:
        raise HurtleError(f"The name {name!r} is taken by {_ZOO[name]}; choose another.")
    _ZOO[name] = env


def native_class(name: str) -> type[Env]:
    """The class behind a short name."""
    found = _ZOO[name]
    if isinstance(found, str):
        module, attribute = found.split(":")
        return getattr(importlib.import_module(module), attribute)
    return found


def name_of(env: Any) -> str:
    """The name by which `resolve` finds an env, also in another process: a short name, or "path/to/file.py:Class".

    Raises:
        UnknownNameError: The class or callable has no such name; the message says why.
    """
    if isinstance(env, str):
        return env
    if isinstance(env, Env):
        raise UnknownNameError(f"{env!r} is an instance: pass its class, and the parameters as env_parameters")
    home = f"{getattr(env, '__module__', '')}:{getattr(env, '__qualname__', '')}"
    return next((name for name, known in _ZOO.items() if known == home), None) or reference_to(env)


def resolve(env: EnvLike, parameters: dict[str, Any]) -> Env | Callable[..., Any]:
    """A native env with its parameters, or a callable that makes a Gymnasium or PettingZoo env, also in another process.

    For a MuJoCo task, and for an id of Gymnasium's, `hurtle.vector.factory` finds out from the callable what it makes.

    Raises:
        UnknownNameError: There is no such name; the message suggests the closest.
        HurtleError: The package of the env is not installed; the message names the extra.
    """
    if NAME in parameters:
        own = {name: value for name, value in parameters.items() if name != NAME}
        found = resolve(env, own)
        return with_last(found, own) if parameters[NAME] else found
    if isinstance(env, Env | Task) and parameters:
        raise HurtleError(f"{env!r} is an instance; pass its parameters to its constructor, not to make: {parameters}.")
    if isinstance(env, Env):
        return env
    if isinstance(env, type) and issubclass(env, Env):
        return env(**parameters)
    if isinstance(env, Task) or (isinstance(env, type) and issubclass(env, Task)):
        from hurtle.mujoco.single_env import make_task_env

        return partial(make_task_env, env if isinstance(env, Task) else env(**parameters))
    if isinstance(env, str):
        if env in _ZOO:
            return native_class(env)(**parameters)
        if is_reference(env):
            return resolve(load_reference(env), parameters)
        if env.endswith(".py"):
            raise UnknownNameError(f"{env!r} is a file; add the name of a class: {env}:MyEnv.")
        if Path(env).is_dir() and env not in (*gymnasium.registry, *ADAPTERS) and not re.search(r"^atari/|[-_]v\d+$", env):
            raise UnknownNameError(f"{env!r} is a folder; add a file and a class: {env.rstrip('/')}/my_env.py:MyEnv.")
        if "/" in env and env not in gymnasium.registry and (native := _native_like(env)):
            raise UnknownNameError(f"No environment {env!r}. Did you mean {native}, Hurtle's own?")
        external = external_maker(env, parameters)
        if external is not None:
            return external
        near = difflib.get_close_matches(env, gymnasium.registry, n=1)
        raise UnknownNameError(
            f"No environment {env!r}. {did_you_mean(env, [*_ZOO, *near])} "
            "A name is a native env (`hurtle envs` lists them), a Gymnasium id such as CartPole-v1, atari/Pong, "
            "pettingzoo/butterfly/pistonball_v6, or my_env.py:MyEnv."
        )
    if callable(env):
        return partial(env, **parameters)
    made = " This is an instance, and several are needed: pass its name, or lambda: …" if hasattr(env, "step") else ""
    raise HurtleError(f"An environment is a name, a class or a callable that makes one, got {env!r}.{made}")


def _native_like(name: str) -> str | None:
    """The native env with the same name as "minatar/breakout" or "MinAtar/SpaceInvaders-v1", or None."""
    family, _, rest = name.rpartition("/")
    if family in ("atari", "ALE", *FAMILIES, *ADAPTERS) or family.startswith("pettingzoo"):
        return None
    plain = re.sub(r"-v\d+$", "", rest).replace("_", "").lower()
    return next((known for known in _ZOO if known.replace("_", "") == plain), None)


APIS = ("gymnasium", "pettingzoo")


def unchecked(env: Env | Callable[..., Any]) -> Env:
    """A copy of a native env that is compiled without bounds checks.

    Raises:
        HurtleError: The env is not a native one.
    """
    if not isinstance(env, Env):
        raise HurtleError("unsafe=True switches off the bounds checks of native envs; this env is not a native one.")
    env = copy(env)
    env.unsafe = True
    return env


def make(
    env: EnvLike,
    *,
    api: str = "gymnasium",
    render_mode: str | None = None,
    debug: bool = False,
    unsafe: bool = False,
    **parameters: Any,
) -> Any:
    """Make one environment: a `gymnasium.Env`, or an unchanged PettingZoo env.

    Args:
        env: A native env's short name ("cartpole") or class, "my_env.py:MyEnv", a Gymnasium id ("CartPole-v1", "ALE/Pong-v5"),
            an Atari game with its preprocessing ("atari/Pong"), a game of PettingZoo ("pettingzoo/butterfly/pistonball_v6"),
            an env of another package ("dm_control/cheetah-run", "procgen/coinrun"; docs/real-environments.md lists them), or a
            callable that returns an env.
        api: For native envs: "gymnasium", where agents are an axis of the arrays, or "pettingzoo" for a `ParallelEnv` with
            dicts by agent.
        render_mode: "rgb_array", "ansi" or None; for Gymnasium envs, whatever they support.
        debug: For native envs: run the code uncompiled, for pdb.
        unsafe: For native envs: compile without bounds checks; an index out of bounds then corrupts memory.
        **parameters: Parameters of the env, such as `gravity=1.6`.

    Example:
        >>> env = make("cartpole", gravity=1.6)
        >>> obs, info = env.reset(seed=0)
        >>> obs.shape
        (4,)
    """
    if api not in APIS:
        raise UnknownNameError(f"No api {api!r}. {did_you_mean(api, APIS)}")
    found = resolve(env, parameters)
    found = unchecked(found) if unsafe else found
    if isinstance(found, Env):
        return (_single_class() if api == "gymnasium" else _parallel_class())(found, render_mode, debug)
    if api != "gymnasium":
        raise HurtleError(f"api={api!r} is for native envs; {env!r} has its own: leave out api.")
    if debug:
        raise HurtleError(f"debug=True is for native envs; {env!r} is plain Python already.")
    try:
        made = found(render_mode=render_mode) if render_mode is not None else found()
    except TypeError as error:
        if not isinstance(env, str):
            raise
        raise HurtleError(f"{env!r} cannot be made with the parameters {parameters}: {error}.") from error
    if not isinstance(made, gymnasium.Env) and not (hasattr(made, "possible_agents") or hasattr(made, "agents")):
        raise HurtleError(f"{env!r} made a {type(made).__name__}; expected a gymnasium.Env or a PettingZoo env.")
    return made


def _single_class() -> Any:
    from hurtle.native.single_env import NativeEnv

    return NativeEnv


def _parallel_class() -> Any:
    try:
        import pettingzoo  # noqa: F401 (only to see whether it is installed)
    except ImportError as error:
        raise HurtleError('api="pettingzoo" needs PettingZoo: pip install "hurtle[pettingzoo]".') from error
    from hurtle.native.pettingzoo_view import NativeParallelEnv

    return NativeParallelEnv
