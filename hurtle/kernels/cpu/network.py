"""Forward and backward of an actor–critic for a tile of rows, on one buffer of packed weights.

observations [rows, inputs] → layer by layer → outputs; their gradients → gradients of the weights. A table describes the
layers, so that one compiled function serves every depth, width and activation. Convolutions and memories are compiled only
for policies that have them, and called by address. Knows nothing of actions or losses.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from .gemm import (
    PANEL,
    RELU,
    TANH,
    add_transposed,
    few_columns,
    linear,
    linear_relu,
    linear_tanh,
    times,
    times_relu_slope,
    times_tanh_slope,
)
from .host import CHECKED, TILE, WIDTH, address_of_function, f4, jit, joined, variant
from .memory import ANY, address_of, call, floats_at, places_at, table_at
from .sparse import add_transposed_sparse, sparse_linear, sparse_relu, sparse_tanh

# Columns of the table of layers, int64 [L, COLUMNS].
SOURCE = 0  # the layer whose outputs it reads; -1: the observations
INPUTS = 1
OUTPUTS = 2
STRIDE = 3  # the row stride of its outputs in the workspace
PANEL_WIDTH = 4  # columns of a panel of its weights
WEIGHT = 5  # offset of its weights, [panel][inputs][PANEL_WIDTH]
BIAS = 6
TRANSPOSED = 7  # offset of the transposed copy of its weights, for the gradient of its inputs; -1: not needed
ACTIVATION = 8
WORK = 9  # offset of its outputs in the workspace, [TILE, STRIDE]
FLAT_WEIGHT = 10  # offset of its weights in the flat buffer, in torch's order …
FLAT_BIAS = 11  # -1: it has no biases
FLAT_DOWN = 12  # … from the weights of an output to those of the next; see also `NetworkPlan.flat_inputs`
PANELS = 13  # of its weights: its outputs rounded up
X_AT = 14  # for layers that read the observations: the first input that this one reads
PARTS = 15  # how many layers, from this one on, write their outputs side by side, as one source of the layers that follow
READ_WIDTH = 16  # columns of a panel of its outputs as layers that follow read them, and as they compute their gradients
READ_PANELS = 17
KIND = 18
FORWARD = 19  # for OWN_CODE: the address of its forward; 0: not compiled yet
BACKWARD = 20  # … and of its backward
EXTRA = 21  # … and what else it needs: conv.py and cells.py say what
COLUMNS = 27

DENSE = 0
OWN_CODE = 1  # another function runs it
HELD = 2  # has no code of its own: weights or memory for one with OWN_CODE
INPUT = 3  # holds the inputs of a chain (policies/dense_chain.py)
FEW_OUTPUTS = 4  # has its weights only once, transposed: WEIGHT and TRANSPOSED are the same offset

BLOCK, BLOCK_COLUMNS = 512, 6
"""Weights that one thread sums and steps at a time, and the columns of `weight_blocks`."""
PAGE, FEW_PAGES = 1024, 32
"""Rows this far apart, in floats, are on a memory page each; so many fit into the CPU's table of pages, with room to spare."""
TRANSPOSED_ROWS = WIDTH
"""Inputs transposed at a time; they must start at a multiple of this."""


def weight_blocks(layers: np.ndarray) -> np.ndarray:
    """The trained weights in blocks: start, length; for those that have a transposed copy, the layer, panel and its rows."""
    blocks: list[tuple[int, ...]] = []
    for n, layer in enumerate(layers):
        inputs, panels, width = (int(layer[column]) for column in (INPUTS, PANELS, PANEL_WIDTH))
        own, step = n if layer[TRANSPOSED] >= 0 else -1, max(1, BLOCK // width)
        if layer[KIND] == FEW_OUTPUTS:
            size = int(layer[INPUTS] * layer[OUTPUTS])
            blocks += [(layer[WEIGHT] + k, min(BLOCK, size - k), -1, 0, 0, 0) for k in range(0, size, BLOCK)]
        for panel in range(0 if layer[KIND] == FEW_OUTPUTS else panels):
            for first in range(0, inputs, step):
                last = min(inputs, first + step)
                start = layer[WEIGHT] + (panel * inputs + first) * width
                blocks.append((start, (last - first) * width, own, panel, first, last))
        if layer[FLAT_BIAS] >= 0:
            blocks.append((layer[BIAS], panels * width, -1, 0, 0, 0))
    return np.array(blocks, np.int64).reshape(-1, BLOCK_COLUMNS)


@jit
def forward(weights, layers, first, last, x, x_at, x_stride, rows, work, lists, more):
    """Run layers [first, last) on at most TILE rows; row q of the observations begins at x_at + q * x_stride.

    With `lists`, it consists of lists[q] nonzero numbers, whose indices begin at lists[TILE + q * x_stride]. If
    `more` is None, the code for lists and for relu is left out.
    """
    for n in range(first, last):
        if layers[n, KIND] != DENSE:
            if layers[n, KIND] == OWN_CODE:
                _forward_elsewhere(weights, layers, n, x, x_at, x_stride, rows, work, lists)
            elif layers[n, KIND] == FEW_OUTPUTS:
                _forward_few(weights, layers, n, rows, work)
            continue
        source, inputs, stride, width = layers[n, SOURCE], layers[n, INPUTS], layers[n, STRIDE], layers[n, PANEL_WIDTH]
        out, weight, bias, activation = layers[n, WORK], layers[n, WEIGHT], layers[n, BIAS], layers[n, ACTIVATION]
        panels = layers[n, PANELS]
        a = (work, layers[source, WORK], layers[source, STRIDE]) if source >= 0 else (x, x_at + layers[n, X_AT], x_stride)
        c, b, biases = (work, out, stride, width), (weights, weight, width, inputs * width), (weights, bias, 0)
        if more is not None and source < 0 and lists.shape[0] > 0:
            values, places = x[x_at:], lists[TILE:]
            if activation == TANH:
                sparse_tanh(c, values, places, lists, x_stride, b, biases, rows, panels, width)
            elif activation == RELU:
                sparse_relu(c, values, places, lists, x_stride, b, biases, rows, panels, width)
            else:
                sparse_linear(c, values, places, lists, x_stride, b, biases, rows, panels, width)
        elif activation == TANH:
            linear_tanh(c, a, b, biases, rows, inputs, panels, width)
        elif more is not None and activation == RELU:
            linear_relu(c, a, b, biases, rows, inputs, panels, width)
        else:
            linear(c, a, b, biases, rows, inputs, panels, width)


@joined
def _forward_few(weights, layers, n, rows, work):
    source, outputs = layers[n, SOURCE], layers[n, OUTPUTS]
    c, a = (work, layers[n, WORK], layers[n, STRIDE]), (work, layers[source, WORK], layers[source, STRIDE])
    b, biases = (weights, layers[n, WEIGHT], outputs * PANEL), (weights, layers[n, BIAS])
    few_columns(c, a, b, biases, rows, outputs, layers[source, READ_PANELS])


@jit
def backward(weights, layers, first, last, x, x_at, x_stride, rows, work, slopes, gradient, at, lists, more):
    """Add the gradient of layers [first, last) to `gradient`, from offset `at` on.

    `work` is the workspace after `forward`; `slopes`, with the same layout, has the gradients of the last layers' outputs. If
    two layers have the same source, the second has one output (the value): its part is added to that of the first.
    """
    for n in range(last - 1, first - 1, -1):
        if layers[n, KIND] == OWN_CODE:
            _backward_elsewhere(weights, layers, n, x, x_at, x_stride, rows, work, slopes, gradient, at, lists)
            continue
        source, inputs, stride = layers[n, SOURCE], layers[n, INPUTS], layers[n, STRIDE]
        width, own, panels = layers[n, PANEL_WIDTH], layers[n, WORK], layers[n, PANELS]
        add_column_sums(slopes, own, stride, panels * width, rows, gradient, at + layers[n, BIAS])
        a = (work, layers[source, WORK], layers[source, STRIDE]) if source >= 0 else (x, x_at + layers[n, X_AT], x_stride)
        c, b = (gradient, at + layers[n, WEIGHT], width, inputs * width), (slopes, own, stride, width)
        if more is not None and source < 0 and lists.shape[0] > 0:
            add_transposed_sparse(c, x[x_at:], lists[TILE:], lists, x_stride, b, rows, panels, width)
            continue
        step = rows if a[2] < PAGE else FEW_PAGES
        for q in range(0, rows, step):
            if layers[n, KIND] == FEW_OUTPUTS:
                outputs, panels = layers[n, OUTPUTS], layers[source, READ_PANELS]
                into, left = (gradient, c[1], PANEL, outputs * PANEL), (slopes, own + q * stride, stride)
                right = (work, a[1] + q * a[2], a[2], PANEL)
                add_transposed(into, left, right, (slopes, 0, 0), outputs, min(step, rows - q), panels, PANEL)
                continue
            left, right = (a[0], a[1] + q * a[2], a[2]), (slopes, own + q * stride, stride, width)
            add_transposed(c, left, right, (slopes, 0, 0), inputs, min(step, rows - q), panels, width)
        if layers[n, KIND] == HELD or source < 0 or layers[source, KIND] == INPUT:
            continue
        if n + 1 < last and layers[n + 1, SOURCE] == source:
            continue
        if n > first and layers[n - 1, SOURCE] == source:  # two heads on one body: the policy's part first, then the value's
            _backward_inputs(weights, layers, n - 1, rows, work, slopes, more)
            _add_value_slopes(weights, layers, n, rows, work, slopes)
        else:
            _backward_inputs(weights, layers, n, rows, work, slopes, more)


@jit
def _backward_inputs(weights, layers, n, rows, work, slopes, more):
    """The gradient with respect to the outputs of layer n's source, before its activation."""
    source, outputs, a = layers[n, SOURCE], layers[n, OUTPUTS], (slopes, layers[n, WORK], layers[n, STRIDE])
    for part in range(source, source + layers[source, PARTS]):
        into, stride, width, panels = (
            layers[part, WORK],
            layers[part, STRIDE],
            layers[part, READ_WIDTH],
            layers[part, READ_PANELS],
        )
        column = into - layers[source, WORK]
        c, h = (slopes, into, stride, width), (work, into, stride)
        b = (weights, layers[n, TRANSPOSED] + column * outputs, width, outputs * width)
        if layers[part, ACTIVATION] == TANH:
            times_tanh_slope(c, a, b, h, rows, outputs, panels, width)
        elif more is not None and layers[part, ACTIVATION] == RELU:
            times_relu_slope(c, a, b, h, rows, outputs, panels, width)
        else:
            times(c, a, b, h, rows, outputs, panels, width)


@jit
def _add_value_slopes(weights, layers, n, rows, work, slopes):
    """The value head's part of the gradient of a shared body: its slope times its row of weights."""
    source, own, stride = layers[n, SOURCE], layers[n, WORK], layers[n, STRIDE]
    into, into_stride, columns = (
        layers[source, WORK],
        layers[source, STRIDE],
        layers[source, READ_PANELS] * layers[source, READ_WIDTH],
    )
    activation, transposed = layers[source, ACTIVATION], layers[n, TRANSPOSED]
    for q in range(rows):
        slope = slopes[own + q * stride]
        h = work[into + q * into_stride : into + q * into_stride + columns]
        d = slopes[into + q * into_stride : into + q * into_stride + columns]
        w = weights[transposed : transposed + columns]  # one row: panels are adjacent
        if activation == TANH:
            for k in range(columns):
                d[k] += slope * w[k] * (f4(1.0) - h[k] * h[k])
        elif activation == RELU:
            for k in range(columns):
                d[k] += f4(0.0) if h[k] <= f4(0.0) else slope * w[k]
        else:
            for k in range(columns):
                d[k] += slope * w[k]


@jit
def _forward_elsewhere(weights, layers, n, x, x_at, x_stride, rows, work, lists):
    w, table, observations = address_of(weights, 0), address_of(layers, 0), address_of(x, x_at)
    left, places, size = address_of(work, 0), address_of(lists, 0), lists.shape[0]
    call(layers[n, FORWARD], (w, table, n, observations, x_stride, np.int64(0), rows, left, places, size))


@jit
def _backward_elsewhere(weights, layers, n, x, x_at, x_stride, rows, work, slopes, gradient, at, lists):
    w, table, observations = address_of(weights, 0), address_of(layers, 0), address_of(x, x_at)
    left, s, g, places = address_of(work, 0), address_of(slopes, 0), address_of(gradient, at), address_of(lists, 0)
    call(layers[n, BACKWARD], (w, table, n, observations, x_stride, np.int64(0), rows, left, s, g, places, lists.shape[0]))


@jit
def add_column_sums(slopes, first, stride, columns, rows, gradient, at):
    """Add the sum of the rows of a matrix: the gradient of biases."""
    sums = gradient[at : at + columns]
    for q in range(rows):
        row = slopes[first + q * stride : first + q * stride + columns]
        for j in range(columns):
            sums[j] += row[j]


@jit
def transpose_rows(weights, layers, n, panel, first, last):
    """Copy rows (inputs) [first, last) of one panel of layer n's weights to the transposed copy."""
    inputs, outputs, width = layers[n, INPUTS], layers[n, OUTPUTS], layers[n, PANEL_WIDTH]
    columns = min(width, outputs - panel * width)
    weight, other = layers[n, WEIGHT] + panel * inputs * width, layers[layers[n, SOURCE], READ_WIDTH]
    for start in range(first, last, TRANSPOSED_ROWS):  # few enough for one panel of the other matrix
        count = min(TRANSPOSED_ROWS, last - start)
        into = layers[n, TRANSPOSED] + (start // other) * outputs * other + panel * width * other + start % other
        rows = weights[weight + start * width : weight + (start + count) * width]
        for j in range(columns):
            row = weights[into + j * other : into + j * other + count]
            for k in range(count):
                row[k] = rows[np.uint64(k * width + j)]


# The same by address, for callers that are compiled separately


@cache
def forward_address(more: bool) -> int:
    """The address of `forward` for `call_forward`; `more`: also for relu and listed observations, which most policies lack."""
    has_more = 1 if more else None

    @variant("more" if more else "less")
    def forward_at(weights, layers, count, first, last, x, x_stride, rows, work, lists, size):
        table, observations, w = table_at(layers, count, COLUMNS), floats_at(x, ANY), floats_at(work, ANY)
        given, places = floats_at(weights, ANY), places_at(lists, size)
        forward(given, table, first, last, observations, 0, x_stride, rows, w, places, has_more)

    return address_of_function(forward_at, 11)


@cache
def backward_address(more: bool) -> int:
    """The same of `backward`, for `call_backward`."""
    has_more = 1 if more else None

    @variant("more" if more else "less")
    def backward_at(weights, layers, count, first, last, x, x_stride, rows, work, slopes, gradient, lists, size):
        table, w, s = table_at(layers, count, COLUMNS), floats_at(work, ANY), floats_at(slopes, ANY)
        given, x_array, g, places = floats_at(weights, ANY), floats_at(x, ANY), floats_at(gradient, ANY), places_at(lists, size)
        backward(
            given, table, first, last, x_array, 0, x_stride, rows, w, s, g, 0, places, has_more
        )  # fmt: skip

    return address_of_function(backward_at, 13)


@cache
def input_slopes_address() -> int:
    """The address for `call_input_slopes`."""

    def input_slopes_at(weights, layers, count, rows, work, slopes):
        table, w, s = table_at(layers, count, COLUMNS), floats_at(work, ANY), floats_at(slopes, ANY)
        for n in range(count - 1, 0, -1):
            _backward_inputs(floats_at(weights, ANY), table, n, rows, w, s, 1)

    return address_of_function(input_slopes_at, 6)


@jit
def call_input_slopes(address, weights, layers, rows, work, slopes):
    """Gradients of the inputs of a chain whose layer 0 holds them, from those of the last layer's outputs; none of weights."""
    w, table = address_of(weights, 0), address_of(layers, 0)
    call(address, (w, table, layers.shape[0], rows, address_of(work, 0), address_of(slopes, 0)))


if CHECKED:

    @jit
    def call_forward(address, weights, layers, first, last, x, x_at, x_stride, rows, work, lists):
        """Call `forward` by address."""
        forward(weights, layers, first, last, x, x_at, x_stride, rows, work, lists, 1)

    @jit
    def call_backward(address, weights, layers, first, last, x, x_at, x_stride, rows, work, slopes, gradient, at, lists):
        """Call `backward` by address."""
        backward(weights, layers, first, last, x, x_at, x_stride, rows, work, slopes, gradient, at, lists, 1)

else:

    @jit
    def call_forward(address, weights, layers, first, last, x, x_at, x_stride, rows, work, lists):
        """Call `forward` by address."""
        w, table, observations = address_of(weights, 0), address_of(layers, 0), address_of(x, x_at)
        into, places = address_of(work, 0), address_of(lists, 0)
        call(address, (w, table, layers.shape[0], first, last, observations, x_stride, rows, into, places, lists.shape[0]))

    @jit
    def call_backward(address, weights, layers, first, last, x, x_at, x_stride, rows, work, slopes, gradient, at, lists):
        """Call `backward` by address."""
        w, table, observations = address_of(weights, 0), address_of(layers, 0), address_of(x, x_at)
        left, s, g, places = address_of(work, 0), address_of(slopes, 0), address_of(gradient, at), address_of(lists, 0)
        size = lists.shape[0]
        call(address, (w, table, layers.shape[0], first, last, observations, x_stride, rows, left, s, g, places, size))
