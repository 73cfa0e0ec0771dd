"""An env whose returns tell the options that it was played with, natively and in plain Python, for tests of curricula."""

import gymnasium
import numpy as np

from hurtle.native import Box, Discrete, Env, float32, int8


class Ladder(Env):
    """Every step is worth `size`; an episode ends after 3 steps, or after one that the policy ends."""

    observation_space = Box(-100.0, 100.0, (3,))
    action_space = Discrete(8)
    max_steps = 3

    class State:
        start: float32
        now: int8
        size: int8 = 3
        push: float32 = 1.0

    def reset(self, state, rng):
        state.start = rng.uniform(0.0, 1.0)

    def step(self, state, action, rng):
        state.now += 1
        return float32(state.size), action == 0

    def observe(self, state, obs):
        obs[0] = state.start
        obs[1] = float32(state.size)
        obs[2] = state.push


class PythonLadder(gymnasium.Env):
    """`Ladder` in plain Python: `size` comes with `reset`, `push` is an attribute."""

    observation_space = gymnasium.spaces.Box(-100.0, 100.0, (3,), np.float32)
    action_space = gymnasium.spaces.Discrete(8)

    def __init__(self):
        self.push, self.size, self.now = 1.0, 3, 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.size, self.now = int((options or {}).get("size", 3)), 0
        return self._obs(), {}

    def step(self, action):
        self.now += 1
        return self._obs(), float(self.size), action == 0, self.now == 3, {}

    def _obs(self):
        return np.array([0.0, self.size, self.push], np.float32)


class Deaf(PythonLadder):
    """Reads no options."""

    def reset(self, *, seed=None, options=None):
        return super().reset(seed=seed)
