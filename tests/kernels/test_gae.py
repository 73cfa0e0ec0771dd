"""Advantages: the compiled kernels against the NumPy reference, and the reference against numbers worked out by hand."""

import numpy as np
import pytest
import torch

from hurtle.errors import HurtleError
from hurtle.kernels.gae import gae, gae_reference

CLOSE = {"rtol": 2e-6, "atol": 1e-5}


def random_columns(steps, columns, seed=0, terminated=0.1, truncated=0.1):
    """rewards, values, terminated, truncated, final_values, last_values."""
    rng = np.random.default_rng(seed)
    rewards, values, final_values = rng.normal(size=(3, steps, columns)).astype(np.float32)
    flags = rng.random((2, steps, columns))
    last_values = rng.normal(size=columns).astype(np.float32)
    return rewards, values, flags[0] < terminated, flags[1] < truncated, final_values, last_values


def column(*numbers, dtype=np.float32):
    return np.array(numbers, dtype).reshape(-1, 1)


def by_hand():
    """Five steps: one in the middle of an episode, its truncation, a termination (truncated too), and two that go on."""
    rewards, values = column(1, 2, 3, 4, 5), column(10, 20, 30, 40, 50)
    terminated, truncated = column(0, 0, 1, 0, 0, dtype=bool), column(0, 1, 1, 0, 0, dtype=bool)
    return rewards, values, terminated, truncated, column(0, 100, 700, 0, 0), np.array([60.0], np.float32)


@pytest.mark.parametrize("compute", [gae, gae_reference])
def test_an_example_by_hand(compute):
    # gamma 0.5, lambda 0.5: deltas are 1 + 10 - 10, 2 + 50 - 20, 3 - 30, 4 + 25 - 40, 5 + 30 - 50; decay 0.25
    advantages = compute(*by_hand(), gamma=0.5, gae_lambda=0.5)
    assert advantages.ravel().tolist() == [1 + 0.25 * 32, 32, -27, -11 + 0.25 * -15, -15]
    assert advantages.dtype == np.float32


@pytest.mark.parametrize("compute", [gae, gae_reference])
def test_an_invalid_step_by_hand(compute):
    # Without step 3, step 2's end stays, and step 1's truncation too; without step 4, step 3 bootstraps from the last value.
    advantages = compute(*by_hand(), gamma=0.5, gae_lambda=0.5, valid=column(1, 1, 0, 1, 0, dtype=bool))
    assert advantages.ravel().tolist() == [9, 32, 0, 4 + 30 - 40, 0]


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("gamma", "gae_lambda"), [(0.99, 0.95), (0.9, 0.0), (0.5, 1.0), (1.0, 1.0)])
@pytest.mark.parametrize("shape", [(1, 1), (1, 7), (9, 1), (2, 3), (40, 17), (64, 300)])
def test_the_kernel_equals_the_reference(shape, gamma, gae_lambda, masked):
    columns = random_columns(*shape, seed=sum(shape))
    valid = np.random.default_rng(1).random(shape) < 0.7 if masked else None
    expected = gae_reference(*columns, gamma, gae_lambda, valid)
    np.testing.assert_allclose(gae(*columns, gamma, gae_lambda, valid), expected, **CLOSE)


@pytest.mark.parametrize("probabilities", [(0, 0), (1, 0), (0, 1), (1, 1), (0.5, 0.5)])
@pytest.mark.parametrize("valid", [None, False, True])
def test_all_done_none_done_all_invalid(probabilities, valid):
    columns = random_columns(20, 33, 2, *probabilities)
    valid = None if valid is None else np.full((20, 33), valid)
    advantages = gae(*columns, 0.99, 0.95, valid)
    np.testing.assert_allclose(advantages, gae_reference(*columns, 0.99, 0.95, valid), **CLOSE)
    rewards, values, terminated, truncated, final_values, _ = columns
    if valid is not None and not valid.any():
        assert not advantages.any()
    elif terminated.all():
        np.testing.assert_allclose(advantages, rewards - values, **CLOSE)
    elif truncated.all():
        np.testing.assert_allclose(advantages, rewards + 0.99 * final_values - values, **CLOSE)


def test_all_valid_gives_the_same_bits_as_no_mask():
    columns = random_columns(50, 37)
    np.testing.assert_array_equal(gae(*columns, 0.99, 0.95, np.ones((50, 37), bool)), gae(*columns, 0.99, 0.95))


def float32_rows(rewards, values, terminated, truncated, final_values, last_values, gamma, gae_lambda, valid):
    """GAE in float32, one rounding for each operation, in the order in which they are written here."""
    gamma, decay, zero = np.float32(gamma), np.float32(gamma * gae_lambda), np.float32(0)
    out, next_value, carried = np.empty_like(rewards), last_values, np.zeros_like(last_values)
    for t in reversed(range(len(rewards))):
        after = np.where(terminated[t], zero, np.where(truncated[t], final_values[t], next_value))
        advantage = rewards[t] + gamma * after - values[t] + decay * np.where(terminated[t] | truncated[t], zero, carried)
        out[t] = np.where(valid[t], advantage, zero)
        next_value, carried = np.where(valid[t], values[t], next_value), np.where(valid[t], advantage, carried)
    return out


@pytest.mark.parametrize("columns", [1, 5, 8, 31, 64, 93, 157])
@pytest.mark.parametrize("masked", [False, True])
def test_the_bits_do_not_depend_on_how_many_columns_go_together(columns, masked):
    arrays = random_columns(30, columns, seed=columns, truncated=0.02)
    valid = np.random.default_rng(1).random((30, columns)) < (0.7 if masked else 2)
    expected = float32_rows(*arrays, 0.99, 0.95, valid)
    np.testing.assert_array_equal(gae(*arrays, 0.99, 0.95, valid if masked else None), expected)


def test_invalid_steps_are_transparent():
    dense = random_columns(12, 6, seed=3)
    rng = np.random.default_rng(4)
    rows = np.sort(rng.permutation(30)[:12])
    sparse = [np.full((30, 6), np.nan if array.dtype.kind == "f" else True, array.dtype) for array in dense[:5]]
    for wide, array in zip(sparse, dense, strict=False):
        wide[rows] = array
    valid = np.zeros((30, 6), bool)
    valid[rows] = True
    advantages = gae(*sparse, dense[5], 0.99, 0.95, valid)
    np.testing.assert_array_equal(advantages[rows], gae(*dense, 0.99, 0.95))
    assert not np.delete(advantages, rows, axis=0).any()


def test_final_values_count_only_where_a_step_truncates():
    *columns, final_values, last_values = random_columns(30, 8, seed=5)
    used = columns[3] & ~columns[2]
    spoiled = np.where(used, final_values, np.nan).astype(np.float32)
    expected = gae(*columns, final_values, last_values, 0.99, 0.95)
    np.testing.assert_array_equal(gae(*columns, spoiled, last_values, 0.99, 0.95), expected)


def test_lambda_one_gives_discounted_returns():
    rewards, values, _, _, final_values, last_values = random_columns(25, 4, seed=6)
    never = np.zeros((25, 4), bool)
    discounts = 0.9 ** np.arange(26)
    returns = (discounts[:25, None] * rewards).sum(0) + discounts[25] * last_values
    advantages = gae(rewards, values, never, never, final_values, last_values, 0.9, 1.0)
    np.testing.assert_allclose(advantages[0] + values[0], returns, **CLOSE)


def test_out_is_written_and_other_layouts_are_converted():
    columns = random_columns(10, 5)
    out = np.empty((10, 5), np.float32)
    assert gae(*columns, 0.99, 0.95, out=out) is out
    others = [np.asfortranarray(array.astype(np.float64 if array.dtype.kind == "f" else np.uint8)) for array in columns]
    np.testing.assert_array_equal(gae(*others, 0.99, 0.95), out)
    np.testing.assert_array_equal(gae(*(array.tolist() for array in columns), 0.99, 0.95), out)
    np.testing.assert_array_equal(gae(*(torch.from_numpy(array) for array in columns), 0.99, 0.95), out)
    np.testing.assert_array_equal(gae(*columns, np.array(0.99), 0.95, out=np.empty_like(out)), out)


def test_arrays_that_are_read_only_or_not_aligned_are_taken():
    columns = random_columns(10, 5)
    expected = gae(*columns, 0.99, 0.95)
    for array in columns:
        array.flags.writeable = False
    np.testing.assert_array_equal(gae(*columns, 0.99, 0.95), expected)
    shifted = np.zeros(1 + columns[0].nbytes, np.uint8)[1:].view(np.float32).reshape(10, 5)
    shifted[:] = columns[0]
    np.testing.assert_array_equal(gae(shifted, *columns[1:], 0.99, 0.95), expected)
    with pytest.raises(HurtleError, match=r"out must be writable, C-contiguous float32"):
        gae(*columns, 0.99, 0.95, out=columns[0])


@pytest.mark.parametrize("shape", [(0, 3), (3, 0)])
def test_nothing_gives_nothing(shape):
    assert gae(*random_columns(*shape), 0.99, 0.95).shape == shape


def test_arrays_that_do_not_fit_are_named():
    columns = random_columns(10, 5)
    for position, name in enumerate(["values", "terminated", "truncated", "final_values", "last_values"], 1):
        wrong = list(columns)
        wrong[position] = wrong[position][1:]
        with pytest.raises(HurtleError, match=name):
            gae(*wrong, 0.99, 0.95)
    with pytest.raises(HurtleError, match=r"valid must have the shape \(10, 5\)"):
        gae(*columns, 0.99, 0.95, valid=np.ones((5, 10), bool))
    with pytest.raises(HurtleError, match="out must be writable, C-contiguous float32"):
        gae(*columns, 0.99, 0.95, out=np.empty((10, 5)))
    with pytest.raises(HurtleError, match="time-major"):
        gae(columns[0][:, 0], *columns[1:], 0.99, 0.95)
