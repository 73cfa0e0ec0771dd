"""A barrier for threads that run compiled code in parallel: spins briefly, then yields; leaves on an abort."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types
from numba.extending import intrinsic

from .host import jit

SPINS = 5_000
"""Spins before yielding, a few microseconds: two threads on one core must not wait for each other for long."""
_ARRIVED, _GENERATION, ABORTED = 0, 16, 32  # a pair of cache lines apart; a 1 at ABORTED makes every thread leave
_yield_processor = types.ExternalFunction("sched_yield", types.int32())


def new_barrier() -> np.ndarray:
    """The state of a barrier, shared by its threads."""
    return np.zeros(48, np.int64)


def _pointer(context: Any, builder: Any, kind: Any, array: Any, index: Any) -> Any:
    return builder.gep(context.make_array(kind)(context, builder, array).data, [index])


@intrinsic
def _add(typing_context: Any, array: Any, index: Any, value: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = _pointer(context, builder, signature.args[0], *arguments[:2])
        return builder.atomic_rmw("add", pointer, arguments[2], "acq_rel")

    return types.int64(array, types.int64, types.int64), codegen


@intrinsic
def _load(typing_context: Any, array: Any, index: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.load_atomic(_pointer(context, builder, signature.args[0], *arguments), "acquire", 8)

    return types.int64(array, types.int64), codegen


@intrinsic
def _store(typing_context: Any, array: Any, index: Any, value: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = _pointer(context, builder, signature.args[0], *arguments[:2])
        builder.store_atomic(arguments[2], pointer, "release", 8)
        return context.get_dummy_value()

    return types.void(array, types.int64, types.int64), codegen


@jit
def wait_for_all(barrier, threads):
    """Wait for all threads; False if one has aborted, and this thread must also return."""
    if threads > 1:
        generation = _load(barrier, _GENERATION)
        if _add(barrier, _ARRIVED, 1) == threads - 1:
            _store(barrier, _ARRIVED, 0)
            _add(barrier, _GENERATION, 1)
        else:
            looks = 0
            while _load(barrier, _GENERATION) == generation and _load(barrier, ABORTED) == 0:
                looks += 1
                if looks > SPINS:
                    _yield_processor()
    return _load(barrier, ABORTED) == 0
