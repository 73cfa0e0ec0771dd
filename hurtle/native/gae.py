"""Generalized advantage estimation: the compiled kernels for CPU and GPU beside the NumPy reference that defines them.

rewards, values, flags, bootstrap values [T, N] → advantages [T, N], each column by itself. Knows no rollout and no policy.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from hurtle.errors import HurtleError

f4 = np.float32


def gae(
    rewards: Any,
    values: Any,
    terminated: Any,
    truncated: Any,
    final_values: Any,
    last_values: Any,
    gamma: float,
    gae_lambda: float,
    valid: Any = None,
    out: np.ndarray | None = None,
) -> np.ndarray:
    """Advantages of a rollout; the returns that a critic learns are `advantages + values`.

    Arrays are time-major, float32 or bool and C-contiguous (others are converted, at the price of a copy).

    Args:
        rewards: [T, N].
        values: V of the observation that each action was chosen from. [T, N]
        terminated: The episode ended with this step, for good: nothing is bootstrapped, even where `truncated` is True too.
            [T, N]
        truncated: The episode was cut off with this step: bootstrap from `final_values`. [T, N]
        final_values: V of the observation before the reset; read only where a step truncates. [T, N]
        last_values: V of the observation after the last step. [N]
        gamma: Discount.
        gae_lambda: 0 for one-step advantages, 1 for whole returns.
        valid: False where there is nothing to learn from: such a step gets advantage 0, and the steps around it are joined
            as if it were not there. None means that all are valid. [T, N]
        out: Where to write, float32 and C-contiguous. [T, N]

    Returns:
        The advantages. [T, N]

    Example:
        >>> ones, never = np.ones((3, 1), np.float32), np.zeros((3, 1), bool)
        >>> gae(ones, ones, never, never, ones, ones[0], gamma=0.5, gae_lambda=1.0).ravel().tolist()
        [0.875, 0.75, 0.5]
    """
    rewards, values, terminated, truncated, final_values, last_values, valid = checked_columns(
        rewards, values, terminated, truncated, final_values, last_values, valid
    )
    out = np.empty(rewards.shape, np.float32) if out is None else out
    if out.shape != rewards.shape or out.dtype != np.float32 or not out.flags.c_contiguous:
        raise HurtleError(f"out must be C-contiguous float32 of shape {rewards.shape}, got {out.dtype} of shape {out.shape}.")
    columns = rewards, values, terminated, truncated, final_values, last_values, f4(gamma), f4(gamma * gae_lambda)
    if valid is None:
        _gae(*columns, out)
    else:
        _gae_masked(*columns, valid, out)
    return out


def gae_reference(
    rewards: Any,
    values: Any,
    terminated: Any,
    truncated: Any,
    final_values: Any,
    last_values: Any,
    gamma: float,
    gae_lambda: float,
    valid: Any = None,
    out: np.ndarray | None = None,
) -> np.ndarray:
    """What `gae` computes, spelled out; float64 inside."""
    steps, columns = np.shape(rewards)
    out = np.empty((steps, columns), np.float32) if out is None else out
    for n in range(columns):
        next_value, next_advantage = float(last_values[n]), 0.0
        for t in reversed(range(steps)):
            if valid is not None and not valid[t, n]:
                out[t, n] = 0.0
                continue
            if terminated[t, n]:
                next_value, next_advantage = 0.0, 0.0
            elif truncated[t, n]:
                next_value, next_advantage = float(final_values[t, n]), 0.0
            delta = float(rewards[t, n]) + gamma * next_value - float(values[t, n])
            next_advantage = delta + gamma * gae_lambda * next_advantage
            next_value = float(values[t, n])
            out[t, n] = next_advantage
    return out


def gae_cuda(
    rewards: Any,
    values: Any,
    terminated: Any,
    truncated: Any,
    final_values: Any,
    last_values: Any,
    gamma: float,
    gae_lambda: float,
    valid: Any = None,
    out: Any = None,
) -> Any:
    """`gae` of torch tensors on a GPU, on torch's current stream and without a copy; it can be captured in a CUDA graph.

    Tensors must be float32 or bool and contiguous.

    Raises:
        DeviceError: There is no GPU, or numba-cuda is missing.
    """
    import torch

    from hurtle.native.cuda_columns import check_tensors, gae_kernel, launch

    out = torch.empty_like(rewards) if out is None else out
    columns = rewards, values, terminated, truncated, final_values, last_values
    check_tensors(*columns, valid, out=out)
    masked, valid = valid is not None, terminated if valid is None else valid
    launch(gae_kernel, *columns, f4(gamma), f4(gamma * gae_lambda), valid, masked, out)
    return out


# On the CPU, time is the outer loop, so that the inner one runs along memory and the compiler can work on many columns at once.
# It does that only in a loop that writes one array, if t is computed from a loop that counts up, and if both of two values are
# loaded before one is chosen: so they are arguments here.


@njit(cache=True, nogil=True)
def _bootstrapped(terminated, truncated, final_value, next_value):
    """V of what comes after a step."""
    alive = final_value if truncated else next_value
    return f4(0.0) if terminated else alive


@njit(cache=True, nogil=True)
def _carried_on(terminated, truncated, carried):
    """What a step hears from the one after it: nothing across the end of an episode."""
    return f4(0.0) if terminated | truncated else carried


@njit(cache=True, nogil=True)
def _gae(rewards, values, terminated, truncated, final_values, last_values, gamma, decay, out):
    steps, columns = rewards.shape
    next_value = last_values.copy()
    advantage = np.zeros(columns, np.float32)
    for i in range(steps):
        t = steps - 1 - i
        for n in range(columns):
            after = _bootstrapped(terminated[t, n], truncated[t, n], final_values[t, n], next_value[n])
            carried = _carried_on(terminated[t, n], truncated[t, n], advantage[n])
            advantage[n] = rewards[t, n] + gamma * after - values[t, n] + decay * carried
        for n in range(columns):
            out[t, n] = advantage[n]
        for n in range(columns):
            next_value[n] = values[t, n]


@njit(cache=True, nogil=True)
def _gae_masked(rewards, values, terminated, truncated, final_values, last_values, gamma, decay, valid, out):
    steps, columns = rewards.shape
    next_value = last_values.copy()
    advantage = np.zeros(columns, np.float32)
    for i in range(steps):
        t = steps - 1 - i
        for n in range(columns):
            if valid[t, n]:
                after = _bootstrapped(terminated[t, n], truncated[t, n], final_values[t, n], next_value[n])
                carried = _carried_on(terminated[t, n], truncated[t, n], advantage[n])
                advantage[n] = rewards[t, n] + gamma * after - values[t, n] + decay * carried
                next_value[n] = values[t, n]
                out[t, n] = advantage[n]
            else:
                out[t, n] = f4(0.0)


def checked_columns(
    rewards: Any,
    values: Any,
    terminated: Any,
    truncated: Any,
    final_values: Any,
    last_values: Any,
    valid: Any,
) -> tuple[Any, ...]:
    """The same arrays, contiguous and of the kernels' dtypes.

    Raises:
        HurtleError: Shapes that do not go together.
    """
    rewards = np.ascontiguousarray(rewards, np.float32)
    if rewards.ndim != 2:
        raise HurtleError(f"rewards must be time-major, [steps, rows]; got the shape {rewards.shape}.")
    return (
        rewards,
        as_column("values", values, rewards.shape, np.float32),
        as_column("terminated", terminated, rewards.shape, np.bool_),
        as_column("truncated", truncated, rewards.shape, np.bool_),
        as_column("final_values", final_values, rewards.shape, np.float32),
        as_column("last_values", last_values, rewards.shape[1:], np.float32),
        None if valid is None else as_column("valid", valid, rewards.shape, np.bool_),
    )


def as_column(name: str, array: Any, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """The array, contiguous and of this dtype; of another shape it is refused."""
    array = np.ascontiguousarray(array, dtype)
    if array.shape != shape:
        raise HurtleError(f"{name} must have the shape {shape}, to go with rewards of [steps, rows]; got {array.shape}.")
    return array
