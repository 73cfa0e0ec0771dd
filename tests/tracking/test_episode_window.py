"""The window over the last episodes: means, bests, metrics, and going on from its state."""

import math

import numpy as np

from hurtle.contracts import Episodes
from hurtle.tracking.episode_window import EpisodeWindow


def test_empty_window_knows_nothing():
    window = EpisodeWindow()
    window.add(Episodes.of(np.empty(0), np.empty(0, int), {"score": np.empty(0)}))
    assert window.count == 0
    assert all(math.isnan(x) for x in (window.mean_return, window.best_return, window.best_length, window.mean_length))
    assert math.isnan(window.best_mean_return)
    assert window.mean_metrics == {}


def test_only_the_last_episodes_count_but_the_best_stays():
    window = EpisodeWindow(size=3)
    window.add(Episodes.of([10.0, 2.0], [5, 7]))
    assert window.mean_return == 6
    assert window.best_return == 10
    assert math.isnan(window.best_mean_return)  # the window is not full yet
    window.add(Episodes.of(np.array([3.0], np.float32), np.array([9]), {"score": np.array([1.5])}))
    assert window.mean_return == window.best_mean_return == 5
    assert window.mean_length == 7
    window.add(Episodes.of([1.0, 2.0], [1, 1], {"score": [2.5, 3.5]}))
    assert window.mean_return == 2
    assert window.best_mean_return == 5
    assert window.best_return == 10
    assert window.best_length == 9
    assert window.mean_metrics == {"score": 2.5}
    assert window.count == 5


def test_best_of_negative_returns():
    window = EpisodeWindow(size=1)
    window.add(Episodes.of([-500.0], [1]))
    window.add(Episodes.of([-80.0], [1]))
    window.add(Episodes.of([-90.0], [1]))
    assert window.best_return == window.best_mean_return == -80


def test_goes_on_from_its_state():
    rng = np.random.default_rng(0)
    whole, first, second = EpisodeWindow(7), EpisodeWindow(7), EpisodeWindow(7)
    episodes = [(rng.normal(size=n), rng.integers(1, 9, n), {"m": rng.normal(size=n)}) for n in (3, 0, 5, 9, 1, 4)]
    for chunk in episodes[:3]:
        whole.add(Episodes.of(*chunk))
        first.add(Episodes.of(*chunk))
    second.load_state_dict(first.state_dict())
    for chunk in episodes[3:]:
        whole.add(Episodes.of(*chunk))
        second.add(Episodes.of(*chunk))
    assert second.state_dict() == whole.state_dict()
    assert second.mean_metrics == whole.mean_metrics


# sums of many episodes


def test_totals_count_as_so_many_episodes_of_their_mean():
    window, by_hand = EpisodeWindow(size=5), EpisodeWindow(size=5)
    window.add(Episodes.of([9.0, 1.0], [3, 5], {"score": [1.0, 2.0]}))
    window.add(Episodes.from_totals(4, returns=20.0, best_return=8.0, lengths=40.0, best_length=30.0, metrics={"score": 7.0}))
    by_hand.add(Episodes.of([9.0, 1.0, 5.0, 5.0, 5.0, 5.0], [3, 5, 10, 10, 10, 10], {"score": [1.0, 2.0, 7.0, 7.0, 7.0, 7.0]}))
    assert window.mean_return == by_hand.mean_return == 4.2
    assert window.mean_length == by_hand.mean_length == 9.0
    assert window.mean_metrics == by_hand.mean_metrics == {"score": 6.0}
    assert window.count == by_hand.count == 6
    assert window.best_return == 9.0  # of single episodes, not of means
    assert window.best_length == 30.0
    assert window.best_mean_return == by_hand.best_mean_return


def test_totals_of_nothing_change_nothing():
    window = EpisodeWindow(size=3)
    window.add(Episodes.from_totals(0, 0.0, -math.inf, 0.0, 0.0, {}))
    assert window.count == 0
    assert math.isnan(window.best_return)
    assert math.isnan(window.mean_return)
    window.add(Episodes.of([1.0], [1]))
    before = window.state_dict()
    window.add(Episodes.from_totals(0, 0.0, -math.inf, 0.0, 0.0, {"score": 1.0}))
    assert window.state_dict() == before


def test_totals_of_more_episodes_than_the_window_holds():
    window = EpisodeWindow(size=3)
    window.add(Episodes.of([100.0], [1]))
    window.add(Episodes.from_totals(1_000_000, returns=-2e6, best_return=-1.0, lengths=7e6, best_length=9.0, metrics={}))
    assert window.count == 1_000_001
    assert window.mean_return == window.best_mean_return == -2.0
    assert window.mean_length == 7.0
    assert len(window.state_dict()["returns"]) == 3
    assert window.best_return == 100.0
    window.add(Episodes.from_totals(3, returns=-9.0, best_return=-3.0, lengths=3.0, best_length=1.0, metrics={}))
    assert window.mean_return == -3.0
    assert window.best_mean_return == -2.0


def test_a_window_with_totals_goes_on_from_its_state():
    window, other = EpisodeWindow(4), EpisodeWindow(4)
    window.add(Episodes.from_totals(3, 6.0, 4.0, 9.0, 5.0, {"score": 2.0}))
    other.load_state_dict(window.state_dict())
    for one in (window, other):
        one.add(Episodes.from_totals(2, 10.0, 6.0, 2.0, 1.0, {"score": 4.0}))
    assert other.state_dict() == window.state_dict()
    assert window.mean_return == 3.5
