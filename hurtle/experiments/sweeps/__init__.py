"""Sweeps: what to search, how, the trials, the winner. `sweep.py` is where to begin."""
