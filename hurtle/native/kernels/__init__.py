"""Compiled kernels of the native gear: matrix products, networks, action heads, the update. Loaded by `kernel_loader`.

Files here import NumPy, Numba and each other, nothing else of the package: they run from a copy under a content-hash name.
"""
