"""V-trace: the compiled kernels against the NumPy reference, against numbers worked out by hand, and against GAE."""

import math

import numpy as np
import pytest
from test_gae import CLOSE, by_hand, column, random_columns

from hurtle.errors import HurtleError
from hurtle.kernels.gae import gae
from hurtle.kernels.vtrace import vtrace, vtrace_reference


def log_ratios_of(shape, seed=0, scale=0.7):
    return (scale * np.random.default_rng(seed).normal(size=shape)).astype(np.float32)


def agree(found, expected):
    for got, wanted in zip(found, expected, strict=True):
        assert got.dtype == wanted.dtype == np.float32
        np.testing.assert_allclose(got, wanted, **CLOSE)


@pytest.mark.parametrize("compute", [vtrace, vtrace_reference])
def test_an_example_by_hand(compute):
    # gamma 0.5; ratios 2, 1/2, 1, 4, 1/4 are clipped to rho = 1, 1/2, 1, 1, 1/4 and c = 1, 1/2, 1, 1, 1/4
    log_ratios = np.log(column(2, 0.5, 1, 4, 0.25))
    targets, advantages = compute(log_ratios, *by_hand(), gamma=0.5)
    last = 50 + 0.25 * (5 + 30 - 50)
    fourth = 40 + (4 + 25 - 40) + 0.5 * (last - 50)
    second = 20 + 0.5 * (2 + 50 - 20)
    first = 10 + (1 + 10 - 10) + 0.5 * (second - 20)
    np.testing.assert_allclose(targets.ravel(), [first, second, 30 + (3 - 30), fourth, last], rtol=1e-6)
    wanted = [1 + 0.5 * second - 10, 0.5 * (2 + 50 - 20), 3 - 30, 4 + 0.5 * last - 40, 0.25 * (5 + 30 - 50)]
    np.testing.assert_allclose(advantages.ravel(), wanted, rtol=1e-6)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("gamma", "gae_lambda", "rho_clip", "c_clip"), [(0.99, 0.95, 1, 1), (0.9, 1, 2.5, 0.5), (1, 0, 1, 1)])
@pytest.mark.parametrize("shape", [(1, 1), (1, 7), (9, 1), (40, 17), (20, 93), (64, 130)])
def test_the_kernel_equals_the_reference(shape, gamma, gae_lambda, rho_clip, c_clip, masked):
    valid = np.random.default_rng(1).random(shape) < 0.7 if masked else None
    arguments = (log_ratios_of(shape), *random_columns(*shape), gamma, gae_lambda, rho_clip, c_clip, valid)
    agree(vtrace(*arguments), vtrace_reference(*arguments))


@pytest.mark.parametrize("probabilities", [(0, 0), (1, 0), (0, 1), (1, 1)])
@pytest.mark.parametrize("valid", [None, False, True])
def test_all_done_none_done_all_invalid(probabilities, valid):
    columns, log_ratios = random_columns(20, 33, 2, *probabilities), log_ratios_of((20, 33))
    valid = None if valid is None else np.full((20, 33), valid)
    targets, advantages = vtrace(log_ratios, *columns, 0.99, valid=valid)
    agree((targets, advantages), vtrace_reference(log_ratios, *columns, 0.99, valid=valid))
    if valid is not None and not valid.any():
        assert not advantages.any()
        np.testing.assert_array_equal(targets, columns[1])


@pytest.mark.parametrize("masked", [False, True])
def test_on_policy_it_is_gae(masked):
    columns = random_columns(60, 21, seed=3)
    valid = np.random.default_rng(1).random((60, 21)) < 0.7 if masked else None
    targets, advantages = vtrace(np.zeros((60, 21)), *columns, 0.97, valid=valid)
    expected = gae(*columns, 0.97, 1.0, valid)
    np.testing.assert_allclose(advantages, expected, **CLOSE)
    np.testing.assert_allclose(targets, expected + columns[1], **CLOSE)


def test_on_policy_targets_with_lambda_are_those_of_gae():
    columns = random_columns(60, 21, seed=4)
    targets, _ = vtrace(np.zeros((60, 21)), *columns, 0.97, gae_lambda=0.8)
    np.testing.assert_allclose(targets, gae(*columns, 0.97, 0.8) + columns[1], **CLOSE)


def test_unlikely_actions_leave_values_alone_and_huge_ratios_are_clipped():
    columns = random_columns(15, 4)
    targets, advantages = vtrace(np.full((15, 4), -math.inf), *columns, 0.99)
    np.testing.assert_array_equal(targets, columns[1])
    assert not advantages.any()
    on_policy = vtrace(np.zeros((15, 4)), *columns, 0.99)
    for got, wanted in zip(vtrace(np.full((15, 4), 1e30), *columns, 0.99), on_policy, strict=True):
        np.testing.assert_array_equal(got, wanted)


def test_a_nan_ratio_is_not_hidden():
    log_ratios = np.zeros((5, 2), np.float32)
    log_ratios[3, 1] = np.nan
    targets, advantages = vtrace(log_ratios, *random_columns(5, 2, terminated=0, truncated=0), 0.99)
    assert np.isnan(targets[:4, 1]).all()
    assert np.isnan(advantages[:4, 1]).all()
    assert np.isfinite(targets[:, 0]).all()


def test_arrays_that_do_not_fit_are_named():
    columns = random_columns(10, 5)
    with pytest.raises(HurtleError, match="log_ratios"):
        vtrace(np.zeros((10, 4)), *columns, 0.99)
    with pytest.raises(HurtleError, match="last_values"):
        vtrace(np.zeros((10, 5)), *columns[:5], np.zeros(4), 0.99)


def test_other_layouts_are_converted():
    arrays = (log_ratios_of((10, 5)), *random_columns(10, 5))
    others = [np.asfortranarray(array.astype(np.float64 if array.dtype.kind == "f" else np.uint8)) for array in arrays]
    for got, wanted in zip(vtrace(*others, 0.99), vtrace(*arrays, 0.99), strict=True):
        np.testing.assert_array_equal(got, wanted)


NARROW = """
import sys
import numpy as np
from hurtle.kernels.gae import gae
from hurtle.kernels.vtrace import vtrace, vtrace_reference
sys.path.insert(0, sys.argv[1])
from test_gae import float32_rows
from test_vtrace import agree, log_ratios_of, random_columns

arrays, log_ratios, valid = random_columns(12, 61), log_ratios_of((12, 61)), np.random.default_rng(1).random((12, 61)) < 0.7
np.testing.assert_array_equal(gae(*arrays, 0.99, 0.95, valid), float32_rows(*arrays, 0.99, 0.95, valid))
agree(vtrace(log_ratios, *arrays, 0.99, valid=valid), vtrace_reference(log_ratios, *arrays, 0.99, valid=valid))
"""


@pytest.mark.slow
@pytest.mark.parametrize("width", ["4", "8"])
def test_hosts_with_narrow_vectors(width, run_python, request):
    run_python(NARROW, request.path.parent, HURTLE_VECTOR_WIDTH=width)
