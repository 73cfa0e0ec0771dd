"""Arrays by their addresses and functions by theirs: what compiled code needs to call code that it was not compiled with."""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numba.np.numpy_support import carray

from .host import jit

ANY = 1 << 40
"""Size of an array whose size its user knows."""


def _pointer_at(typing_context: Any, address: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(types.voidptr))

    return types.voidptr(address), codegen


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


pointer_at: Any = intrinsic(_pointer_at)
"""A void pointer from an address."""
address_of: Any = intrinsic(_address_of)
"""The address of an element of a flat array, or of the first one of any other (index 0)."""
call: Any = intrinsic(_call)
"""Call a function by its address with a tuple of int64; see `host.address_of_function`."""


@jit
def floats_at(address, size):
    """A flat float32 array."""
    return carray(pointer_at(address), (size,), np.float32)


@jit
def ints_at(address, size):
    """A flat int64 array."""
    return carray(pointer_at(address), (size,), np.int64)


@jit
def places_at(address, size):
    """A flat int32 array."""
    return carray(pointer_at(address), (size,), np.int32)


@jit
def bools_at(address, size):
    """A flat bool array."""
    return carray(pointer_at(address), (size,), np.bool_)


@jit
def table_at(address, rows, columns):
    """An int64 array of two dimensions."""
    return carray(pointer_at(address), (rows, columns), np.int64)
