"""The env compiler: plain-Python environments that run uncompiled, on CPU threads and on the GPU."""

from math import inf

from gymnasium.spaces import Box, Discrete, MultiDiscrete

from hurtle.native.check_env import check
from hurtle.native.dtypes import bool_, float32, int8, int16, int32, int64, uint8, uint16, uint32
from hurtle.native.env import Env, EnvSpec
from hurtle.native.rng import Rng

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
