"""The env compiler: plain-Python environments that run uncompiled, on CPU threads and on the GPU."""

from importlib import import_module
from math import inf
from typing import TYPE_CHECKING, Any

from gymnasium.spaces import Box, Discrete, MultiDiscrete

from hurtle.native.dtypes import bool_, float32, int8, int16, int32, int64, uint8, uint16, uint32
from hurtle.native.env import Env, EnvSpec
from hurtle.native.rng import Rng

if TYPE_CHECKING:
    from hurtle.native.check_env import check

__all__ = [
    "Box",
    "Discrete",
    "Env",
    "EnvSpec",
    "MultiDiscrete",
    "Rng",
    "bool_",
    "check",
    "float32",
    "inf",
    "int8",
    "int16",
    "int32",
    "int64",
    "uint8",
    "uint16",
    "uint32",
]


def __getattr__(name: str) -> Any:
    if name == "check":  # defining an env needs nothing that runs one
        return import_module("hurtle.native.check_env").check
    raise AttributeError(f"module 'hurtle.native' has no attribute {name!r}")
