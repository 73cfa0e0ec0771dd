"""The folder of generated modules and their compiled code, shared by all processes of a user and bounded in size.

module name → file or folder in the cache, marked as used; new ones make room by removing those unused for the longest time.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from types import ModuleType

try:
    import fcntl
except ImportError:  # Windows: nothing is removed there
    fcntl = None  # type: ignore[assignment]

MOST_MIB = 512
"""Size from which on unused code is removed; $HURTLE_CACHE_MIB overrides it."""
KEPT_SECONDS = 24 * 3600.0
"""What was used more recently than this stays: its process may still load from it."""
MARK_SECONDS = 3600.0
"""How old a mark of use may get before it is renewed."""


@cache
def cache_folder() -> Path:
    """Where generated modules live: $HURTLE_CACHE_DIR, else the user's cache folder, else a temporary one."""
    try:
        chosen = os.environ.get("HURTLE_CACHE_DIR")
        base = Path(chosen) if chosen else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hurtle"
        base.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=base):
            return base
    except (OSError, RuntimeError):  # not writable, or the user has no home folder
        return Path(tempfile.mkdtemp(prefix="hurtle-"))


@contextmanager
def used(name: str) -> Iterator[None]:
    """Mark a module as used; it is not removed while the body looks it up or writes it, nor within a day.

    The mark is a file of its own, since Numba takes a module for changed if the time of its file is.
    """
    folder = cache_folder()
    with _lock(folder, exclusive=False):
        with suppress(OSError):
            mark = folder / f"{name}.used"
            if not mark.exists() or time.time() - mark.stat().st_mtime > MARK_SECONDS:
                mark.touch()
        yield


def make_room() -> None:
    """Remove what was unused for the longest time until the rest fits; called when something new was written."""
    folder, most = cache_folder(), _most_bytes()
    with suppress(OSError), _lock(folder, exclusive=True) as is_locked:
        modules = _modules(folder)
        size = sum(module.size for module in modules)
        if not is_locked or size <= most:
            return
        for module in sorted(modules, key=lambda module: module.last_use):
            if size <= most or time.time() - module.last_use < KEPT_SECONDS:
                return
            module.remove()
            size -= module.size


def import_file(name: str, path: Path, folder: Path | None = None) -> ModuleType:
    """Import a file under a name; with a folder, as the package in it. A failed import leaves nothing behind."""
    found = importlib.util.spec_from_file_location(name, path, submodule_search_locations=[str(folder)] if folder else None)
    assert found is not None
    assert found.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(found)
    try:
        found.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


class _Module:
    """The files of one module: its text, locks, marks and compiled code."""

    def __init__(self) -> None:
        self.paths: list[Path] = []
        self.size, self.last_use = 0, 0.0

    def add(self, path: Path) -> None:
        """Count a file, or a folder with all that is in it."""
        for found in (path, *path.rglob("*")) if path.is_dir() else (path,):
            with suppress(FileNotFoundError):
                status = found.stat()
                self.size += status.st_size
                self.last_use = max(self.last_use, status.st_mtime)
        self.paths.append(path)

    def remove(self) -> None:
        """Remove all of it; whatever another process has removed or keeps open is left."""
        for path in self.paths:
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                with suppress(OSError):
                    path.unlink()


def _modules(folder: Path) -> list[_Module]:
    """The modules in the cache; a file belongs to the module that its name begins with."""
    found: dict[str, _Module] = {}
    for path in (*folder.iterdir(), *(folder / "__pycache__").glob("*")):
        if path.name != "__pycache__" and not path.name.startswith("."):
            found.setdefault(path.name.partition(".")[0], _Module()).add(path)
    return list(found.values())


def _most_bytes() -> int:
    try:
        return int(float(os.environ.get("HURTLE_CACHE_MIB", MOST_MIB)) * 2**20)
    except ValueError:
        return MOST_MIB * 2**20


@contextmanager
def _lock(folder: Path, exclusive: bool) -> Iterator[bool]:
    """Hold the folder's lock, shared or alone; False where there are no locks."""
    try:
        file = (folder / ".lock").open("a") if fcntl is not None else None
    except OSError:
        file = None
    if file is None:
        yield False
        return
    with file:
        try:  # whoever wants it alone does not wait: it may be this very process that shares it
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB if exclusive else fcntl.LOCK_SH)
        except OSError:
            yield False
            return
        try:
            yield True
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)  # closing it is not enough: a forked child holds it open too
