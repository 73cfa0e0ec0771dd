"""Numba intrinsics: the few lines of LLVM that cannot be written in Python."""

from __future__ import annotations

import sys
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numba.np.arrayobj import np_cfarray

_MONOTONIC = 6 if sys.platform == "darwin" else 1


@intrinsic
def array_at(typing_context: Any, address: Any, shape: Any, dtype: Any) -> Any:
    """The array at an address: `numba.carray`, but compiled in a tenth of the time."""
    array = types.Array(dtype.dtype, len(shape), "C")

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = builder.inttoptr(args[0], context.get_value_type(types.voidptr))
        return np_cfarray(context, builder, array(types.voidptr, shape), (pointer, args[1]))

    return array(address, shape, dtype), codegen


@intrinsic
def call_env(typing_context: Any, address: Any, numbers: Any) -> Any:
    """Call a compiled entry point of int64 by its address; what it raises is raised here."""
    count = len(numbers)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        convention, given = context.call_conv, [types.int64] * count
        pointer = builder.inttoptr(args[0], convention.get_function_type(types.int64, given).as_pointer())
        values = cgutils.unpack_tuple(builder, args[1], count)
        status, result = convention.call_function(builder, pointer, types.int64, given, values)
        with cgutils.if_unlikely(builder, status.is_error):
            convention.return_status_propagate(builder, status)
        return result

    return types.int64(types.int64, types.UniTuple(types.int64, count)), codegen


@intrinsic
def call_c(typing_context: Any, address: Any, pointers: Any) -> Any:
    """Call a C function by its address, with pointers as int64, and ignore what it returns."""
    count = len(pointers)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [ir.IntType(64)] * count)
        builder.call(builder.inttoptr(args[0], kind.as_pointer()), cgutils.unpack_tuple(builder, args[1], count))
        return context.get_dummy_value()

    return types.void(types.int64, types.UniTuple(types.int64, count)), codegen


@intrinsic
def nanoseconds(typing_context: Any) -> Any:
    """The time of a clock that never goes back."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        word, number = ir.IntType(64), ir.IntType(32)
        kind = ir.FunctionType(number, [number, word.as_pointer()])
        clock = cgutils.get_or_insert_function(builder.module, kind, "clock_gettime")
        time = cgutils.alloca_once(builder, word, 2)  # seconds, nanoseconds
        builder.call(clock, [ir.Constant(number, _MONOTONIC), time])
        seconds = builder.mul(builder.load(time), ir.Constant(word, 1_000_000_000))
        return builder.add(seconds, builder.load(builder.gep(time, [ir.Constant(word, 1)])))

    return types.int64(), codegen
