"""Collectors: a vector env and a policy in, filled rollouts out. Loaded lazily, as they import torch."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hurtle.collect.general_collector import GeneralCollector
    from hurtle.collect.native_collector import NativeCollector
    from hurtle.collect.postprocess import Postprocess

__all__ = ["GeneralCollector", "NativeCollector", "Postprocess"]

_HOMES = {
    "GeneralCollector": "hurtle.collect.general_collector",
    "NativeCollector": "hurtle.collect.native_collector",
    "Postprocess": "hurtle.collect.postprocess",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'hurtle.collect' has no attribute {name!r}")
