"""First layers whose inputs are mostly zeros (grids of bits, one-hot vectors): products that skip zeros, bitwise equal.

observations → lists of their nonzeros → the products of gemm.py over only these. A zero adds nothing to a sum, so the
results equal those of the dense products. Knows nothing of networks.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from .gemm import VECTORS, Tile
from .host import CHECKED, WIDTH, entry, f4, jit, joined, variant
from .memory import ANY, array_like, floats_at, places_at, view

LEAST_INPUTS = 4 * WIDTH
"""With fewer inputs there is little to skip."""
INPUTS_PER_PLACE = 4
"""At most one in this many inputs may be nonzero: otherwise the dense product is as fast."""


def list_length(inputs: int) -> int:
    """Maximum nonzeros listed per row; 0 if lists do not pay off."""
    return inputs // INPUTS_PER_PLACE if inputs >= LEAST_INPUTS else 0


def _list(typing_context: Any, obs: Any, at: Any, k: Any, values: Any, places: Any, to: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        made, i4 = Tile(builder, 1), ir.IntType(32)

        def pointer(n: int, offset: Any) -> Any:
            return made.at(context.make_array(signature.args[n])(context, builder, arguments[n]).data, offset)

        def pressed(vector: Any, mask: Any) -> Any:  # the selected lanes, packed
            kind = ir.FunctionType(vector.type, [vector.type, vector.type, mask.type])
            name = f"llvm.x86.avx512.mask.compress.v16{'f' if vector.type == made.vector else 'i'}32"
            function = cgutils.get_or_insert_function(builder.module, kind, name)
            return builder.call(function, [vector, ir.Constant(vector.type, None), mask])

        given = pointer(0, builder.add(arguments[1], arguments[2]))
        numbers = builder.load(builder.bitcast(given, ir.VectorType(given.type.pointee, WIDTH).as_pointer()), align=1)
        if obs.dtype == types.uint8:
            numbers = builder.uitofp(numbers, made.vector)
        mask = builder.fcmp_unordered("!=", numbers, made.constant(0.0))
        lanes = ir.VectorType(i4, WIDTH)
        first = builder.insert_element(ir.Constant(lanes, ir.Undefined), builder.trunc(arguments[2], i4), ir.Constant(i4, 0))
        spread = builder.shuffle_vector(first, ir.Constant(lanes, ir.Undefined), ir.Constant(lanes, [0] * WIDTH))
        indices = builder.add(spread, ir.Constant(lanes, list(range(WIDTH))))
        listed = builder.bitcast(pointer(4, arguments[5]), lanes.as_pointer())
        made.store(pressed(numbers, mask), pointer(3, arguments[5]))
        builder.store(pressed(indices, mask), listed, align=4)
        bits = builder.zext(builder.bitcast(mask, ir.IntType(WIDTH)), ir.IntType(64))
        return builder.ctpop(bits)

    return types.int64(obs, types.int64, types.int64, values, places, types.int64), codegen


_list_vector: Any = intrinsic(_list)
"""Branchless list of the nonzeros (including NaN) of 16 numbers from obs[at + k] on; returns their count. AVX-512."""


if WIDTH == 16:

    @jit
    def _list_vectors(obs, at, inputs, values, places, first, length):
        """List the nonzeros of full vectors, until there are too many; returns their number and that of the inputs read."""
        whole, count = inputs // WIDTH * WIDTH, 0
        for k in range(0, whole, WIDTH):
            count += _list_vector(obs, at, k, values, places, first + count)
            if count > length:
                break
        return count, whole

else:

    @jit
    def _list_vectors(obs, at, inputs, values, places, first, length):
        """Leave all inputs to the scalar loop."""
        return 0, 0


@jit
def list_row(obs, at, inputs, low, span, values, places, first, length):
    """List the nonzeros of one observation from `first` on, at most `length`; returns their number, or -1 if there are more.

    Listed values are the network's inputs: (number - low) / span, or the number itself where `span` is empty. Zeros must stay
    zero for the network: `low` is 0. Up to WIDTH elements past the end of the list are overwritten.
    """
    if CHECKED and first + length + WIDTH > min(values.shape[0], places.shape[0]):
        raise IndexError("a list would exceed its memory")
    count, whole = _list_vectors(obs, at, inputs, values, places, first, length)
    for k in range(whole, inputs):
        if obs[at + k] != 0:
            if count < length:
                values[first + count] = f4(obs[at + k])
                places[first + count] = k
            count += 1
    if count > length:
        return -1
    if span.shape[0]:
        for i in range(first, first + count):
            values[i] = (values[i] - low[places[i]]) / span[places[i]]
    return count


@entry
def list_rows(obs, rows, inputs, low, span, values, places, counts, length):
    """List the nonzeros of all rows; False if one has too many."""
    for q in range(rows):
        counts[q] = list_row(obs, q * inputs, inputs, low, span, values, places, q * length, length)
        if counts[q] < 0:
            return False
    return True


LISTING = np.dtype(
    [(name, np.int64) for name in ["obs", "rows", "inputs", "low", "span", "scales", "values", "lists", "length"]]
)
"""What `list_observations` lists: addresses of arrays, and sizes. `lists` has the counts of all rows, then the indices."""
_listing_at = view(LISTING)


@cache
def list_observations_of(dtype: np.dtype) -> Any:
    """`list_observations(listing)` of observations of that dtype: `list_rows` of what is at the addresses of a LISTING."""
    like = np.zeros(0, dtype)

    @entry
    @variant(dtype.name)
    def list_observations(listing):
        t = _listing_at(listing, 1)[0]
        obs, values, lists = array_like(t.obs, t.rows * t.inputs, like), floats_at(t.values, ANY), places_at(t.lists, ANY)
        scales = t.inputs if t.scales else 0
        low, span = floats_at(t.low, scales), floats_at(t.span, scales)
        return np.int64(list_rows(obs, t.rows, t.inputs, low, span, values, lists[t.rows :], lists, t.length))

    return list_observations


def list_memory(rows: int, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Memory for `list_rows`: values, and counts followed by indices."""
    return np.empty(rows * length + WIDTH, np.float32), np.empty(rows * (1 + length) + WIDTH, np.int32)


def _make_row(finish: str, vectors: int) -> Any:
    """An intrinsic for vectors of one row: finish(bias + sum of x[i] * b[places[i]] over i from `first` on)."""

    @intrinsic
    def row(typing_context: Any, c: Any, c_at: Any, x: Any, places: Any, first: Any, count: Any, b: Any, b_at: Any,
            b_stride: Any, bias: Any, bias_at: Any) -> Any:  # fmt: skip
        i8 = types.int64

        def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            made = Tile(builder, vectors)

            def pointer(n: int, offset: Any) -> Any:
                return made.at(context.make_array(signature.args[n])(context, builder, arguments[n]).data, offset)

            into, b_first, biases = (pointer(n, arguments[n + 1]) for n in (0, 6, 9))
            values, listed, lanes = pointer(2, arguments[4]), pointer(3, arguments[4]), [v * WIDTH for v in range(vectors)]

            def place(i: Any, u: int) -> Any:
                return builder.sext(builder.load(made.at(listed, i, u)), ir.IntType(64))

            def step(i: Any, count: int, sums: list[Any]) -> list[Any]:
                for u in range(count):
                    line = made.at(b_first, builder.mul(place(i, u), arguments[8]))
                    element = made.splat(builder.load(made.at(values, i, u)))
                    sums = [made.fma(element, made.load(made.at(line, n)), s) for n, s in zip(lanes, sums, strict=True)]
                return sums

            sums = made.sums([made.load(made.at(biases, n)) for n in lanes], arguments[5], step)
            for lane, value in zip(lanes, sums, strict=True):
                made.store(made.finished(value, finish, None), made.at(into, lane))
            return context.get_dummy_value()

        return types.void(c, i8, x, places, i8, i8, b, i8, i8, bias, i8), codegen

    return row


def _make_product(finish: str) -> Any:
    """`gemm.linear…` of rows whose nonzeros are listed: those of row q begin at q * length."""
    wide, narrow = (_make_row(finish, vectors) for vectors in (VECTORS, 1))

    @joined
    def product(c, values, places, counts, length, b, x, rows, panels, width):
        for q in range(rows):
            first, count = q * length, np.int64(counts[q])
            for p in range(panels):
                c_at, b_at, x_at = c[1] + q * c[2] + p * c[3], b[1] + p * b[3], x[1] + p * width
                if width > WIDTH:
                    wide(c[0], c_at, values, places, first, count, b[0], b_at, b[2], x[0], x_at)
                else:
                    narrow(c[0], c_at, values, places, first, count, b[0], b_at, b[2], x[0], x_at)

    return product


def _axpy(typing_context: Any, c: Any, c_at: Any, factor: Any, b: Any, b_at: Any, vectors: Any) -> Any:
    count = vectors.literal_value

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        made = Tile(builder, count)
        into, source = (
            made.at(context.make_array(signature.args[n])(context, builder, arguments[n]).data, arguments[n + 1])
            for n in (0, 3)
        )
        element = made.splat(arguments[2])
        for lane in range(0, count * WIDTH, WIDTH):
            total = made.fma(element, made.load(made.at(source, lane)), made.load(made.at(into, lane)))
            made.store(total, made.at(into, lane))
        return context.get_dummy_value()

    return types.void(c, types.int64, types.float32, b, types.int64, vectors), codegen


_add_scaled: Any = intrinsic(prefer_literal=True)(_axpy)
"""c += factor * b, for a few vectors."""


@jit
def add_transposed_sparse(c, values, places, counts, length, b, samples, panels, width):
    """`gemm.add_transposed` of an A whose rows are lists."""
    for q in range(samples):
        for i in range(q * length, q * length + counts[q]):
            k, factor = np.int64(places[i]), values[i]
            for p in range(panels):
                c_at, b_at = c[1] + p * c[3] + k * c[2], b[1] + q * b[2] + p * b[3]
                if width > WIDTH:
                    _add_scaled(c[0], c_at, factor, b[0], b_at, VECTORS)
                else:
                    _add_scaled(c[0], c_at, factor, b[0], b_at, 1)


sparse_linear = _make_product("none")
sparse_tanh = _make_product("tanh")
sparse_relu = _make_product("relu")
