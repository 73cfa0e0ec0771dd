"""`EpisodeWindow`: returns, lengths and metrics of the last 100 episodes, and the best so far.

ended episodes → window → means. Knows nothing of envs or of where episodes come from.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from hurtle.contracts import Episodes

NAN = float("nan")


class EpisodeWindow:
    """Statistics over the last `size` episodes; NaN if there are none.

    Attributes:
        count: Total number of episodes added.
        best_return: The highest return of a single episode.
        best_length: The length of the longest episode.
        best_mean_return: The highest `mean_return` of a full window after an `add`.

    Example:
        >>> window = EpisodeWindow(size=2)
        >>> window.add(Episodes.of([1.0, 3.0, 5.0], [10, 30, 50]))
        >>> window.mean_return, window.best_return, window.mean_length, window.count
        (4.0, 5.0, 40.0, 3)
    """

    def __init__(self, size: int = 100):
        self.size = size
        self.count = 0
        self.best_return = NAN
        self.best_length = NAN
        self.best_mean_return = NAN
        self._returns: deque[float] = deque(maxlen=size)
        self._lengths: deque[float] = deque(maxlen=size)
        self._metrics: dict[str, deque[float]] = {}

    def add(self, episodes: Episodes) -> None:
        """Add ended episodes."""
        if not episodes.count:
            return
        self._returns.extend(_floats(episodes.returns))
        self._lengths.extend(_floats(episodes.lengths))
        self.count += episodes.count
        self.best_return = float(np.fmax(self.best_return, episodes.best_return))
        self.best_length = float(np.fmax(self.best_length, episodes.best_length))
        if self.count >= self.size:
            self.best_mean_return = float(np.fmax(self.best_mean_return, self.mean_return))
        for name, values in episodes.metrics.items():
            self._metrics.setdefault(name, deque(maxlen=self.size)).extend(_floats(values))

    @property
    def mean_return(self) -> float:
        """Mean return of the window."""
        return _mean(self._returns)

    @property
    def mean_length(self) -> float:
        """Mean length of the window's episodes."""
        return _mean(self._lengths)

    @property
    def mean_metrics(self) -> dict[str, float]:
        """Mean of each metric over the window."""
        return {name: _mean(values) for name, values in self._metrics.items()}

    def state_dict(self) -> dict[str, Any]:
        """The state as plain numbers and lists."""
        return {
            "count": self.count,
            "best_return": self.best_return,
            "best_length": self.best_length,
            "best_mean_return": self.best_mean_return,
            "returns": list(self._returns),
            "lengths": list(self._lengths),
            "metrics": {name: list(values) for name, values in self._metrics.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a `state_dict`."""
        self.count, self.best_return = state["count"], state["best_return"]
        self.best_length = state["best_length"]
        self.best_mean_return = state["best_mean_return"]
        self._returns = deque(state["returns"], maxlen=self.size)
        self._lengths = deque(state["lengths"], maxlen=self.size)
        self._metrics = {name: deque(values, maxlen=self.size) for name, values in state["metrics"].items()}


def _floats(values: ArrayLike) -> list[float]:
    return np.asarray(values, np.float64).ravel().tolist()


def _mean(values: deque[float]) -> float:
    return sum(values) / len(values) if values else NAN
