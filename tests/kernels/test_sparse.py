"""First layers that skip zeros: the same bits as the dense products, on any share of zeros."""

import numpy as np
import pytest
from kernel_calls import load_calls

from hurtle.kernels.loader import load_kernels

kernels = load_kernels()
gemm, sparse = kernels.gemm, kernels.sparse
calls = load_calls()
NONE = np.zeros(0, np.float32)


def lists_of(x, low=NONE, span=NONE):
    """The non-zeros of rows, as the kernels take them; None if they are too many."""
    rows, inputs = x.shape
    length = sparse.list_length(inputs)
    values, lists = sparse.list_memory(rows, length)
    found = sparse.list_rows(x.ravel(), rows, inputs, low, span, values, lists[rows:], lists, length)
    return (values, lists[rows:], lists[:rows], length) if found else None


def dense(c, a, b, x, rows, depth, panels, width, is_tanh):
    call = calls.call_linear_tanh if is_tanh else calls.call_linear_relu
    call(c, a, b, x, rows, depth, panels, width)


def inputs_of(rng, rows, depth, share):
    values = rng.standard_normal((rows, depth)).astype(np.float32)
    return np.where(rng.random((rows, depth)) < share, values, np.float32(0.0))


@pytest.mark.parametrize("is_tanh", [True, False])
@pytest.mark.parametrize("shape", [(64, 400, 64), (7, 64, 5), (33, 77, 40), (1, 130, 16), (2, 405, 65)])
def test_a_layer_has_the_bits_of_the_dense_one(shape, is_tanh):
    rows, depth, columns = shape
    rng = np.random.default_rng(0)
    x, weights = inputs_of(rng, rows, depth, 0.05), gemm.panels_of(rng.standard_normal((depth, columns)).astype(np.float32))
    width, stride = gemm.panel_width(columns), gemm.padded(columns)
    bias = rng.standard_normal(stride).astype(np.float32)
    found, expected = np.full((2, rows * stride), np.nan, np.float32)
    b, panels = (weights, 0, width, depth * width), stride // width
    dense((expected, 0, stride, width), (x.ravel(), 0, depth), b, (bias, 0, 0), rows, depth, panels, width, is_tanh)
    calls.skipping((found, 0, stride, width), lists_of(x), b, (bias, 0, 0), rows, panels, width, is_tanh)
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
    calls.both_gradients(c, d, (x.ravel(), 0, inputs), lists_of(x), b, inputs, rows, stride // width, width)
    np.testing.assert_array_equal(found, expected)


def listed(x, **scale):
    """Place and value of every number that is listed, row by row; None if they are too many."""
    if (lists := lists_of(x, **scale)) is None:
        return None
    values, places, counts, length = lists
    starts = [q * length for q in range(len(x))]
    return [
        list(zip(places[s : s + n].tolist(), values[s : s + n].tolist(), strict=True))
        for s, n in zip(starts, counts, strict=True)
    ]


@pytest.mark.parametrize("depth", [64, 65, 100, 127, 128, 405])
@pytest.mark.parametrize("dtype", [np.float32, np.uint8])
def test_lists_hold_the_non_zeros(dtype, depth):
    rng = np.random.default_rng(2)
    x = (100 * inputs_of(rng, 9, depth, 0.1)).astype(np.int64).astype(dtype)
    x[3] = 0
    assert listed(x) == [[(k, float(row[k])) for k in np.flatnonzero(row)] for row in x]


def test_bytes_are_listed_as_the_network_takes_them():
    x = np.zeros((2, 70), np.uint8)
    x[0, 3], x[1, 69] = 7, 255
    low, span = np.zeros(70, np.float32), np.linspace(1, 255, 70, dtype=np.float32)
    values = [[(3, np.float32(7) / span[3])], [(69, np.float32(255) / span[69])]]
    assert listed(x, low=low, span=span) == values


def test_nan_is_not_a_zero_and_minus_zero_is():
    x = np.zeros((3, 64), np.float32)
    x[1, 5], x[2, 63] = np.nan, -0.0
    found = listed(x)
    assert found[0] == found[2] == []
    assert found[1][0][0] == 5
    assert np.isnan(found[1][0][1])


def test_a_full_list_is_one_and_a_longer_one_is_none():
    """Wherever the one too many is: among the inputs that are taken as vectors, or among the last ones."""
    inputs = 77
    length = sparse.list_length(inputs)
    for places in (range(length), range(inputs - length, inputs), range(0, 4 * length, 4)):
        x = np.zeros((2, inputs), np.float32)
        x[:, list(places)] = 1.0
        assert [[k for k, _ in row] for row in listed(x)] == [list(places)] * 2
        for more in set(range(inputs)) - set(places):
            longer = x.copy()
            longer[1, more] = 2.0
            assert listed(longer) is None


def test_lists_stay_in_their_memory():
    rng = np.random.default_rng(4)
    for inputs in (64, 65, 77, 405):
        length = sparse.list_length(inputs)
        values, lists = sparse.list_memory(3, length)
        guarded = [np.concatenate([part, np.full(99, -7, part.dtype)]) for part in (values, lists)]
        for share in (0.1, 0.2, 1.0):
            x = inputs_of(rng, 3, inputs, share).ravel()
            sparse.list_rows(x, 3, inputs, NONE, NONE, guarded[0], guarded[1][3:], guarded[1], length)
            assert (guarded[0][len(values) :] == -7).all()
            assert (guarded[1][len(lists) :] == -7).all()


@pytest.mark.parametrize("share", [0.3, 0.6, 1.0])
def test_what_is_not_sparse_is_left_to_the_dense_product(share):
    assert listed(inputs_of(np.random.default_rng(3), 64, 100, share)) is None


def test_short_rows_are_not_listed():
    assert sparse.list_length(sparse.LEAST_INPUTS - 1) == 0
    assert sparse.list_length(sparse.LEAST_INPUTS) > 0
