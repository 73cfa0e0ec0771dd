"""What workers of every kind do with pickles: env makers in, results and errors out, and no workers of workers."""

from __future__ import annotations

import pickle
from typing import Any

import cloudpickle

from hurtle.errors import HurtleError

_importing_envs = False  # True while the user's env code is being imported in a worker


def load(payload: bytes) -> Any:
    """Unpickle in a worker; this may import the user's modules."""
    global _importing_envs
    _importing_envs = True
    try:
        return pickle.loads(payload)
    finally:
        _importing_envs = False


def refuse_inside_import(backend: str) -> None:
    """Stop a worker that imports the user's module from starting workers of its own, and those from starting more."""
    if _importing_envs:
        raise HurtleError(
            f"make_vec(backend={backend!r}) was called while a worker imported the module that defines the env. "
            "Put the code that trains under `if __name__ == '__main__':`, or in another file."
        )


def dumps(value: Any) -> bytes:
    """Pickle fast, or where that fails (lambdas, local classes) by value."""
    try:
        return pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    except Exception:
        return cloudpickle.dumps(value)


def portable(error: BaseException | None) -> bytes | None:
    """An error pickled, or None: some cannot travel; their text always does."""
    try:
        pickled = cloudpickle.dumps(error)
        pickle.loads(pickled)
        return pickled
    except Exception:
        return None
