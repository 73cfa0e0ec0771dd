"""Arrays and functions by address, so that compiled code can call separately compiled code."""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numba.np.arrayobj import np_cfarray
from numba.np.numpy_support import from_dtype

from .host import CACHE_LINE, allocating

ANY = 1 << 40
"""The size to pass when only the caller knows the real one."""


def view(dtype: Any, dimensions: int = 1) -> Any:
    """An intrinsic that makes an array from an address and a shape; `numba.carray` takes ten times as long to compile."""
    array = types.Array(from_dtype(np.dtype(dtype)), dimensions, "C")

    def flat(typing_context: Any, address: Any, size: Any) -> Any:
        return array(types.int64, types.int64), _made(array)

    def table(typing_context: Any, address: Any, rows: Any, columns: Any) -> Any:
        return array(types.int64, types.int64, types.int64), _made(array)

    return intrinsic(flat if dimensions == 1 else table)


def _array_like(typing_context: Any, address: Any, size: Any, like: Any) -> Any:
    array = types.Array(like.dtype, 1, "C")
    return array(types.int64, types.int64, like), _made(array)


def _made(array: Any) -> Any:
    """Code generation for an array of that type from an address followed by a shape."""
    shape = types.UniTuple(types.int64, array.ndim)

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = builder.inttoptr(arguments[0], context.get_value_type(types.voidptr))
        sizes = context.make_tuple(builder, shape, arguments[1 : 1 + array.ndim])
        return np_cfarray(context, builder, array(types.voidptr, shape), (pointer, sizes))

    return codegen


def _address_of(typing_context: Any, array: Any, index: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        return builder.ptrtoint(builder.gep(data, [arguments[1]]), ir.IntType(64))

    return types.int64(array, types.int64), codegen


def _call(typing_context: Any, address: Any, numbers: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        values = cgutils.unpack_tuple(builder, arguments[1], len(signature.args[1]))
        kind = ir.FunctionType(ir.VoidType(), [ir.IntType(64)] * len(values))
        builder.call(builder.inttoptr(arguments[0], kind.as_pointer()), values)
        return context.get_dummy_value()

    return types.void(types.int64, types.UniTuple(types.int64, len(numbers))), codegen


array_like: Any = intrinsic(_array_like)
"""The flat array at an address, of the dtype of another array: `array_like(address, size, like)`."""
address_of: Any = intrinsic(_address_of)
"""The address of an element of a flat array, or of the first element (index 0) of any other."""
call: Any = intrinsic(_call)
"""Call a function by its address with a tuple of int64; see `host.address_of_function`."""

floats_at, ints_at, places_at, bools_at, doubles_at = (
    view(dtype) for dtype in (np.float32, np.int64, np.int32, np.bool_, np.float64)
)
"""Flat arrays: `floats_at(address, size)`."""
table_at = view(np.int64, 2)
"""An int64 array of two dimensions: `table_at(address, rows, columns)`."""


@allocating
def aligned(count):
    """New memory for float32 numbers, aligned to a cache line."""
    memory = np.empty(count + CACHE_LINE, np.float32)
    first = -(memory.ctypes.data // 4) % CACHE_LINE
    return memory[first : first + count]
