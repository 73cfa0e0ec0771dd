"""Finds the `Backend` of a model, by the user's choice or by the file. Imports only the one chosen."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from hurtle.errors import HurtleError, UnknownNameError, did_you_mean
from hurtle.references import is_reference, load_reference
from hurtle.serving.backends.base import Backend

BACKENDS = {
    "onnx": "hurtle.serving.backends.onnx:OnnxBackend",
    "torch_export": "hurtle.serving.backends.torch_export:TorchExportBackend",
    "torchscript": "hurtle.serving.backends.torchscript:TorchScriptBackend",
    "native_mlp": "hurtle.serving.backends.native_mlp:NativeMLPBackend",
    "affine": "hurtle.serving.backends.affine:AffineBackend",
    "dlrm": "hurtle.serving.backends.dlrm:DLRMBackend",
}
ENDINGS = {
    ".onnx": "onnx",
    ".pt2": "torch_export",
    ".pt": "torchscript",
    ".ts": "torchscript",
    ".torchscript": "torchscript",
    "affine.json": "affine",
    "dlrm.npz": "dlrm",
}
"""Backends by the endings of file names."""


def backend_for(path: str | Path, parameters: Mapping[str, Any]) -> type[Backend]:
    """The class that runs a model.

    Args:
        path: The model's file, or a folder with one such file.
        parameters: The user's; `backend` names one of `BACKENDS`, or the user's own class as "package.module:Class" or
            "file.py:Class". With `runtime=native` an .onnx file that Hurtle exported from a plain MLP runs as compiled code.

    Raises:
        HurtleError: There is no such backend, or no file that a backend can run.

    Example:
        >>> backend_for("model/affine.json", {}).__name__
        'AffineBackend'
    """
    name = parameters.get("backend")
    if not name:
        name = _backend_of_file(find_model(path))
        if name == "onnx" and parameters.get("runtime") == "native":
            name = "native_mlp"
    if name in BACKENDS:
        return _imported(BACKENDS[name])
    if not isinstance(name, str) or ":" not in name:
        raise UnknownNameError(f"No backend {name!r}. {did_you_mean(str(name), BACKENDS)} Your own: package.module:Class.")
    return _checked(name, load_reference(name) if is_reference(name) else _imported(name))


def find_model(path: str | Path) -> Path:
    """The model's file: `path`, or the only one in this folder that a built-in backend can run.

    Raises:
        HurtleError: The folder has none, or several.
    """
    path = Path(path)
    if not path.is_dir():
        return path
    found = sorted(file for file in path.iterdir() if file.is_file() and _ending_of(file.name))
    found = [file for file in found if file.name.startswith("model.")] or found
    if len(found) != 1:
        names = ", ".join(file.name for file in found)
        raise HurtleError(
            f"{path} must hold one model (a file that ends with {', '.join(ENDINGS)}), got {names or 'none'}."
            + (" Rename one of them to model.*, or name a backend." if found else "")
        )
    return found[0]


def can_serve(path: str | Path) -> bool:
    """Whether a built-in backend runs files with this ending."""
    return _ending_of(Path(path).name) is not None


def _ending_of(name: str) -> str | None:
    return next((ending for ending in ENDINGS if name.endswith(ending)), None)


def _backend_of_file(file: Path) -> str:
    ending = _ending_of(file.name)
    if ending is None:
        raise HurtleError(
            f"No backend runs {file}. {did_you_mean(file.suffix or file.name, ENDINGS)} For other files, name the backend."
        )
    return ENDINGS[ending]


def _imported(reference: str) -> Any:
    module_name, _, name = reference.partition(":")
    try:
        module = import_module(module_name)
    except (ImportError, ValueError) as error:
        raise HurtleError(
            f"Cannot import {module_name!r}: {error}. To use a file that is not on the import path, give file.py:Class."
        ) from None
    if not hasattr(module, name):
        raise UnknownNameError(f"{module_name!r} has no {name!r}. {did_you_mean(name, dir(module))}")
    return getattr(module, name)


def _checked(reference: str, found: Any) -> type[Backend]:
    if not (isinstance(found, type) and issubclass(found, Backend)):
        raise HurtleError(f"{reference} must be a subclass of hurtle.serving.backends.base.Backend, got {found!r:.100}.")
    return found
