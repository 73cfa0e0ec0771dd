"""IQM and bootstrap intervals against their definitions."""

import numpy as np
import pytest

from hurtle.errors import HurtleError
from hurtle.tracking.return_statistics import bootstrap_interval, iqm, summarize


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([3.0], 3.0),
        ([1.0, 5.0], 3.0),
        ([0.0, 1.0, 100.0], (0 + 1 + 100) / 3),  # int(0.75) = 0: nothing is cut
        ([-100.0, 1.0, 2.0, 100.0], 1.5),
        ([9.0, 1.0, 8.0, 2.0, 3.0, 1000.0, -1000.0], (1 + 2 + 3 + 8 + 9) / 5),
        (np.arange(8.0), (2 + 3 + 4 + 5) / 4),
    ],
)
def test_iqm_cuts_a_quarter_of_the_values_at_each_end(values, expected):
    assert iqm(values) == pytest.approx(expected, abs=1e-12)


def test_iqm_is_the_mean_of_what_is_left():
    rng = np.random.default_rng(0)
    for size in range(1, 30):
        values = rng.normal(size=size)
        expected = np.mean(sorted(values)[size // 4 : size - size // 4])
        assert iqm(values) == pytest.approx(expected, abs=1e-12)


@pytest.mark.slow  # scipy.stats takes seconds to import
def test_iqm_is_scipys_trimmed_mean():
    stats = pytest.importorskip("scipy.stats")
    rng = np.random.default_rng(0)
    for size in range(1, 30):
        values = rng.normal(size=size)
        assert iqm(values) == pytest.approx(stats.trim_mean(values, 0.25), abs=1e-12)


def test_iqm_does_not_sort_the_callers_array():
    values = np.array([3.0, 1.0, 2.0])
    iqm(values)
    assert values.tolist() == [3.0, 1.0, 2.0]


def test_interval_is_deterministic_by_seed_and_matches_theory():
    values = np.random.default_rng(1).normal(10, 2, size=400)
    low, high = bootstrap_interval(values, seed=3)
    assert (low, high) == bootstrap_interval(values, seed=3)
    assert (low, high) != bootstrap_interval(values, seed=4)
    error = values.std() / np.sqrt(len(values))
    assert low == pytest.approx(values.mean() - 1.96 * error, abs=0.15 * error)
    assert high == pytest.approx(values.mean() + 1.96 * error, abs=0.15 * error)
    narrow = bootstrap_interval(values, confidence=0.5, seed=3)
    assert low < narrow[0] < narrow[1] < high


def test_interval_of_any_statistic():
    values = [0.0] * 50 + [1.0] * 49 + [1e6]
    low, high = bootstrap_interval(values, statistic=iqm)
    assert 0 <= low < high <= 1  # the outlier does not reach the interquartile mean
    assert bootstrap_interval([4.0, 4.0, 4.0]) == (4.0, 4.0)


def test_interval_covers_the_true_mean_as_often_as_it_says():
    rng = np.random.default_rng(5)
    inside = 0
    for _ in range(200):
        low, high = bootstrap_interval(rng.exponential(size=60), resamples=200)
        inside += low <= 1.0 <= high
    assert 0.87 <= inside / 200 <= 0.99


def test_summary_and_bad_input():
    found = summarize(np.array([1.0, 2.0, 3.0, 6.0]))
    assert found["mean"] == 3
    assert found["std"] == pytest.approx(np.sqrt(3.5))
    assert found["iqm"] == 2.5
    assert (found["min"], found["max"], found["episodes"]) == (1, 6, 4)
    assert (found["low"], found["high"]) == bootstrap_interval([1.0, 2.0, 3.0, 6.0])
    with pytest.raises(HurtleError, match="at least one finished episode"):
        summarize([])
    with pytest.raises(HurtleError, match=r"between 0 and 1.*got 95"):
        bootstrap_interval([1.0], confidence=95)
