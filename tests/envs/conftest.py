"""Imports the package `minatar`, where it is there, without seaborn: only its pictures need that, and it takes seconds."""

import contextlib
import sys
from types import ModuleType

if "seaborn" not in sys.modules:
    sys.modules["seaborn"] = ModuleType("seaborn")
    with contextlib.suppress(ImportError):
        import minatar  # noqa: F401
    del sys.modules["seaborn"]
