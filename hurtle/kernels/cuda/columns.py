"""The CUDA kernels of `gae` and `vtrace`: one thread per column, launched on torch's current stream without copies.

tensors [T, N] → kernel → tensors [T, N]. Imported lazily: without a GPU it raises a DeviceError.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np

from hurtle.errors import HurtleError
from hurtle.native.cuda_support import import_cuda

cuda = import_cuda()
entry = cuda.jit(cache=True)
f4 = np.float32
u8 = np.uint64  # unsigned indices need no check for negative values
BLOCK_THREADS = 64
AHEAD = 16
"""Steps that a thread loads ahead: the recurrence is sequential, the loads are not."""
TERMINATED, TRUNCATED, INVALID = 1, 2, 4
"""Bits of a step's flags; a final value counts where TRUNCATED is the only one."""


@cuda.jit(device=True)
def clipped(ratio, limit):
    """The ratio, capped at `limit`; NaN stays NaN, so that it is noticed."""
    return limit if ratio > limit else ratio


@cuda.jit(device=True)
def gae_step(reward, value, end, final_value, gamma, decay, next_value, advantage):
    """One step backward: the (next value, advantage) for the step before."""
    if end & INVALID:
        return next_value, advantage
    if end:
        next_value, advantage = final_value, f4(0.0)
    return value, reward + gamma * next_value - value + decay * advantage


@cuda.jit(device=True)
def end_at(terminated, truncated, valid, masked, t, n):
    """The flags of a step."""
    end = (TERMINATED if terminated[t, n] else 0) | (TRUNCATED if truncated[t, n] else 0)
    if masked:
        end |= 0 if valid[t, n] else INVALID
    return end


@cuda.jit(device=True)
def write(out, returns, has_returns, t, n, end, advantage, value):
    """Store the results of a step."""
    shown = f4(0.0) if end & INVALID else advantage
    out[t, n] = shown
    if has_returns:
        returns[t, n] = shown + value


@cache
def gae_kernel(masked: bool, has_returns: bool) -> Any:
    """`gae` of one column, and advantages + values if `has_returns`; `valid` is read if `masked`."""

    @entry
    def gae_kernel(
        rewards, values, terminated, truncated, final_values, last_values, gamma, decay, valid, out, returns
    ):  # fmt: skip
        n = u8(cuda.grid(1))
        if n < u8(rewards.shape[1]):
            reward = cuda.local.array(AHEAD, np.float32)
            value = cuda.local.array(AHEAD, np.float32)
            final_value = cuda.local.array(AHEAD, np.float32)
            end = cuda.local.array(AHEAD, np.int8)
            next_value, advantage = last_values[n], f4(0.0)
            steps = u8(rewards.shape[0])
            for _ in range(steps // u8(AHEAD)):
                steps -= u8(AHEAD)
                for k in range(AHEAD):
                    t = steps + u8(k)
                    reward[k], value[k] = rewards[t, n], values[t, n]
                    end[k] = end_at(terminated, truncated, valid, masked, t, n)
                for k in range(AHEAD):  # issue all of these loads at once
                    final_value[k] = final_values[steps + u8(k), n] if end[k] == TRUNCATED else f4(0.0)
                for k in range(AHEAD - 1, -1, -1):
                    next_value, advantage = gae_step(
                        reward[k], value[k], end[k], final_value[k], gamma, decay, next_value, advantage
                    )
                    write(out, returns, has_returns, steps + u8(k), n, end[k], advantage, value[k])
            while steps > u8(0):  # the remainder
                steps -= u8(1)
                last = end_at(terminated, truncated, valid, masked, steps, n)
                final = final_values[steps, n] if last == TRUNCATED else f4(0.0)
                next_value, advantage = gae_step(
                    rewards[steps, n], values[steps, n], last, final, gamma, decay, next_value, advantage
                )
                write(out, returns, has_returns, steps, n, last, advantage, values[steps, n])

    return gae_kernel


@entry
def vtrace_kernel(
    log_ratios, rewards, values, terminated, truncated, final_values, last_values,
    gamma, decay, rho_clip, c_clip, valid, masked, targets, advantages,
):  # fmt: skip
    """`vtrace` of one column; `valid` is read if `masked`."""
    n = cuda.grid(1)
    if n < rewards.shape[1]:
        next_value, excess = last_values[n], f4(0.0)
        for t in range(rewards.shape[0] - 1, -1, -1):
            if masked and not valid[t, n]:
                targets[t, n] = values[t, n]
                advantages[t, n] = f4(0.0)
            else:
                after, carried = next_value, excess
                if terminated[t, n]:
                    after, carried = f4(0.0), f4(0.0)
                elif truncated[t, n]:
                    after, carried = final_values[t, n], f4(0.0)
                ratio = math.exp(log_ratios[t, n])
                rho, trace = clipped(ratio, rho_clip), decay * clipped(ratio, c_clip)
                excess = rho * (rewards[t, n] + gamma * after - values[t, n]) + trace * carried
                targets[t, n] = values[t, n] + excess
                advantages[t, n] = rho * (rewards[t, n] + gamma * (after + carried) - values[t, n])
                next_value = values[t, n]


def launch(kernel: Any, first: Any, *rest: Any) -> None:
    """Launch a kernel with one thread per column of the tensor `first`."""
    import torch

    if not first.numel():
        return
    with cuda.gpus[first.device.index]:
        views = [cuda.as_cuda_array(x.detach()) if isinstance(x, torch.Tensor) else x for x in (first, *rest)]
        stream = cuda.external_stream(torch.cuda.current_stream(first.device).cuda_stream)
        kernel[-(-first.shape[1] // BLOCK_THREADS), BLOCK_THREADS, stream](*views)


def check_tensors(
    rewards: Any,
    values: Any,
    terminated: Any,
    truncated: Any,
    final_values: Any,
    last_values: Any,
    valid: Any,
    **others: Any,
) -> None:
    """Raise if a kernel would misread one of the tensors.

    Raises:
        HurtleError: Names the tensor and the expected shape and dtype.
    """
    import torch

    if rewards.ndim != 2:
        raise HurtleError(f"rewards must be time-major, [steps, rows]; got the shape {tuple(rewards.shape)}.")
    floats = {"rewards": rewards, "values": values, "final_values": final_values, "last_values": last_values, **others}
    flags = {"terminated": terminated, "truncated": truncated} | ({} if valid is None else {"valid": valid})
    for name, tensor in {**floats, **flags}.items():
        shape = tuple(rewards.shape[1:] if name == "last_values" else rewards.shape)
        dtype = torch.bool if name in flags else torch.float32
        wrong = tuple(tensor.shape) != shape or tensor.dtype != dtype or not tensor.is_contiguous()
        if wrong or tensor.device != rewards.device or not tensor.is_cuda:
            raise HurtleError(
                f"{name} must be a contiguous {dtype} tensor of shape {shape} on the GPU of rewards; "
                f"got {tensor.dtype} of shape {tuple(tensor.shape)} on {tensor.device}."
            )
