"""First layers whose inputs are mostly zeros (grids of bits, one-hot vectors): products that skip them, to the same bits.

observations → places of their non-zeros → the products of gemm.py over these alone. A zero adds nothing to a sum, so that
results are those of the dense products. Knows nothing of networks.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from .gemm import VECTORS, Tile
from .host import WIDTH, inlined, jit

LEAST_INPUTS = 4 * WIDTH
"""Below so many inputs there is little to skip."""
MOST_PLACES = 4
"""One in so many inputs may be other than zero: else the dense product is as fast."""


def _nonzeros(typing_context: Any, x: Any, at: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        made = Tile(builder, 1)
        array = context.make_array(signature.args[0])(context, builder, arguments[0])
        differs = builder.fcmp_unordered("!=", made.load(made.at(array.data, arguments[1])), made.constant(0.0))
        return builder.zext(builder.bitcast(differs, ir.IntType(WIDTH)), ir.IntType(64))

    return types.int64(x, types.int64), codegen


_nonzeros_at: Any = intrinsic(_nonzeros)
"""Which of WIDTH elements are not zero (NaN is not), as bits."""


@jit
def new_places(rows, inputs):
    """Memory for `find_nonzeros`: as many places as are worth listing, and where each row's begin."""
    return np.empty(rows * inputs // MOST_PLACES + inputs, np.int64), np.empty(rows + 1, np.int64)


@jit
def find_nonzeros(x, at, stride, rows, inputs, places, bounds):
    """Write the places of the non-zeros of each row, row q's from bounds[q] to bounds[q + 1]; False if they are too many."""
    whole, count = inputs // WIDTH * WIDTH, 0
    bounds[0] = 0
    for q in range(rows):
        first = at + q * stride
        if count + inputs > places.shape[0]:
            return False
        for k in range(0, whole, WIDTH):
            bits = _nonzeros_at(x, first + k)
            while bits:
                places[count] = k + _lowest(bits)
                count += 1
                bits &= bits - 1
        for k in range(whole, inputs):
            if x[first + k] != 0:
                places[count] = k
                count += 1
        bounds[q + 1] = count
    return count * MOST_PLACES <= rows * inputs


def _trailing_zeros(typing_context: Any, bits: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 1))

    return types.int64(types.int64), codegen


_lowest: Any = intrinsic(_trailing_zeros)
"""The place of the lowest bit that is set."""


def _make_row(finish: str, vectors: int) -> Any:
    """An intrinsic for vectors of one row: finish(bias + sum of x[k] * b[k] over the places k from `first` to `last`)."""

    @intrinsic
    def row(typing_context: Any, c: Any, c_at: Any, x: Any, x_at: Any, places: Any, first: Any, last: Any, b: Any, b_at: Any,
            b_stride: Any, bias: Any, bias_at: Any) -> Any:  # fmt: skip
        i8 = types.int64

        def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            made = Tile(builder, vectors)

            def pointer(n: int, offset: Any) -> Any:
                return made.at(context.make_array(signature.args[n])(context, builder, arguments[n]).data, offset)

            into, x_first, b_first, biases = (pointer(n, arguments[n + 1]) for n in (0, 2, 7, 10))
            listed, lanes = pointer(4, arguments[5]), [v * WIDTH for v in range(vectors)]

            def step(i: Any, count: int, sums: list[Any]) -> list[Any]:
                for u in range(count):
                    k = builder.load(made.at(listed, i, u))
                    element, line = (
                        made.splat(builder.load(made.at(x_first, k))),
                        made.at(b_first, builder.mul(k, arguments[9])),
                    )
                    sums = [made.fma(element, made.load(made.at(line, n)), s) for n, s in zip(lanes, sums, strict=True)]
                return sums

            sums = made.sums([made.load(made.at(biases, n)) for n in lanes], builder.sub(arguments[6], arguments[5]), step)
            for lane, value in zip(lanes, sums, strict=True):
                made.store(made.finished(value, finish, None), made.at(into, lane))
            return context.get_dummy_value()

        return types.void(c, i8, x, i8, places, i8, i8, b, i8, i8, bias, i8), codegen

    return row


def _make_product(finish: str) -> Any:
    """`gemm.linear…` over the listed places."""
    wide, narrow = (_make_row(finish, vectors) for vectors in (VECTORS, 1))

    @inlined
    def product(c, a, b, x, rows, panels, width, places, bounds):
        for q in range(rows):
            for p in range(panels):
                c_at, b_at, x_at = c[1] + q * c[2] + p * c[3], b[1] + p * b[3], x[1] + p * width
                if width > WIDTH:
                    wide(c[0], c_at, a[0], a[1] + q * a[2], places, bounds[q], bounds[q + 1], b[0], b_at, b[2], x[0], x_at)
                else:
                    narrow(c[0], c_at, a[0], a[1] + q * a[2], places, bounds[q], bounds[q + 1], b[0], b_at, b[2], x[0], x_at)

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
"""c += factor * b, some vectors of each."""


@jit
def add_transposed_sparse(c, a, b, samples, panels, width, places, bounds):
    """`gemm.add_transposed` over the listed places of A's rows."""
    for q in range(samples):
        for i in range(bounds[q], bounds[q + 1]):
            k = places[i]
            factor = a[0][a[1] + q * a[2] + k]
            for p in range(panels):
                c_at, b_at = c[1] + p * c[3] + k * c[2], b[1] + q * b[2] + p * b[3]
                if width > WIDTH:
                    _add_scaled(c[0], c_at, factor, b[0], b_at, VECTORS)
                else:
                    _add_scaled(c[0], c_at, factor, b[0], b_at, 1)


sparse_linear = _make_product("none")
sparse_tanh = _make_product("tanh")
sparse_relu = _make_product("relu")
