"""What kernels are compiled for: the host's vector unit, and how Numba is asked to compile."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
from llvmlite import binding
from numba import cfunc, njit, types

f4 = np.float32
TILE = 64
"""Rows that are worked on at a time: enough to use a loaded weight often, few enough to stay in the first-level cache."""


def vector_width() -> int:
    """Float32 lanes of the host's vectors: 16 (AVX-512), 8 (AVX2) or 4; $HURTLE_VECTOR_WIDTH overrides it, for tests."""
    if "HURTLE_VECTOR_WIDTH" in os.environ:
        return int(os.environ["HURTLE_VECTOR_WIDTH"])
    features = binding.get_host_cpu_features()
    return 16 if features.get("avx512f") else 8 if features.get("avx2") else 4


WIDTH = vector_width()
CHECKED = os.environ.get("HURTLE_CHECK_KERNELS", "0") not in ("", "0")
"""Whether every tile looks at its bounds first, and every index of plain loops is checked (slow, to find mistakes)."""

_OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy", "fastmath": {"contract"}, "boundscheck": CHECKED}
_INNER: dict[str, Any] = {**_OPTIONS, "no_cpython_wrapper": True, "no_cfunc_wrapper": True}
jit = njit(**_INNER)
"""Compile an inner function, which Python cannot call: that takes a third less time."""
entry = njit(cache=True, **_OPTIONS)
"""Compile a function that Python calls, and keep it in the disk cache."""
inlined = njit(inline="always", **_OPTIONS)
"""Compile a function into each of its callers, so that LLVM sees it once."""
reordering = njit(**{**_INNER, "fastmath": {"contract", "reassoc"}})
"""Compile a sum whose order does not matter, so that it is vectorized; NaN still comes through."""


def address_of_function(function: Any, arguments: int) -> int:
    """Compile a function of so many int64 numbers (addresses and sizes), or load it from the cache; returns its address.

    Whoever calls it by its address need not be compiled together with it: Numba would optimize all of it anew in every caller.
    """
    options = {name: value for name, value in _OPTIONS.items() if name != "nogil"}
    return int(cfunc(types.void(*[types.int64] * arguments), cache=True, **options)(function).address or 0)
