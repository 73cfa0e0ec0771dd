"""The arrays of a batch of envs: one table of names, shapes, dtypes and meanings.

table → allocated arrays (`Arrays`) → their addresses, which is what compiled code on the CPU takes.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from hurtle.errors import EnvDefinitionError, HurtleError, UnknownNameError, did_you_mean
from hurtle.native.drawn import seed_draws
from hurtle.native.dtypes import fitting
from hurtle.native.env import EnvSpec
from hurtle.native.pasted import Arrays
from hurtle.native.rng import stream_states

Shape = tuple[int, ...]
NEVER = 2**31 - 1
"""The limit of steps of an env without one."""


def array_table(spec: EnvSpec, num_envs: int) -> dict[str, tuple[Shape, Any]]:
    """Shape and dtype of each array as compiled code sees it: one row per env, observations and masks flat."""
    n, agents, obs_dtype = num_envs, spec.num_agents, spec.observation_space.dtype
    return {
        "envs": ((n,), spec.record),
        "obs": ((n, spec.obs_size), obs_dtype),
        "final_obs": ((n, spec.obs_size), obs_dtype),  # valid for envs whose episode ended in this step
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
        "max_steps": ((n,), np.int32),  # an episode of so many steps is truncated
    }


def allocate(spec: EnvSpec, num_envs: int, zeros: Callable[[Shape, Any], Any]) -> Arrays:
    """Allocate the arrays of a batch with `zeros(shape, dtype)`; all agents are present, and the limit of steps is the env's.

    The limit is data, not a constant of the compiled code, so that envs that differ only in it share one module.
    """
    arrays = Arrays(**{name: zeros(shape, dtype) for name, (shape, dtype) in array_table(spec, num_envs).items()})
    arrays.present[:] = True
    arrays.max_steps[:] = min(spec.max_steps or NEVER, NEVER)
    return arrays


def batch_bytes(spec: EnvSpec, num_envs: int) -> int:
    """Bytes that the arrays of a batch take."""
    return num_envs * sum(math.prod(shape) * np.dtype(dtype).itemsize for shape, dtype in array_table(spec, 1).values())


def check_fits(what: str, size: int) -> None:
    """Raise if something needs more memory than the machine has, before the system kills the process.

    Args:
        what: What needs the memory, such as "num_envs=4096".
        size: Bytes needed.

    Raises:
        HurtleError: Names both sizes.
    """
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if size > memory:
        raise HurtleError(
            f"{what} needs {size / 2**30:,.0f} GiB of memory and this machine has {memory / 2**30:,.0f}: use fewer envs."
        )


def aligned_zeros(shape: Shape, dtype: Any) -> np.ndarray:
    """An array of zeros, aligned to a pair of cache lines (see threads.SHARD_GRAIN)."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    memory = np.zeros(size + 128, np.uint8)
    first = -memory.ctypes.data % 128
    return memory[first : first + size].view(dtype).reshape(shape)


def address_table(arrays: Arrays) -> np.ndarray:
    """The address of each array, then the number of envs; the caller keeps the arrays alive."""
    return np.array([*(array.ctypes.data for array in arrays), len(arrays.envs)], np.int64)


def unpack_source(spec: EnvSpec) -> str:
    """The generated functions that turn addresses back into arrays inside compiled code."""
    table = array_table(spec, 1) | {"envs": ((1,), "RECORD")}
    arrays = [_array_source(f"p[{k}]", *array) for k, array in enumerate(table.values())]
    actions = _array_source("address", (1, *spec.agents_shape, *spec.action_shape), spec.action_dtype)
    return f"""\
@jit
def unpack(handle):
    p = array_at(handle, ({len(table) + 1},), np.int64)
    n = p[{len(table)}]
    return Arrays({", ".join(arrays)})


@viewing
def actions_at(address, n):
    return {actions}


@viewing
def flags_at(address, n):
    return {_array_source("address", (1,), np.bool_)}


@viewing
def seeds_at(address, n):
    return {_array_source("address", (1,), np.uint64)}
"""


def _array_source(address: str, shape: Shape, dtype: Any) -> str:
    """The array of n rows at an address, as an expression."""
    kind = dtype if isinstance(dtype, str) else "np.bool_" if dtype is np.bool_ else f"np.{np.dtype(dtype).name}"
    return f"array_at({address}, ({', '.join(['n', *map(str, shape[1:])])},), {kind})"


def seed_records(spec: EnvSpec, records: np.ndarray, seeds: np.ndarray, chosen: np.ndarray) -> None:
    """Write the random streams of the seeds, and the defaults of runtime parameters, into the chosen records.

    The defaults are restored so that a seed alone decides the episode, whatever was played or set before.
    """
    records["_rng"][chosen] = stream_states(seeds)[chosen]
    for name, default in spec.runtime_parameters.items():
        records[name][chosen] = default
    seed_draws(spec, records, seeds, chosen)


def apply_options(spec: EnvSpec, records: np.ndarray, options: Mapping[str, Any], chosen: np.ndarray) -> None:
    """Write runtime parameters into the records of the chosen envs.

    Raises:
        UnknownNameError: The env has no such option.
        EnvDefinitionError: The value has the wrong shape.
    """
    for name, value in options.items():
        if name not in spec.runtime_parameters:
            raise UnknownNameError(
                f"{spec.name} has no option {name!r}. {did_you_mean(name, spec.runtime_parameters)} "
                "An option is a State field with a default."
            )
        field = records[name]
        given = fitting(value, field.dtype, f"Option {name!r} of {spec.name}")
        try:
            field[chosen] = np.broadcast_to(given, field.shape)[chosen]
        except ValueError:
            raise EnvDefinitionError(
                f"Option {name!r} of {spec.name} takes one value or an array of shape {field.shape}, got shape {given.shape}."
            ) from None
