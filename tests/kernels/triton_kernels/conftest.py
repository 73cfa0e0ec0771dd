"""Triton's kernels run here in its interpreter, on the CPU; tests/gpu runs the same checks on a GPU."""

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
