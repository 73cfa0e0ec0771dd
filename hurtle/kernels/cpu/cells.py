"""One step of an LSTM, a GRU or a MinGRU for some rows of a tile, and its gradient.

gates of the features, state before → gates of the state → state after; and back. `policies/recurrent.py` is the reference.
States and gates are outputs of layers in the workspace, see network.py; a cell row of the table connects them.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from .gemm import linear, times
from .host import address_of_function, f4, jit
from .memory import ANY, floats_at, table_at
from .network import (
    BIAS,
    COLUMNS,
    EXTRA,
    INPUTS,
    OUTPUTS,
    PANEL_WIDTH,
    PANELS,
    READ_PANELS,
    READ_WIDTH,
    STRIDE,
    TRANSPOSED,
    WEIGHT,
    WORK,
)
from .vector_math import sigmoid

CELL = EXTRA  # one of these
LSTM, GRU, MINGRU = 1, 2, 3
OF_FEATURES = EXTRA + 1  # the layer of the features' gates, which the step replaces by their activations
OF_STATE = EXTRA + 2  # the layer of the state's gates; -1: there is none
BEFORE = EXTRA + 3  # the layer that holds the state before the step
CELLS = EXTRA + 4  # offset of an LSTM's cells in the workspace, for this row and for the one before; as wide as its outputs
STATES = EXTRA + 5  # offset of states that a rollout sets aside, [parts, TILE, size]


@jit
def tanh(x):
    """The hyperbolic tangent, to 1e-7."""
    return f4(2.0) * sigmoid(f4(2.0) * x) - f4(1.0)


def _forward(weights, layers, n, x, x_stride, first, rows, work, lists, listed):
    table, w, into = table_at(layers, n + 1, COLUMNS), floats_at(weights, ANY), floats_at(work, ANY)
    gates, before, size, kind = table[n, OF_FEATURES], table[n, BEFORE], table[n, OUTPUTS], table[n, CELL]
    hidden = table[n, OF_STATE]
    if hidden >= 0:
        width, stride, inputs = table[hidden, PANEL_WIDTH], table[hidden, STRIDE], table[hidden, INPUTS]
        a = (into, table[before, WORK] + first * table[before, STRIDE], table[before, STRIDE])
        c, b = (into, table[hidden, WORK] + first * stride, stride, width), (w, table[hidden, WEIGHT], width, inputs * width)
        linear(c, a, b, (w, table[hidden, BIAS], np.int64(0)), rows, inputs, table[hidden, PANELS], width)
    for q in range(first, first + rows):
        g = into[table[gates, WORK] + q * table[gates, STRIDE] :]
        h, new = into[table[before, WORK] + q * table[before, STRIDE] :], into[table[n, WORK] + q * table[n, STRIDE] :]
        if kind == MINGRU:
            _min_gru(size, g, h, new)
            continue
        u = into[table[hidden, WORK] + q * table[hidden, STRIDE] :]
        if kind == GRU:
            _gru(size, g, u, h, new)
        else:
            c, after = into[table[before, CELLS] + q * table[before, STRIDE] :], into[table[n, CELLS] + q * table[n, STRIDE] :]
            _lstm(size, g, u, c, new, after)


def _backward(weights, layers, n, x, x_stride, first, rows, work, slopes, gradient, lists, listed):
    """From the gradient of the state after to those of the gates, and of the state before."""
    table, w, left, s = table_at(layers, n + 1, COLUMNS), floats_at(weights, ANY), floats_at(work, ANY), floats_at(slopes, ANY)
    gates, before, size, kind = table[n, OF_FEATURES], table[n, BEFORE], table[n, OUTPUTS], table[n, CELL]
    hidden = table[n, OF_STATE]
    _clear_padding(table, gates, first, rows, s)
    if hidden >= 0:
        _clear_padding(table, hidden, first, rows, s)
        for q in range(first, first + rows):
            at, own, to = q * table[gates, STRIDE], table[n, WORK] + q * table[n, STRIDE], q * table[hidden, STRIDE]
            g, dg = left[table[gates, WORK] + at :], s[table[gates, WORK] + at :]
            du, d = s[table[hidden, WORK] + to :], s[own:]
            if kind == GRU:
                h = left[table[before, WORK] + q * table[before, STRIDE] :]
                _gru_back(size, g, left[table[hidden, WORK] + to :], h, d, dg, du)
            else:
                cells, after = q * table[before, STRIDE], q * table[n, STRIDE]
                c, dc = left[table[before, CELLS] + cells :], s[table[before, CELLS] + cells :]
                _lstm_back(size, g, c, left[table[n, CELLS] + after :], d, s[table[n, CELLS] + after :], dg, du, dc)
        outputs, width, stride = table[hidden, OUTPUTS], table[before, READ_WIDTH], table[before, STRIDE]
        into = (s, table[before, WORK] + first * stride, stride, width)
        a = (s, table[hidden, WORK] + first * table[hidden, STRIDE], table[hidden, STRIDE])
        b = (w, table[hidden, TRANSPOSED], width, outputs * width)
        times(into, a, b, (left, np.int64(0), np.int64(0)), rows, outputs, table[before, READ_PANELS], width)
    if kind != LSTM:  # what of the state goes through unchanged
        for q in range(first, first + rows):
            g, h = (
                left[table[gates, WORK] + q * table[gates, STRIDE] :],
                left[table[before, WORK] + q * table[before, STRIDE] :],
            )
            d, dh = s[table[n, WORK] + q * table[n, STRIDE] :], s[table[before, WORK] + q * table[before, STRIDE] :]
            if kind == GRU:
                for k in range(size):
                    dh[k] += d[k] * g[size + k]
            else:
                _min_gru_back(size, g, h, d, s[table[gates, WORK] + q * table[gates, STRIDE] :], dh)


@jit
def recall(layers, n, states, rows, row, cleared, work, q):
    """Copy the state of a row into row q of the workspace, for memory n's next step; zeros if `cleared`.

    `states` is [parts, rows, size], flat: the output of the last step and, for an LSTM, its cells.
    """
    held, size = layers[n, BEFORE], layers[n, OUTPUTS]
    for part in range(len(states) // (rows * size)):
        into, source = layers[held, CELLS if part else WORK] + q * layers[held, STRIDE], (part * rows + row) * size
        for k in range(size):
            work[into + k] = f4(0.0) if cleared else states[source + k]


@jit
def keep(layers, n, states, rows, row, work, q):
    """Copy the state after memory n's step from row q of the workspace; the reverse of `recall`."""
    size = layers[n, OUTPUTS]
    for part in range(len(states) // (rows * size)):
        source, into = layers[n, CELLS if part else WORK] + q * layers[n, STRIDE], (part * rows + row) * size
        for k in range(size):
            states[into + k] = work[source + k]


@jit
def _clear_padding(layers, n, first, rows, slopes):
    """No gradient for the columns between the last gate and the end of the panel."""
    for q in range(first, first + rows):
        at = layers[n, WORK] + q * layers[n, STRIDE]
        for k in range(layers[n, OUTPUTS], layers[n, STRIDE]):
            slopes[at + k] = f4(0.0)


@jit
def _lstm(size, g, u, c, h, after):
    for k in range(size):
        take, keep = sigmoid(g[k] + u[k]), sigmoid(g[size + k] + u[size + k])
        candidate, give = tanh(g[2 * size + k] + u[2 * size + k]), sigmoid(g[3 * size + k] + u[3 * size + k])
        cell = keep * c[k] + take * candidate
        g[k], g[size + k], g[2 * size + k], g[3 * size + k] = take, keep, candidate, give
        after[k], h[k] = cell, give * tanh(cell)


@jit
def _lstm_back(size, g, c, after, d, d_after, dg, du, dc):
    for k in range(size):
        take, keep, candidate, give = g[k], g[size + k], g[2 * size + k], g[3 * size + k]
        bent = tanh(after[k])
        of_cell = d_after[k] + d[k] * give * (f4(1.0) - bent * bent)
        of_take, of_keep = of_cell * candidate * take * (f4(1.0) - take), of_cell * c[k] * keep * (f4(1.0) - keep)
        of_candidate, of_give = of_cell * take * (f4(1.0) - candidate * candidate), d[k] * bent * give * (f4(1.0) - give)
        dg[k], dg[size + k], dg[2 * size + k], dg[3 * size + k] = of_take, of_keep, of_candidate, of_give
        du[k], du[size + k], du[2 * size + k], du[3 * size + k] = of_take, of_keep, of_candidate, of_give
        dc[k] = of_cell * keep


@jit
def _gru(size, g, u, h, new):
    for k in range(size):
        reset, keep = sigmoid(g[k] + u[k]), sigmoid(g[size + k] + u[size + k])
        candidate = tanh(g[2 * size + k] + reset * u[2 * size + k])
        g[k], g[size + k], g[2 * size + k] = reset, keep, candidate
        new[k] = candidate + keep * (h[k] - candidate)


@jit
def _gru_back(size, g, u, h, d, dg, du):
    for k in range(size):
        reset, keep, candidate = g[k], g[size + k], g[2 * size + k]
        of_candidate = d[k] * (f4(1.0) - keep) * (f4(1.0) - candidate * candidate)
        of_reset = of_candidate * u[2 * size + k] * reset * (f4(1.0) - reset)
        of_keep = d[k] * (h[k] - candidate) * keep * (f4(1.0) - keep)
        dg[k], dg[size + k], dg[2 * size + k] = of_reset, of_keep, of_candidate
        du[k], du[size + k], du[2 * size + k] = of_reset, of_keep, of_candidate * reset


@jit
def _min_gru(size, g, h, new):
    for k in range(size):
        gate = sigmoid(g[k])
        g[k] = gate
        new[k] = h[k] + gate * (g[size + k] - h[k])


@jit
def _min_gru_back(size, g, h, d, dg, dh):
    for k in range(size):
        gate, candidate = g[k], g[size + k]
        dg[k], dg[size + k] = d[k] * (candidate - h[k]) * gate * (f4(1.0) - gate), d[k] * gate
        dh[k] = d[k] * (f4(1.0) - gate)


@cache
def addresses() -> tuple[int, int]:
    """The addresses of forward and backward, for the table of layers."""
    return address_of_function(_forward, 10), address_of_function(_backward, 12)
