"""`load_reference`: the class or function behind "path/to/file.py:Name", from a file outside the import path."""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import inspect
import sys
import traceback
from pathlib import Path
from typing import Any

from hurtle.errors import HurtleError, UnknownNameError, did_you_mean


def is_reference(name: str) -> bool:
    """Whether a name is a reference for `load_reference`, which splits it at its last colon."""
    return ".py:" in name


def load_reference(reference: str) -> Any:
    """The class or function behind "path/to/file.py:Name"; runs the file, as an import does.

    Raises:
        UnknownNameError: There is no such file, or no such name in it; the message suggests the nearest.
        HurtleError: The file raised an exception; the message names it and the line.
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
    except HurtleError:
        del sys.modules[module_name]
        raise
    except Exception as error:
        del sys.modules[module_name]
        raise HurtleError(f"{file} cannot be imported: {_described(error, path)}") from error
    finally:
        sys.path.remove(str(path.parent))
    if not hasattr(module, name):
        makers = inspect.getmembers(module, lambda value: inspect.isclass(value) or inspect.isfunction(value))
        public = [n for n, value in makers if value.__module__ == module_name and not n.startswith("_")]
        raise UnknownNameError(f"{file!r} has no {name!r}. {did_you_mean(name, public)}")
    return getattr(module, name)


def _described(error: Exception, path: Path) -> str:
    """The exception and the last line of the file that led to it."""
    if isinstance(error, SyntaxError):
        return f"{type(error).__name__}: {error}."
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename) == path]
    return f"{type(error).__name__}: {error}{f' (line {lines[-1]})' if lines else ''}."


def reference_to(value: Any) -> str:
    """The "file.py:Name" from which `load_reference` loads a class or function.

    Raises:
        UnknownNameError: It has none; the message gives the reason.
    """
    name = getattr(value, "__qualname__", "")
    module = sys.modules.get(getattr(value, "__module__", None) or "")
    if not name:
        raise UnknownNameError(f"{value!r} is neither a class nor a function")
    if not name.isidentifier() or getattr(module, name, None) is not value:
        raise UnknownNameError(f"{name} is not at the top level of a file, so it cannot be imported")
    path = Path(getattr(module, "__file__", None) or "")
    if path.suffix != ".py" or not path.is_file():
        raise UnknownNameError(f"{name} was not defined in a file")
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
    """`value`; a reference gets the file's absolute path, so that it works from another folder too."""
    if not isinstance(value, str) or not is_reference(value):
        return value
    file, _, name = value.rpartition(":")
    return f"{Path(file).resolve()}:{name}"
