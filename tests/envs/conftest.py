"""Imports the package `minatar`, where it is there, without what draws its pictures, which takes seconds to import."""

import contextlib
import sys
from types import ModuleType

DRAWING = ("matplotlib", "matplotlib.pyplot", "matplotlib.colors", "seaborn")

if "matplotlib" not in sys.modules and "seaborn" not in sys.modules:
    for name in DRAWING:
        sys.modules[name] = ModuleType(name)
    sys.modules["matplotlib"].pyplot = sys.modules["matplotlib"].colors = None
    with contextlib.suppress(ImportError):
        import minatar  # noqa: F401
    for name in DRAWING:
        del sys.modules[name]
