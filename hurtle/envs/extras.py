"""Third-party env packages: which one an env id needs, and which of our extras installs it.

env id → package imported, or an error that names the extra.
"""

from __future__ import annotations

import importlib

from hurtle.errors import HurtleError

# Prefix of an id → the module that registers such ids with Gymnasium when imported.
REGISTERED_BY = {"ALE/": "ale_py", "MiniGrid-": "minigrid", "BabyAI-": "minigrid"}
EXTRAS = {
    "ale_py": "hurtle[atari]",
    "minigrid": "hurtle[minigrid]",
    "mujoco": "hurtle[mujoco]",
    "pettingzoo": "hurtle[pettingzoo]",
    "mpe2": "hurtle[pettingzoo]",
    "pygame": "hurtle[pettingzoo]",
    "pymunk": "hurtle[pettingzoo]",
}


def load_package_of(name: str) -> bool:
    """Import the package that registers an id such as "ALE/Pong-v5"; returns False if none is known.

    Raises:
        HurtleError: The package is not installed; the message names the extra.
    """
    for prefix, module in REGISTERED_BY.items():
        if name.startswith(prefix):
            load_module(module, name)
            return True
    return False


def load_module(module: str, name: str) -> None:
    """Import a module that the env `name` needs.

    Raises:
        HurtleError: The module is not installed; the message names the extra.
    """
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
        raise missing_package(name, module, EXTRAS[module]) from error


def missing_package(name: str, module: str, install: str) -> HurtleError:
    """The error to raise when the env `name` needs a module that is not installed."""
    return HurtleError(f'{name} needs {module.replace("_", "-")}: pip install "{install}"')


def missing_module(error: BaseException | None) -> str | None:
    """The missing module that caused an error, or None."""
    while error is not None:
        if isinstance(error, ModuleNotFoundError):
            return error.name
        error = error.__cause__
    return None
