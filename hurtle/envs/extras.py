"""Third-party env packages: which one an env id needs, and which of our extras installs it.

env id → package imported, or an error that names the extra.
"""

from __future__ import annotations

import importlib.metadata
import re
from dataclasses import dataclass

import gymnasium
from gymnasium.envs.registration import EnvSpec

from hurtle.errors import HurtleError

EXTRAS = {
    "ale_py": "hurtle[atari]",
    "Box2D": "hurtle[box2d]",
    "crafter": "hurtle[crafter]",
    "craftax": "hurtle[craftax]",
    "dm_control": "hurtle[dmcontrol]",
    "gymnasium_robotics": "hurtle[robotics]",
    "highway_env": "hurtle[highway]",
    "lbforaging": "hurtle[lbf]",
    "metaworld": "hurtle[metaworld]",
    "minigrid": "hurtle[minigrid]",
    "minihack": "hurtle[minihack]",
    "mujoco": "hurtle[mujoco]",
    "nle": "hurtle[nle]",
    "pettingzoo": "hurtle[pettingzoo]",
    "mpe2": "hurtle[pettingzoo]",
    "procgen": "hurtle[procgen]",
    "pygame": "hurtle[pettingzoo]",
    "pymunk": "hurtle[pettingzoo]",
    "rware": "hurtle[rware]",
    "shimmy": "hurtle[dmcontrol]",
    "stable_retro": "hurtle[retro]",
    "vizdoom": "hurtle[vizdoom]",
}
ALSO = {"procgen": "pip install --no-deps procgen2 gym3 (they ask for NumPy 1, and work with 2)"}
"""What no extra can install."""


@dataclass(frozen=True)
class Family:
    """Envs that a package registers with Gymnasium: "minigrid/Empty-5x5" is MiniGrid-Empty-5x5-v0."""

    module: str
    """The module that registers them when imported."""
    prefixes: tuple[str, ...]
    """What their ids begin with; a single prefix is left out of short names."""
    also: str | None = None
    """A module that making one needs besides."""
    adapter: str | None = None
    """ "module:Class" that envs are wrapped in."""
    mujoco: str | None = None
    """The newest MuJoCo that all of them run with."""


FAMILIES = {
    "ale": Family("ale_py", ("ALE/",)),
    "babyai": Family("minigrid", ("BabyAI-",)),
    "dm_control": Family("shimmy", ("dm_control/",), also="dm_control", mujoco="3.17"),
    "highway": Family(
        "highway_env", ("highway-", "merge-", "roundabout-", "parking-", "intersection-", "racetrack-", "exit-", "two-way-")
    ),
    "lbf": Family("lbforaging", ("Foraging-",), adapter="hurtle.envs.tuple_agents:Foraging"),
    "minigrid": Family("minigrid", ("MiniGrid-",)),
    "minihack": Family("minihack", ("MiniHack-",), adapter="hurtle.envs.adapters:NetHackSeeds"),
    "nle": Family("nle", ("NetHack",), adapter="hurtle.envs.adapters:NetHackSeeds"),
    "robotics": Family(
        "gymnasium_robotics",
        ("Fetch", "HandReach", "HandManipulate", "AdroitHand", "AntMaze_", "PointMaze_", "FrankaKitchen-"),
        mujoco="3.3",
    ),
    "rware": Family("rware", ("rware-",), adapter="hurtle.envs.tuple_agents:TupleAgents"),
    "vizdoom": Family("vizdoom.gymnasium_wrapper", ("Vizdoom",)),
}


def family_of(env: str | EnvSpec) -> Family | None:
    """The family of an id such as "ALE/Pong-v5"; None if there is none, or another package has registered the id."""
    name = env if isinstance(env, str) else env.id
    family = next((family for family in FAMILIES.values() if name.startswith(family.prefixes)), None)
    spec = gymnasium.registry.get(env) if isinstance(env, str) else env
    if family is None or spec is None or spec.entry_point is None:
        return family
    origin = spec.entry_point if isinstance(spec.entry_point, str) else getattr(spec.entry_point, "__module__", "")
    return family if re.split("[.:]", origin)[0] == family.module.partition(".")[0] else None


def load_package_of(name: str) -> bool:
    """Import the package that registers an id such as "ALE/Pong-v5"; returns False if none is known.

    Raises:
        HurtleError: The package is not installed; the message names the extra.
    """
    family = family_of(name)
    if family is None:
        return False
    load_family(family, name)
    return True


def load_family(family: Family, name: str) -> None:
    """Import what registers and makes the envs of a family.

    Raises:
        HurtleError: A package is not installed; the message names the extra.
    """
    for module in (family.module, family.also):
        if module is not None:
            load_module(module, name)


def load_module(module: str, name: str) -> None:
    """Import a module that the env `name` needs.

    Raises:
        HurtleError: The module is not installed; the message names the extra.
    """
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        package = module.partition(".")[0]
        if error.name not in (module, package):
            raise
        raise missing_package(name, package, EXTRAS[package]) from error


def wrong_mujoco(family: Family | None, name: str) -> HurtleError | None:
    """The error to raise when an env failed to be made and the installed MuJoCo is too new for it, or None."""
    if family is None or family.mujoco is None:
        return None
    try:
        installed = importlib.metadata.version("mujoco")
    except importlib.metadata.PackageNotFoundError:
        return None
    newest = [int(number) for number in family.mujoco.split(".")]
    if [int(number) for number in re.findall(r"\d+", installed)[: len(newest)]] <= newest:
        return None
    extra = EXTRAS[family.also or family.module]
    return HurtleError(f'{name} does not run with MuJoCo {installed}, only up to {family.mujoco}: pip install "{extra}"')


def missing_package(name: str, module: str, install: str) -> HurtleError:
    """The error to raise when the env `name` needs a module that is not installed."""
    also = f" and {ALSO[module]}" if module in ALSO else ""
    return HurtleError(f'{name} needs {module.replace("_", "-")}: pip install "{install}"{also}')


def missing_module(error: BaseException | None) -> str | None:
    """The missing module that caused an error, or None."""
    while error is not None:
        if isinstance(error, ModuleNotFoundError):
            return error.name
        error = error.__cause__
    return None
