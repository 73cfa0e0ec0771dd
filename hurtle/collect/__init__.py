"""Collectors: a vector env and a policy in, filled rollouts out."""
