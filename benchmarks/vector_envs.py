"""The envs that `vector.py` measures: counted work, nothing at all, images and nested dicts; of NumPy and Gymnasium only."""

from __future__ import annotations

import time
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

IMAGE_SHAPE = (100, 32, 32)
"""102,400 bytes."""


def work(loops: int) -> int:
    """Compute for a while: the same `loops` are the same work in every process, however busy the machine."""
    x = 1
    for _ in range(loops):
        x = (x * 1103515245 + 12345) & 0x7FFFFFFF
    return x


def calibrate(seconds: float = 0.2) -> float:
    """Loops of `work` per second on a core that nobody disturbs: the best of several tries."""
    loops, best = 20_000, 0.0
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        began = time.perf_counter()
        work(loops)
        best = max(best, loops / (time.perf_counter() - began))
    return best


class Delay(gymnasium.Env):
    """Computes for `loops` on average in each step.

    Args:
        loops: Mean work of a step.
        deviation: Standard deviation of a step's work, relative to the mean (gamma distributed; 1 is exponential).
    """

    observation_space = spaces.Box(-1, 1, (4,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, loops: int = 0, deviation: float = 0.0):
        self.loops, self.deviation = loops, deviation
        self._observation = np.zeros(4, np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict[str, Any]]:
        """Begin."""
        super().reset(seed=seed)
        return self._observation, {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Work."""
        if self.deviation:
            variance = self.deviation**2
            work(int(self.loops * self.np_random.gamma(1 / variance, variance)))
        elif self.loops:
            work(self.loops)
        return self._observation, 0.0, False, False, {}


class Images(gymnasium.Env):
    """Shows one of four pictures of 100 KB in turn."""

    observation_space = spaces.Box(0, 255, IMAGE_SHAPE, np.uint8)
    action_space = spaces.Discrete(2)

    def __init__(self) -> None:
        self._pictures = list(np.random.default_rng(0).integers(0, 256, (4, *IMAGE_SHAPE)).astype(np.uint8))
        self._turn = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict[str, Any]]:
        """Begin."""
        super().reset(seed=seed)
        return self._pictures[0], {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Show the next picture."""
        self._turn = (self._turn + 1) % 4
        return self._pictures[self._turn], 0.0, False, False, {}


def nested_space() -> spaces.Dict:
    """A dict of dicts with 20 leaves, as a game with units, an inventory and a map has."""
    units = {f"unit_{k}": _unit_space() for k in range(4)}
    hero = {"health": spaces.Box(0, 1, (1,), np.float32), "class": spaces.Discrete(5), "skills": spaces.MultiBinary(8)}
    return spaces.Dict(
        {
            "units": spaces.Dict(units),
            "hero": spaces.Dict(hero),
            "map": spaces.Box(0, 1, (8, 8), np.float32),
        }
    )


def _unit_space() -> spaces.Dict:
    return spaces.Dict(
        {
            "position": spaces.Box(-1, 1, (2,), np.float32),
            "velocity": spaces.Box(-1, 1, (2,), np.float32),
            "kind": spaces.Discrete(6),
            "items": spaces.MultiDiscrete([4, 4, 4]),
        }
    )


class Constant(gymnasium.Env):
    """Observes the same value of a space in every step, so that what is measured is what others do with it."""

    action_space = spaces.Discrete(2)

    def __init__(self, space: spaces.Space):
        self.observation_space = space
        space.seed(0)
        self._value = space.sample()

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin."""
        super().reset(seed=seed)
        return self._value, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Nothing happens."""
        return self._value, 0.0, False, False, {}
