"""Elementwise functions of the Triton kernels, in float32."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def tanh(x):
    """Precise for large and for small x; NaN stays NaN."""
    e = tl.exp(-2.0 * tl.abs(x))
    t = (1.0 - e) / (1.0 + e)
    return tl.where(x < 0, -t, t)


@triton.jit
def sigmoids(x):
    """Sigmoids of x and of -x, both precise, from one exponential."""
    small = tl.exp(-tl.abs(x))
    large = 1.0 / (1.0 + small)
    small = small * large
    return tl.where(x < 0, small, large), tl.where(x < 0, large, small)


@triton.jit
def sigmoid(x):
    """The first of `sigmoids`."""
    return sigmoids(x)[0]
