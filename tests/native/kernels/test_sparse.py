"""First layers that skip zeros: the same bits as the dense products, on any share of zeros."""

import numpy as np
import pytest
from numba import njit

from hurtle.native.kernel_loader import load_kernels

kernels = load_kernels()
gemm, sparse = kernels.gemm, kernels.sparse
linear_tanh, linear_relu, add_transposed = gemm.linear_tanh, gemm.linear_relu, gemm.add_transposed
sparse_tanh, sparse_relu, add_sparse = sparse.sparse_tanh, sparse.sparse_relu, sparse.add_transposed_sparse
find, new_places = sparse.find_nonzeros, sparse.new_places


@njit
def dense(c, a, b, x, rows, depth, panels, width, is_tanh):
    if is_tanh:
        linear_tanh(c, a, b, x, rows, depth, panels, width)
    else:
        linear_relu(c, a, b, x, rows, depth, panels, width)


@njit
def skipping(c, a, b, x, rows, depth, panels, width, is_tanh):
    places, bounds = new_places(rows, depth)
    if not find(a[0], a[1], a[2], rows, depth, places, bounds):
        return False
    if is_tanh:
        sparse_tanh(c, a, b, x, rows, panels, width, places, bounds)
    else:
        sparse_relu(c, a, b, x, rows, panels, width, places, bounds)
    return True


@njit
def both_gradients(c, d, a, b, inputs, rows, panels, width):
    add_transposed(c, a, b, (b[0], 0, 0), inputs, rows, panels, width)
    places, bounds = new_places(rows, inputs)
    found = find(a[0], a[1], a[2], rows, inputs, places, bounds)
    add_sparse(d, a, b, rows, panels, width, places, bounds)
    return found


def inputs_of(rng, rows, depth, share):
    values = rng.standard_normal((rows, depth)).astype(np.float32)
    return np.where(rng.random((rows, depth)) < share, values, np.float32(0.0))


@pytest.mark.parametrize("is_tanh", [True, False])
@pytest.mark.parametrize("shape", [(64, 400, 64), (7, 64, 5), (33, 77, 40), (1, 130, 16)])
def test_a_layer_has_the_bits_of_the_dense_one(shape, is_tanh):
    rows, depth, columns = shape
    rng = np.random.default_rng(0)
    x, weights = inputs_of(rng, rows, depth, 0.05), gemm.panels_of(rng.standard_normal((depth, columns)).astype(np.float32))
    width, stride = gemm.panel_width(columns), gemm.padded(columns)
    bias = rng.standard_normal(stride).astype(np.float32)
    found, expected = np.full((2, rows * stride), np.nan, np.float32)
    for call, out in ((dense, expected), (skipping, found)):
        c, b = (out, 0, stride, width), (weights, 0, width, depth * width)
        assert call(c, (x.ravel(), 0, depth), b, (bias, 0, 0), rows, depth, stride // width, width, is_tanh) is not False
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("shape", [(64, 400, 64), (7, 64, 5), (33, 77, 40)])
def test_gradients_of_weights_have_the_bits_of_the_dense_ones(shape):
    rows, inputs, outputs = shape
    rng = np.random.default_rng(1)
    x = inputs_of(rng, rows, inputs, 0.1)
    width, stride = gemm.panel_width(outputs), gemm.padded(outputs)
    slopes = rng.standard_normal((rows, stride)).astype(np.float32)
    expected = rng.standard_normal(inputs * stride).astype(np.float32)
    found = expected.copy()
    c, d = (expected, 0, width, inputs * width), (found, 0, width, inputs * width)
    b = (slopes.ravel(), 0, stride, width)
    assert both_gradients(c, d, (x.ravel(), 0, inputs), b, inputs, rows, stride // width, width)
    np.testing.assert_array_equal(found, expected)


def places_of(x):
    rows, inputs = x.shape
    places, bounds = new_places(rows, inputs)
    found = find(x.ravel(), 0, inputs, rows, inputs, places, bounds)
    return found, [places[bounds[q] : bounds[q + 1]].tolist() for q in range(rows)] if found else None


def test_places_are_those_of_the_non_zeros():
    rng = np.random.default_rng(2)
    for depth in (1, 15, 16, 17, 100):
        x = inputs_of(rng, 9, depth, 0.1)
        found, places = places_of(x)
        if found:
            assert places == [np.flatnonzero(row).tolist() for row in x]
    x = np.zeros((3, 64), np.float32)
    x[1, 5], x[2, 63] = np.nan, -0.0
    assert places_of(x) == (True, [[], [5], []])


@pytest.mark.parametrize("share", [0.3, 0.6, 1.0])
def test_what_is_not_sparse_is_left_to_the_dense_product(share):
    assert places_of(inputs_of(np.random.default_rng(3), 64, 100, share))[0] is False
