"""From a checked env to runnable functions: writes one generated module per (env, parameters, target) and imports it.

rewritten methods + adapters + pasted engine sources → <cache>/<env>_<target>_<hash>.py → import → compiled on first call.
The hash covers the whole text, so that Numba's disk cache can never hand out stale or foreign code.
"""

from __future__ import annotations

import ast
import gc
import hashlib
import importlib.util
import os
import re
import sys
import tempfile
import threading
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from hurtle.errors import EnvCodeError, EnvIndexError
from hurtle.native import python_target
from hurtle.native.adapters import adapter_source
from hurtle.native.bounds import OutOfBounds, Site, at_source
from hurtle.native.cuda_support import simulated
from hurtle.native.env import EnvSpec
from hurtle.native.language import code_message
from hurtle.native.layout import job_source, unpack_source
from hurtle.native.rewrite import METHODS, Rewritten, rewrite

HERE = Path(__file__).parent
TARGETS = ("cpu", "cuda", "python", "rollout")

PRELUDE = {
    "cpu": """\
import math

import numpy as np
from numpy import inf, nan
from numba import carray, njit

from hurtle.native.bounds import OutOfBounds
from hurtle.native.intrinsics import pointer_at
from hurtle.native.pasted import Arrays

f4 = np.float32
i8 = np.int64
INNER = {"nogil": True, "error_model": "numpy", "no_cpython_wrapper": True, "no_cfunc_wrapper": True}  # not for Python to call
jit = njit(forceinline=True, **INNER)
entry = njit(nogil=True, error_model="numpy", cache=True)
""",
    "cuda": """\
import math

import numpy as np
from numpy import inf, nan
from numba import cuda

f4 = np.float32
i8 = np.int64
jit = cuda.jit(device=True)
entry = cuda.jit(cache=True)
""",
}
STAGE_BYTES = 48 * 1024
"""Shared memory that any CUDA device grants a block; more rows at a time beat more blocks at a time (measured on an H200)."""


class _Compiling:
    """A lock that a thread may take again, and a break for the garbage collector.

    Compilers make millions of objects, which it would go through again and again.
    """

    def __init__(self) -> None:
        self._lock, self._depth, self._collects = threading.RLock(), 0, False
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._in_child)

    def __enter__(self) -> None:
        self._lock.acquire()
        self._depth += 1
        if self._depth == 1:
            self._collects = gc.isenabled()
            gc.disable()

    def __exit__(self, *error: object) -> None:
        try:
            if self._depth == 1 and self._collects:
                gc.enable()
        finally:
            self._depth -= 1
            self._lock.release()

    def _in_child(self) -> None:
        """Whoever held it in the parent does not exist here."""
        if self._depth and self._collects:
            gc.enable()
        self._lock, self._depth = threading.RLock(), 0


COMPILING = _Compiling()
"""Held while a module is generated, imported and compiled: Numba and the import system take one thread at a time."""
LOOPS = {"cpu": "cpu_loops.py", "cuda": "cuda_loops.py", "python": "cpu_loops.py"}


@dataclass(frozen=True)
class Program:
    """One env compiled for one target."""

    spec: EnvSpec
    target: str
    functions: Any
    """The module (or namespace) with the entry points of cpu_loops.py or cuda_loops.py."""
    lines: dict[int, tuple[str, int]] = field(default_factory=dict)
    """Line of the generated module → file and line of the author."""
    sites: list[Site] = field(default_factory=list)
    """The indices that are checked."""
    is_new: bool = False
    """Whether the module was generated just now, so that the first call compiles."""

    def out_of_bounds(self, error: OutOfBounds) -> EnvIndexError:
        """An index out of bounds in the author's terms."""
        site, index, length = error.args
        return self.sites[site].error(index, length)

    def explain(self, error: Exception) -> EnvCodeError:
        """A Numba error in the author's terms: the author's line first, then what Numba said of it."""
        text = re.sub(r"\x1b\[[0-9;]*m", "", str(error))
        own = re.escape(Path(self.functions.__file__).name)
        seen = re.findall(rf'(?:File "[^"\n]*{own}", line |at [^\s"]*{own} \()(\d+)', text)
        known = [self.lines[int(n)] for n in seen if int(n) in self.lines]  # innermost first
        said = _first_reason(text)
        if not known:
            return EnvCodeError(f"{self.spec.name} cannot be compiled for the {self.target} target: {said}.")
        file, line = known[0]
        problem = f"cannot be compiled for the {self.target} target: {said}"
        hint = "Run it with debug=True to step through it in plain Python."
        return EnvCodeError(code_message(file, line, self.spec.name, problem, hint))


def build(spec: EnvSpec, target: str) -> Program:
    """Make an env runnable on a target: "cpu", "cuda", "python" (uncompiled, for the debugger) or "rollout" (with a policy).

    Raises:
        EnvCodeError: The env's code cannot be compiled.
    """
    try:
        return _build(spec, target)
    except EnvCodeError as error:  # without the frames of the rewriter, which say nothing to an author
        raise error.with_traceback(None) from None


def _build(spec: EnvSpec, target: str) -> Program:
    if target == "python":
        return Program(spec, target, _python_namespace(spec))
    text, lines, sites = generate(spec, target)
    name = f"{_snake(spec.name)}_{target}_{_digest(text)}"
    path = cache_folder() / f"{name}.py"
    is_new = not path.exists()
    if is_new:
        from hurtle.native.checks import probe

        probe(spec)
        _write_atomically(path, text)
    return Program(spec, target, _import(name, path), lines, sites, is_new)


def generate(spec: EnvSpec, target: str) -> tuple[str, dict[int, tuple[str, int]], list[Site]]:
    """The text of a generated module, where each of its lines comes from, and the indices that are checked."""
    if target == "rollout":
        stepping, origins, sites = generate(spec, "cpu")
        return f"{stepping}\n\n{kernel_source()}{job_source(spec)}\n\n{paste('rollout_loops.py')}", origins, sites
    rewritten = rewrite(spec, target)
    fields = [(n, _code(spec.record[n].base), spec.record[n].shape) for n in spec.record.names or ()]
    head = [
        f'"""{spec.env!r} for the {target} target, generated by hurtle.native.build; edits are lost."""',
        PRELUDE[target],
        f"RECORD = np.dtype({fields!r}, align=True)\n",
        *(f"{n} = np.array({t.tolist()!r}, np.{t.dtype.name}).reshape({t.shape})" for n, t in rewritten.tables.items()),
        paste("stream.py"),
        at_source(target, spec.env.unsafe),
    ]
    text = "\n".join(head) + "\n"
    lines: dict[int, tuple[str, int]] = {}
    for function, file in rewritten.functions:
        body = "@jit\n" + ast.unparse(function) + "\n\n\n"
        first = text.count("\n") + 1
        for original, printed in zip(_statements(function), _statements(ast.parse(body).body[0]), strict=True):
            lines[first + printed.lineno - 1] = (file, original.lineno)
        text += body
    text += adapter_source(spec, zero_obs=not rewritten.writes_whole_obs, has_fault=target == "cuda") + "\n"
    text += paste("core.py") + f"\n\nadvance_env = advance_{'many' if spec.num_agents > 1 else 'one'}\n\n\n"
    text += unpack_source(spec) + "\n\n" if target == "cpu" else block_source(spec)
    return text + paste(LOOPS[target]), lines, rewritten.sites


def kernel_source() -> str:
    """What a rollout takes from the kernels package, whose name changes with its content."""
    from hurtle.native.kernel_loader import load_kernels

    package = load_kernels().__name__
    return f"""\
from collections import namedtuple

from {package}.head_calls import call_sample
from {package}.host import TILE, WIDTH
from {package}.network import COLUMNS, STRIDE, WORK, call_forward
from {package}.sparse import list_length, list_rows

part = njit(**INNER)
"""


def block_source(spec: EnvSpec) -> str:
    """The shape of a CUDA block: as many observations in shared memory at a time as `STAGE_BYTES` hold."""
    return f"WORD = np.dtype(np.uint32)\nTHREADS = {block_threads()}\nROWS = {staged_rows(spec)}\n\n\n"


def block_threads() -> int:
    """Threads of a CUDA block; few in the simulator, where each is a thread of the host."""
    return 8 if simulated() else 128


def staged_rows(spec: EnvSpec) -> int:
    """Envs of a CUDA block whose observations are in shared memory at the same time: a power of two, or 0 if not even 4 fit."""
    row_bytes = spec.obs_size * np.dtype(spec.observation_space.dtype).itemsize
    rows = block_threads()
    while rows * row_bytes > STAGE_BYTES:
        rows //= 2
    return rows if rows >= 4 else 0  # four rows of any length are whole words


def paste(file: str) -> str:
    """The text of an engine source without its docstring and its imports from this package."""
    text = (HERE / file).read_text(encoding="utf-8")
    dropped: set[int] = set()
    for node in ast.parse(text).body:
        is_docstring = isinstance(node, ast.Expr)
        is_ours = isinstance(node, ast.ImportFrom) and (node.module or "").startswith("hurtle")
        if is_docstring or is_ours or isinstance(node, ast.Import):
            dropped.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return "\n".join(line for n, line in enumerate(text.split("\n"), 1) if n not in dropped).strip() + "\n"


def _python_namespace(spec: EnvSpec) -> Any:
    """The same functions uncompiled: the author's own files and lines, checked arrays, the reference random library."""
    namespace = python_target.namespace()
    namespace["self"] = spec.env  # for the debugger: rewritten code no longer needs it
    rewritten: Rewritten = rewrite(spec, "python")
    namespace.update({name: python_target.CheckedArray(table) for name, table in rewritten.tables.items()})
    for method in METHODS:  # what `print` and `assert` messages may name
        for name, value in getattr(spec.method(method), "__globals__", {}).items():
            namespace.setdefault(name, value)
    for function, file in rewritten.functions:
        exec(compile(ast.Module([function], []), file, "exec"), namespace)
    python_target.guard_methods(namespace, spec)
    for label, text in (
        ("adapters", adapter_source(spec)),
        ("core", paste("core.py")),
        ("loops", paste(LOOPS["python"])),
    ):
        exec(compile(text, f"<hurtle {label}>", "exec"), namespace)
    namespace["zero_obs"] = python_target.zero
    namespace["advance_env"] = namespace["advance_many" if spec.num_agents > 1 else "advance_one"]
    module = ModuleType(f"{_snake(spec.name)}_python")
    vars(module).update(namespace)
    return module


@cache
def cache_folder() -> Path:
    """Where generated modules live: $HURTLE_CACHE_DIR, else the user's cache folder, else a temporary one."""
    try:
        chosen = os.environ.get("HURTLE_CACHE_DIR")
        base = Path(chosen) if chosen else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hurtle"
        base.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=base):
            return base
    except (OSError, RuntimeError):  # not writable, or a user without a home
        return Path(tempfile.mkdtemp(prefix="hurtle-"))


def _digest(text: str) -> str:
    imported = [(HERE / name).read_bytes() for name in ("intrinsics.py", "pasted.py", "bounds.py")]
    return hashlib.sha256(b"\0".join([text.encode(), *imported])).hexdigest()[:16]


def _write_atomically(path: Path, text: str) -> None:
    with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".tmp", delete=False, encoding="utf-8") as file:
        file.write(text)
    Path(file.name).replace(path)


def _import(name: str, path: Path) -> ModuleType:
    full = f"hurtle_generated_{name}"
    if full not in sys.modules:
        found = importlib.util.spec_from_file_location(full, path)
        assert found is not None
        assert found.loader is not None
        module = importlib.util.module_from_spec(found)
        sys.modules[full] = module
        try:
            found.loader.exec_module(module)
        except BaseException:
            del sys.modules[full]
            raise
    return sys.modules[full]


def _first_reason(text: str) -> str:
    """The line of a Numba error that says what is wrong."""
    noise = ("Failed in", "- Resolution", "File", "During", "raised from", "There are", ">>>", "In definition", "No match")
    lines = [line.strip() for line in text.split("\n")]
    said = [line for line in lines if line and not line.startswith(noise)]
    reason = said[0] if said else "Numba gave no reason"
    return reason.removesuffix("for signature:").rstrip(" .:")


def _statements(function: ast.AST) -> list[ast.stmt]:
    return [node for node in ast.walk(function) if isinstance(node, ast.stmt)]


def _snake(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()


def _code(dtype: np.dtype) -> str:
    return dtype.str.lstrip("<>|=")
