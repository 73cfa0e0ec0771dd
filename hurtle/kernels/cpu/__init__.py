"""Compiled kernels of the native gear: matrix products, networks, action heads, the update. Loaded by `loader.py`.

Files here import NumPy, Numba, each other, and from `native` only how to compile: they run from a copy in a folder named by a
hash of their content.
"""
