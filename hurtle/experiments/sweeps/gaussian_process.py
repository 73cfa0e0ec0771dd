"""`GaussianProcess`: a smooth function through noisy points, with its uncertainty. Plain NumPy, for some hundred points."""

from __future__ import annotations

import math

import numpy as np

DRAWS, REFINEMENTS = 48, 24
"""Hyperparameters tried at random, then around the best."""
FITTED = 64
"""Points, at most, that hyperparameters are fitted to: a search runs beside the trials, and takes their time."""


class GaussianProcess:
    """A Gaussian process with a Matérn 5/2 kernel and one length scale per feature; hyperparameters by marginal likelihood.

    Args:
        x: Features, [points, features], about from 0 to 1.
        y: Values, [points]; they are scaled to mean 0 and variance 1.
        seed: Of the search for hyperparameters.
        like: Take the hyperparameters of this one.

    Example:
        >>> x = np.linspace(0, 1, 9)[:, None]
        >>> mean, deviation = GaussianProcess(x, np.sin(6 * x[:, 0])).predict(np.array([[0.3], [3.0]]))
        >>> bool(abs(mean[0] - np.sin(1.8)) < 0.05), bool(deviation[0] < deviation[1])
        (True, True)
    """

    def __init__(self, x: np.ndarray, y: np.ndarray, seed: int = 0, like: GaussianProcess | None = None):
        self._x = np.asarray(x, np.float64)
        self._mean, self._scale = float(np.mean(y)), float(np.std(y)) or 1.0
        self._y = (np.asarray(y, np.float64) - self._mean) / self._scale
        best: np.ndarray = self._fitted(seed) if like is None else like._logarithms
        self._logarithms: np.ndarray = best
        self._lengths, self._noise = np.exp(best[:-1]), math.exp(best[-1])
        self._factor = np.linalg.cholesky(_covariance(self._x, best))
        self._weights = _solve(self._factor, self._y)

    def _fitted(self, seed: int) -> np.ndarray:
        """The logarithms of the length scales and of the noise that make the points most likely."""
        rng = np.random.default_rng(seed)
        features = self._x.shape[1]
        some = rng.permutation(len(self._y))[:FITTED]
        x, y = self._x[some], self._y[some]
        start = np.concatenate([np.zeros(features) + math.log(0.6 * math.sqrt(features)), [math.log(0.1)]])
        spread = np.concatenate([np.full(features, 0.8), [1.2]])  # of the logarithms of length scales and of the noise
        best, found = start, _likelihood(x, y, start)
        for k in range(DRAWS + REFINEMENTS):
            near = k >= DRAWS
            tried = (best if near else start) + rng.normal(size=features + 1) * spread * (0.3 if near else 1.0)
            if (value := _likelihood(x, y, tried)) > found:
                best, found = tried, value
        return best

    def predict(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Mean and standard deviation of the function, without noise, at points [n, features]."""
        across = _matern(x / self._lengths, self._x / self._lengths)  # [n, points]
        half = np.linalg.solve(self._factor, across.T)
        variance = np.maximum(1.0 - (half * half).sum(0), 1e-12)
        return self._mean + self._scale * (across @ self._weights), self._scale * np.sqrt(variance)


def _covariance(x: np.ndarray, logarithms: np.ndarray) -> np.ndarray:
    scaled = x / np.exp(logarithms[:-1])
    return _matern(scaled, scaled) + (math.exp(logarithms[-1]) + 1e-8) * np.eye(len(scaled))


def _likelihood(x: np.ndarray, y: np.ndarray, logarithms: np.ndarray) -> float:
    """The log marginal likelihood, with a prior that keeps hyperparameters near where they begin."""
    try:
        factor = np.linalg.cholesky(_covariance(x, logarithms))
    except np.linalg.LinAlgError:
        return -math.inf
    fit = -0.5 * float(y @ _solve(factor, y)) - float(np.log(np.diag(factor)).sum())
    centre = math.log(0.6 * math.sqrt(x.shape[1]))
    return fit - 0.5 * float(np.square((logarithms[:-1] - centre) / 1.0).sum()) - 0.5 * ((logarithms[-1] + 2.3) / 1.5) ** 2


def _matern(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    squared = np.maximum((a * a).sum(1)[:, None] + (b * b).sum(1)[None] - 2 * a @ b.T, 0.0)
    distance = np.sqrt(5.0 * squared)
    return (1.0 + distance + distance * distance / 3.0) * np.exp(-distance)


def _solve(factor: np.ndarray, y: np.ndarray) -> np.ndarray:
    return np.linalg.solve(factor.T, np.linalg.solve(factor, y))
