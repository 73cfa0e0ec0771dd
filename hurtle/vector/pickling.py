"""Pickling between learner and workers: env makers in, results and errors out. Keeps workers from starting workers."""

from __future__ import annotations

import functools
import io
import pickle
import sys
import threading
import weakref
from collections import ChainMap
from collections.abc import Callable
from typing import Any, ClassVar

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
    """Keep a worker that imports the user's module from starting workers in turn."""
    if _importing_envs:
        raise HurtleError(
            f"make_vec(backend={backend!r}) was called while a worker imported the module that defines the env. "
            "Put the training code under `if __name__ == '__main__':`, or in another file."
        )


def dumps(value: Any) -> bytes:
    """Pickle by reference, or, if that fails (lambdas, local classes), by value."""
    try:
        return pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    except Exception:
        return dumps_by_value(value)


def dumps_by_value(value: Any) -> bytes:
    """Pickle for another process: anything defined in `__main__`, a notebook or a function is pickled by value."""
    with io.BytesIO() as file:
        _Pickler(file).dump(value)
        return file.getvalue()


def portable(error: BaseException | None) -> bytes | None:
    """The error as a pickle, or None if it cannot be pickled."""
    try:
        pickled = dumps_by_value(error)
        pickle.loads(pickled)
        return pickled
    except Exception:
        return None


def _reduce_cached(cached: Any) -> Any:
    """Pickle a function under `functools.lru_cache` by name if a worker can import it, else by value with its settings.

    The cached values are not pickled.
    """
    found: Any = sys.modules.get(cached.__module__)
    if cached.__module__ != "__main__" and found is not None and not _travels_by_value(cached.__module__):
        for name in cached.__qualname__.split("."):
            found = getattr(found, name, None)
        if found is cached:
            return cached.__qualname__
    attributes = {name: value for name, value in vars(cached).items() if name != "cache_parameters"}
    return _cached, (cached.__wrapped__, cached.cache_parameters()), attributes


def _cached(function: Callable[..., Any], parameters: dict[str, Any]) -> Any:
    return functools.lru_cache(**parameters)(function)


def _travels_by_value(module: str) -> bool:
    """Whether the module, or a package that it is in, was given to `cloudpickle.register_pickle_by_value`."""
    registered = cloudpickle.cloudpickle.list_registry_pickle_by_value()
    parts = module.split(".")
    return any(".".join(parts[:depth]) in registered for depth in range(1, len(parts) + 1))


class _Pickler(cloudpickle.Pickler):
    """cloudpickle, extended by objects in classes and functions of `__main__` that it cannot pickle."""

    dispatch_table: ClassVar[Any] = ChainMap(
        {
            functools._lru_cache_wrapper: _reduce_cached,
            # A lock guards the threads of one process (cached_property has one up to Python 3.11): the worker gets a new one.
            type(threading.Lock()): lambda lock: (threading.Lock, ()),
            type(threading.RLock()): lambda lock: (threading.RLock, ()),
            # functools.singledispatch has a weak dict, as do registries of instances.
            weakref.WeakKeyDictionary: lambda weak: (weakref.WeakKeyDictionary, (dict(weak),)),
            weakref.WeakValueDictionary: lambda weak: (weakref.WeakValueDictionary, (dict(weak),)),
            weakref.WeakSet: lambda weak: (weakref.WeakSet, (list(weak),)),
        },
        cloudpickle.Pickler.dispatch_table,
    )
