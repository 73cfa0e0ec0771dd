"""The random library of env code: the plain-Python reference of the compiled one in `stream.py`.

seed → SplitMix64 stream per env (one uint64 in the env's record) → random / uniform / integers / normal / choice / shuffle.
Hashing separates the streams, so that env dynamics and action sampling never share a number.
"""

from __future__ import annotations

import math
from collections.abc import MutableSequence, Sequence
from typing import Any, Protocol

import numpy as np

from hurtle.errors import HurtleError

MASK = 0xFFFFFFFFFFFFFFFF
GAMMA = 0x9E3779B97F4A7C15
ENV_STREAM = 0
ACTION_STREAM = 1
OPTION_STREAM = 4


class Rng(Protocol):
    """The type of `rng` in env code, with NumPy's names and bounds (high is excluded)."""

    def random(self) -> float:
        """A float32 in [0, 1)."""

    def uniform(self, low: float = 0.0, high: float = 1.0) -> float:
        """A float32 in [low, high)."""

    def integers(self, low: int, high: int | None = None) -> int:
        """An integer in [low, high), or in [0, low) when called with one argument."""

    def normal(self, mean: float = 0.0, std: float = 1.0) -> float:
        """A float32 from the normal distribution."""

    def choice(self, items: Sequence[Any]) -> Any:
        """One element of a one-dimensional array, each equally likely."""

    def shuffle(self, items: MutableSequence[Any]) -> None:
        """Shuffle a one-dimensional array in place."""


METHODS = frozenset({"random", "uniform", "integers", "normal", "choice", "shuffle"})


def mix(z: int) -> int:
    """SplitMix64's finalizer: a bijection of 64-bit integers that scatters neighbours."""
    z &= MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def stream_state(seed: int, stream: int = ENV_STREAM) -> int:
    """The starting state of one stream of one env.

    Example:
        >>> stream_state(0) != stream_state(1) != stream_state(1, ACTION_STREAM)
        True
    """
    return mix(mix(seed + GAMMA) + (stream + 1) * GAMMA)


def stream_states(seeds: np.ndarray, stream: int = ENV_STREAM) -> np.ndarray:
    """`stream_state` of an array of seeds. uint64[n] → uint64[n]."""
    seeds = np.asarray(seeds).astype(np.uint64)
    gamma = np.uint64(GAMMA)
    offset = np.uint64(((stream + 1) * GAMMA) & MASK)
    with np.errstate(over="ignore"):
        return _mix_array(_mix_array(seeds + gamma) + offset)


def seed_range(seed: int, count: int) -> np.ndarray:
    """The seeds of envs 0 … count - 1: seed, seed + 1, … (modulo 2^64).

    Raises:
        HurtleError: The seed is not an int of at least 0.
    """
    if isinstance(seed, bool) or not isinstance(seed, int | np.integer) or seed < 0:
        raise HurtleError(f"A seed is an int of at least 0, got {seed!r}.")
    with np.errstate(over="ignore"):
        return np.uint64(int(seed) & MASK) + np.arange(count, dtype=np.uint64)


def _mix_array(z: np.ndarray) -> np.ndarray:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


# The reference of each function in stream.py; `rng` is anything with an attribute `_rng`.


def rng_next(rng: Any) -> int:
    rng._rng = (int(rng._rng) + GAMMA) & MASK
    return mix(rng._rng)


def rng_random(rng: Any) -> np.float32:
    return np.float32(rng_next(rng) >> 40) * np.float32(2.0**-24)


def rng_uniform(rng: Any, low: float = 0.0, high: float = 1.0) -> np.float32:
    first, last = np.float32(low), np.float32(high)
    drawn = first + (last - first) * rng_random(rng)
    return first if drawn == last else drawn  # the sum can round up to high


def rng_integers(rng: Any, low: int, high: int) -> int:
    if high <= low:
        raise ValueError(f"rng.integers({low}, {high}) has no value to choose from: high must be above low")
    return int(low) + (((rng_next(rng) >> 32) * (int(high) - int(low))) >> 32)


def rng_normal(rng: Any, mean: float = 0.0, std: float = 1.0) -> np.float32:
    radius = np.float32(math.sqrt(np.float32(-2.0) * np.float32(math.log(np.float32(1.0) - rng_random(rng)))))
    angle = np.float32(2.0 * math.pi) * rng_random(rng)
    return np.float32(mean) + np.float32(std) * (radius * np.float32(math.cos(angle)))


def rng_choice(rng: Any, items: Any) -> Any:
    return items[rng_integers(rng, 0, len(items))]


def rng_shuffle(rng: Any, items: Any) -> None:
    for i in range(len(items) - 1, 0, -1):
        j = rng_integers(rng, 0, i + 1)
        items[i], items[j] = items[j], items[i]


def action_bits(seed: int, step: int) -> int:
    """32 random bits for the action of the env whose action stream starts at `seed`, at its step `step`."""
    return mix(int(seed) + (int(step) + 1) * GAMMA) >> 32
