"""`Staging`: what arrives is what was sent, however late the copies run, and nothing waits longer than needed."""

import numpy as np
import pytest
import torch
from fake_gpu import FakeGpu

from hurtle.collect.transfer import Staging

DTYPES = [np.float32, np.float64, np.float16, np.int64, np.int32, np.uint8, np.uint16, np.bool_]


def random_array(rng, shape, dtype=np.float32):
    return (rng.random(shape) * 200).astype(dtype) if dtype is not np.bool_ else rng.random(shape) < 0.5


@pytest.fixture
def gpu():
    return FakeGpu()


@pytest.fixture
def staging(gpu):
    return Staging("cpu", gpu)


@pytest.mark.parametrize("dtype", DTYPES)
def test_arrays_of_every_dtype_come_through(dtype, gpu, staging):
    array = random_array(np.random.default_rng(0), (5, 3), dtype)
    tensor = staging.to_device("x", array)
    back = staging.start_to_host("x", tensor)
    assert "wait" not in gpu.log
    np.testing.assert_array_equal(back.wait(), array)
    np.testing.assert_array_equal(tensor.numpy(), array)
    assert tensor.numpy().dtype == back.wait().dtype == dtype


def test_the_dtype_is_changed_on_the_way(gpu, staging):
    array = np.array([[1.1, 2.2], [3.3, 1e-9]])
    tensor = staging.to_device("x", array, torch.float32)
    gpu.run(len(gpu.queue))
    assert tensor.dtype == torch.float32
    assert torch.equal(tensor, torch.from_numpy(array).float())


def test_nothing_is_overwritten_while_it_is_copied(gpu, staging):
    """Copies run as late as they can: without the wait for a buffer, later arrays would arrive in place of earlier ones."""
    rng = np.random.default_rng(0)
    sent, arrived = [], []
    for step in range(50):
        array = random_array(rng, (int(rng.integers(1, 9)), 4))
        sent.append(array.copy())
        arrived.append(staging.to_device("obs", array))
        array[:] = -1.0  # the env's memory: overwritten at once
        if step % 7 == 0:
            sent.append(random_array(rng, (3,)))
            arrived.append(staging.to_device("starts", sent[-1]))
    gpu.run(len(gpu.queue))
    for array, tensor in zip(sent, arrived, strict=True):
        np.testing.assert_array_equal(tensor.numpy(), array)
    assert gpu.log.count("wait") >= 48  # the test has power: every buffer was reused before its copy had run


def test_what_came_back_stays_until_the_second_next_copy(gpu, staging):
    rng = np.random.default_rng(0)
    sent = [torch.from_numpy(random_array(rng, (6, 2))) for _ in range(20)]
    before = None
    for tensor in sent:
        now = staging.start_to_host("actions", tensor)
        if before is not None:
            np.testing.assert_array_equal(before[1].wait(), before[0].numpy())
        before = tensor, now
    np.testing.assert_array_equal(before[1].wait(), sent[-1].numpy())


def test_waiting_for_one_copy_leaves_later_work_alone(gpu, staging):
    first = staging.start_to_host("actions", torch.ones(3))
    later = staging.to_device("obs", np.full((2, 2), 7.0, np.float32))
    assert first.wait().tolist() == [1.0, 1.0, 1.0]
    assert (later == 55).all(), "not copied yet"
    assert staging.to_host("values", torch.zeros(2)).tolist() == [0.0, 0.0]
    assert (later == 7).all(), "launched before, so done before"


def test_directions_and_names_have_buffers_of_their_own(gpu, staging):
    up = staging.to_device("x", np.full(3, 1.0, np.float32))
    down = staging.start_to_host("x", torch.full((3,), 2.0))
    other = staging.to_device("y", np.full(3, 3.0, np.float32))
    gpu.run(len(gpu.queue))
    assert (up.tolist(), down.wait().tolist(), other.tolist()) == ([1.0] * 3, [2.0] * 3, [3.0] * 3)


def test_buffers_are_made_twice_and_again_only_for_more_rows(gpu, staging):
    for rows in (4, 4, 2, 0, 3, 4, 1):
        tensor = staging.to_device("obs", np.full((rows, 2), rows, np.float32))
        gpu.run(len(gpu.queue))
        assert tensor.shape == (rows, 2)
        assert (tensor == rows).all()
    assert gpu.pinned_count == 2
    for rows in (5, 5, 4):
        staging.to_device("obs", np.zeros((rows, 2), np.float32))
    assert gpu.pinned_count == 4
    staging.to_device("obs", np.zeros((4, 2), np.float64))
    staging.to_device("obs", np.zeros((4, 3), np.float32))
    assert gpu.pinned_count == 6


def test_arrays_that_are_not_contiguous(gpu, staging):
    array = np.arange(24.0).reshape(4, 6)[:, ::2]
    tensor = torch.arange(12.0).reshape(3, 4).T
    up, down = staging.to_device("x", array), staging.start_to_host("x", tensor)
    gpu.run(len(gpu.queue))
    np.testing.assert_array_equal(up.numpy(), array)
    np.testing.assert_array_equal(down.wait(), tensor.numpy())


def test_on_the_cpu_tensors_are_views():
    staging = Staging("cpu")
    array = np.arange(3, dtype=np.float32)
    tensor = staging.to_device("x", array)
    array[0] = 9
    assert tensor.tolist() == [9, 1, 2]
    staging.to_host("x", tensor)[1] = 8
    assert array.tolist() == [9, 8, 2]
    staging.host_array(tensor)[2] = 7
    assert array.tolist() == [9, 8, 7]
    assert staging.to_device("x", np.ones(2), torch.float32).dtype == torch.float32
    assert staging.shares_memory


def test_the_host_writes_into_memory_of_its_own_for_a_gpu(staging):
    field = torch.ones(2, 3, dtype=torch.bool)
    array = staging.host_array(field)
    assert (array.shape, array.dtype, bool(array.any())) == ((2, 3), np.bool_, False)
    array[:] = False
    assert field.all()
    assert not staging.shares_memory
