"""Algorithms, one readable file each; they know about rollouts and policies, but not envs, processes or devices."""
