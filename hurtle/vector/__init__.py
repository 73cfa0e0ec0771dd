"""Vector envs: many environments behind `gymnasium.vector.VectorEnv`, and the back ends that step them."""
