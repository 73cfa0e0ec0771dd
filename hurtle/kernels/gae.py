"""Generalized advantage estimation: the compiled kernels for CPU and GPU beside the NumPy reference that defines them.

rewards, values, flags, bootstrap values [T, N] → advantages [T, N], each column independently. Knows no rollout and no policy.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from hurtle.errors import HurtleError
from hurtle.kernels.loader import load_cuda_kernels, load_kernels

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
    """Advantages of a rollout; the critic's targets are `advantages + values`.

    Arrays are time-major, float32 or bool and C-contiguous; others are converted, which costs a copy.

    Args:
        rewards: [T, N].
        values: V of the observation that each action was chosen from. [T, N]
        terminated: The episode ended in this step: nothing is bootstrapped, even if `truncated` is also True.
            [T, N]
        truncated: The episode was cut off in this step: bootstrap from `final_values`. [T, N]
        final_values: V of the observation before the reset; read only where a step truncates. [T, N]
        last_values: V of the observation after the last step. [N]
        gamma: Discount.
        gae_lambda: 0 for one-step advantages, 1 for full returns.
        valid: False for steps to ignore: such a step has advantage 0, and the steps around it are joined as if
            it did not exist. None means that all are valid. [T, N]
        out: Where to write, float32 and C-contiguous. [T, N]

    Returns:
        The advantages. [T, N]

    Example:
        >>> ones, never = np.ones((3, 1), np.float32), np.zeros((3, 1), bool)
        >>> gae(ones, ones, never, never, ones, ones[0], gamma=0.5, gae_lambda=1.0).ravel().tolist()
        [0.875, 0.75, 0.5]
    """
    kernel, decay = _compiled(valid is not None), gamma * gae_lambda
    written = np.empty_like(rewards) if out is None else out
    try:
        fits = kernel(rewards, values, terminated, truncated, final_values, last_values, gamma, decay, valid, written)
    except TypeError:  # other dtypes or layouts
        fits = False
    if not fits:
        *columns, valid = checked_columns(rewards, values, terminated, truncated, final_values, last_values, valid)
        written = np.empty_like(columns[0]) if out is None else _checked_out(out, columns[0].shape)
        kernel(*columns, float(gamma), float(decay), valid, written)
    return written


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
    """The reference for `gae`; float64 inside. cpu/advantages.py, cpu/rollout.py and cuda/columns.py repeat it."""
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
    returns: Any = None,
) -> Any:
    """`gae` of torch tensors on a GPU, on torch's current stream, without a copy. It can be captured in a CUDA graph.

    Tensors must be float32 or bool and contiguous. `returns`, if given, gets advantages + values.

    Raises:
        DeviceError: There is no GPU, or numba-cuda is missing.
    """
    import torch

    kernels = load_cuda_kernels().columns
    out = torch.empty_like(rewards) if out is None else out
    columns = rewards, values, terminated, truncated, final_values, last_values
    kernel = kernels.gae_kernel(valid is not None, returns is not None)
    returns = out if returns is None else returns
    kernels.check_tensors(*columns, valid, out=out, returns=returns)
    kernels.launch(kernel, *columns, f4(gamma), f4(gamma * gae_lambda), terminated if valid is None else valid, out, returns)
    return out


@cache
def _compiled(masked: bool) -> Any:
    """The kernel for arrays that need no conversion; it checks that faster than Python."""
    return load_kernels().advantages.compiled_gae(masked)


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
        HurtleError: Shapes do not match.
    """
    rewards = _plain(rewards, np.float32)
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
    """The array, contiguous and of this dtype. Raises if the shape differs."""
    array = _plain(array, dtype)
    if array.shape != shape:
        raise HurtleError(f"{name} must have the shape {shape} to match rewards [steps, rows]; got {array.shape}.")
    return array


def _plain(array: Any, dtype: Any) -> np.ndarray:
    """The array as compiled code expects it: contiguous, of this dtype, aligned and writable; copied if necessary."""
    array = np.ascontiguousarray(array, dtype)
    return array if array.flags.behaved else array.copy()


def _checked_out(out: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    if out.shape != shape or out.dtype != np.float32 or not out.flags.carray:
        raise HurtleError(f"out must be writable, C-contiguous float32 of shape {shape}, got {out.dtype} of shape {out.shape}.")
    return out
