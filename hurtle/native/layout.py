"""The arrays of a batch of envs: one table of names, shapes and meanings that every target allocates from.

`Arrays` carries them into compiled code; on the CPU they travel as one struct of addresses.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from hurtle.native.env import EnvSpec
from hurtle.native.pasted import Arrays

Shape = tuple[int, ...]


def array_table(spec: EnvSpec, num_envs: int) -> dict[str, tuple[Shape, Any]]:
    """Shape and dtype of each array as compiled code sees it: one row per env, observations and masks flat."""
    n, agents, obs_dtype = num_envs, spec.num_agents, spec.observation_space.dtype
    return {
        "envs": ((n,), spec.record),
        "obs": ((n, spec.obs_size), obs_dtype),
        "final_obs": ((n, spec.obs_size), obs_dtype),  # rows of envs whose episode ended with this step
        "reward": ((n, agents), np.float32),
        "terminated": ((n, agents), np.bool_),
        "truncated": ((n, agents), np.bool_),
        "ended": ((n,), np.bool_),  # this step ended the env's episode
        "episode_ended": ((n, agents), np.bool_),  # this step ended the agent's episode
        "episode_return": ((n, agents), np.float32),
        "episode_length": ((n, agents), np.int32),
        "episode_metrics": ((n, max(1, len(spec.env.metrics))), np.float32),
        "mask": ((n, int(np.prod(spec.mask_shape))), np.bool_),
        "present": ((n, agents), np.bool_),
    }


def allocate(spec: EnvSpec, num_envs: int, zeros: Callable[[Shape, Any], Any]) -> Arrays:
    """Allocate the arrays of a batch with `zeros(shape, dtype)`."""
    return Arrays(**{name: zeros(shape, dtype) for name, (shape, dtype) in array_table(spec, num_envs).items()})


def aligned_zeros(shape: Shape, dtype: Any) -> np.ndarray:
    """An array of zeros that begins on a pair of cache lines (see threads.SHARD_GRAIN)."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    memory = np.zeros(size + 128, np.uint8)
    first = -memory.ctypes.data % 128
    return memory[first : first + size].view(dtype).reshape(shape)


def address_struct(arrays: Arrays) -> np.ndarray:
    """One record with the address of each array, and the number of envs."""
    struct = np.zeros(1, np.dtype([(name, np.uint64) for name in Arrays._fields] + [("num_envs", np.int64)]))
    for name, array in arrays._asdict().items():
        struct[name] = array.ctypes.data
    struct["num_envs"] = len(arrays.envs)
    return struct


def unpack_source(spec: EnvSpec) -> str:
    """The generated `unpack(pool)`, which turns the struct of addresses back into arrays inside compiled code."""
    lines = []
    for name, (shape, dtype) in array_table(spec, 1).items():
        kind = "RECORD" if name == "envs" else "np.bool_" if dtype is np.bool_ else f"np.{np.dtype(dtype).name}"
        dims = ", ".join(["n", *map(str, shape[1:])])
        lines.append(f"        carray(pointer_at(p.{name}), ({dims},), {kind}),")
    return "@jit\ndef unpack(pool):\n    p = pool[0]\n    n = p.num_envs\n    return Arrays(\n" + "\n".join(lines) + "\n    )\n"
