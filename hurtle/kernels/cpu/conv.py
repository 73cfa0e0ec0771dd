"""A convolution with ReLU over the observations, and the gradient of its weights: products of patches, or of listed nonzeros.

observations [rows, inputs] → [rows, pixels × filters]. A table says which inputs each pixel reads, so that any order of
channels, stride and padding is the same code. Both ways sum in the same order, so their results are bitwise equal.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from .gemm import VECTORS, Tile, add_transposed, linear_relu
from .host import TILE, WIDTH, address_of_function, f4, jit
from .memory import ANY, floats_at, places_at, table_at
from .network import (
    BIAS,
    COLUMNS,
    EXTRA,
    INPUTS,
    OUTPUTS,
    PANEL_WIDTH,
    PANELS,
    STRIDE,
    WEIGHT,
    WORK,
    add_column_sums,
)

TAPS = EXTRA  # address of the table, see `tables`
PIXELS = EXTRA + 1
X_INPUTS = EXTRA + 2  # elements of one observation
PATCH = EXTRA + 3  # offset of the patches of one observation in the workspace, [PIXELS, INPUTS]


def tables(taps: np.ndarray, inputs: int, filters: int, width: int) -> np.ndarray:
    """What the kernels know of a convolution: taps, and for each input which pixels and weights it meets.

    Args:
        taps: The input that each weight of a filter meets at each pixel; -1 for padding. [pixels, weights]
        inputs: Elements of one observation.
        filters: Number of filters.
        width: Columns of a panel of weights.

    Returns:
        int32: the taps, where the pairs of each input begin (inputs + 1), then pairs of offsets, of a pixel and of a weight.
    """
    flat = taps.ravel()
    order = np.argsort(flat, kind="stable")[(flat < 0).sum() :]  # by input, then by pixel; padding comes first
    starts = np.searchsorted(flat[order], np.arange(inputs + 1))
    pixels, weights = np.divmod(order, taps.shape[1])
    pairs = np.column_stack([pixels * filters, weights * width]).ravel()
    return np.concatenate([flat, starts, pairs]).astype(np.int32)


def _forward(weights, layers, n, x, x_stride, first, rows, work, lists, listed):
    table, w, given = table_at(layers, n + 1, COLUMNS), floats_at(weights, ANY), floats_at(x, ANY)
    into = floats_at(work, ANY)
    if listed > 0:
        _convolve_listed(w, table, n, given, places_at(lists, listed), x_stride, rows, into)
    else:
        _convolve(w, table, n, given, x_stride, rows, into)


def _backward(weights, layers, n, x, x_stride, first, rows, work, slopes, gradient, lists, listed):
    table, given, left = table_at(layers, n + 1, COLUMNS), floats_at(x, ANY), floats_at(work, ANY)
    s, g = floats_at(slopes, ANY), floats_at(gradient, ANY)
    filters, pixels = table[n, OUTPUTS], table[n, PIXELS]
    for q in range(rows):
        add_column_sums(s, table[n, WORK] + q * table[n, STRIDE], filters, filters, pixels, g, table[n, BIAS])
    if listed > 0:
        _add_gradient_listed(table, n, given, places_at(lists, listed), x_stride, rows, s, g)
    else:
        _add_gradient(table, n, given, x_stride, rows, left, s, g)


@jit
def _convolve(weights, layers, n, x, x_stride, rows, work):
    """Copy each pixel's inputs side by side, then one matrix product."""
    depth, width, filters = layers[n, INPUTS], layers[n, PANEL_WIDTH], layers[n, OUTPUTS]
    b, biases = (weights, layers[n, WEIGHT], width, depth * width), (weights, layers[n, BIAS], np.int64(0))
    for q in range(rows):
        a = _patches(layers, n, x[q * x_stride :], work)
        c = (work, layers[n, WORK] + q * layers[n, STRIDE], filters, width)
        linear_relu(c, a, b, biases, layers[n, PIXELS], depth, layers[n, PANELS], width)


@jit
def _add_gradient(layers, n, x, x_stride, rows, work, slopes, gradient):
    depth, width, filters = layers[n, INPUTS], layers[n, PANEL_WIDTH], layers[n, OUTPUTS]
    c = (gradient, layers[n, WEIGHT], width, depth * width)
    for q in range(rows):
        a = _patches(layers, n, x[q * x_stride :], work)
        b = (slopes, layers[n, WORK] + q * layers[n, STRIDE], filters, width)
        add_transposed(c, a, b, (slopes, np.int64(0), np.int64(0)), depth, layers[n, PIXELS], layers[n, PANELS], width)


@jit
def _patches(layers, n, x, work):
    """The inputs of each pixel of one observation, as the left factor of a product."""
    at, depth = layers[n, PATCH], layers[n, INPUTS]
    taps = places_at(layers[n, TAPS], ANY)
    for k in range(layers[n, PIXELS] * depth):
        work[at + k] = x[taps[k]] if taps[k] >= 0 else f4(0.0)
    return work, at, depth


def _filling(typing_context: Any, c: Any, c_at: Any, c_step: Any, count: Any, b: Any, b_at: Any, vectors: Any) -> Any:
    width = vectors.literal_value

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        made = Tile(builder, width)
        into, source = (_pointer(made, context, signature, arguments, n) for n in (0, 4))
        numbers = [made.load(made.at(source, lane)) for lane in range(0, width * WIDTH, WIDTH)]
        with cgutils.for_range(builder, arguments[3]) as loop:
            row = made.at(into, builder.mul(loop.index, arguments[2]))
            for n, number in enumerate(numbers):
                made.store(number, made.at(row, n * WIDTH))
        return context.get_dummy_value()

    i8 = types.int64
    return types.void(c, i8, i8, i8, b, i8, vectors), codegen


def _adding(to_pixels: bool) -> Any:
    def add(typing_context: Any, c: Any, c_at: Any, factor: Any, b: Any, b_at: Any, pairs: Any, first: Any, count: Any,
            vectors: Any) -> Any:  # fmt: skip
        width = vectors.literal_value

        def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            made, i8 = Tile(builder, width), ir.IntType(64)
            c_first, b_first = (_pointer(made, context, signature, arguments, n) for n in (0, 3))
            listed = context.make_array(signature.args[5])(context, builder, arguments[5]).data
            listed = made.at(listed, builder.shl(arguments[6], ir.Constant(i8, 1)))
            element = made.splat(arguments[2])
            with cgutils.for_range(builder, arguments[7]) as loop:
                pair = made.at(listed, builder.shl(loop.index, ir.Constant(i8, 1)))
                offsets = [builder.sext(builder.load(made.at(pair, n)), i8) for n in (0, 1)]
                of_pixel, of_weight = offsets
                into = made.at(c_first, of_pixel if to_pixels else of_weight)
                source = made.at(b_first, of_weight if to_pixels else of_pixel)
                for lane in range(0, width * WIDTH, WIDTH):
                    total = made.fma(element, made.load(made.at(source, lane)), made.load(made.at(into, lane)))
                    made.store(total, made.at(into, lane))
            return context.get_dummy_value()

        i8 = types.int64
        return types.void(c, i8, types.float32, b, i8, pairs, i8, i8, vectors), codegen

    return intrinsic(prefer_literal=True)(add)


def _pointer(made: Tile, context: Any, signature: Any, arguments: Any, n: int) -> Any:
    """To the element of argument n, an array, that argument n + 1 says."""
    return made.at(context.make_array(signature.args[n])(context, made.b, arguments[n]).data, arguments[n + 1])


_fill: Any = intrinsic(prefer_literal=True)(_filling)
"""Copy a few vectors of b to `count` places of c, `c_step` apart."""
_add_to_pixels, _add_to_weights = _adding(True), _adding(False)
"""c += factor * b, a few vectors for each of `count` pairs of offsets: of a pixel, of a weight."""


@jit
def _convolve_listed(weights, layers, n, values, lists, length, rows, work):
    """Add to each pixel what the nonzeros contribute."""
    filters, width, depth = layers[n, OUTPUTS], layers[n, PANEL_WIDTH], layers[n, INPUTS]
    pixels, panels, bias, weight = layers[n, PIXELS], layers[n, PANELS], layers[n, BIAS], layers[n, WEIGHT]
    starts, pairs = _meetings(layers, n)
    for q in range(rows):
        at = layers[n, WORK] + q * layers[n, STRIDE]
        for panel in range(panels):
            c_at, b_at = at + panel * width, weight + panel * depth * width
            if width > WIDTH:
                _fill(work, c_at, filters, pixels, weights, bias + panel * width, VECTORS)
            else:
                _fill(work, c_at, filters, pixels, weights, bias + panel * width, 1)
            for i in range(q * length, q * length + lists[q]):
                k = lists[TILE + i]
                first, count = np.int64(starts[k]), np.int64(starts[k + 1] - starts[k])
                if width > WIDTH:
                    _add_to_pixels(work, c_at, values[i], weights, b_at, pairs, first, count, VECTORS)
                else:
                    _add_to_pixels(work, c_at, values[i], weights, b_at, pairs, first, count, 1)
        outputs = work[at : at + pixels * filters]
        for k in range(pixels * filters):
            outputs[k] = f4(0.0) if outputs[k] < f4(0.0) else outputs[k]


@jit
def _add_gradient_listed(layers, n, values, lists, length, rows, slopes, gradient):
    width, depth, weight = layers[n, PANEL_WIDTH], layers[n, INPUTS], layers[n, WEIGHT]
    starts, pairs = _meetings(layers, n)
    for q in range(rows):
        at = layers[n, WORK] + q * layers[n, STRIDE]
        for panel in range(layers[n, PANELS]):
            c_at, b_at = weight + panel * depth * width, at + panel * width
            for i in range(q * length, q * length + lists[q]):
                k = lists[TILE + i]
                first, count = np.int64(starts[k]), np.int64(starts[k + 1] - starts[k])
                if width > WIDTH:
                    _add_to_weights(gradient, c_at, values[i], slopes, b_at, pairs, first, count, VECTORS)
                else:
                    _add_to_weights(gradient, c_at, values[i], slopes, b_at, pairs, first, count, 1)


@jit
def _meetings(layers, n):
    """Where the pairs of each input begin, and the pairs; see `tables`."""
    first = layers[n, PIXELS] * layers[n, INPUTS]
    table = places_at(layers[n, TAPS], ANY)
    return table[first:], table[first + layers[n, X_INPUTS] + 1 :]


@cache
def addresses() -> tuple[int, int]:
    """The addresses of forward and backward, for the table of layers."""
    return address_of_function(_forward, 10), address_of_function(_backward, 12)
