"""Loads product_calls.py from a copy in the cache folder, named after its content and the kernels' version.

Numba's disk cache checks the file of a function, not the kernels that it calls.
"""

import hashlib
import importlib.util
import os
import sys
from functools import cache
from pathlib import Path

from hurtle.kernels.loader import load_kernels
from hurtle.native.code_cache import cache_folder

SOURCE = Path(__file__).with_name("product_calls.py")


@cache
def load_calls():
    text = SOURCE.read_bytes()
    name = f"test_calls_of_{load_kernels().__name__}_{hashlib.sha256(text).hexdigest()[:16]}"
    path = cache_folder() / f"{name}.py"
    if not path.exists():
        making = path.with_suffix(f".{os.getpid()}")
        making.write_bytes(text)
        making.replace(path)  # whole: other processes may look for it
    found = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(found)
    sys.modules[name] = module  # where Numba looks for it when it loads what it has cached
    found.loader.exec_module(module)
    return module
