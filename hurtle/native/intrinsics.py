"""Numba intrinsics: the few lines of LLVM that cannot be written in Python."""

from __future__ import annotations

from typing import Any

from numba import types
from numba.extending import intrinsic
from numba.np.arrayobj import np_cfarray


@intrinsic
def array_at(typing_context: Any, address: Any, shape: Any, dtype: Any) -> Any:
    """The array at an address: `numba.carray`, but compiled in a tenth of the time."""
    array = types.Array(dtype.dtype, len(shape), "C")

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = builder.inttoptr(args[0], context.get_value_type(types.voidptr))
        return np_cfarray(context, builder, array(types.voidptr, shape), (pointer, args[1]))

    return array(address, shape, dtype), codegen
