"""`gpu_errors`: what torch, Numba and Triton raise when a GPU fails becomes one error that says what to do."""

import pickle

import pytest
import torch

from hurtle.errors import DeviceError, EnvFailedError
from hurtle.runners.devices import explain_gpu_error, gpu_errors

TORCH_ADVICE = (
    "\nCUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be incorrect."
    "\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1\n"
)


def numba_error(code, text):
    driver = pytest.importorskip("numba.cuda.cudadrv.driver")
    return driver.CudaAPIError(code, text)


def explained(error, device="cuda"):
    """The error that `gpu_errors` raises for this one."""
    with pytest.raises(DeviceError) as caught, gpu_errors(device):
        raise error
    assert caught.value.__cause__ is error
    return caught.value


ALLOCATING = "Tried to allocate 2.50 GiB."
NO_MEMORY = {
    "torch": (torch.OutOfMemoryError(f"CUDA out of memory. {ALLOCATING} GPU 0 has a total capacity of 80.00 GiB."), ALLOCATING),
    "driver": (torch.AcceleratorError(f"CUDA error: out of memory{TORCH_ADVICE}"), "CUDA error: out of memory."),
    "cublas": (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), "ALLOC_FAILED"),
    "numba": (None, "cuMemAlloc"),
}


@pytest.mark.parametrize("case", NO_MEMORY)
def test_out_of_memory(case, monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (3 * 2**29, 80 * 2**30))
    error, said = NO_MEMORY[case]
    found = explained(error or numba_error(2, "Call to cuMemAlloc results in CUDA_ERROR_OUT_OF_MEMORY"), "cuda:0")
    assert not found.device_lost
    for words in ("out of memory (1.5 of 80.0 GiB are free)", said, "num_envs", "num_steps", "minibatch_size"):
        assert words in str(found)
    assert "asynchronously" not in str(found)


def test_out_of_memory_on_a_device_that_cannot_tell_how_much_it_has(monkeypatch):
    def fail(device):
        raise torch.AcceleratorError("CUDA error: out of memory")

    monkeypatch.setattr(torch.cuda, "mem_get_info", fail)
    assert str(explained(torch.OutOfMemoryError("CUDA out of memory."))).startswith("The GPU is out of memory. ")


LOST = [
    "CUDA error: an illegal memory access was encountered",
    "CUDA error: unspecified launch failure",
    "CUDA error: device-side assert triggered",
    "CUDA error: uncorrectable ECC error encountered",
    "CUDA error: misaligned address",
    "CUDA error: the launch timed out and was terminated",
    "CUDA error: an illegal instruction was encountered",
    "CUDA error: unknown error",
    "Triton Error [CUDA]: an illegal memory access was encountered",
]


@pytest.mark.parametrize("kind", [torch.AcceleratorError, RuntimeError])
@pytest.mark.parametrize("text", LOST)
def test_a_lost_device(text, kind):
    found = explained(kind(text + TORCH_ADVICE))
    assert found.device_lost
    for words in (f"{text}.", "Restart the process", "--resume", "last checkpoint"):
        assert words in str(found)


@pytest.mark.parametrize("code", [700, 719, 214])
def test_a_lost_device_by_numbas_code(code):
    assert explained(numba_error(code, "Call to cuMemcpyDtoH results in UNKNOWN_CUDA_ERROR")).device_lost


def test_a_lost_device_by_torchs_code():
    error = torch.AcceleratorError("CUDA error: what nobody has seen before")
    error.error_code = 718
    assert explained(error).device_lost


UNCLEAR = "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm( handle, opa, opb, m, n, k)`"


@pytest.mark.parametrize("answer", ["well", "lost", "capturing"])
def test_an_unclear_error_is_settled_by_asking_the_device(answer, monkeypatch):
    asked = []

    def synchronize(device):
        asked.append(device)
        if answer != "well":
            what = {"lost": "an illegal memory access was encountered", "capturing": "operation not permitted when capturing"}
            raise torch.AcceleratorError(f"CUDA error: {what[answer]}")

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    found = explained(RuntimeError(UNCLEAR), "cuda:1")
    assert found.device_lost == (answer == "lost")
    assert asked == [torch.device("cuda:1")]
    assert "CUBLAS_STATUS_EXECUTION_FAILED" in str(found)


def test_other_errors_of_cuda_leave_the_device_as_it_is(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    found = explained(torch.AcceleratorError("CUDA error: no kernel image is available for execution on the device"))
    assert not found.device_lost
    assert "no kernel image" in str(found)
    assert "nvidia-smi" in str(found)


NO_DRIVER = [
    RuntimeError("Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU."),
    RuntimeError("The NVIDIA driver on your system is too old (found version 11040)."),
    RuntimeError("No CUDA GPUs are available"),
    RuntimeError("CUDA unknown error - this may be due to an incorrectly set up environment"),
    AssertionError("Torch not compiled with CUDA enabled"),
    RuntimeError("Cannot access accelerator device when none is available."),
    torch.AcceleratorError("CUDA error: CUDA driver version is insufficient for CUDA runtime version"),
    None,
]


@pytest.mark.parametrize("error", NO_DRIVER, ids=lambda error: str(error)[:30])
def test_no_driver(error):
    if error is None:
        numba = pytest.importorskip("numba.cuda.cudadrv.error")
        error = numba.CudaSupportError("Error at driver init: \n\nCUDA driver library cannot be found.")
    found = explained(error)
    assert not found.device_lost
    for words in ("no GPU", "nvidia-smi", "device='cpu'"):
        assert words in str(found)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_torchs_own_complaint_about_a_missing_gpu():
    with pytest.raises(DeviceError, match="nvidia-smi"), gpu_errors("cuda"):
        torch.zeros(1).cuda()


def test_a_kernel_that_is_too_large():
    errors = pytest.importorskip("triton.runtime.errors")
    found = explained(errors.OutOfResources(300_000, 232_448, "shared memory"))
    assert not found.device_lost
    for words in ("shared memory", "300000", "232448", "hidden_sizes", "gear='general'"):
        assert words in str(found)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!"),
        RuntimeError("mat1 and mat2 shapes cannot be multiplied (4x3 and 2x8)"),
        EnvFailedError("Env 3 raised. CUDA error: out of memory", 3),
        DeviceError("device='cuda:9': torch sees 1 GPU here."),
        KeyError("cuda"),
        MemoryError("out of memory"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_all_other_errors_pass(error):
    with pytest.raises(type(error)) as caught, gpu_errors("cuda"):
        raise error
    assert caught.value is error
    assert explain_gpu_error(error, torch.device("cuda")) is None


def test_nothing_is_done_without_an_error_nor_for_ctrl_c():
    with gpu_errors("cpu"):
        pass
    with pytest.raises(KeyboardInterrupt), gpu_errors("cpu"):
        raise KeyboardInterrupt


def test_the_error_crosses_processes():
    error = pickle.loads(pickle.dumps(DeviceError("gone", device_lost=True)))
    assert (str(error), error.device_lost) == ("gone", True)
    assert not DeviceError("busy").device_lost
