"""Presets: settings known to be good for an env, from presets.toml; `preset_for` is the only way in."""

from __future__ import annotations

import tomllib
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any


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
        if any(fnmatchcase(env, pattern) for pattern in table.get("envs", [name])):
            settings |= table.get(algorithm, {})
    return settings


@cache
def preset_tables() -> dict[str, dict[str, Any]]:
    """The tables of presets.toml; if several match an env, later ones win."""
    return tomllib.loads(Path(__file__).with_name("presets.toml").read_text())
