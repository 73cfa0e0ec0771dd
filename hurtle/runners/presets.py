"""Presets: settings known to be good for an env, or for its kind, from presets.toml.

name → `preset_for`; kind, and what else is set → `preset_of_kind`. Knows no env.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

DEFAULT_ENVS = 8
"""Where num_envs is not set."""
FEWEST_STEPS = 32
"""Per env and rollout, however many envs there are."""


def preset_for(env: str, algorithm: str) -> dict[str, Any]:
    """The settings known to be good for `env` with `algorithm`; empty when none are known.

    Example:
        >>> preset_for("CartPole-v1", "ppo") == preset_for("cartpole", "ppo")
        True
        >>> preset_for("my_env.py:MyEnv", "ppo")
        {}
    """
    settings: dict[str, Any] = {}
    for name, table in preset_tables().items():
        if "kind" not in table and any(fnmatchcase(env, pattern) for pattern in table.get("envs", [name])):
            settings |= table.get(algorithm, {})
    return settings


def kinds() -> set[str]:
    """The kinds of envs that have a preset."""
    return {table["kind"] for table in preset_tables().values() if "kind" in table}


def preset_of_kind(kind: str, algorithm: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """The settings for envs of a kind, see `kinds.kind_of`; empty where the algorithm's own defaults are used.

    The table's `batch` and `minibatches` become num_steps and minibatch_size, which depend on the number of envs. Policies
    with a memory, and priorities, learn from whole segments, and have the algorithm's own.

    Args:
        kind: The kind.
        algorithm: The algorithm.
        given: Other settings of the run, as far as they are not the algorithm's own.

    Example:
        >>> preset = preset_of_kind("continuous", "ppo", {"num_envs": 64})
        >>> preset["num_steps"], preset["minibatch_size"], preset["reward_mode"]
        (32, 64, 'normalize')
    """
    found: dict[str, Any] = {}
    for table in preset_tables().values():
        if table.get("kind") == kind:
            found |= table.get(algorithm, {})
    batch, minibatches = found.pop("batch", 0), found.pop("minibatches", 1)
    if batch and given.get("recurrent", "none") == "none" and not given.get("priority_alpha"):
        found |= _sizes(batch, minibatches, given)
    return found


def _sizes(batch: int, minibatches: int, given: Mapping[str, Any]) -> dict[str, int]:
    """Steps per env, a power of two, for about that batch; and the size of so many minibatches, which divides the batch."""
    num_envs = given.get("num_envs", DEFAULT_ENVS)
    num_steps = given.get("num_steps", max(FEWEST_STEPS, 1 << max(0, (batch // num_envs).bit_length() - 1)))
    size, smallest = num_envs * num_steps, batch // minibatches
    wanted = max(smallest, size // minibatches)
    fits = next((divisor for divisor in range(wanted, size) if size % divisor == 0), size)
    return {"num_steps": num_steps, "minibatch_size": fits}


@cache
def preset_tables() -> dict[str, dict[str, Any]]:
    """The tables of presets.toml; if several match an env, later ones win."""
    return tomllib.loads(Path(__file__).with_name("presets.toml").read_text())
