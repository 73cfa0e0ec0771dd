"""Usage: real numbers of this process, a fake GPU, and no more work than once a second."""

import mmap
import sys
import types
from time import perf_counter, sleep

import pytest

from hurtle.tracking import usage as module
from hurtle.tracking.usage import Usage


def test_cpu_and_memory_of_this_process(monkeypatch):
    psutil = pytest.importorskip("psutil")
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    usage = Usage(every=0)
    end = perf_counter() + 0.2
    while perf_counter() < end:
        pass
    busy = usage.sample()
    sleep(0.2)
    idle = usage.sample()
    assert busy["cpu_percent"] > 2 * idle["cpu_percent"]
    if sys.platform == "linux":
        assert idle["memory"] == pytest.approx(psutil.Process().memory_info().rss, rel=0.05)
    assert set(idle) == {"cpu_percent", "memory"}


def test_memory_is_what_is_resident_now(monkeypatch):
    pages = [1000]  # size, resident, shared …: the kernel may count a real allocation late, so the file is ours
    monkeypatch.setattr(module.Path, "read_text", lambda self: f"9000 {pages[0]} 300 4 0 5000 0\n")
    usage = Usage(every=0)
    before = usage.sample()["memory"]
    pages[0] = 400
    assert before == 1000 * mmap.PAGESIZE
    assert usage.sample()["memory"] == 400 * mmap.PAGESIZE


def test_samples_at_most_once_a_second(monkeypatch):
    calls = []
    monkeypatch.setattr(module, "_resident_bytes", lambda: calls.append(1) or 5)
    now = [100.0]
    monkeypatch.setattr(module, "monotonic", lambda: now[0])
    usage = Usage()
    for _ in range(10):
        now[0] += 0.25
        usage.sample()
    assert len(calls) == 3  # at 0.25 s, then 1.25 s and 2.25 s


def test_gpu_only_where_it_is_in_use(monkeypatch):
    def no_pynvml(device):
        raise ModuleNotFoundError("pynvml")

    cuda = types.SimpleNamespace(
        is_initialized=lambda: True,
        device_count=lambda: 3,
        memory_reserved=[0, 3 << 30, 1 << 30].__getitem__,
        mem_get_info=[(0, 0), (1 << 30, 8 << 30), (0, 0)].__getitem__,
        utilization=[0, 87, 0].__getitem__,  # training is on cuda:1
    )
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(cuda=cuda))
    sample = Usage().sample()
    assert (sample["gpu_memory"], sample["gpu_memory_total"], sample["gpu_percent"]) == (3 << 30, 8 << 30, 87)
    cuda.utilization = no_pynvml
    assert "gpu_percent" not in Usage().sample()
    assert "gpu_memory" in Usage().sample()
    cuda.is_initialized = lambda: False
    assert "gpu_memory" not in Usage().sample()


def test_without_proc(monkeypatch):
    def gone(self):
        raise FileNotFoundError(self)

    monkeypatch.setattr(module.Path, "read_text", gone)
    assert module._resident_bytes() > 1000


def test_a_torch_that_is_being_imported_is_left_alone(monkeypatch):
    half = types.ModuleType("torch")  # without torch.cuda
    half.__spec__ = types.SimpleNamespace(_initializing=True)
    monkeypatch.setitem(sys.modules, "torch", half)
    assert "gpu_memory" not in Usage(every=0.0).sample()
