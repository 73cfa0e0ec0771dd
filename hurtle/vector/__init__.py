"""Vectors of environments behind `gymnasium.vector.VectorEnv`."""
