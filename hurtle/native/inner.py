"""How functions that only compiled code calls are compiled: to optimized IR that is linked into their callers, and no further.

Numba would also generate machine code for each of them, which nothing runs: the entry point has its own copy. This relies on
Numba's internals, so it is used only with the versions it was tested with; others compile as usual, which takes longer.
"""

from __future__ import annotations

from typing import Any

import numba
from numba import _dynfunc  # type: ignore[attr-defined]
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import Compiler, CompilerBase, DefaultPassBuilder
from numba.core.compiler_machinery import register_pass
from numba.core.typed_passes import NativeLowering

TESTED = ("0.68.",)
"""Numba versions whose internals this was tested with."""


class _LinkedLibrary(JITCodeLibrary):
    """Code that never enters the execution engine by itself: the entry point optimizes it together with its own."""

    def _optimize_final_module(self) -> None:
        pass

    def _finalize_final_module(self) -> None:
        self._finalize_dynamic_globals()
        self._finalized = True


def _not_executable(library: Any, fndesc: Any, env: Any) -> Any:
    """What Numba knows a compiled function by; Python could not call it anyway, as it has no wrapper."""
    return _dynfunc.make_function(fndesc.lookup_module(), fndesc.qualname.split(".")[-1], "", 0, env, (library,))


@register_pass(mutates_CFG=True, analysis_only=False)
class _LinkedLowering(NativeLowering):
    _name = "linked_lowering"

    def run_pass(self, state: Any) -> bool:
        state.library = _LinkedLibrary(state.targetctx.codegen(), state.func_id.func_qualname)
        state.library.enable_object_caching()
        state.targetctx.get_executable = _not_executable  # the context is this function's own
        return super().run_pass(state)


class _LinkedCompiler(CompilerBase):
    """For `njit(pipeline_class=InnerCompiler, no_cpython_wrapper=True, no_cfunc_wrapper=True)`."""

    def define_pipelines(self) -> list[Any]:
        """Numba's own pipeline but for the last step."""
        passes = DefaultPassBuilder.define_nopython_pipeline(self.state)
        passes.passes = [(_LinkedLowering if kind is NativeLowering else kind, text) for kind, text in passes.passes]
        passes.finalize()
        return [passes]


InnerCompiler = _LinkedCompiler if numba.__version__.startswith(TESTED) else Compiler
"""The compiler of inner functions."""
