"""Running returns and scaled rewards: the compiled functions against the plain references and numbers worked out by hand."""

import numpy as np
import pytest
import torch

from hurtle.errors import HurtleError
from hurtle.kernels.returns import (
    running_returns,
    running_returns_reference,
    scaled_rewards,
    scaled_rewards_reference,
)


def random_steps(steps, columns, seed=0, dtype=np.float32):
    """rewards, ended, valid; what is not valid is NaN, which must not spread."""
    rng = np.random.default_rng(seed)
    rewards = (3.0 * rng.normal(size=(steps, columns))).astype(dtype)
    valid = rng.random((steps, columns)) < 0.7
    if rewards.dtype.kind == "f":
        rewards[~valid] = np.nan
    return rewards, rng.random((steps, columns)) < 0.2, valid


def both(rewards, ended, valid, rows, returns, gamma=0.97):
    """Returns after each step and at the end, of the compiled function and of the reference."""
    found, expected = returns.copy(), returns.copy()
    columns = running_returns(rewards, ended, valid, rows, gamma, found)
    wanted = running_returns_reference(rewards, ended, valid, rows, gamma, expected)
    assert columns.dtype == np.float64
    return (columns, found), (wanted, expected)


def assert_same_bits(found, expected):
    for got, wanted in zip(found, expected, strict=True):
        np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize("compute", [running_returns, running_returns_reference])
def test_an_example_by_hand(compute):
    # Row 1 has two columns, the second of which goes on from the first; row 0 has none; step 1 of column 1 is not valid.
    rewards = np.array([[1, 10, 4], [2, 99, 4], [3, 30, 4]], np.float32)
    ended = np.array([[0, 0, 1], [0, 1, 0], [1, 0, 0]], bool)
    valid = np.array([[1, 1, 1], [1, 0, 1], [1, 1, 1]], bool)
    returns = np.array([7.0, 8.0, 2.0])
    columns = compute(rewards, ended, valid, np.array([1, 2, 1]), 0.5, returns)
    assert columns.T.tolist() == [[5.0, 4.5, 5.25], [11.0, 11.0, 35.5], [4.0, 4.0, 6.0]]
    assert returns.tolist() == [7.0, 6.0, 35.5]


@pytest.mark.parametrize(
    ("dtype", "masked"),
    [
        (np.float32, False),
        (np.float32, True),
        (np.float64, False),
        (np.int64, True),
        pytest.param(np.float64, True, marks=pytest.mark.slow),  # each is compiled; dtype and mask have nothing to do with
        pytest.param(np.int64, False, marks=pytest.mark.slow),  # each other
    ],
)
@pytest.mark.parametrize("shape", [(1, 1), (1, 7), (9, 1), (0, 3), (33, 17), (128, 64)])
def test_every_row_has_one_column(shape, dtype, masked):
    rewards, ended, valid = random_steps(*shape, seed=sum(shape), dtype=dtype)
    returns = np.random.default_rng(1).normal(size=shape[1])
    if not masked:
        rewards, valid = np.nan_to_num(rewards), None
    assert_same_bits(*both(rewards, ended, valid, None, returns))


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    "rows",
    [
        [3, 1, 0, 2],
        [2, 0],
        [0, 0, 0, 0, 0],
        [0, 1, 2, 0, 1, 2, 0, 1, 2],
        [0, 0, 0, 1, 1, 4, 4, 4, 4],
        [4, 2, 2, 0, 4, 3, 4, 0, 2, 1, 2],
        [],
    ],
)
def test_rows_of_a_pool_have_several_columns_or_none(rows, masked):
    rewards, ended, valid = random_steps(21, len(rows), seed=len(rows))
    returns = np.random.default_rng(2).normal(size=5)
    if not masked:
        rewards, valid = np.nan_to_num(rewards), None
    assert_same_bits(*both(rewards, ended, valid, np.array(rows, np.int64), returns))


def test_columns_of_one_row_are_one_long_column():
    rewards, ended, valid = random_steps(40, 1, seed=3)
    whole, found = np.array([1.5]), np.array([1.5])
    expected = running_returns(rewards, ended, valid, None, 0.9, whole)
    parts = [array.reshape(4, 10).T for array in (rewards, ended, valid)]
    columns = running_returns(*parts, np.zeros(4, np.int64), 0.9, found)
    np.testing.assert_array_equal(columns.T.ravel(), expected.ravel())
    assert found == whole


def test_all_valid_gives_the_same_bits_as_no_mask():
    rewards, ended, _ = random_steps(50, 37)
    rewards, returns = np.nan_to_num(rewards), np.ones(37)
    masked, _ = both(rewards, ended, np.ones((50, 37), bool), None, returns)
    assert_same_bits(both(rewards, ended, None, None, returns)[0], masked)


def test_a_reward_that_is_not_a_number_is_seen_where_it_is_valid():
    rewards, ended = np.array([[1.0], [np.nan], [1.0]], np.float32), np.zeros((3, 1), bool)
    columns = running_returns(rewards, ended, None, None, 0.5, np.zeros(1))
    np.testing.assert_array_equal(columns.ravel(), [1.0, np.nan, np.nan])


def test_out_is_written_and_other_layouts_are_converted():
    rewards, ended, valid = random_steps(10, 5)
    out = np.empty((10, 5))
    assert running_returns(rewards, ended, valid, None, 0.9, np.zeros(5), out) is out
    others = np.asfortranarray(rewards), np.asfortranarray(ended.astype(np.uint8)), np.asfortranarray(valid)
    np.testing.assert_array_equal(running_returns(*others, np.arange(5, dtype=np.int32), 0.9, np.zeros(5)), out)


def test_arrays_that_do_not_fit_are_named():
    rewards, ended, valid = random_steps(10, 5)
    returns = np.zeros(5)
    with pytest.raises(HurtleError, match="ended"):
        running_returns(rewards, ended[1:], valid, None, 0.9, returns)
    with pytest.raises(HurtleError, match="valid"):
        running_returns(rewards, ended, valid.T, None, 0.9, returns)
    with pytest.raises(HurtleError, match="time-major"):
        running_returns(rewards[0], ended, valid, None, 0.9, returns)
    with pytest.raises(HurtleError, match=r"each of the 5 columns of rewards, got rows of shape \(4,\)"):
        running_returns(rewards, ended, valid, None, 0.9, returns[1:])
    with pytest.raises(HurtleError, match="rows must be from 0 to 4, got 0 to 5"):
        running_returns(rewards, ended, valid, np.array([0, 1, 2, 3, 5]), 0.9, returns)
    with pytest.raises(HurtleError, match="rows must be from 0 to 4, got -1 to 3"):
        running_returns(rewards, ended, valid, np.array([0, 1, 2, 3, -1]), 0.9, returns)
    with pytest.raises(HurtleError, match="returns must be float64"):
        running_returns(rewards, ended, valid, None, 0.9, returns.astype(np.float32))
    with pytest.raises(HurtleError, match="out must be C-contiguous float64"):
        running_returns(rewards, ended, valid, None, 0.9, returns, np.empty((10, 5), np.float32))


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int64])
@pytest.mark.parametrize("clip", [2.0, np.inf])
def test_rewards_are_scaled_in_float64_and_rounded_once(dtype, clip):
    rewards = (100.0 * np.random.default_rng(5).normal(size=(33, 17))).astype(dtype)
    if dtype != np.int64:
        rewards[:2, :3] = [[np.nan, np.inf, -np.inf], [0.0, -0.0, 1e-30]]
    found = scaled_rewards(rewards, 37.3, clip)
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, scaled_rewards_reference(rewards, 37.3, clip))
    by_torch = (torch.from_numpy(rewards).double() / 37.3).clamp(-clip, clip).float()
    np.testing.assert_array_equal(found, by_torch)
    np.testing.assert_array_equal(np.signbit(found[~np.isnan(found)]), np.signbit(rewards[~np.isnan(found)]))
