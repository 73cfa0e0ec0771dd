"""What seeds and populations share: their settings, which other processes must understand, and the file that holds them.

arguments or a saved file → checked `Settings`. Imports no torch.
"""

from __future__ import annotations

import contextlib
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hurtle.algorithms.algorithm import algorithm_name, allow_algorithm
from hurtle.errors import HurtleError
from hurtle.experiments.records import latest
from hurtle.references import absolute_reference, is_reference
from hurtle.runners.settings import Settings, check_settings, check_settings_file, make_settings, settings_from_dict
from hurtle.trust import SIGNATURE, check_code, is_signed


def given_values(overrides: Mapping[str, Any], algorithm: Any, **given: Any) -> dict[str, Any]:
    """The settings that the user gave: those with an argument of their own, unless None, and the overrides."""
    named = {"algorithm": None if algorithm is None else algorithm_name(algorithm), **given}
    return {name: value for name, value in {**named, **overrides}.items() if value is not None}


def check_counts(**counts: int | None) -> None:
    """Refuse what is not a whole number of at least 1; None is allowed.

    Raises:
        HurtleError: Names it.
    """
    for name, number in counts.items():
        if number is not None and (isinstance(number, bool) or not isinstance(number, int) or number < 1):
            raise HurtleError(f"{name} must be a whole number of at least 1, got {number!r}.")


def make_shared_settings(
    env: Any, algorithm: Any, values: dict[str, Any], config: str | Path | None, trust: bool, each: str
) -> Settings:
    """The settings of new runs, each in a process of its own.

    Args:
        env: As for `hurtle.train`, or None if the config names it.
        algorithm: As the user gave it.
        values: The settings that the user gave; the algorithm by its name.
        config: A TOML file of settings.
        trust: Whether the file may name code.
        each: What each of the runs is, for errors, such as "seed".

    Raises:
        HurtleError: Settings are wrong, or another process could not find the env or the algorithm.
    """
    env = _name(env, each)
    if isinstance(algorithm, type) and not is_reference(values["algorithm"]):
        raise HurtleError(
            f"Each {each} has its own process, which cannot find {algorithm.__name__}: define it at the top level of a file."
        )
    if config is not None:
        check_settings_file(config, values if env is None else {*values, "env"}, trust, values.get("algorithm"))
    return make_settings(env, values, config)


def _name(env: Any, each: str) -> str | None:
    """The name by which another process finds the env."""
    if env is None or isinstance(env, str):
        return absolute_reference(env)
    from hurtle.envs.registry import name_of

    try:
        return name_of(env)
    except HurtleError as error:
        raise HurtleError(f"Each {each} has its own process, which cannot find this env: {error}.") from None


def find_folder(place: str | Path, file: str, runs: str | Path = "runs") -> Path | None:
    """The folder with such a file that `--resume` means; None if it means something else."""
    if str(place) == "latest":
        newest = latest(runs)
        return newest if (newest / file).is_file() else None
    return next((path for path in (Path(place), Path(runs) / place) if (path / file).is_file()), None)


@contextlib.contextmanager
def reading(file: Path) -> Iterator[dict[str, Any]]:
    """The values of a saved TOML file, for a block that takes from them what are not settings.

    Raises:
        HurtleError: The file cannot be read, or the block misses something in it.
    """
    try:
        yield tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise HurtleError(f"{file} could not be read: {error.strerror}.") from None
    except (ValueError, TypeError, KeyError) as error:
        raise HurtleError(f"{file} is damaged: {error!r}.") from None


def change_settings(
    file: Path, saved: dict[str, Any], values: dict[str, Any], trust: bool, what: str
) -> tuple[dict[str, Any], Settings]:
    """The settings of a saved file, with those that the user changes.

    Args:
        file: The file.
        saved: Its settings, with their signature.
        values: What the user changes.
        trust: Whether the file may name code.
        what: Who goes on, for errors, such as "Seeds go".

    Returns:
        The changes, checked; and all settings.

    Raises:
        HurtleError: A setting is wrong, or the file names code that is not allowed.
    """
    if "algorithm" in values:
        raise HurtleError(f"{what} on with the algorithm that they began with: leave out algorithm.")
    allow_algorithm(file, saved, trust)
    signature = saved.pop(SIGNATURE, None)
    check_code(file, saved, trust or is_signed(saved, signature), signature)
    values = check_settings(values, saved.get("algorithm", "ppo"))
    return values, settings_from_dict({**saved, **values})
