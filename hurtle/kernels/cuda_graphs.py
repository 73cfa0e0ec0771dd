"""CUDA graphs: a function's launches, captured once and replayed with one call; and results read back without waiting.

function → a few plain runs → capture → replays. On the CPU a function is just called. Knows nothing of what is captured.
"""

from __future__ import annotations

import gc
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

WARM_UPS = 1
"""Plain runs before a capture, in which kernels are compiled and libraries allocate their workspaces."""
MOST_SPANS = 256
"""Maximum stage timings kept until they are read."""
MOST_IN_FLIGHT = 2
"""Updates that the host may run ahead of the GPU: with fewer the GPU would wait, with more Ctrl-C would take longer."""


class Graphs:
    """The stream of a run on one device, and the graphs captured on it. They run one at a time, so they share memory.

    Args:
        device: Where functions run.
        enabled: False always calls functions directly.

    Attributes:
        failure: The reason a function could not be captured and runs without a graph, if any.
    """

    def __init__(self, device: torch.device | str, enabled: bool = True):
        self.device = torch.device(device)
        self.enabled = enabled and self.device.type == "cuda"
        self.failure = ""
        self._stream = stream_of(self.device) if self.device.type == "cuda" else None
        self._graphs: list[torch.cuda.CUDAGraph] = []  # all captured graphs: their shared memory is freed with the last one
        self._spans: dict[str, deque[tuple[Any, Any]]] = defaultdict(lambda: deque(maxlen=MOST_SPANS))  # by stage: start, end

    def wrap(self, function: Callable[[], None], stage: str = "other") -> Callable[[], None]:
        """The same function, replaying its launches from the second call on.

        It must always launch the same kernels on the same memory, and must not wait for the device. Its time is counted
        under `stage`.
        """
        return _Replayed(self, function, stage)

    def seconds(self, stage: str) -> dict[str, float]:
        """GPU seconds of one stage measured since the last call, as `{stage: seconds}`; empty if there were none."""
        spans, spent = self._spans[stage], 0.0
        known = bool(spans) and spans[0][1].query()
        while spans and spans[0][1].query():
            begin, end = spans.popleft()
            spent += begin.elapsed_time(end) / 1e3
        return {stage: spent} if known else {}

    @contextmanager
    def stream(self) -> Iterator[None]:
        """Run launches on the graphs' stream, after all earlier work of that stream and of torch's current one."""
        if self._stream is None:
            yield
            return
        current = torch.cuda.current_stream(self.device)
        self._stream.wait_stream(current)
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            current.wait_stream(self._stream)

    @contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        """Record when the GPU starts and ends the work launched inside."""
        if self._stream is None:
            yield
            return
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record(self._stream)
        yield
        end.record(self._stream)
        self._spans[stage].append((begin, end))

    def capture(self, function: Callable[[], None]) -> torch.cuda.CUDAGraph | None:
        """Capture a function's launches as a graph; None if it does something that cannot be captured."""
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()  # a graph has its own memory and cannot use what the plain runs cached
        try:
            self._record(graph, function)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            torch.cuda.synchronize(self.device)
            self.enabled, self.failure = False, str(error).splitlines()[0]
            return None
        self._graphs.append(graph)
        return graph

    def _record(self, graph: torch.cuda.CUDAGraph, function: Callable[[], None]) -> None:
        """Capture, but without torch.cuda.graph: its garbage collection takes longer than some training runs."""
        from hurtle.native.cuda_support import import_cuda

        was_collecting, waiting = gc.isenabled(), torch.cuda.get_sync_debug_mode()
        memory = self._graphs[0].pool() if self._graphs else torch.cuda.graph_pool_handle()
        gc.disable()  # GPU memory must not be freed during a capture
        torch.cuda.set_sync_debug_mode("error")  # raises where the function waits, before that breaks the capture
        try:
            with import_cuda().defer_cleanup():
                graph.capture_begin(pool=memory, capture_error_mode="thread_local")
                try:
                    function()
                except BaseException:
                    with suppress(RuntimeError):  # not the cause
                        graph.capture_end()
                    raise
                graph.capture_end()
        finally:
            torch.cuda.set_sync_debug_mode(waiting)
            if was_collecting:
                gc.enable()

    def close(self) -> None:
        """Free all graphs and their memory; nothing can be replayed afterwards."""
        self._graphs.clear()
        self._spans.clear()


@cache
def stream_of(device: torch.device, side: bool = False) -> torch.cuda.Stream:
    """The stream on which graphs run, or the one beside it: libraries keep a workspace for every stream they use."""
    return torch.cuda.Stream(device)


def side_by_side(device: torch.device, work: Callable[[], None], beside: Callable[[], None]) -> None:
    """Do two things that do not need each other's results; on a GPU at the same time, `beside` on a stream of its own."""
    if device.type != "cuda":
        work()
        beside()
        return
    here, side = torch.cuda.current_stream(device), stream_of(device, side=True)
    side.wait_stream(here)
    with torch.cuda.stream(side):
        beside()
    work()
    here.wait_stream(side)


class _Replayed:
    def __init__(self, graphs: Graphs, function: Callable[[], None], stage: str):
        self._graphs, self._function, self._stage = graphs, function, stage
        self._graph: torch.cuda.CUDAGraph | None = None
        self._calls = 0

    def __call__(self) -> None:
        graphs = self._graphs
        with graphs.stream():
            if graphs.enabled and self._graph is None and self._calls >= WARM_UPS:
                self._graph = graphs.capture(self._function)
            self._calls += 1
            with graphs.timed(self._stage):
                if self._graph is not None:
                    self._graph.replay()
                else:
                    self._function()


class Readback:
    """Small tensors copied to the host asynchronously: requested now, read when they have arrived.

    Args:
        device: The device they come from.
        most: Maximum copies in flight; `send` waits for the oldest if there would be more.
    """

    def __init__(self, device: torch.device | str, most: int = MOST_IN_FLIGHT):
        self._device, self._most = torch.device(device), most
        self._coming: deque[tuple[Any, Tensor]] = deque()
        self._here: list[np.ndarray] = []

    def send(self, numbers: Tensor) -> None:
        """Request a copy of `numbers` as they are once all work launched so far is done."""
        if self._device.type != "cuda":
            self._here.append(numbers.detach().numpy().copy())
            return
        host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
        host.copy_(numbers, non_blocking=True)
        done = torch.cuda.Event()
        done.record(torch.cuda.current_stream(self._device))
        self._coming.append((done, host))
        while len(self._coming) > self._most:
            self._take_oldest()

    def arrived(self, wait: bool = False) -> list[np.ndarray]:
        """The copies that `send` has waited for since the last call, in order; all copies with `wait`.

        Copies that happen to have arrived are left out, so that two equal runs read the same at the same time.
        """
        while self._coming and wait:
            self._take_oldest()
        here, self._here = self._here, []
        return here

    def _take_oldest(self) -> None:
        done, host = self._coming.popleft()
        done.synchronize()
        self._here.append(host.numpy())


def autocast(device: torch.device, dtype: torch.dtype | None) -> Any:
    """A mixed-precision context with `dtype`, or a null context."""
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype)
