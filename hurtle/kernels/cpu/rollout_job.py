"""The arguments of a compiled rollout: a table of arrays and numbers in one int64 array, and the views that read it.

`floats(job, J.values)` is the float32 array named values. Unlike the update's job in update.py it is not a record: it has no
floats, and each array comes with its size, so pairs of int64 are all it needs.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np

from .host import viewing
from .memory import array_like, bools_at, doubles_at, floats_at, ints_at, places_at, table_at, view
from .network import COLUMNS

JOB_ARRAYS = (
    # the policy, see NetworkPlan
    *("weights", "layers", "nvec"),
    *("low", "range"),  # for byte inputs: (x - low) / range
    *("mean", "std"),  # for normalized observations: (x - mean) / std, clipped
    "constants",  # clip of normalized observations, gamma, gamma * lambda
    # from raw actions to the env's
    "action_start",  # added to choices
    *("action_low", "action_range"),  # for a Beta: low + raw * range
    *("bound_low", "bound_high"),  # numbers are clipped to these
    # state carried from rollout to rollout, [rows]
    "streams",  # of the uniforms that actions are sampled with
    "drawn",  # number of actions so far
    "beginning",  # whether the row's next step begins an episode
    "states",  # of the policy's memory, [parts, rows, size], see kernels/cpu/cells.py; empty without one
    # the rollout, [steps, rows, …], see Rollout
    *("obs", "inputs", "masks", "log_probs", "values", "rewards", "terminated", "truncated", "starts", "valid"),
    *("final_values", "last_values", "advantages", "returns"),
    *("choices", "numbers"),  # actions, in one of two dtypes
    *("final_obs", "final_steps"),  # final observations of truncated episodes, [slots, rows, …], and their last steps
    "final_states",  # of the memory at these, [parts, slots, rows, size]
    "cuts",  # number of truncated episodes so far, [rows]
    # episodes that ended, [steps, rows], and envs, [steps, envs, …]
    *("ended", "episode_returns", "episode_lengths"),
    *("over", "metrics"),
    # the batch of envs, see array_table
    *("env_obs", "env_final_obs", "env_reward", "env_terminated", "env_truncated", "env_ended", "env_mask", "env_present"),
    *("env_episode_ended", "env_episode_return", "env_episode_length", "env_episode_metrics"),
    *("env_choices", "env_numbers"),
    "exchanged",  # arrays that a thread copies to its own memory during a call: (address, own address, bytes) each
)
"""Arrays of a job: address and size each."""
JOB_NUMBERS = (
    *("num_steps", "num_rows", "num_agents"),
    *("num_inputs", "list_length"),  # elements of one observation, and maximum nonzeros listed
    *("is_box", "has_present", "num_metrics"),
    "max_steps",  # of an episode; 0: no limit
    *(
        "split",
        "actor",
        "critic",
        "num_values",
        "head_kind",
        "num_uniforms",
        "mask_size",
        "log_std_at",
        "work_size",
        "scratch_size",
    ),
    *("is_shared", "is_scaled", "scaling", "normalizes"),
    *("has_masks", "copies_masks"),  # whether the rollout has masks, and whether they come from the env
    *("memory", "remember"),  # the layer of the policy's memory, -1 without one; the address of remembering.py, else 0
    "has_advantages",  # whether the rollout computes advantages
    *("forward", "sample"),  # addresses of the network and action kernels
    *("first_illegal", "run_envs"),  # addresses of the env's entry points, see native/cpu_loops.py
    *("handle", "actions"),  # their arguments: the addresses of the batch's table and of the env's actions
)
JOB = {name: 2 * k for k, name in enumerate(JOB_ARRAYS)} | {n: 2 * len(JOB_ARRAYS) + k for k, n in enumerate(JOB_NUMBERS)}
"""Indices into the job, one int64 array: an array's address followed by its size, or a number."""
SIZE = max(JOB.values()) + 1
J: Any = ModuleType("J")
"""`JOB` for compiled code, and the size of a job: a module, whose numbers Numba takes as constants one by one."""
vars(J).update(JOB, size=SIZE)

words_at, bytes_at = view(np.uint64), view(np.uint8)


@viewing
def observations(job, k, like):
    """The array at that index of the job, with the dtype of `like`."""
    return array_like(job[k], job[k + 1], like)


@viewing
def floats(job, k):
    """The float32 array at that index of the job."""
    return floats_at(job[k], job[k + 1])


@viewing
def doubles(job, k):
    """The float64 array at that index of the job."""
    return doubles_at(job[k], job[k + 1])


@viewing
def ints(job, k):
    """The int64 array at that index of the job."""
    return ints_at(job[k], job[k + 1])


@viewing
def lengths(job, k):
    """The int32 array at that index of the job."""
    return places_at(job[k], job[k + 1])


@viewing
def words(job, k):
    """The uint64 array at that index of the job."""
    return words_at(job[k], job[k + 1])


@viewing
def bools(job, k):
    """The bool array at that index of the job."""
    return bools_at(job[k], job[k + 1])


@viewing
def tables(job, k):
    """The table of layers at that index of the job, int64 [layers, columns]."""
    return table_at(job[k], job[k + 1] // COLUMNS, COLUMNS)
