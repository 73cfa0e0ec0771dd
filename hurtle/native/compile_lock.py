"""Lets one process compile a function while others that want the same one wait, and then load it from the disk cache."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from numba.core.compiler_lock import global_compiler_lock

from hurtle.garbage import RARE_COLLECTIONS
from hurtle.native.compiler_flags import compare_flags_quickly

try:
    import fcntl
except ImportError:  # Windows: processes that start together all compile
    fcntl = None  # type: ignore[assignment]

compare_flags_quickly()  # before anything is compiled: all that is kept on disk imports this module


@contextmanager
def one_process_at_a_time(function: Any) -> Iterator[None]:
    """Hold the lock of a function whose file is in the cache folder; the lock lies beside it."""
    with global_compiler_lock:  # first, always: threads that take the two in different orders would wait for each other
        lock = _locked(Path(f"{function.__code__.co_filename}.{function.__name__}.lock"))
        try:
            yield
        finally:
            if lock is not None:
                fcntl.flock(lock, fcntl.LOCK_UN)  # closing it is not enough: a forked child holds it open too
                lock.close()


def _locked(path: Path) -> Any:
    """The locked file, or None where there are no locks: in a folder or on a file system that allows none."""
    if fcntl is None:
        return None
    try:
        file = path.open("a")
    except OSError:
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
    except OSError:
        file.close()
        return None
    return file


def compile_once(dispatcher: Any) -> Any:
    """Make a function of `numba.njit(cache=True)` compile under its lock; calling it needs none."""
    compile_now, function = dispatcher.compile, dispatcher.py_func

    def compile_locked(signature: Any) -> Any:
        with RARE_COLLECTIONS, one_process_at_a_time(function):
            return compile_now(signature)

    dispatcher.compile = compile_locked
    return dispatcher
