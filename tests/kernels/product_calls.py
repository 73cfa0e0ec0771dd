"""Compiled functions that call the products, which are made to be called by compiled code. `load_calls` loads this file."""

from numba import njit

from hurtle.kernels.loader import load_kernels

kernels = load_kernels()
gemm, sparse = kernels.gemm, kernels.sparse
linear, linear_tanh, linear_relu = gemm.linear, gemm.linear_tanh, gemm.linear_relu
times_tanh_slope, times_relu_slope, add_transposed = gemm.times_tanh_slope, gemm.times_relu_slope, gemm.add_transposed
sparse_tanh, sparse_relu, add_sparse = sparse.sparse_tanh, sparse.sparse_relu, sparse.add_transposed_sparse


@njit(cache=True)
def call_linear(c, a, b, x, rows, depth, panels, width):
    linear(c, a, b, x, rows, depth, panels, width)


@njit(cache=True)
def call_linear_tanh(c, a, b, x, rows, depth, panels, width):
    linear_tanh(c, a, b, x, rows, depth, panels, width)


@njit(cache=True)
def call_linear_relu(c, a, b, x, rows, depth, panels, width):
    linear_relu(c, a, b, x, rows, depth, panels, width)


@njit(cache=True)
def call_times_tanh_slope(c, a, b, x, rows, depth, panels, width):
    times_tanh_slope(c, a, b, x, rows, depth, panels, width)


@njit(cache=True)
def call_times_relu_slope(c, a, b, x, rows, depth, panels, width):
    times_relu_slope(c, a, b, x, rows, depth, panels, width)


@njit(cache=True)
def call_add_transposed(c, a, b, x, rows, depth, panels, width):
    add_transposed(c, a, b, x, rows, depth, panels, width)


@njit(cache=True)
def skipping(c, lists, b, x, rows, panels, width, is_tanh):
    values, places, counts, length = lists
    if is_tanh:
        sparse_tanh(c, values, places, counts, length, b, x, rows, panels, width)
    else:
        sparse_relu(c, values, places, counts, length, b, x, rows, panels, width)


@njit(cache=True)
def both_gradients(c, d, a, lists, b, inputs, rows, panels, width):
    values, places, counts, length = lists
    add_transposed(c, a, b, (b[0], 0, 0), inputs, rows, panels, width)
    add_sparse(d, values, places, counts, length, b, rows, panels, width)


@njit(cache=True)
def call_few_columns(c, a, b, x, rows, columns, panels):
    gemm.few_columns(c, a, b, x, rows, columns, panels)
