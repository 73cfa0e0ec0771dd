"""From a checked env to runnable functions: writes one generated module per (env, parameters, target) and imports it.

env → generated text → <cache>/<env>_<target>_<hash>.py → import → compiled on first call.
The hash covers the whole text, so Numba's disk cache never returns code of another env or version.
"""

from __future__ import annotations

import hashlib
import os
import re
import sys
import tempfile
import threading
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from types import ModuleType
from typing import Any

from hurtle.errors import EnvCodeError, EnvIndexError
from hurtle.garbage import RARE_COLLECTIONS
from hurtle.native.bounds import OutOfBounds, Site
from hurtle.native.code_cache import cache_folder, import_file, make_room, used
from hurtle.native.env import EnvSpec
from hurtle.native.generate import HERE, generate
from hurtle.native.language import code_message
from hurtle.native.uncompiled import UncompiledFunctions, probe


class _Compiling:
    """A reentrant lock, with fewer garbage collections while it is held."""

    def __init__(self) -> None:
        self._renew()
        if hasattr(os, "register_at_fork"):  # the thread that held the lock in the parent does not exist in the child
            os.register_at_fork(after_in_child=self._renew)

    def __enter__(self) -> None:
        self._lock.acquire()
        RARE_COLLECTIONS.__enter__()

    def __exit__(self, *error: object) -> None:
        RARE_COLLECTIONS.__exit__()
        self._lock.release()

    def _renew(self) -> None:
        self._lock = threading.RLock()


COMPILING = _Compiling()
"""Held while a module is generated, imported and compiled: Numba and the import system are not thread-safe."""


@dataclass(frozen=True)
class Program:
    """One env compiled for one target."""

    spec: EnvSpec
    target: str
    functions: Any
    """The module (or namespace) with the entry points of cpu_loops.py or cuda_loops.py; see `CpuFunctions`."""
    lines: dict[int, tuple[str, int]] = field(default_factory=dict)
    """Line of the generated module → the author's file and line."""
    sites: list[Site] = field(default_factory=list)
    """The checked indices."""
    is_new: bool = False
    """Whether the module was generated just now: its first call compiles."""

    def out_of_bounds(self, error: OutOfBounds) -> EnvIndexError:
        """The error for an index out of bounds, with the author's line."""
        site, index, length = error.args
        return self.sites[site].error(index, length)

    def explain(self, error: Exception) -> EnvCodeError:
        """A Numba error with the author's line first, then Numba's reason."""
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


class CpuFunctions:
    """One env's compiled code, to be called from Python with arrays; `env_calls.py` says what the functions do.

    Args:
        program: The env, built for the CPU.

    Attributes:
        addresses: Of the entry points of cpu_loops.py, by name; for `intrinsics.call_env`.

    Raises:
        EnvCodeError: The env's code cannot be compiled; names the author's line.
    """

    def __init__(self, program: Program):
        self._program, calls = program, shared_module("env_calls.py")
        self.addresses = {name: self._address(name) for name in ("run_envs", "first_illegal")}
        run, check = self.addresses.values()
        self.reset_envs, self.first_illegal = partial(calls.reset_envs, run), partial(calls.first_illegal, check)
        self.step_envs, self.play_envs = partial(calls.step_envs, run), partial(calls.play_envs, run)
        self._run_shard = calls.run_shard

    @cached_property
    def run_shard(self) -> int:
        """The address of `run_shard`, for calls on several threads."""
        with COMPILING:
            return address_of_entry(self._run_shard)

    def _address(self, name: str) -> int:
        """The address of an entry point, compiled or loaded from the disk cache."""
        from numba.core.errors import NumbaError

        try:
            return address_of_entry(getattr(self._program.functions, name))
        except NumbaError as error:
            raise self._program.explain(error) from None


def address_of_entry(function: Any) -> int:
    """The address of a Numba function of int64 that returns an int64, for `call_env`; compiles it, or loads it from disk."""
    from numba import types

    signature = (types.int64,) * function.py_func.__code__.co_argcount
    function.compile(signature)
    compiled = function.overloads[signature]
    assert compiled.signature.return_type == types.int64
    address = compiled.library.get_pointer_to_function(compiled.fndesc.llvm_func_name)
    assert address
    return address


def build(spec: EnvSpec, target: str) -> Program:
    """Make an env runnable on a target.

    Args:
        spec: The checked env.
        target: "cpu", "cuda" or "python" (uncompiled, for the debugger).

    Raises:
        EnvCodeError: The env's code cannot be compiled.
    """
    try:
        return _build(spec, target)
    except EnvCodeError as error:  # hide the rewriter's frames: they mean nothing to an author
        raise error.with_traceback(None) from None


def _build(spec: EnvSpec, target: str) -> Program:
    if target == "python":
        return Program(spec, target, UncompiledFunctions(spec))
    text, lines, sites = generate(spec, target)
    name = f"{_snake(spec.name)}_{target}_{_digest(text)}"
    is_new = not (cache_folder() / f"{name}.py").exists()
    if is_new:
        probe(spec)
    return Program(spec, target, _imported(name, text), lines, sites, is_new)


def shared_module(file: str) -> ModuleType:
    """A source of this folder, imported from a copy in the cache folder."""
    text = (HERE / file).read_text(encoding="utf-8")
    return _imported(f"{Path(file).stem}_{_digest(text)}", text)


def _digest(text: str) -> str:
    names = ("intrinsics.py", "atomics.py", "pasted.py", "bounds.py", "cpu_loops.py")
    imported = [(HERE / name).read_bytes() for name in names]
    return hashlib.sha256(b"\0".join([text.encode(), *imported])).hexdigest()[:16]


def write_atomically(path: Path, text: str) -> None:
    """Write a file that is never seen half written."""
    with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".tmp", delete=False, encoding="utf-8") as file:
        file.write(text)
    Path(file.name).replace(path)


def _imported(name: str, text: str) -> ModuleType:
    """The module of that text, from a file in the cache folder."""
    full, path = f"hurtle_generated_{name}", cache_folder() / f"{name}.py"
    with used(name):
        is_new = not path.exists()
        if is_new:
            write_atomically(path, text)
        module = sys.modules.get(full) or import_file(full, path)
    if is_new:
        make_room()
    return module


def _first_reason(text: str) -> str:
    """The line of a Numba error that says what is wrong."""
    noise = ("Failed in", "- Resolution", "File", "During", "raised from", "There are", ">>>", "In definition", "No match")
    lines = [line.strip() for line in text.split("\n")]
    said = [line for line in lines if line and not line.startswith(noise)]
    reason = said[0] if said else "Numba gave no reason"
    return reason.removesuffix("for signature:").rstrip(" .:")


def _snake(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()
