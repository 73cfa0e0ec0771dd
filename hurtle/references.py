"""`load_reference`: the class or function behind "path/to/file.py:Name", from a file that is on no import path."""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import inspect
import sys
from pathlib import Path
from typing import Any

from hurtle.errors import UnknownNameError, did_you_mean


def is_reference(name: str) -> bool:
    """Whether a name is one for `load_reference`, which splits it at its last colon, whatever stands before."""
    return ".py:" in name


def load_reference(reference: str) -> Any:
    """The class or function behind "path/to/file.py:Name"; the file is run, as an import would.

    Raises:
        UnknownNameError: There is no such file, or no such name in it; the message suggests the nearest.
    """
    file, _, name = reference.rpartition(":")
    path = Path(file).resolve()
    if not path.is_file():
        raise UnknownNameError(f"{reference!r}: there is no file {file!r}.")
    module_name = f"hurtle_user_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    found = importlib.util.spec_from_file_location(module_name, path)
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    sys.modules[module_name] = module
    sys.path.insert(0, str(path.parent))
    try:
        found.loader.exec_module(module)
    finally:
        sys.path.remove(str(path.parent))
    if not hasattr(module, name):
        makers = inspect.getmembers(module, lambda value: inspect.isclass(value) or inspect.isfunction(value))
        public = [n for n, value in makers if value.__module__ == module_name and not n.startswith("_")]
        raise UnknownNameError(f"{file!r} has no {name!r}. {did_you_mean(name, public)}")
    return getattr(module, name)


def reference_to(value: Any) -> str:
    """The "file.py:Name" with which `load_reference` finds a class or function again.

    Raises:
        UnknownNameError: It has none; the message says why.
    """
    name = getattr(value, "__qualname__", "")
    module = sys.modules.get(getattr(value, "__module__", None) or "")
    if not name:
        raise UnknownNameError(f"{value!r} is neither a class nor a function")
    if not name.isidentifier() or getattr(module, name, None) is not value:
        raise UnknownNameError(f"{name} is not at the top level of a file, where it could be imported from")
    path = Path(getattr(module, "__file__", None) or "")
    if path.suffix != ".py" or not path.is_file():
        raise UnknownNameError(f"{name} was defined in no file")
    tree = ast.parse(path.read_text(encoding="utf-8"))
    if any(isinstance(node, ast.ImportFrom) and node.level for node in ast.walk(tree)):
        raise UnknownNameError(f"{path.name} has relative imports, which work only inside its package")
    if module is sys.modules["__main__"] and not any(isinstance(node, ast.If) and _is_guard(node.test) for node in tree.body):
        raise UnknownNameError(
            f'{path.name} would train again when {name} is imported from it: call train under `if __name__ == "__main__":`'
        )
    return f"{path.resolve()}:{name}"


def _is_guard(test: ast.expr) -> bool:
    """Whether this is `__name__ == "__main__"`."""
    return ast.unparse(test).replace('"', "'") in ("__name__ == '__main__'", "'__main__' == __name__")


def absolute_reference(value: Any) -> Any:
    """`value`; if it is such a reference, with the file's absolute path, so that it works from another folder too."""
    if not isinstance(value, str) or not is_reference(value):
        return value
    file, _, name = value.rpartition(":")
    return f"{Path(file).resolve()}:{name}"
