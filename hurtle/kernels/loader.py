"""Loads `hurtle.kernels.cpu` and `hurtle.kernels.cuda` from copies in folders named after a hash of their content.

Numba's disk cache checks the file of a function, not the files of the functions it calls. A folder for every version, vector
width and mode keeps it from returning stale code.
"""

from __future__ import annotations

import hashlib
import importlib
import shutil
import sys
import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import ModuleType

from hurtle.kernels.cpu import host
from hurtle.native import atomics, cpu_loops, intrinsics
from hurtle.native.build import COMPILING
from hurtle.native.code_cache import cache_folder, import_file, make_room, used

KERNELS = Path(__file__).parent
SOURCE, CUDA_SOURCE = KERNELS / "cpu", KERNELS / "cuda"
IMPORTED = (
    KERNELS / "error_codes.py",
    *(Path(str(module.__file__)) for module in (atomics, cpu_loops, intrinsics)),
)
"""Files outside the package whose constants and code are compiled into it."""
CUDA_IMPORTED = (KERNELS / "error_codes.py", KERNELS / "device_rows.py")


_NEW: set[str] = set()  # folders that this process has made


@cache
def load_kernels() -> ModuleType:
    """The CPU's kernels; `load_kernels().gemm` and so on are its modules."""
    mode = f"{host.WIDTH}{'_checked' * host.CHECKED}"
    return _load(f"hurtle_generated_kernels_{mode}", SOURCE, IMPORTED, "the kernels of policies and updates")


@cache
def load_cuda_kernels() -> ModuleType:
    """The GPU's; `load_cuda_kernels().rows` and `.columns` are its modules.

    Raises:
        DeviceError: There is no GPU, or numba-cuda is missing.
    """
    return _load("hurtle_generated_cuda", CUDA_SOURCE, CUDA_IMPORTED, "the GPU's kernels of rollouts")


def _load(prefix: str, source: Path, imported: tuple[Path, ...], what: str) -> ModuleType:
    with COMPILING:
        files = sorted(source.glob("*.py"))
        name = f"{prefix}_{_digest([*files, *imported])}"
        if name in sys.modules:  # another thread was faster
            return sys.modules[name]
        with used(name):
            folder, is_new = _folder_of(name, files, what)
            package = _imported(name, folder, files)
        if is_new:
            make_room()
        return package


def say_if_new(*kind: bool) -> None:
    """Say that compiling takes a while, unless kernels of that kind were compiled before or a new folder has said so."""
    folder = Path(str(load_kernels().__file__)).parent
    marker = folder / f"policy-{''.join(str(int(has)) for has in kind)}.compiled"
    if marker.exists():
        return
    if folder.name not in _NEW:
        print("hurtle: compiling the kernels of this kind of policy (first run only) …", file=sys.stderr, flush=True)
    with suppress(OSError):
        marker.touch()


def _folder_of(name: str, files: list[Path], what: str) -> tuple[Path, bool]:
    """The copy of the package, and whether it was made just now."""
    folder = cache_folder() / name
    if folder.exists() and _digest(sorted(folder.glob("*.py"))) != _digest(files):  # damaged or edited
        shutil.rmtree(folder)
    is_new = not folder.exists()
    if is_new:
        print(f"hurtle: compiling {what} (first run only) …", file=sys.stderr, flush=True)
        _copy(files, folder)
        _NEW.add(name)
    return folder, is_new


def _imported(name: str, folder: Path, files: list[Path]) -> ModuleType:
    """The package with all of its modules."""
    try:
        package = import_file(name, folder / "__init__.py", folder)
        for file in files:
            if file.stem != "__init__":
                importlib.import_module(f"{name}.{file.stem}")
    except BaseException:
        sys.modules.pop(name, None)
        raise
    return package


def _digest(files: list[Path]) -> str:
    text = b"\0".join(part for file in files for part in (file.name.encode(), file.read_bytes()))
    return hashlib.sha256(text).hexdigest()[:16]


def _copy(files: list[Path], folder: Path) -> None:
    """Copy all files or none: other processes may look for the folder concurrently."""
    making = Path(tempfile.mkdtemp(dir=folder.parent, prefix="making-"))
    for file in files:
        shutil.copyfile(file, making / file.name)
    try:
        making.rename(folder)
    except OSError:  # another process was faster
        shutil.rmtree(making)
