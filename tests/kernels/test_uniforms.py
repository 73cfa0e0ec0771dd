"""The uniforms that actions are sampled from: exact, uniform, and the same whoever draws them and when."""

import numpy as np
import pytest

from hurtle.errors import HurtleError
from hurtle.kernels.uniforms import uniforms, uniforms_reference
from hurtle.native.rng import ACTION_STREAM, GAMMA, MASK, mix, stream_state, stream_states


@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("rows", [1, 3, 40])
def test_the_kernel_equals_the_reference(rows, count):
    rng = np.random.default_rng(rows)
    streams = rng.integers(0, 2**64, rows, np.uint64)
    steps = rng.integers(0, 2**40, rows)
    streams[0], steps[0] = MASK, 0  # the counter passes 2^64
    drawn = uniforms(streams, steps, count)
    assert drawn.dtype == np.float32
    np.testing.assert_array_equal(drawn, uniforms_reference(streams, steps, count))


def test_a_number_by_hand():
    stream = stream_state(7, ACTION_STREAM)
    drawn = uniforms(stream_states(np.array([7]), ACTION_STREAM), np.array([3]), 2)
    assert drawn[0, 1] == np.float32((mix(stream + (3 * 2 + 1 + 1) * GAMMA) >> 40) / 2**24)


def test_rows_depend_on_nobody_else_and_steps_follow_on():
    streams, steps = stream_states(np.arange(10), ACTION_STREAM), np.arange(10) * 5
    whole = uniforms(streams, steps, 3)
    order = np.random.default_rng(0).permutation(10)
    np.testing.assert_array_equal(uniforms(streams[order], steps[order], 3), whole[order])
    np.testing.assert_array_equal(uniforms(streams[4:5], steps[4:5], 3), whole[4:5])
    two_steps = uniforms(np.repeat(streams[:1], 2), np.arange(2), 3).ravel()  # steps 0 and 1 of 3 are step 0 of 6
    np.testing.assert_array_equal(two_steps, uniforms(streams[:1], np.array([0]), 6)[0])


def test_they_are_uniform_and_never_one():
    drawn = uniforms(stream_states(np.arange(2000), ACTION_STREAM), np.arange(2000) % 50, 50).astype(np.float64)
    assert drawn.min() >= 0.0
    assert drawn.max() < 1.0
    counts = np.histogram(drawn, 64, (0, 1))[0]
    expected = drawn.size / 64
    assert ((counts - expected) ** 2 / expected).sum() < 120  # chi-squared with 63 degrees of freedom: 1 in 50,000 is above
    assert abs(np.corrcoef(drawn[:, 0], drawn[:, 1])[0, 1]) < 0.1
    assert abs(np.corrcoef(drawn[:-1, 0], drawn[1:, 0])[0, 1]) < 0.1
    assert len(np.unique(drawn)) > 0.99 * drawn.size


def test_no_rows_and_wrong_streams():
    assert uniforms(np.zeros(0, np.uint64), np.zeros(0, np.int64), 3).shape == (0, 3)
    with pytest.raises(HurtleError, match="uint64 stream"):
        uniforms(np.zeros(3, np.int64), np.zeros(3, np.int64), 1)
    with pytest.raises(HurtleError, match=r"steps of shape \(2,\)"):
        uniforms(np.zeros(3, np.uint64), np.zeros(2, np.int64), 1)
