"""Torch's global settings for the duration of a run, and explanations of GPU errors."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from hurtle.errors import DeviceError, HurtleError

_GPU_CLASSES = ("OutOfMemoryError", "AcceleratorError", "OutOfResources", "CudaDriverError", "CudaSupportError", "CUDAError")
"""Error classes of torch, Triton, Numba and NVIDIA's package, by name, so that none is imported for this."""
_GPU_WORDS = re.compile(
    r"CUDA (driver |kernel |runtime )?error|CUDA out of memory|Triton Error \[CUDA\]|CUDA_ERROR_|cudaError|"
    r"cuDNN error|CU(BLAS|DNN|SOLVER|SPARSE)_STATUS_"
)
"""Recognizes GPU errors raised as Python's built-in classes by their text."""
_NO_DRIVER = re.compile(
    r"no nvidia driver|driver on your system is too old|driver version is insufficient|driver initialization failed|"
    r"error at driver init|driver library cannot be found|cuda unknown error|no cuda gpus|no cuda-capable device|"
    r"not compiled with cuda|accelerator device when none is available",
    re.IGNORECASE,
)
_NO_MEMORY = re.compile(r"out.of.memory|_ALLOC_FAILED|MemoryAllocation", re.IGNORECASE)
_LOST = re.compile(
    r"illegal.(memory.access|address|instruction)|misaligned.address|launch.fail|launch.timed.out|launch.timeout|"
    r"device-side assert|ERROR_ASSERT|uncorrectable|hardware.stack|invalid.program.counter|invalid.pc\b|"
    r"invalid.address.space|context.is.destroyed|gpu is lost|unknown error",
    re.IGNORECASE,
)
_LOST_CODES = frozenset((214, 220, 700, 702, 709, 710, *range(714, 720), 999))
"""CUDA errors after which every call fails until the process ends."""


@contextmanager
def torch_settings(threads: int, precision: str, device: torch.device) -> Iterator[None]:
    """Set torch's global state (threads, float precision, random streams) for a run, and restore it afterwards."""
    num_threads, matmul = torch.get_num_threads(), torch.get_float32_matmul_precision()
    convolutions = torch.backends.cudnn.allow_tf32
    torch.set_num_threads(threads)
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    torch.backends.cudnn.allow_tf32 = precision == "tf32"
    validates = torch.distributions.Distribution._validate_args
    if device.type == "cuda":  # validating a distribution's arguments synchronizes, which is illegal in a CUDA graph
        torch.distributions.Distribution.set_default_validate_args(False)
    try:
        with own_random_streams(device):
            yield
    finally:
        torch.set_num_threads(num_threads)
        torch.set_float32_matmul_precision(matmul)
        torch.backends.cudnn.allow_tf32 = convolutions
        torch.distributions.Distribution.set_default_validate_args(validates)


@contextmanager
def own_random_streams(device: torch.device) -> Iterator[None]:
    """Restore torch's global generators on exit."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        yield


@contextmanager
def gpu_errors(device: torch.device | str = "cuda") -> Iterator[None]:
    """Turn GPU failures of torch, Numba and Triton into errors that say what to do; others pass through.

    Args:
        device: The device of the run, whose memory an out-of-memory error reports.

    Raises:
        DeviceError: A GPU error; `device_lost` tells whether the device can still be read from.
    """
    try:
        yield
    except Exception as error:
        explained = explain_gpu_error(error, torch.device(device))
        if explained is None:
            raise
        raise explained from error


def explain_gpu_error(error: Exception, device: torch.device) -> DeviceError | None:
    """What a GPU error means and what to do about it; None if it is not one."""
    if isinstance(error, HurtleError):
        return None
    said = _words_of(error)
    if _NO_DRIVER.search(str(error)):
        return DeviceError(
            f"There is no GPU that torch {torch.__version__} can use: {said} Check that nvidia-smi lists one, that its driver "
            "is recent, and that torch was installed with CUDA. Without a GPU, use device='cpu'."
        )
    if not (_is_of_a_gpu(error) or _GPU_WORDS.search(str(error))):
        return None
    if type(error).__name__ == "OutOfResources":
        return DeviceError(
            f"A GPU kernel does not fit this GPU: {said} Use smaller hidden_sizes, or gear='general', which runs without it."
        )
    if isinstance(error, torch.OutOfMemoryError) or _NO_MEMORY.search(str(error)):
        return DeviceError(
            f"The GPU is out of memory{_memory_of(device)}. {said} Use fewer num_envs, a smaller num_steps or a smaller "
            "minibatch_size; nvidia-smi shows who else uses the GPU."
        )
    if _says_lost(error) or _is_lost(device):
        return DeviceError(
            f"The GPU has failed, and nothing can be read from it any more: {said} Restart the process; the run continues from "
            "its last checkpoint with --resume. If it happens again, CUDA_LAUNCH_BLOCKING=1 shows where, and nvidia-smi -q "
            "whether the hardware is at fault.",
            device_lost=True,
        )
    return DeviceError(
        f"The GPU could not do what was asked for: {said} Check with nvidia-smi that nobody else holds the GPU, and that the "
        f"driver is recent enough for torch {torch.__version__}."
    )


def _is_of_a_gpu(error: Exception) -> bool:
    """Whether its class belongs to a GPU package."""
    packages = ("torch", "triton", "numba", "numba_cuda", "cuda")
    return any(kind.__name__ in _GPU_CLASSES and kind.__module__.split(".")[0] in packages for kind in type(error).__mro__)


def _says_lost(error: Exception) -> bool:
    code = getattr(error, "error_code", getattr(error, "code", None))
    return (isinstance(code, int) and code in _LOST_CODES) or _LOST.search(str(error)) is not None


def _is_lost(device: torch.device) -> bool:
    """Probe the device, for errors that do not tell."""
    if device.type != "cuda" or not torch.cuda.is_initialized():
        return False
    try:
        torch.cuda.synchronize(device)
    except RuntimeError as error:
        return _says_lost(error)
    return False


def _memory_of(device: torch.device) -> str:
    try:
        free, total = torch.cuda.mem_get_info(device if device.type == "cuda" else None)
    except (RuntimeError, AssertionError):  # it cannot report even that
        return ""
    return f" ({free / 2**30:.1f} of {total / 2**30:.1f} GiB are free)"


def _words_of(error: Exception) -> str:
    """The message of an error, without torch's advice to its own developers; ends with a full stop."""
    if asked := re.search(r"Tried to allocate [\d.]+ \w+", str(error)):
        return f"{asked.group()}."
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return f"{lines[0].strip().rstrip('.')}."
