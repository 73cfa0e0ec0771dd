"""The uniform numbers that every gear samples actions from: a function of only seed, step and draw.

streams, step counts [N] → uniforms [N, count]. Knows no distribution.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from hurtle.errors import HurtleError
from hurtle.native.rng import GAMMA, mix

_GAMMA = np.uint64(GAMMA)


def uniforms(streams: np.ndarray, steps: np.ndarray, count: int) -> np.ndarray:
    """`count` float32 numbers in [0, 1) for each row.

    The numbers of a row depend only on its stream and step. So rows can be drawn in any order, anywhere, and a run resumes
    from just its step counts.

    Args:
        streams: The stream of each row: `rng.stream_states(seeds, ACTION_STREAM)`. uint64[N]
        steps: Number of earlier draws of each row, with the same `count`. int64[N]
        count: Numbers per row.

    Returns:
        float32[N, count].

    Example:
        >>> from hurtle.native.rng import ACTION_STREAM, stream_states
        >>> streams = stream_states(np.arange(3), ACTION_STREAM)
        >>> drawn = uniforms(streams, np.array([0, 0, 7]), count=2)
        >>> bool((drawn[2] == uniforms(streams[2:], np.array([7]), count=2)[0]).all())
        True
    """
    streams, steps = np.ascontiguousarray(streams), np.ascontiguousarray(steps, np.int64)
    if streams.dtype != np.uint64 or streams.ndim != 1 or steps.shape != streams.shape:
        raise HurtleError(
            "uniforms take one uint64 stream and one step count per row; "
            f"got {streams.dtype} of shape {streams.shape} and steps of shape {steps.shape}."
        )
    out = np.empty((len(streams), count), np.float32)
    _uniforms(streams, steps, out)
    return out


def uniforms_reference(streams: np.ndarray, steps: np.ndarray, count: int) -> np.ndarray:
    """The reference for `uniforms`, in Python's integers. kernels/cpu/rollout.py and device_rows.py repeat it."""
    out = np.empty((len(streams), count), np.float32)
    for n, (stream, step) in enumerate(zip(streams.tolist(), steps.tolist(), strict=True)):
        for k in range(count):
            bits = mix(stream + (step * count + k + 1) * GAMMA) >> 40  # 24 bits: the resolution of float32 below 1
            out[n, k] = np.float32(bits) * np.float32(2.0**-24)
    return out


@njit(cache=True, nogil=True)
def _uniforms(streams, steps, out):
    rows, count = out.shape
    for n in range(rows):
        z = streams[n] + np.uint64(steps[n] * count) * _GAMMA
        for k in range(count):
            z += _GAMMA
            out[n, k] = np.float32(_mixed(z) >> np.uint64(40)) * np.float32(2.0**-24)


@njit(cache=True, nogil=True)
def _mixed(z):
    """`rng.mix` of a uint64."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
