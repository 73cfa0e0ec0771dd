"""Envs that take their time or fail on request. A light module: worker processes import it, and nothing else of the tests."""

import os
import time

import gymnasium
import numpy as np
from gymnasium import spaces


class Simulator(gymnasium.Env):
    """Counts its steps; pays 1 for action 1. Episodes have 20 steps.

    Args:
        seconds: A step takes this long, waiting.
        fails_at: In this step of its life it raises, exits or hangs, as `fails_by` says; 0: never.
        fails_by: "raise", "exit" or "hang".
    """

    observation_space = spaces.Box(-1, 1, (2,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, seconds=0.0, fails_at=0, fails_by="raise"):
        self.seconds, self.fails_at, self.fails_by, self.age = seconds, fails_at, fails_by, 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.now = 0
        return self._obs(), {}

    def step(self, action):
        self.age += 1
        self.now += 1
        if self.age == self.fails_at:
            if self.fails_by == "exit":
                os._exit(3)
            if self.fails_by == "hang":
                time.sleep(3600)
            raise ValueError("the simulator broke")
        if self.seconds:
            time.sleep(self.seconds)
        return self._obs(), float(action == 1), False, self.now == 20, {}

    def _obs(self):
        return np.array([self.now / 20, self.np_random.random() * 0.1], np.float32)
