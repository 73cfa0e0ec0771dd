"""Running moments: the compiled kernel against the NumPy reference and against plain means and variances."""

import numpy as np
import pytest

from hurtle.errors import HurtleError
from hurtle.kernels.moments import BLOCK_ELEMENTS, merge_columns, merge_columns_reference


def nothing(size):
    return 0.0, np.zeros(size), np.zeros(size)


def samples_of(shape, dtype, seed=0):
    samples = np.random.default_rng(seed).normal(50.0, 20.0, shape)
    return samples.clip(0, 255).astype(dtype)


def agree(found, expected):
    for got, wanted in zip(found, expected, strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-12)
    assert found[1].dtype == found[2].dtype == np.float64


@pytest.mark.parametrize("merge", [merge_columns, merge_columns_reference])
def test_an_example_by_hand(merge):
    # 2 samples with mean 1 and m2 2; columns (3, 5): mean 4, m2 2; (7): mean 7, m2 0; its other sample is invalid
    columns = np.array([[3, 7], [5, 99]], np.uint8).reshape(2, 2, 1)
    count, mean, m2 = merge(2.0, np.array([1.0]), np.array([2.0]), columns, np.array([[True, True], [True, False]]))
    assert count == 5.0
    assert mean[0] == pytest.approx((0 + 2 + 3 + 5 + 7) / 5, rel=1e-15)  # 0 and 2 have that mean and m2
    assert m2[0] == pytest.approx(np.var([0, 2, 3, 5, 7]) * 5, rel=1e-15)


@pytest.mark.parametrize(  # each dtype is compiled with and without a mask; ints of one kind are like those of another
    "dtype", [np.float32, np.float64, np.uint8, pytest.param(np.int16, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 5, 3), (9, 1, 2), (20, 7, 4), (3, 2500, 1), (5, 3, 2000), (4, 300, 9)])
def test_the_kernel_equals_the_reference(shape, masked, dtype):
    columns = samples_of(shape, dtype)
    valid = np.random.default_rng(1).random(shape[:2]) < 0.6 if masked else None
    start = 37.0, np.linspace(40, 60, shape[2]), np.linspace(1000, 2000, shape[2])
    agree(merge_columns(*start, columns, valid), merge_columns_reference(*start, columns, valid))


def test_from_nothing_it_is_mean_and_variance():
    columns = samples_of((64, 40, 3), np.float32)
    count, mean, m2 = merge_columns(*nothing(3), columns)
    flat = columns.reshape(-1, 3).astype(np.float64)
    agree((count, mean, m2 / count), (len(flat), flat.mean(0), flat.var(0)))


def test_rollout_by_rollout_or_valid_samples_alone_give_the_moments_of_all():
    columns = samples_of((60, 12, 3), np.float32)
    valid = np.random.default_rng(2).random((60, 12)) < 0.5
    running = nothing(3)
    for first in range(0, 60, 20):
        running = merge_columns(*running, columns[first : first + 20], valid[first : first + 20])
    flat = columns[valid].astype(np.float64)
    agree(running, (len(flat), flat.mean(0), flat.var(0) * len(flat)))


@pytest.mark.parametrize("masked", [False, True])
def test_shares_of_the_columns_merged_in_order_give_the_same_bits(masked):
    wide = BLOCK_ELEMENTS // 4 + 30
    columns = samples_of((10, wide, 4), np.float32)
    valid = np.random.default_rng(3).random((10, wide)) < 0.5 if masked else None
    whole, running = merge_columns(*nothing(4), columns, valid), nothing(4)
    for share in (slice(0, 3), slice(3, 100), slice(100, wide)):
        running = merge_columns(*running, columns[:, share], None if valid is None else valid[:, share])
    assert running[0] == whole[0]
    np.testing.assert_array_equal(running[1], whole[1])
    np.testing.assert_array_equal(running[2], whole[2])


def test_all_valid_gives_the_same_bits_as_no_mask():
    columns = samples_of((10, 77, 5), np.float32)
    masked = merge_columns(*nothing(5), columns, np.ones((10, 77), bool))
    for got, wanted in zip(masked, merge_columns(*nothing(5), columns), strict=True):
        np.testing.assert_array_equal(got, wanted)


def test_a_far_away_mean_does_not_drown_the_variance():
    columns = (1e7 + np.random.default_rng(4).integers(-3, 4, (200, 8, 1))).astype(np.float32)
    count, _, m2 = merge_columns(*nothing(1), columns)
    assert m2[0] / count == pytest.approx(np.var(columns.astype(np.float64)), rel=1e-9)


@pytest.mark.parametrize("shape", [(6, 4, 2), (0, 4, 2), (6, 0, 2)])
def test_nothing_valid_changes_nothing_and_spoils_nothing(shape):
    start = 5.0, np.array([1.0, 2.0]), np.array([3.0, 4.0])
    columns = np.full(shape, np.nan, np.float32)
    count, mean, m2 = merge_columns(*start, columns, np.zeros(shape[:2], bool))
    assert (count, mean.tolist(), m2.tolist()) == (5.0, [1.0, 2.0], [3.0, 4.0])


def test_the_given_arrays_are_left_alone():
    mean, m2 = np.zeros(2), np.zeros(2)
    merge_columns(0.0, mean, m2, samples_of((3, 3, 2), np.float32))
    assert not mean.any()
    assert not m2.any()


def test_shapes_that_do_not_fit_are_named():
    columns = samples_of((3, 4, 2), np.float32)
    with pytest.raises(HurtleError, match=r"columns must be \[steps, rows, size\].*\(3, 4, 2\).*\(3,\)"):
        merge_columns(*nothing(3), columns)
    with pytest.raises(HurtleError, match=r"valid must have the shape \(3, 4\)"):
        merge_columns(*nothing(2), columns, np.ones((4, 3), bool))
