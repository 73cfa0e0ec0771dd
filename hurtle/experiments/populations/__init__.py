"""Populations: members that train, copy the best and change their settings. `population.py` is where to begin."""
