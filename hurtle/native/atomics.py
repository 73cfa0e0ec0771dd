"""Atomic operations on int64 arrays, and sleeping until a word changes: what threads in compiled code wait for each other with.

A sleeping thread gives its core to others, and the kernel runs it soon after it is woken; one that only yields waits for a
whole time slice of whoever else is busy.
"""

from __future__ import annotations

import platform
import sys
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

SPINS = 16_000
"""Looks at a word before sleeping, some tens of microseconds: sleeping and waking take as long."""
_FUTEX = {"x86_64": 202, "aarch64": 98, "riscv64": 98}.get(platform.machine()) if sys.platform == "linux" else None
_NAP_MICROSECONDS = 100  # macOS
_WAIT, _WAKE, _EVERYONE = 128, 129, 1 << 30  # of this process


def _pointer(context: Any, builder: Any, kind: Any, array: Any, index: Any) -> Any:
    return builder.gep(context.make_array(kind)(context, builder, array).data, [index])


@intrinsic
def add(typing_context: Any, array: Any, index: Any, value: Any) -> Any:
    """Add to a word; returns what it was."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = _pointer(context, builder, signature.args[0], *arguments[:2])
        return builder.atomic_rmw("add", pointer, arguments[2], "seq_cst")

    return types.int64(array, types.int64, types.int64), codegen


@intrinsic
def load(typing_context: Any, array: Any, index: Any) -> Any:
    """Read a word."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.load_atomic(_pointer(context, builder, signature.args[0], *arguments), "seq_cst", 8)

    return types.int64(array, types.int64), codegen


@intrinsic
def store(typing_context: Any, array: Any, index: Any, value: Any) -> Any:
    """Write a word."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = _pointer(context, builder, signature.args[0], *arguments[:2])
        builder.store_atomic(arguments[2], pointer, "seq_cst", 8)
        return context.get_dummy_value()

    return types.void(array, types.int64, types.int64), codegen


@intrinsic
def sleep_while(typing_context: Any, array: Any, index: Any, value: Any) -> Any:
    """Sleep if the word still has that value, until `wake`; may return early."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _futex(builder, _pointer(context, builder, signature.args[0], *arguments[:2]), _WAIT, arguments[2])
        return context.get_dummy_value()

    return types.void(array, types.int64, types.int64), codegen


@intrinsic
def wake(typing_context: Any, array: Any, index: Any) -> Any:
    """Wake all that sleep on a word."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _futex(builder, _pointer(context, builder, signature.args[0], *arguments), _WAKE, arguments[1].type(_EVERYONE))
        return context.get_dummy_value()

    return types.void(array, types.int64), codegen


def _futex(builder: Any, pointer: Any, operation: int, value: Any) -> None:
    """The system call on the word's lower half; without one, sleep for a moment and look again."""
    word = ir.IntType(64)
    if _FUTEX is None:
        if operation == _WAIT:
            kind = ir.FunctionType(ir.IntType(32), [ir.IntType(32)])
            call = cgutils.get_or_insert_function(builder.module, kind, "usleep")
            builder.call(call, [ir.IntType(32)(_NAP_MICROSECONDS)])
        return
    kind = ir.FunctionType(word, [word] * 7)
    call = cgutils.get_or_insert_function(builder.module, kind, "syscall")
    zero = word(0)
    builder.call(call, [word(_FUTEX), builder.ptrtoint(pointer, word), word(operation), value, zero, zero, zero])
