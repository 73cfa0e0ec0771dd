"""Replayed functions and numbers on their way to the host: on the CPU, and with a GPU that the CPU plays."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from hurtle.kernels import cuda_graphs as module
from hurtle.kernels.cuda_graphs import MOST_IN_FLIGHT, WARM_UPS, Graphs, Readback, autocast

# On the CPU


def test_on_the_cpu_a_function_is_simply_called():
    graphs = Graphs("cpu")
    assert not graphs.enabled
    calls = []
    function = graphs.wrap(lambda: calls.append(len(calls)))
    for _ in range(5):
        function()
    assert calls == [0, 1, 2, 3, 4]
    assert graphs.failure == ""
    with graphs.stream():
        function()
    assert len(calls) == 6


def test_errors_come_through():
    def fail():
        raise ValueError("its own")

    with pytest.raises(ValueError, match="its own"):
        Graphs("cpu").wrap(fail)()


def test_numbers_come_in_order_and_as_they_were():
    readback, numbers = Readback("cpu"), torch.zeros(2, dtype=torch.float64)
    assert readback.arrived() == []
    for k in range(3):
        numbers.fill_(k)
        readback.send(numbers)
    numbers.fill_(99)
    found = readback.arrived()
    assert [array.tolist() for array in found] == [[0, 0], [1, 1], [2, 2]]
    assert found[0].dtype == np.float64
    assert readback.arrived(wait=True) == []  # once


def test_numbers_may_have_a_gradient():
    readback, weight = Readback("cpu"), torch.ones(1, requires_grad=True)
    readback.send(weight * 2)
    assert readback.arrived()[0].tolist() == [2]


def test_mixed_precision_where_it_is_asked_for():
    left = right = torch.ones(2, 2)
    with autocast(torch.device("cpu"), torch.bfloat16):
        assert (left @ right).dtype == torch.bfloat16
    with autocast(torch.device("cpu"), None):
        assert (left @ right).dtype == torch.float32


# With a GPU that the CPU plays


class FakeGraph:
    def __init__(self, function):
        self.function, self.replays = function, 0

    def replay(self):
        self.replays += 1
        self.function()


def capturing(captures):
    """Graphs whose `capture` gives, one after the other, what the list says."""
    graphs = Graphs("cpu")
    graphs.enabled, left = True, list(captures)

    def capture(function):
        made = left.pop(0)
        graphs.enabled = made is not None
        return made

    graphs.capture = capture
    return graphs, left


def test_a_function_is_captured_after_its_warm_ups_and_then_replayed():
    calls, replayed = [], []
    graph = FakeGraph(lambda: replayed.append(len(calls)))
    graphs, left = capturing([graph])
    function = graphs.wrap(lambda: calls.append(1))
    for _ in range(WARM_UPS):
        function()
    assert (len(calls), graph.replays, len(left)) == (WARM_UPS, 0, 1)
    for _ in range(3):
        function()
    assert (len(calls), graph.replays, len(left)) == (WARM_UPS, 3, 0)


def test_each_function_has_its_own_graph():
    first, second = FakeGraph(lambda: None), FakeGraph(lambda: None)
    graphs, _ = capturing([first, second])
    one, other = graphs.wrap(lambda: None), graphs.wrap(lambda: None)
    for _ in range(WARM_UPS + 1):
        one()
    assert (first.replays, second.replays) == (1, 0)
    for _ in range(WARM_UPS + 2):
        other()
    assert (first.replays, second.replays) == (1, 2)


def test_what_cannot_be_captured_goes_on_being_called():
    calls = []
    graphs, left = capturing([None])
    function = graphs.wrap(lambda: calls.append(1))
    for _ in range(WARM_UPS + 4):
        function()
    assert len(calls) == WARM_UPS + 4
    assert left == []  # it was tried once


class FakeCuda:
    """One queue of copies, which happen when somebody waits for them or `work` says so; stands for `torch` in graphs.py."""

    device = staticmethod(torch.device)

    def __init__(self):
        self.queue, self.done, self.waits = [], 0, 0
        self.cuda = SimpleNamespace(Event=lambda: FakeEvent(self), current_stream=lambda device: self)

    def empty(self, shape, dtype, pin_memory):
        assert pin_memory
        return FakeHost(self, torch.full(shape, -1, dtype=dtype))

    def work(self, until):
        for copy in self.queue[self.done : until]:
            copy()
        self.done = max(self.done, until)


class FakeHost:
    def __init__(self, gpu, memory):
        self.gpu, self.memory = gpu, memory

    def copy_(self, numbers, non_blocking):
        assert non_blocking
        value = numbers.clone()  # the queue is in order: what changes later does not change this copy
        self.gpu.queue.append(lambda: self.memory.copy_(value))

    def numpy(self):
        return self.memory.numpy()


class FakeEvent:
    def __init__(self, gpu):
        self.gpu, self.place = gpu, None

    def record(self, stream):
        self.place = len(stream.queue)

    def query(self):
        return self.gpu.done >= self.place

    def synchronize(self):
        self.gpu.waits += not self.query()
        self.gpu.work(self.place)


@pytest.fixture
def gpu(monkeypatch):
    fake = FakeCuda()
    monkeypatch.setattr(module, "torch", fake)
    return fake


def send(readback, numbers):
    for number in numbers:
        readback.send(torch.tensor([float(number)]))


def taken(readback, **how):
    return [int(array.item()) for array in readback.arrived(**how)]


def test_what_is_handed_out_does_not_depend_on_how_fast_the_gpu_is(gpu):
    readback = Readback("cuda", most=2)
    send(readback, range(2))
    gpu.work(2)
    assert taken(readback) == []  # though both have come
    send(readback, [2])
    assert taken(readback) == [0]
    send(readback, [3, 4])
    assert taken(readback) == [1, 2]
    assert taken(readback) == []
    assert taken(readback, wait=True) == [3, 4]


@pytest.mark.parametrize("most", [0, 1, MOST_IN_FLIGHT])
def test_no_more_than_that_many_are_on_their_way(gpu, most):
    readback = Readback("cuda", most=most)
    for k in range(6):
        send(readback, [k])
        assert len(gpu.queue) - gpu.done <= most
        assert gpu.waits == max(0, k + 1 - most)  # for the oldest, and only when there are too many
    assert taken(readback) == list(range(6 - most))
    assert taken(readback, wait=True) == list(range(6 - most, 6))
