"""The host's vector unit, and the options that kernels are compiled with."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
from llvmlite import binding
from numba import cfunc, njit, types

from hurtle.native.compile_lock import compile_once, one_process_at_a_time
from hurtle.native.inner import InnerCompiler

f4 = np.float32
CACHE_LINE = 16
"""float32 in a cache line; vectors that cross from one to the next take longer to load."""
TILE = 64
"""Rows processed at a time: enough to reuse each loaded weight, few enough to stay in the L1 cache."""


def vector_width() -> int:
    """float32 lanes of the host's vectors: 16 (AVX-512), 8 (AVX2) or 4; $HURTLE_VECTOR_WIDTH overrides it, for tests."""
    if "HURTLE_VECTOR_WIDTH" in os.environ:
        return int(os.environ["HURTLE_VECTOR_WIDTH"])
    features = binding.get_host_cpu_features()
    return 16 if features.get("avx512f") else 8 if features.get("avx2") else 4


WIDTH = vector_width()
CHECKED = os.environ.get("HURTLE_CHECK_KERNELS", "0") not in ("", "0")
"""Whether every tile checks its bounds and every loop its indices (slow, for debugging)."""

_OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy", "fastmath": {"contract"}, "boundscheck": CHECKED}
_INNER: dict[str, Any] = {**_OPTIONS, "no_cpython_wrapper": True, "no_cfunc_wrapper": True}
_FAST: dict[str, Any] = {**_INNER, "_nrt": False, "pipeline_class": InnerCompiler}
jit = njit(**_FAST)
"""Compile an inner function, which Python cannot call and which allocates nothing: this halves the compile time."""
allocating = njit(**{**_INNER, "_nrt": True})
"""The same for a function that allocates arrays or raises formatted messages."""
viewing = njit(**{**_FAST, "_nrt": True, "forceinline": True})
"""The same for a function that returns a view of memory; inlined."""
inlined = njit(inline="always", **_OPTIONS)
"""Inline a function into each of its callers before LLVM sees it."""
joined = njit(**{**_FAST, "forceinline": True})
"""Have LLVM inline a function into each of its callers, which compiles faster than `inlined`."""
reordering = njit(**{**_FAST, "fastmath": {"contract", "reassoc"}})
"""Compile a sum whose order does not matter, so that it is vectorized; NaN is preserved."""

_STRICT: dict[str, Any] = {**_FAST, "fastmath": False}
strict = njit(**_STRICT)
"""Compile a function whose products and sums must each be rounded, as NumPy's and torch's are."""
strict_inlined = njit(**{**_STRICT, "forceinline": True})
strict_allocating = njit(**{**_STRICT, "_nrt": True})


def variant(name: str) -> Any:
    """Add a name to that of a function which is made several times, with the same types of arguments.

    Without one, LLVM may take one variant for another: names of compiled functions end in a count, which starts anew in every
    process, so that variants which two processes have put into the disk cache can have the same name.
    """

    def renamed(function: Any) -> Any:
        function.__name__ += f"_{name}"
        function.__qualname__ += f"_{name}"
        return function

    return renamed


def entry(function: Any) -> Any:
    """Compile a function that Python calls, and keep it in the disk cache."""
    return compile_once(njit(**{**_OPTIONS, "cache": True, "_nrt": True})(function))


def address_of_function(function: Any, arguments: int) -> int:
    """Compile a function of int64 arguments (addresses and sizes), or load it from the cache; returns its address.

    Callers use the address so that they are not compiled together with it: Numba would optimize it again in every caller.
    """
    options = {name: value for name, value in _OPTIONS.items() if name != "nogil"}
    with one_process_at_a_time(function):
        return int(cfunc(types.void(*[types.int64] * arguments), cache=True, **options)(function).address or 0)
