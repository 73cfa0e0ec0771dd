"""The CUDA kernels of `gae` and `vtrace`: one thread per column, launched on torch's current stream without a copy.

tensors [T, N] → kernel → tensors [T, N]. Imported when first needed: it raises a DeviceError where there is no GPU.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from hurtle.errors import HurtleError
from hurtle.native import vtrace
from hurtle.native.cuda_support import import_cuda

cuda = import_cuda()
f4 = np.float32
BLOCK_THREADS = 64
AHEAD = 8
"""Steps that a thread reads before it computes with the first: each needs the one after it, but reading them does not."""

clipped = cuda.jit(device=True)(vtrace.clipped.py_func)


@cuda.jit
def gae_kernel(
    rewards, values, terminated, truncated, final_values, last_values, gamma, decay, valid, masked, out, returns, has_returns,
):  # fmt: skip
    """`gae` of one column, and advantages + values if `has_returns`; `valid` is read if `masked`."""
    n = cuda.grid(1)
    if n < rewards.shape[1]:
        reward = cuda.local.array(AHEAD, np.float32)
        value = cuda.local.array(AHEAD, np.float32)
        ends = cuda.local.array(AHEAD, np.int8)  # 1: terminated, 2: truncated, 4: does not count
        next_value, advantage = last_values[n], f4(0.0)
        for block in range((rewards.shape[0] + AHEAD - 1) // AHEAD):
            last = rewards.shape[0] - 1 - block * AHEAD
            for k in range(AHEAD):
                t = max(last - k, 0)
                reward[k], value[k] = rewards[t, n], values[t, n]
                ends[k] = (1 if terminated[t, n] else 0) | (2 if truncated[t, n] else 0)
                if masked:
                    ends[k] |= 0 if valid[t, n] else 4
            for k in range(AHEAD):
                t = last - k
                if t >= 0:
                    shown = f4(0.0)
                    if not ends[k] & 4:
                        after, carried = next_value, advantage
                        if ends[k]:
                            after, carried = f4(0.0) if ends[k] & 1 else final_values[t, n], f4(0.0)
                        advantage = reward[k] + gamma * after - value[k] + decay * carried
                        next_value, shown = value[k], advantage
                    out[t, n] = shown
                    if has_returns:
                        returns[t, n] = shown + value[k]


@cuda.jit
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
    """Launch a kernel with one thread per column of `first`, a tensor like most of `rest`."""
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
    """Refuse tensors that a kernel would misread.

    Raises:
        HurtleError: Names the tensor, and what it must be.
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
