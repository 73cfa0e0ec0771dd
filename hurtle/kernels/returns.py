"""Running discounted returns and rewards scaled by their spread, for reward normalization, beside the NumPy reference.

rewards, ends [T, N] + the returns so far → returns after each step [T, N], in float64. Knows no statistics and no policy.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from hurtle.errors import HurtleError
from hurtle.kernels.gae import as_column


def running_returns(
    rewards: Any,
    ended: Any,
    valid: Any,
    rows: np.ndarray | None,
    gamma: float,
    returns: np.ndarray,
    out: np.ndarray | None = None,
) -> np.ndarray:
    """The discounted return of each row after every step of a rollout: `gamma` times the last one plus the reward.

    Args:
        rewards: Of any real dtype, time-major. [T, N]
        ended: The return starts again from 0 after such a step. [T, N]
        valid: False for steps to ignore: the return is unchanged and ends are ignored. None: all are valid.
            [T, N]
        rows: The row that each column belongs to; None: column n is row n's. A row may have several columns, in order, or
            none. [N]
        gamma: Discount.
        returns: The return of each row so far, float64; updated in place. [rows]
        out: Where to write, float64 and C-contiguous. [T, N]

    Returns:
        The return after each step, before an end resets it to 0. [T, N]

    Raises:
        HurtleError: Shapes do not match, or a row does not exist.

    Example:
        >>> so_far = np.array([2.0])
        >>> ended = np.array([[False], [True], [False]])
        >>> running_returns(np.ones((3, 1)), ended, None, None, 0.5, so_far).ravel().tolist(), so_far.tolist()
        ([2.0, 2.0, 1.0], [1.0])
    """
    rewards = np.ascontiguousarray(rewards)
    if rewards.ndim != 2:
        raise HurtleError(f"rewards must be time-major, [steps, rows]; got the shape {rewards.shape}.")
    ended = as_column("ended", ended, rewards.shape, np.bool_)
    valid = None if valid is None else as_column("valid", valid, rewards.shape, np.bool_)
    rows = _checked_rows(rows, rewards.shape[1], returns)
    out = np.empty(rewards.shape) if out is None else out
    if out.shape != rewards.shape or out.dtype != np.float64 or not out.flags.c_contiguous:
        raise HurtleError(f"out must be C-contiguous float64 of shape {rewards.shape}, got {out.dtype} of shape {out.shape}.")
    _running_returns(rewards, ended, valid, rows, float(gamma), returns, out)
    return out


def running_returns_reference(
    rewards: Any,
    ended: Any,
    valid: Any,
    rows: np.ndarray | None,
    gamma: float,
    returns: np.ndarray,
    out: np.ndarray | None = None,
) -> np.ndarray:
    """The reference for `running_returns`."""
    steps, columns = np.shape(rewards)
    out = np.empty((steps, columns)) if out is None else out
    for n in range(columns):
        row = n if rows is None else rows[n]
        for t in range(steps):
            real = valid is None or valid[t, n]
            if real:
                returns[row] = gamma * returns[row] + float(rewards[t, n])
            out[t, n] = returns[row]
            if real and ended[t, n]:
                returns[row] = 0.0
    return out


def scaled_rewards(rewards: Any, scale: float, clip: float) -> np.ndarray:
    """Rewards divided by `scale` and clipped: float64 inside, rounded to float32 once.

    Example:
        >>> scaled_rewards(np.array([[1.0, -8.0]], np.float32), 2.0, clip=3.0).tolist()
        [[0.5, -3.0]]
    """
    rewards = np.ascontiguousarray(rewards)
    out = np.empty(rewards.shape, np.float32)
    _scaled_rewards(rewards.reshape(-1), float(scale), float(clip), out.reshape(-1))
    return out


def scaled_rewards_reference(rewards: Any, scale: float, clip: float) -> np.ndarray:
    """The reference for `scaled_rewards`."""
    return np.clip(np.asarray(rewards, np.float64) / scale, -clip, clip).astype(np.float32)


def _checked_rows(rows: np.ndarray | None, columns: int, returns: np.ndarray) -> np.ndarray:
    """The row of each column, int64, checked: compiled code would write out of bounds of `returns`."""
    if returns.ndim != 1 or returns.dtype != np.float64:
        raise HurtleError(f"returns must be float64, one for each row; got {returns.dtype} of shape {returns.shape}.")
    rows = np.arange(len(returns)) if rows is None else np.ascontiguousarray(rows, np.int64)
    if rows.shape != (columns,):
        raise HurtleError(f"Expected one row for each of the {columns} columns of rewards, got rows of shape {rows.shape}.")
    if columns and not 0 <= rows.min() <= rows.max() < len(returns):
        raise HurtleError(f"rows must be from 0 to {len(returns) - 1}, got {rows.min()} to {rows.max()}.")
    return rows


@njit(cache=True, nogil=True)
def _running_returns(rewards, ended, valid, rows, gamma, returns, out):
    columns = len(rows)
    running = np.empty(columns)
    taken = np.full(len(returns), -1)  # the block that last used each row
    first = 0
    while first < columns:  # a block: adjacent columns of different rows, which can be computed together
        last = first
        while last < columns and taken[rows[last]] != first:
            taken[rows[last]] = first
            running[last] = returns[rows[last]]
            last += 1
        for t in range(len(rewards)):
            now = running[first:last]
            if valid is None:
                _step(now, rewards[t, first:last], gamma, out[t, first:last])
                _begin_anew(now, ended[t, first:last])
            else:
                _valid_step(now, rewards[t, first:last], valid[t, first:last], gamma, out[t, first:last])
                _valid_begin_anew(now, ended[t, first:last], valid[t, first:last])
        for n in range(first, last):
            returns[rows[n]] = running[n]
        first = last


# Each of these loops writes one array, so that the compiler can vectorize it.


@njit(cache=True, nogil=True)
def _step(running, rewards, gamma, out):
    for n in range(len(running)):
        running[n] = gamma * running[n] + np.float64(rewards[n])
    for n in range(len(running)):
        out[n] = running[n]


@njit(cache=True, nogil=True)
def _begin_anew(running, ended):
    for n in range(len(running)):
        running[n] = 0.0 if ended[n] else running[n]


@njit(cache=True, nogil=True)
def _valid_step(running, rewards, valid, gamma, out):
    for n in range(len(running)):
        after = gamma * running[n] + np.float64(rewards[n])
        running[n] = after if valid[n] else running[n]
    for n in range(len(running)):
        out[n] = running[n]


@njit(cache=True, nogil=True)
def _valid_begin_anew(running, ended, valid):
    for n in range(len(running)):
        running[n] = 0.0 if ended[n] & valid[n] else running[n]


@njit(cache=True, nogil=True)
def _scaled_rewards(rewards, scale, clip, out):
    for n in range(len(rewards)):
        scaled = np.float64(rewards[n]) / scale
        bounded = clip if scaled > clip else scaled  # NaN stays NaN, so it is noticed
        out[n] = np.float32(-clip if bounded < -clip else bounded)
