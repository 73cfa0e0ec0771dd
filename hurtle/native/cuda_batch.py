"""`CudaBatch`: many envs of one kind in GPU memory, stepped by one kernel; all arrays but the records are torch tensors.

Kernels run on torch's current stream, so that `torch.cuda.graph` captures them. Under Numba's CUDA simulator the arrays are
NumPy arrays; everything else is the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from hurtle.errors import ActionError, DeviceError, EnvIndexError
from hurtle.native.batch_arrays import Shape, allocate, apply_options, seed_records
from hurtle.native.bounds import OutOfBounds
from hurtle.native.build import COMPILING, build
from hurtle.native.cuda_support import import_cuda, simulated
from hurtle.native.drawn import Ranges, write_ranges
from hurtle.native.env import EnvSpec
from hurtle.native.generate import block_threads, staged_rows
from hurtle.native.pasted import CudaArrays
from hurtle.native.python_target import StateView
from hurtle.native.rng import ACTION_STREAM, seed_range, stream_states

STEPS_PER_GRAPH = 32
STEPS_BETWEEN_CHECKS = 256
"""Steps between checks for illegal actions and indices out of bounds: a check waits for the GPU."""


class CudaBatch:
    """A batch of envs on one GPU; all arrays are allocated once and reused.

    Args:
        spec: The checked env.
        num_envs: Number of envs.
        device: A torch device such as "cuda" or "cuda:0".
    """

    def __init__(self, spec: EnvSpec, num_envs: int, device: str = "cuda"):
        self._cuda = import_cuda()
        self.spec = spec
        self.num_envs = num_envs
        self.num_threads = num_envs
        self._memory: _TorchMemory | _SimulatedMemory
        self._memory = _SimulatedMemory() if simulated() else _TorchMemory(self._cuda, device)
        with COMPILING:
            self._program = build(spec, "cuda")
        self._functions = self._program.functions
        self._launch_shape = (-(-num_envs // block_threads()), block_threads())
        row_bytes = spec.obs_size * np.dtype(spec.observation_space.dtype).itemsize
        self._shared_bytes = -(-staged_rows(spec) * row_bytes // 4) * 4

        self.arrays = allocate(spec, num_envs, self._memory.zeros)
        views = {name: self._memory.view(array) for name, array in self.arrays._asdict().items()}
        self.fault = self._memory.zeros((1,), np.int64)  # nonzero after an index out of bounds, see bounds.py
        fault = self._memory.view(self.fault)
        self._views = CudaArrays(**views, obs_words=self._memory.words(self.arrays.obs), fault=fault)
        self.actions = self._memory.zeros((num_envs, *spec.agents_shape, *spec.action_shape), spec.action_dtype)
        self._action_view = self._memory.view(self.actions)
        self._illegal = self._memory.zeros((1,), np.int32)
        self._illegal_view = self._memory.view(self._illegal)
        self._clock = self._memory.zeros((1,), np.int64)
        self._steps = 0
        self._player: Any = None
        self._play_seed: int | None = None
        self._compile()

    def records(self) -> np.ndarray:
        """A copy of all envs' records on the host."""
        return self._memory.to_host(self._views.envs)

    def load_records(self, records: np.ndarray) -> None:
        """Replace all envs' records."""
        self._memory.load(self._views.envs, records)

    def seed(self, seeds: np.ndarray, chosen: np.ndarray) -> None:
        """Restart each chosen env from its seed: reset its random stream, and its runtime parameters to their defaults."""
        records = self.records()
        seed_records(self.spec, records, seeds, chosen)
        self.load_records(records)

    def set_options(self, options: Mapping[str, Any], chosen: np.ndarray) -> None:
        """Set runtime parameters of the chosen envs: one value for all, or an array with one per env."""
        records = self.records()
        apply_options(self.spec, records, options, chosen)
        self.load_records(records)

    def set_ranges(self, ranges: Ranges) -> None:
        """Set the ranges of the drawn options, from which all episodes draw that begin from now on. Waits for the GPU."""
        records = self.records()
        write_ranges(self.spec, records, ranges)
        self.load_records(records)
        self._memory.wait()  # numba copies on its own stream, and the next rollout is launched on torch's

    def reset(self, chosen: np.ndarray) -> None:
        """Begin a new episode in the chosen envs."""
        self._launch(self._functions.reset_kernel, self._views, self._memory.view(self._memory.from_host(chosen)))

    def to_device(self, array: Any) -> Any:
        """A host array or list as a device array of the actions' dtype."""
        return self._memory.from_host(np.asarray(array, self.spec.action_dtype))

    def step(self, same_step: bool = True) -> None:
        """Step all envs with `self.actions`."""
        self._launch(self._functions.step_kernel, self._views, self._action_view, same_step, self._illegal_view)
        self._steps += 1
        if self._steps % STEPS_BETWEEN_CHECKS == 0 and not self._memory.capturing():
            self.check_faults()

    def step_with(self, actions: Any) -> None:
        """Step all envs with a copy of `actions` from the host."""
        self.actions[...] = self.to_device(actions)
        self.step()

    def to_numpy(self, array: Any) -> np.ndarray:
        """One of the batch's arrays, copied to the host."""
        return array.cpu().numpy() if hasattr(array, "cpu") else np.asarray(array)

    def check_faults(self) -> None:
        """Raise if an action was illegal or an index out of bounds since the last check. Waits for the GPU.

        Raises:
            ActionError: Gives the number of illegal actions; their envs were not stepped.
            EnvIndexError: Names the author's line and the index; element 0 was used instead.
        """
        fault = int(self.fault[0])
        if fault:
            self.fault[...] = 0
            raise self.out_of_bounds(fault)
        count = int(self._illegal[0])
        if count:
            self._illegal[...] = 0
            raise ActionError(
                f"{count} actions of the last steps are not in {self.spec.action_space}; these envs did not step."
            )

    def out_of_bounds(self, fault: int) -> EnvIndexError:
        """The error behind a value that kernels wrote to `fault`."""
        return self._program.out_of_bounds(OutOfBounds.on_gpu(fault))

    def play(self, num_steps: int, seed: int = 0) -> None:
        """Take uniformly random actions by replaying a captured graph, without synchronizing with the host in between."""
        if self._player is None:
            self._player = self._memory.repeater(self._play_steps)
            self._seeds = self._memory.from_host(np.zeros(self.num_envs, np.uint64))
        if seed != self._play_seed:
            self._memory.load(self._seeds, stream_states(seed_range(seed, self.num_envs), ACTION_STREAM))
            self._play_seed = seed
        self._player(num_steps)
        self._memory.wait()
        self.check_faults()

    @property
    def played(self) -> int:
        """Steps that `play` has taken; the next call continues from there."""
        return int(self._clock[0])

    @played.setter
    def played(self, steps: int) -> None:
        self._clock[0] = steps

    def _play_steps(self, count: int) -> None:
        clock = self._memory.view(self._clock)
        for offset in range(count):
            self._launch(self._functions.play_kernel, self._views, self._action_view, self._seeds, clock, offset)
        self._functions.tick_kernel[1, 1, self._memory.stream()](clock, count)

    def close(self) -> None:
        """Do nothing: memory is freed with the object."""

    def _launch(self, kernel: Any, *arguments: Any) -> None:
        kernel[(*self._launch_shape, self._memory.stream(), self._shared_bytes)](*arguments)

    def _compile(self) -> None:
        """Compile before the first step, so that errors come early and name the author's line."""
        from numba.core.errors import NumbaError

        everyone = np.ones(self.num_envs, np.bool_)
        self.seed(seed_range(0, self.num_envs), everyone)
        nobody = self._memory.view(self.actions[:0])
        try:
            with COMPILING:
                self.reset(everyone)
                self._launch(self._functions.step_kernel, self._views, nobody, True, self._illegal_view)
                self._memory.wait()
        except NumbaError as error:
            raise self._program.explain(error) from None
        self.check_faults()


def whole_words(shape: Shape) -> int:
    """Elements to allocate so that the last rows of a block can be copied as 32-bit words."""
    return -(-int(np.prod(shape)) // 4) * 4


class _TorchMemory:
    """GPU memory: torch tensors outside, numba device arrays over the same memory inside kernels."""

    def __init__(self, cuda: Any, device: str):
        import torch

        if not torch.cuda.is_available():
            raise DeviceError("device='cuda' was asked for, but torch was installed without GPU support or finds no GPU.")
        self.torch = torch
        self.cuda = cuda
        self.device = torch.device(device)
        if (self.device.index or 0) >= torch.cuda.device_count():
            raise DeviceError(f"device={device!r} was asked for, but there are {torch.cuda.device_count()} GPUs.")
        if self.device.index is not None:
            cuda.select_device(self.device.index)
        self._streams: dict[int, Any] = {}

    def zeros(self, shape: Shape, dtype: Any) -> Any:
        dtype = np.dtype(dtype)
        if dtype.names:
            return self.cuda.to_device(np.zeros(shape, dtype))
        flat = self.torch.zeros(whole_words(shape), dtype=getattr(self.torch, dtype.name), device=self.device)
        return flat[: int(np.prod(shape))].view(shape)

    def view(self, array: Any) -> Any:
        if not isinstance(array, self.torch.Tensor):
            return array
        return self.cuda.as_cuda_array(array)

    def words(self, tensor: Any) -> Any:
        """The memory of a tensor as one row of 32-bit words."""
        words = self.torch.empty(0, dtype=self.torch.int32, device=self.device)
        words.set_(tensor.untyped_storage())
        return self.cuda.as_cuda_array(words).view(np.uint32)

    def from_host(self, array: np.ndarray) -> Any:
        if array.dtype == np.uint64:
            return self.cuda.to_device(array)
        return self.torch.from_numpy(array).to(self.device)

    def to_host(self, view: Any) -> np.ndarray:
        self.wait()  # numba copies on its own stream
        return view.copy_to_host()

    def load(self, view: Any, array: np.ndarray) -> None:
        self.wait()
        view.copy_to_device(array)

    def stream(self) -> Any:
        handle = self.torch.cuda.current_stream(self.device).cuda_stream
        if handle not in self._streams:
            self._streams[handle] = self.cuda.external_stream(handle)
        return self._streams[handle]

    def capturing(self) -> bool:
        return self.torch.cuda.is_current_stream_capturing()

    def wait(self) -> None:
        self.torch.cuda.synchronize(self.device)

    def repeater(self, steps: Any) -> Any:
        """A function of `num_steps` that takes so many steps with `steps(n)`, mostly by replaying one captured graph."""
        graph: Any = None

        def repeat(num_steps: int) -> None:
            nonlocal graph
            graphs, rest = divmod(num_steps, STEPS_PER_GRAPH)
            if graph is None and not rest:  # a kernel must run once before it can be captured
                graphs, rest = graphs - 1, STEPS_PER_GRAPH
            steps(rest)
            if graphs and graph is None:
                self.wait()
                captured = self.torch.cuda.CUDAGraph()
                with self.cuda.defer_cleanup(), self.torch.cuda.graph(captured):
                    steps(STEPS_PER_GRAPH)
                graph = captured
            for _ in range(graphs):
                graph.replay()

        return repeat


class _SimulatedRecords:
    """Records with fields as attributes, as in a kernel."""

    def __init__(self, array: np.ndarray):
        self.array = array
        self.shape = array.shape

    def __getitem__(self, i: int) -> StateView:
        return StateView(self.array[i])


class _SimulatedMemory:
    """Host memory for Numba's CUDA simulator: NumPy arrays."""

    def zeros(self, shape: Shape, dtype: Any) -> Any:
        if np.dtype(dtype).names:
            return np.zeros(shape, dtype)
        return np.zeros(whole_words(shape), dtype)[: int(np.prod(shape))].reshape(shape)

    def view(self, array: Any) -> Any:
        return _SimulatedRecords(array) if array.dtype.names else array

    def words(self, array: Any) -> Any:
        return array.base.view(np.uint32)

    def from_host(self, array: np.ndarray) -> Any:
        return array

    def to_host(self, view: Any) -> np.ndarray:
        return view.array.copy()

    def load(self, view: Any, array: np.ndarray) -> None:
        getattr(view, "array", view)[...] = array

    def stream(self) -> Any:
        return 0

    def capturing(self) -> bool:
        return False

    def wait(self) -> None:
        pass

    def repeater(self, steps: Any) -> Any:
        return steps
