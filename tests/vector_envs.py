"""Gymnasium envs for the tests of the back ends: cheap, deterministic, and broken in chosen ways."""

import copy
import os
import signal
import time
from pathlib import Path

import gymnasium
import numpy as np
from gymnasium import spaces


class Counter(gymnasium.Env):
    """Counts its steps; the observation says seed, episode and step. Ends after 3 + seed % 4 steps, by turns in both ways."""

    observation_space = spaces.Box(-np.inf, np.inf, (4,), np.float64)
    action_space = spaces.Discrete(5)

    def __init__(self, render_mode=None):
        self.render_mode = render_mode
        self.task = 0
        self.episode = -1
        self.given = None

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if seed is not None:
            self.given, self.episode = seed, -1
        self.task = (options or {}).get("task", self.task)
        self.episode += 1
        self.steps = 0
        return self._obs(), {"task": self.task} if options else {}

    def step(self, action):
        self.steps += 1
        over = self.steps >= 3 + (self.given or 0) % 4
        terminated, truncated = over and self.episode % 2 == 0, over and self.episode % 2 == 1
        info = {"squared": self.steps**2, "last": {"action": int(action)}} if self.steps > 1 else {}
        return self._obs(), float(action) + 0.1, terminated, truncated, info

    def _obs(self):
        return np.array([self.given or 0, self.episode, self.steps, self.np_random.random()])

    def render(self):
        return np.full((2, 2, 3), self.steps, np.uint8)

    def triple(self, x, add=0):
        return 3 * x + add


class Nested(gymnasium.Env):
    """Observations and actions are trees; the mission is text."""

    observation_space = spaces.Dict(
        {
            "image": spaces.Box(0, 255, (3, 3), np.uint8),
            "inventory": spaces.Dict({"gold": spaces.Discrete(100, start=5), "items": spaces.MultiBinary(4)}),
            "mission": spaces.Text(8),
            "pair": spaces.Tuple((spaces.Box(-1, 1, (2,), np.float64), spaces.MultiDiscrete([3, 4]))),
        }
    )
    action_space = spaces.Dict({"move": spaces.Discrete(3), "use": spaces.MultiBinary(2)})

    def __init__(self):
        self.observation_space = copy.deepcopy(self.observation_space)  # its random stream is the env's own

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if seed is not None:
            self.observation_space.seed(seed)
        self.steps = 0
        return self.observation_space.sample(), {}

    def step(self, action):
        assert self.action_space.contains(action), action
        self.steps += 1
        return self.observation_space.sample(), float(action["move"] + action["use"].sum()), self.steps == 4, False, {}


class Fixed(Nested):
    """The same without the text: every leaf has a fixed size."""

    observation_space = spaces.Dict({key: space for key, space in Nested.observation_space.items() if key != "mission"})


class Masked(Counter):
    """Says which actions are legal."""

    def reset(self, *, seed=None, options=None):
        obs, _ = super().reset(seed=seed, options=options)
        return obs, {"action_mask": self._mask()}

    def step(self, action):
        obs, reward, terminated, truncated, info = super().step(action)
        return obs, reward, terminated, truncated, {**info, "action_mask": self._mask()}

    def _mask(self):
        return np.arange(5) <= self.steps


class Faulty(Counter):
    """Env with a seed in `seeds` does `what` at step `at` (0 is the reset): raise, kill, stick, exit, crash."""

    def __init__(self, what="raise", at=2, seeds=(1,), once=None):
        super().__init__()
        self.what, self.at, self.seeds, self.once = what, at, seeds, once

    def reset(self, *, seed=None, options=None):
        result = super().reset(seed=seed, options=options)
        self._maybe(0)
        return result

    def step(self, action):
        result = super().step(action)
        self._maybe(self.steps)
        return result

    def _maybe(self, now):
        if now != self.at or self.given not in self.seeds:
            return
        if self.once is not None:  # only the first time, in any process
            if Path(self.once).exists():
                return
            Path(self.once).touch()
        if self.what == "raise":
            raise ZeroDivisionError("the env is broken")
        if self.what == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.what == "exit":
            os._exit(7)
        if self.what == "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        while self.what == "stick":
            stuck_here()


def stuck_here():
    time.sleep(0.05)


class Slow(Counter):
    """Takes `seconds` a step, `slow` for the env with the seed `slow_seed`."""

    def __init__(self, seconds=0.001, slow=0.1, slow_seed=-1):
        super().__init__()
        self.seconds, self.slow, self.slow_seed = seconds, slow, slow_seed

    def step(self, action):
        time.sleep(self.slow if self.given == self.slow_seed else self.seconds)
        return super().step(action)


class BadSpace(Counter):
    """Returns what its space does not hold."""

    observation_space = spaces.Dict({"a": spaces.Box(0, 1, (2,), np.float32), "b": spaces.Discrete(3)})

    def _obs(self):
        return {"a": np.zeros(3, np.float32), "b": 1}
