"""Numba intrinsics: the few lines of LLVM that Python has no word for."""

from __future__ import annotations

from typing import Any

from numba import types
from numba.extending import intrinsic


@intrinsic
def pointer_at(typing_context: Any, address: Any) -> Any:
    """A void pointer from an address held in a uint64."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], context.get_value_type(types.voidptr))

    return types.voidptr(address), codegen
