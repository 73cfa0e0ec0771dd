"""Triton's kernels run here in its interpreter, on the CPU, which checks their memory; tests/gpu runs the same on a GPU."""

import numpy as np
import pytest


def pytest_collection_modifyitems(items):
    try:
        import triton
    except ImportError:
        reason = "triton is not installed"
    else:
        reason = "" if triton.knobs.runtime.interpret else "there is a GPU, where tests/gpu runs the same checks"
    if reason:
        for item in items:
            if "triton_kernels" in str(item.path):
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True)
def _loops_up_to_numbers_of_the_launch(monkeypatch):
    """The interpreter takes the bounds of a `range` with int(array), which NumPy 2.4 refuses for arrays of one number."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patched(tensor, scope):
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patched)


@pytest.fixture(autouse=True)
def _memory_is_checked(monkeypatch):
    """Every load and store must be within one of the tensors that the kernel was given: a GPU would not always notice."""
    from triton.runtime import interpreter

    given = interpreter.GridExecutor._init_args_hst
    load, store = (getattr(interpreter.InterpreterBuilder, f"create_masked_{name}") for name in ("load", "store"))
    begins, ends = np.zeros(0, np.uint64), np.zeros(0, np.uint64)

    def noting(self, args, kwargs):
        nonlocal begins, ends
        args, kwargs = given(self, args, kwargs)
        tensors = [part for part in (*args, *kwargs.values()) if hasattr(part, "data_ptr") and part.numel()]
        begins = np.array([tensor.data_ptr() for tensor in tensors], np.uint64)
        sizes = [1 + sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True)) for x in tensors]
        ends = begins + np.array([n * x.element_size() for n, x in zip(sizes, tensors, strict=True)], np.uint64)
        return args, kwargs

    def check(pointers, mask):
        at, size = pointers.data[mask.data.astype(bool)].astype(np.uint64), pointers.get_element_ty().primitive_bitwidth // 8
        inside = ((at[:, None] >= begins) & (at[:, None] + np.uint64(max(size, 1)) <= ends)).any(1)
        assert inside.all(), f"{(~inside).sum()} of {len(at)} accesses are outside of the kernel's tensors"

    def checked_load(self, pointers, mask, *others):
        check(pointers, mask)
        return load(self, pointers, mask, *others)

    def checked_store(self, pointers, value, mask, *others):
        check(pointers, mask)
        return store(self, pointers, value, mask, *others)

    monkeypatch.setattr(interpreter.GridExecutor, "_init_args_hst", noting)
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_masked_load", checked_load)
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_masked_store", checked_store)
