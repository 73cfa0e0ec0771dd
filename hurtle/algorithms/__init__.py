"""Algorithms, one readable file each; they know rollouts and policies, but no envs, processes or devices."""
