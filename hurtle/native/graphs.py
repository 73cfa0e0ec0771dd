"""CUDA graphs: a function's launches, captured once and replayed with one call; and numbers read back without waiting.

function → a few plain runs → capture → replays. On the CPU a function is simply called. Knows nothing of what is captured.
"""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

WARM_UPS = 1
"""Plain runs before a capture: kernels must have been compiled, and libraries have taken their workspaces."""
MOST_SPANS = 256
"""Times of stages that are kept for whoever may ask."""
MOST_IN_FLIGHT = 2
"""Updates that the host may be ahead of the GPU: with fewer the GPU would wait, with more Ctrl-C would be late."""


class Graphs:
    """The stream of a run on one device, and the graphs captured there; they share memory, since they run one by one.

    Args:
        device: Where functions run.
        enabled: False calls functions plainly, always.

    Attributes:
        failure: Why a function could not be captured, if so; it then runs without a graph.
    """

    def __init__(self, device: torch.device | str, enabled: bool = True):
        self.device = torch.device(device)
        self.enabled = enabled and self.device.type == "cuda"
        self.failure = ""
        self._stream = stream_of(self.device) if self.device.type == "cuda" else None
        self._graphs: list[torch.cuda.CUDAGraph] = []  # all that were captured: their shared memory goes with the last one
        self._spans: deque[tuple[str, Any, Any]] = deque(maxlen=MOST_SPANS)  # stage, its beginning and its end

    def wrap(self, function: Callable[[], None], stage: str = "other") -> Callable[[], None]:
        """The same function, which from its second call on is a replay of what it launched.

        It must always launch the same kernels on the same memory, and must not wait for the device. `stage` is what its time
        counts as.
        """
        return _Replayed(self, function, stage)

    def seconds(self) -> dict[str, float]:
        """How long the GPU was busy with each stage, as far as it is known and was not told before; nothing on the CPU."""
        spent: dict[str, float] = {}
        while self._spans and self._spans[0][2].query():
            stage, begin, end = self._spans.popleft()
            spent[stage] = spent.get(stage, 0.0) + begin.elapsed_time(end) / 1e3
        return spent

    @contextmanager
    def stream(self) -> Iterator[None]:
        """What is launched inside runs in the order of all graphs, and of what torch's current stream did before."""
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
        """Note when the GPU begins and ends what is launched inside."""
        if self._stream is None:
            yield
            return
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record(self._stream)
        yield
        end.record(self._stream)
        self._spans.append((stage, begin, end))

    def capture(self, function: Callable[[], None]) -> torch.cuda.CUDAGraph | None:
        """What the function launches, as a graph; None if it does something that no graph can hold."""
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()  # what the plain runs used is not free for a graph, which has memory of its own
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
        """Capture; not with torch.cuda.graph, which collects garbage first and so takes longer than many a training."""
        from hurtle.native.cuda_support import import_cuda

        was_collecting, waiting = gc.isenabled(), torch.cuda.get_sync_debug_mode()
        memory = self._graphs[0].pool() if self._graphs else torch.cuda.graph_pool_handle()
        gc.disable()  # garbage of the GPU must not be freed during a capture
        torch.cuda.set_sync_debug_mode("error")  # says what waits, before the waiting spoils the capture
        try:
            with import_cuda().defer_cleanup():
                graph.capture_begin(pool=memory, capture_error_mode="thread_local")
                try:
                    function()
                except BaseException:
                    with suppress(RuntimeError):  # that is not the cause
                        graph.capture_end()
                    raise
                graph.capture_end()
        finally:
            torch.cuda.set_sync_debug_mode(waiting)
            if was_collecting:
                gc.enable()

    def close(self) -> None:
        """Let go of all graphs and their memory; nothing can be replayed any more."""
        self._graphs.clear()
        self._spans.clear()


@cache
def stream_of(device: torch.device) -> torch.cuda.Stream:
    """The one stream of a device on which graphs run; libraries keep a workspace for every stream that they ever saw."""
    return torch.cuda.Stream(device)


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
    """Small tensors on their way to the host: asked for now, looked at when they have come.

    Args:
        device: Where they come from.
        most: How many may be on their way; `send` waits for the oldest when there would be more.
    """

    def __init__(self, device: torch.device | str, most: int = MOST_IN_FLIGHT):
        self._device, self._most = torch.device(device), most
        self._coming: deque[tuple[Any, Tensor]] = deque()
        self._here: list[np.ndarray] = []

    def send(self, numbers: Tensor) -> None:
        """Ask for a copy of what `numbers` will be when all that was launched so far is done."""
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
        """What `send` has waited for since the last call, in order; `wait` for all that was sent.

        Not what has come by chance, so that two equal runs hear the same at the same time.
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
    """Mixed precision in `dtype`, or none."""
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype)
