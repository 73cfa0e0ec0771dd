"""Compiled kernels of the native gear: matrix products, networks, action heads, rollouts, the update. Loaded by `loader.py`.

Files here import NumPy, Numba, each other, and little else (`loader.IMPORTED`): they run from a copy in a folder named by a
hash of their content.
"""
