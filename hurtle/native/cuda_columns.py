"""The CUDA kernels of `gae` and `vtrace`: threads for columns of steps, launched on torch's current stream without a copy.

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
BLOCK_THREADS = 128
CHUNKS, COLUMNS = 8, 32
"""Of a block that computes advantages: threads share a column, each has a chunk of its steps."""

clipped = cuda.jit(device=True)(vtrace.clipped.py_func)


@cuda.jit
def gae_kernel(rewards, values, terminated, truncated, final_values, last_values, gamma, decay, valid, out):
    """`gae` of one column with steps that do not count."""
    n = cuda.grid(1)
    if n < rewards.shape[1]:
        next_value, advantage = last_values[n], f4(0.0)
        for t in range(rewards.shape[0] - 1, -1, -1):
            if not valid[t, n]:
                out[t, n] = f4(0.0)
            else:
                after, carried = next_value, advantage
                if terminated[t, n]:
                    after, carried = f4(0.0), f4(0.0)
                elif truncated[t, n]:
                    after, carried = final_values[t, n], f4(0.0)
                advantage = rewards[t, n] + gamma * after - values[t, n] + decay * carried
                next_value = values[t, n]
                out[t, n] = advantage


@cuda.jit
def gae_chunks_kernel(
    rewards, values, terminated, truncated, final_values, last_values, gamma, decay, out, returns, has_returns
):
    """`gae` of a block of columns, and advantages + values if `has_returns`; all but `last_values` flat, [T * N].

    Within a chunk, the first advantage is a linear function of the one after the chunk. Each thread finds that function, learns
    from those of later chunks what comes after its own, and goes through its chunk once more, which the cache still holds. So
    many steps are read at once, though each needs the one after it.
    """
    factors = cuda.shared.array((CHUNKS, COLUMNS), np.float32)  # one a line: the simulator tells them apart by that
    terms = cuda.shared.array((CHUNKS, COLUMNS), np.float32)
    column, chunk = cuda.threadIdx.x, cuda.threadIdx.y
    n, columns = cuda.blockIdx.x * COLUMNS + column, last_values.shape[0]
    steps = rewards.shape[0] // columns
    size = (steps + CHUNKS - 1) // CHUNKS
    first = min(chunk * size, steps)
    end = min(first + size, steps)
    stride, at = np.uint64(columns), np.uint64((end - 1) * columns + n)  # unsigned: else Numba asks whether they are below 0
    factor, term = f4(1.0), f4(0.0)
    if n < columns:
        next_value = last_values[n] if end == steps else values[at + stride]
        for _ in range(first, end):
            value, after, kept = values[at], next_value, decay
            if terminated[at]:
                after, kept = f4(0.0), f4(0.0)
            elif truncated[at]:
                after, kept = final_values[at], f4(0.0)
            term = rewards[at] + gamma * after - value + kept * term
            factor *= kept
            next_value = value
            at -= stride
    factors[chunk, column], terms[chunk, column] = factor, term
    cuda.syncthreads()
    if n < columns:
        advantage = f4(0.0)
        for later in range(CHUNKS - 1, chunk, -1):
            advantage = terms[later, column] + factors[later, column] * advantage
        at = np.uint64((end - 1) * columns + n)
        next_value = last_values[n] if end == steps else values[at + stride]
        for _ in range(first, end):
            value, after, kept = values[at], next_value, decay
            if terminated[at]:
                after, kept = f4(0.0), f4(0.0)
            elif truncated[at]:
                after, kept = final_values[at], f4(0.0)
            advantage = rewards[at] + gamma * after - value + kept * advantage
            out[at] = advantage
            if has_returns:
                returns[at] = advantage + value
            next_value = value
            at -= stride


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
    """Launch a kernel for the columns of `first`, a tensor like most of `rest`."""
    import torch

    if not first.numel():
        return
    columns, block = (COLUMNS, (COLUMNS, CHUNKS)) if kernel is gae_chunks_kernel else (BLOCK_THREADS, BLOCK_THREADS)
    with cuda.gpus[first.device.index]:
        tensors = [x.flatten() if isinstance(x, torch.Tensor) and kernel is gae_chunks_kernel else x for x in (first, *rest)]
        views = [cuda.as_cuda_array(x.detach()) if isinstance(x, torch.Tensor) else x for x in tensors]
        stream = cuda.external_stream(torch.cuda.current_stream(first.device).cuda_stream)
        kernel[-(-first.shape[1] // columns), block, stream](*views)


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
