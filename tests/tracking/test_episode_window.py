"""The window over the last episodes: means, bests, metrics, and going on from its state."""

import math

import numpy as np

from hurtle.tracking.episodes import EpisodeWindow


def test_empty_window_knows_nothing():
    window = EpisodeWindow()
    window.add(np.empty(0), np.empty(0, int), {"score": np.empty(0)})
    assert window.count == 0
    assert all(math.isnan(x) for x in (window.mean_return, window.best_return, window.best_length, window.mean_length))
    assert math.isnan(window.best_mean_return)
    assert window.mean_metrics == {}


def test_only_the_last_episodes_count_but_the_best_stays():
    window = EpisodeWindow(size=3)
    window.add([10.0, 2.0], [5, 7])
    assert window.mean_return == 6
    assert window.best_return == 10
    assert math.isnan(window.best_mean_return)  # the window is not full yet
    window.add(np.array([3.0], np.float32), np.array([9]), {"score": np.array([1.5])})
    assert window.mean_return == window.best_mean_return == 5
    assert window.mean_length == 7
    window.add([1.0, 2.0], [1, 1], {"score": [2.5, 3.5]})
    assert window.mean_return == 2
    assert window.best_mean_return == 5
    assert window.best_return == 10
    assert window.best_length == 9
    assert window.mean_metrics == {"score": 2.5}
    assert window.count == 5


def test_best_of_negative_returns():
    window = EpisodeWindow(size=1)
    window.add([-500.0], [1])
    window.add([-80.0], [1])
    window.add([-90.0], [1])
    assert window.best_return == window.best_mean_return == -80


def test_goes_on_from_its_state():
    rng = np.random.default_rng(0)
    whole, first, second = EpisodeWindow(7), EpisodeWindow(7), EpisodeWindow(7)
    episodes = [(rng.normal(size=n), rng.integers(1, 9, n), {"m": rng.normal(size=n)}) for n in (3, 0, 5, 9, 1, 4)]
    for chunk in episodes[:3]:
        whole.add(*chunk)
        first.add(*chunk)
    second.load_state_dict(first.state_dict())
    for chunk in episodes[3:]:
        whole.add(*chunk)
        second.add(*chunk)
    assert second.state_dict() == whole.state_dict()
    assert second.mean_metrics == whole.mean_metrics
