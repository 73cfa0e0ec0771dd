"""The most likely action of an MLP policy, for one observation or a batch, called by address or from other compiled loops.

observation → numbers or one-hot → layers → most likely action, as the env expects it. A table describes a policy and where its
arrays are, so that one compiled function serves every policy. Knows nothing of torch, sampling or learning.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core.errors import TypingError
from numba.extending import NativeValue, intrinsic, models, register_model, unbox
from numba.np.numpy_support import from_dtype

from .choosing import write_action
from .gemm import PANEL, RELU, TANH, VECTORS, Tile
from .host import TILE, WIDTH, address_of_function, entry, f4, inlined, jit
from .memory import ANY, address_of, bools_at, call, floats_at, ints_at, places_at, table_at
from .network import ACTIVATION, BIAS, COLUMNS, INPUTS, PANEL_WIDTH, STRIDE, WEIGHT, WORK, call_forward, forward_address
from .observing import holds_nan, item_size, list_ones, place_of, read, read_tile
from .policy_table import (
    ACTION_DTYPE,
    ACTION_SIZE,
    ARRAY_TYPE,
    CATEGORICAL,
    F4,
    FORWARD_AT,
    HEAD_KIND,
    INPUT_KIND,
    INTEGER,
    LAYERS_AT,
    LISTED,
    NUM_DIMENSIONS,
    NUM_INPUTS,
    NUM_LAYERS,
    NUM_NUMBERS,
    NUM_OUTPUTS,
    NUM_WEIGHTS,
    NUMBERS,
    OBS_DTYPE,
    ONE_HOT,
    REFUSED,
    ROW_AT,
    ROWS_AT,
    SHAPE,
    TYPE_NUMBER,
    WEIGHTS_AT,
    WIDEST,
    WORK_SIZE,
)
from .sparse import list_row, sparse_linear

STACK = 4096
"""Floats of scratch memory that a call keeps on the stack; larger policies allocate it."""
MANY_WEIGHTS = 2**15
"""From this many rows on (a few microseconds) the GIL is released; below, releasing it would cost too much."""
_SUMS = 8  # independent sums: two multiply-adds start per cycle, and each takes four


def _stack(typing_context: Any, floats: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        with builder.goto_entry_block():  # not cgutils.alloca_once, which zeroes the memory
            memory = builder.alloca(ir.ArrayType(ir.FloatType(), floats.literal_value))
        memory.align = 64
        return builder.ptrtoint(memory, ir.IntType(64))

    return types.int64(floats), codegen


_stack_of: Any = intrinsic(prefer_literal=True)(_stack)
"""The address of `count` floats on the caller's stack."""


def _make_row(vectors: int) -> Any:
    """An intrinsic for one panel of one row: bias + x · b, with several independent sums to hide the latency of additions."""
    chains = max(1, _SUMS // vectors)

    @intrinsic
    def row(typing_context: Any, c: Any, c_at: Any, x: Any, x_at: Any, depth: Any, b: Any, b_at: Any, bias_at: Any) -> Any:
        i8 = types.int64

        def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            made, lanes = Tile(builder, vectors), [v * WIDTH for v in range(vectors)]

            def pointer(n: int, offset: Any) -> Any:
                return made.at(context.make_array(signature.args[n])(context, builder, arguments[n]).data, offset)

            into, given, matrix = (pointer(n, arguments[n + 1]) for n in (0, 2, 5))
            biases, depth = pointer(5, arguments[7]), arguments[4]

            def step(k: Any, count: int, sums: list[Any]) -> list[Any]:
                new, line = list(sums), made.at(matrix, builder.mul(k, ir.Constant(k.type, vectors * WIDTH)))
                for u in range(count):
                    element = made.splat(builder.load(made.at(given, k, u)))
                    for v, lane in enumerate(lanes):
                        n = u * vectors + v
                        new[n] = made.fma(element, made.load(made.at(line, u * vectors * WIDTH + lane)), new[n])
                return new

            starts = [made.load(made.at(biases, lane)) for lane in lanes] + [made.constant(0.0)] * (vectors * (chains - 1))
            whole = builder.and_(depth, ir.Constant(depth.type, -chains))
            sums = made._loop(ir.Constant(depth.type, 0), whole, chains, starts, step)
            sums = made._loop(whole, depth, 1, sums, step)
            while len(sums) > vectors:
                half = len(sums) // 2
                sums = [builder.fadd(x, y) for x, y in zip(sums[:half], sums[half:], strict=True)]
            for lane, total in zip(lanes, sums, strict=True):
                made.store(total, made.at(into, lane))
            return context.get_dummy_value()

        return types.void(c, i8, x, i8, i8, b, i8, i8), codegen

    return row


_wide_row, _narrow_row = _make_row(VECTORS), _make_row(1)


def _tanh(typing_context: Any, c: Any, c_at: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        made = Tile(builder, 1)
        place = made.at(context.make_array(signature.args[0])(context, builder, arguments[0]).data, arguments[1])
        made.store(made.tanh(made.load(place)), place)
        return context.get_dummy_value()

    return types.void(c, types.int64), codegen


_tanh_vector: Any = intrinsic(_tanh)
"""Replace a vector by its tanh."""


@jit
def _layer(weights, layers, n, given, into, values, lists):
    """Layer n of one row; all arguments but n are addresses.

    Its inputs are `given`, unless `lists` is not 0: then the nonzero inputs are the first lists[0] of `values`, and their
    indices follow in `lists`.
    """
    table, w, y = table_at(layers, n + 1, COLUMNS), floats_at(weights, ANY), floats_at(into, ANY)
    inputs, stride, width = table[n, INPUTS], table[n, STRIDE], table[n, PANEL_WIDTH]
    weight, bias = table[n, WEIGHT], table[n, BIAS]
    if lists != 0:
        c, b = (y, 0, stride, width), (w, weight, width, inputs * width)
        x, places, counts = floats_at(values, ANY), places_at(lists + 4, ANY), places_at(lists, 1)
        sparse_linear(c, x, places, counts, 0, b, (w, bias, 0), 1, stride // width, width)
    elif width > WIDTH:
        for j in range(0, stride, PANEL):
            _wide_row(y, j, floats_at(given, ANY), 0, inputs, w, weight + j * inputs, bias + j)
    else:
        _narrow_row(y, 0, floats_at(given, ANY), 0, inputs, w, weight, bias)
    if table[n, ACTIVATION] == TANH:
        for j in range(0, stride, WIDTH):
            _tanh_vector(y, j)
    elif table[n, ACTIVATION] == RELU:
        for j in range(stride):
            y[j] = f4(0.0) if y[j] < f4(0.0) else y[j]


# One row, and many


@jit
def _vectors(count):
    """The count rounded up to full vectors, plus one vector: writing a list may overrun its end."""
    return (count // WIDTH + 2) * WIDTH


@jit
def _act_for_row(table, obs, out, scratch):
    """The action for one observation. Passes addresses, to avoid counting references to arrays in every step."""
    t = ints_at(table, ANY)
    inputs, widest, kind, length = t[NUM_INPUTS], t[WIDEST], t[INPUT_KIND], t[LISTED]
    works = address_of(scratch, 0)
    values = works + 4 * 2 * widest
    lists, given = values + 4 * _vectors(length), values + 4 * (2 * _vectors(length) + WIDTH)
    listed, places = floats_at(values, ANY), places_at(lists, ANY)
    count = -1
    if kind == INTEGER:
        count = 1
        listed[0], places[1] = f4(1.0), place_of(t, 0, obs)
    elif kind == ONE_HOT:
        count = t[NUM_NUMBERS]
        list_ones(t, obs, listed, places, 0, 1)
    else:
        if kind == NUMBERS and t[OBS_DTYPE] == F4:
            given = obs
        else:
            read(t, obs, floats_at(given, ANY), 0)
        x = floats_at(given, inputs)
        if t[OBS_DTYPE] >= F4 and holds_nan(x):
            return REFUSED
        if length > 0:
            none = floats_at(given, 0)
            count = list_row(x, 0, inputs, none, none, listed, places_at(lists + 4, ANY), 0, length)
    places[0] = count
    for n in range(t[NUM_LAYERS]):
        into = works + 4 * widest * (n % 2)
        _layer(t[WEIGHTS_AT], t[LAYERS_AT], n, given, into, values, lists if n == 0 and count >= 0 else 0)
        given = into
    return write_action(t, floats_at(given, ANY), 0, bools_at(obs, 0), 0, out)


def _row(table, obs, out, result):
    """Act for the observation at the address `obs` (or the integer `obs`); the result of `write_action` goes to `result`."""
    t = ints_at(table, ANY)
    size = 2 * t[WIDEST] + 2 * _vectors(t[LISTED]) + WIDTH + _vectors(t[NUM_INPUTS])
    if size <= STACK:
        ints_at(result, 1)[0] = _act_for_row(table, obs, out, floats_at(_stack_of(STACK), STACK))
    else:
        ints_at(result, 1)[0] = _act_for_row(table, obs, out, np.empty(size, np.float32))


def _rows(table, obs, count, out, mask, outputs):
    """Act for `count` consecutive observations; with `outputs`, write the last layer's outputs there instead of actions.

    `mask` is the address of a bool [count, NUM_OUTPUTS], or 0 for none.
    """
    t = ints_at(table, ANY)
    inputs, length, num_layers, width = t[NUM_INPUTS], t[LISTED], t[NUM_LAYERS], t[NUM_OUTPUTS]
    is_one_hot = t[INPUT_KIND] == ONE_HOT or t[INPUT_KIND] == INTEGER
    tile = min(count, TILE)
    x, values = np.empty(0 if is_one_hot else tile * inputs, np.float32), np.empty(tile * length + WIDTH, np.float32)
    lists, work = np.empty(TILE + tile * length + WIDTH, np.int32), np.empty(t[WORK_SIZE], np.float32)
    weights, layers = floats_at(t[WEIGHTS_AT], ANY), table_at(t[LAYERS_AT], num_layers, COLUMNS)
    y_at, stride = layers[num_layers - 1, WORK], layers[num_layers - 1, STRIDE]
    obs_bytes, action_bytes = t[NUM_NUMBERS] * item_size(t[OBS_DTYPE]), t[ACTION_SIZE] * item_size(t[ACTION_DTYPE])
    legal = bools_at(mask, 0 if mask == 0 else count * width)
    for first in range(0, count, TILE):
        rows = min(TILE, count - first)
        if read_tile(t, obs + first * obs_bytes, rows, x, values, lists):
            call_forward(t[FORWARD_AT], weights, layers, 0, num_layers, values, 0, length, rows, work, lists)
        else:
            call_forward(t[FORWARD_AT], weights, layers, 0, num_layers, x, 0, inputs, rows, work, lists[:0])
        for q in range(rows):
            if outputs != 0:
                floats_at(outputs, count * width)[(first + q) * width : (first + q + 1) * width] = (
                    work[y_at + q * stride : y_at + q * stride + width]
                )  # fmt: skip
            else:
                write_action(t, work, y_at + q * stride, legal, (first + q) * width, out + (first + q) * action_bytes)


@cache
def address_for_one() -> int:
    """The address of the compiled function for one row."""
    return address_of_function(_row, 4)


@cache
def addresses_for_many() -> tuple[int, int]:
    """The addresses of the compiled function for many rows and of `network.forward`."""
    return address_of_function(_rows, 6), forward_address(True)


# Called from Python


class Object(types.Opaque):
    """Any Python object, by its address."""

    def __init__(self) -> None:
        super().__init__("object by address")


OBJECT = Object()
register_model(Object)(models.OpaqueModel)


@unbox(Object)
def _unbox_object(kind: Any, value: Any, c: Any) -> NativeValue:
    return NativeValue(value)


def _object_address(typing_context: Any, value: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.ptrtoint(arguments[0], ir.IntType(64))

    return types.int64(value), codegen


_address_of_object: Any = intrinsic(_object_address)

# Offsets in NumPy's structs (PyArrayObject_fields, PyArray_Descr), in words of 8 and of 4 bytes.
OBJECT_TYPE, ARRAY_DATA, ARRAY_SHAPE, ARRAY_DESCR = 1, 2, 4, 7
ARRAY_DIMENSIONS, ARRAY_FLAGS, DESCR_LETTERS, DESCR_NUMBER = 6, 16, 6, 7
C_CONTIGUOUS_AND_ALIGNED = 0x0101
_NATIVE, _NO_ORDER = ord("="), ord("|")


@jit
def _data_of(t, array):
    """The address of an array's data if it fits the policy's observation space, else 0."""
    words, halves = ints_at(array, ANY), places_at(array, ANY)
    if words[OBJECT_TYPE] != t[ARRAY_TYPE] or halves[ARRAY_DIMENSIONS] != t[NUM_DIMENSIONS]:
        return 0
    if halves[ARRAY_FLAGS] & C_CONTIGUOUS_AND_ALIGNED != C_CONTIGUOUS_AND_ALIGNED:
        return 0
    about = places_at(words[ARRAY_DESCR], ANY)
    order = about[DESCR_LETTERS] >> 16 & 0xFF
    if about[DESCR_NUMBER] != t[TYPE_NUMBER] or (order != _NATIVE and order != _NO_ORDER):
        return 0
    shape = ints_at(words[ARRAY_SHAPE], ANY)
    for d in range(t[NUM_DIMENSIONS]):
        if shape[d] != t[SHAPE + d]:
            return 0
    return words[ARRAY_DATA]


@inlined
def _call_row(table, obs, out):
    result = _stack_of(2)
    call(ints_at(table, ANY)[ROW_AT], (table, obs, out, result))
    return ints_at(result, 1)[0]


def _release(typing_context: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.ptrtoint(context.get_python_api(builder).save_thread(), ir.IntType(64))

    return types.int64(), codegen


def _restore(typing_context: Any, state: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        state = builder.inttoptr(arguments[0], context.get_value_type(types.voidptr))
        context.get_python_api(builder).restore_thread(state)
        return context.get_dummy_value()

    return types.void(state), codegen


_release_lock: Any = intrinsic(_release)
_restore_lock: Any = intrinsic(_restore)


@inlined
def _call_row_from_python(table, obs, out):
    if ints_at(table, ANY)[NUM_WEIGHTS] < MANY_WEIGHTS:
        action = _call_row(table, obs, out)
    else:
        state = _release_lock()
        action = _call_row(table, obs, out)
        _restore_lock(state)
    return action


locked = njit(cache=True, error_model="numpy")
"""Compile a function that Python calls and that keeps the GIL."""


@locked
def act_on_array(obs, table):
    """The action for an array, if it is one number; or REFUSED."""
    data = _data_of(ints_at(table, ANY), _address_of_object(obs))
    return _call_row_from_python(table, data, 0) if data != 0 else REFUSED


@locked
def act_on_array_into(obs, out, table):
    """Write the action for an array into `out`, which must fit the action space; returns REFUSED or anything else."""
    data = _data_of(ints_at(table, ANY), _address_of_object(obs))
    return _call_row_from_python(table, data, ints_at(_address_of_object(out), ANY)[ARRAY_DATA]) if data != 0 else REFUSED


@locked
def act_on_integer(obs, table):
    """The action for an integer, if it is one number."""
    return _call_row_from_python(table, obs, 0)


@locked
def act_on_integer_into(obs, out, table):
    """Write the action for an integer."""
    return _call_row_from_python(table, obs, ints_at(_address_of_object(out), ANY)[ARRAY_DATA])


@entry
def act_on_rows(table, obs, count, out, mask, outputs):
    """`_rows`; all arguments but `count` are addresses."""
    call(ints_at(table, ANY)[ROWS_AT], (table, obs, count, out, mask, outputs))


# Called from other compiled loops


def _make_checked_address(what: str, dtype: np.dtype, written: bool) -> Any:
    """An intrinsic for the address of a contiguous array of this dtype; other arrays are a compile-time error."""
    wanted = from_dtype(dtype)

    @intrinsic
    def checked_address(typing_context: Any, array: Any) -> Any:
        fits = isinstance(array, types.Array) and array.dtype == wanted and array.layout == "C"
        if not fits or (written and not array.mutable):
            raise TypingError(f"{what}: expected a contiguous array of {dtype.name}, got {array}")

        def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
            return builder.ptrtoint(data, ir.IntType(64))

        return types.int64(array), codegen

    return checked_address


def bound(table: np.ndarray, obs_dtype: np.dtype, action_dtype: np.dtype, kept: Any) -> Any:
    """A function for compiled loops that acts for one policy: (obs) → int64, or (obs, out) if actions are arrays.

    Args:
        table: The policy's table.
        obs_dtype: Dtype of observations; INTEGER inputs accept any integer.
        action_dtype: Dtype of actions.
        kept: Objects that must live as long as the function.
    """
    address, numbers, size = table.ctypes.data, int(table[NUM_NUMBERS]), int(table[ACTION_SIZE])

    @intrinsic
    def table_address(typing_context: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:  # it is never cached
            return builder.ptrtoint(context.add_dynamic_addr(builder, address, info="policy"), ir.IntType(64))

        return types.int64(), codegen

    obs_address = _make_checked_address("obs", obs_dtype, written=False)
    out_address = _make_checked_address("out", action_dtype, written=True)
    if table[INPUT_KIND] == INTEGER:

        @inlined
        def given(obs):
            return np.int64(obs)
    else:

        @inlined
        def given(obs):
            if obs.size != numbers:
                raise ValueError("The observation's size does not match the policy's.")
            return obs_address(obs)

    if table[HEAD_KIND] == CATEGORICAL:

        @njit(nogil=True, error_model="numpy")
        def native(obs):
            action = _call_row(table_address(), given(obs), 0)
            if action == REFUSED:
                raise ValueError("The observation contains NaN.")
            return action
    else:

        @njit(nogil=True, error_model="numpy")
        def native(obs, out):
            if out.size != size:
                raise ValueError("The output array's size does not match the action's.")
            if _call_row(table_address(), given(obs), out_address(out)) == REFUSED:
                raise ValueError("The observation contains NaN.")

    native.kept = kept
    return native
