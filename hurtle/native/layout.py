"""The arrays of a batch of envs, and those of a rollout: one table each of names, dtypes and meanings.

`Arrays` and `Job` carry them into compiled code; on the CPU they travel as one struct of addresses each.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import Any

import numpy as np
from gymnasium import spaces

from hurtle.errors import HurtleError
from hurtle.native.env import EnvSpec
from hurtle.native.pasted import Arrays

Shape = tuple[int, ...]

JOB_ARRAYS = (
    # the policy, see NetworkPlan
    *("weights", "layers", "nvec"),
    *("low", "range"),  # inputs that are bytes: (x - low) / range
    *("mean", "std"),  # normalized observations: (x - mean) / std, clipped
    "constants",  # bound of normalized observations, gamma, gamma * lambda
    # raw actions to the env's
    "action_start",  # added to choices
    *("action_low", "action_range"),  # of a Beta: low + raw * range
    *("bound_low", "bound_high"),  # between which numbers are sent
    # what goes on from rollout to rollout, [rows]
    "streams",  # of the uniforms that actions are made from
    "drawn",  # actions so far
    "beginning",  # whose coming step begins an episode
    # the rollout, [steps, rows, …], see Rollout
    *("obs", "masks", "log_probs", "values", "rewards", "terminated", "truncated", "starts", "valid"),
    *("final_values", "last_values", "advantages", "returns"),
    *("choices", "numbers"),  # actions, of one of two dtypes
    "raw",  # observations before they were normalized
    # episodes that ended, [steps, rows], and envs, [steps, envs, …]
    *("ended", "episode_returns", "episode_lengths"),
    *("over", "metrics"),
    # the batch of envs, see array_table
    *("env_obs", "env_final_obs", "env_reward", "env_terminated", "env_truncated", "env_ended", "env_mask", "env_present"),
    *("env_episode_ended", "env_episode_return", "env_episode_length", "env_episode_metrics"),
    *("env_choices", "env_numbers"),
    "exchanged",  # of what a thread keeps in memory of its own for the length of a call: (address, own address, bytes) each
)
"""What a rollout is told: of each array its address and size."""
JOB_NUMBERS = (
    *("num_steps", "num_rows"),
    *("split", "actor", "critic", "head_kind", "num_uniforms", "mask_size", "log_std_at", "work_size", "scratch_size"),
    *("is_shared", "is_scaled", "is_beta", "normalizes", "has_masks"),
    "has_advantages",  # whether they are computed at once
    *("forward", "sample"),  # addresses of the kernels that compute networks and actions
)
JOB = {name: 2 * k for k, name in enumerate(JOB_ARRAYS)} | {n: 2 * len(JOB_ARRAYS) + k for k, n in enumerate(JOB_NUMBERS)}
"""Places in the job, which is one int64 array: an array's address, with its size after it, or a number."""
JOB_VIEWS = {
    "floats": "np.float32",
    "doubles": "np.float64",
    "ints": "np.int64",
    "lengths": "np.int32",
    "words": "np.uint64",
    "bools": "np.bool_",
    "observations": "OBS_DTYPE",
}


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


def batch_bytes(spec: EnvSpec, num_envs: int) -> int:
    """Memory that the arrays of a batch take."""
    return num_envs * sum(math.prod(shape) * np.dtype(dtype).itemsize for shape, dtype in array_table(spec, 1).values())


def check_fits(what: str, size: int) -> None:
    """Refuse what needs more bytes than the machine has, before the system ends the process for it.

    Args:
        what: What needs them, such as "num_envs=4096".
        size: How many bytes.

    Raises:
        HurtleError: Names both sizes.
    """
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if size > memory:
        raise HurtleError(
            f"{what} needs {size / 2**30:,.0f} GiB of memory and this machine has {memory / 2**30:,.0f}: use fewer envs."
        )


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


def job_source(spec: EnvSpec) -> str:
    """What rollouts need to know of an env, and the generated functions that give the arrays of a job."""
    views = [
        f"@jit\ndef {name}(job, k):\n    return carray(pointer_at(U64(job[k])), (job[k + 1],), {dtype})\n\n\n"
        for name, dtype in JOB_VIEWS.items()
    ]
    return f"""\
INPUTS = OBS_SIZE // AGENTS
LIST_LENGTH = list_length(INPUTS)
HAS_MASK = {spec.has_mask}
HAS_PRESENT = {spec.has_present}
IS_BOX = {isinstance(spec.action_space, spaces.Box)}
METRICS = {len(spec.env.metrics)}
J = namedtuple("J", "{" ".join(JOB)}")(*{list(JOB.values())})


{"".join(views)}@jit
def bytes_at(address, size):
    return carray(pointer_at(U64(address)), (size,), np.uint8)


@jit
def tables(job, k):
    return carray(pointer_at(U64(job[k])), (job[k + 1] // COLUMNS, COLUMNS), np.int64)
"""
