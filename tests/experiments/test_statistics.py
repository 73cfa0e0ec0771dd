"""Statistics over runs against plain references."""

import numpy as np
import pytest

from hurtle.errors import HurtleError
from hurtle.experiments.statistics import (
    Estimate,
    joined_curve,
    normalized,
    overall,
    performance_profile,
    probability_of_improvement,
)
from hurtle.tracking.return_statistics import bootstrap_interval, iqm


def plain_iqm(values):
    ordered = sorted(values)
    return float(np.mean(ordered[len(ordered) // 4 : len(ordered) - len(ordered) // 4]))


def random_tasks(rng, tasks=3):
    """Some runs tie."""
    return [rng.integers(0, 8, rng.integers(1, 7)) / 4.0 for _ in range(tasks)]


def resamples_of(tasks, count, seed):
    rng = np.random.default_rng(seed)
    drawn = [rng.integers(0, len(task), (count, len(task))) for task in tasks]
    return [[task[rows[k]] for task, rows in zip(tasks, drawn, strict=True)] for k in range(count)]


def ends(values):
    return np.quantile(values, [0.025, 0.975], axis=0)


def test_an_estimate_is_the_iqm_with_its_interval():
    values = [500.0, 480.0, 0.0, 490.0, 500.0]
    found = Estimate.of(values)
    assert found == (490.0, *bootstrap_interval(values, iqm))
    assert str(Estimate(490.0, 160.0, 500.0)) == "490.0 [160.0, 500.0]"


def test_the_interval_of_an_iqm_is_that_of_the_plain_function():
    values = np.random.default_rng(0).normal(size=7)
    assert bootstrap_interval(values, iqm) == pytest.approx(bootstrap_interval(values, plain_iqm), abs=1e-12)


def test_a_joined_curve_is_the_iqm_of_interpolated_runs_at_each_point():
    rng = np.random.default_rng(1)
    curves = [np.stack([np.sort(rng.uniform(0, 100, 30)), rng.normal(size=30)], axis=1) for _ in range(5)]
    found = joined_curve(curves, points=7)
    assert found.x[0] == max(curve[0, 0] for curve in curves)
    assert found.x[-1] == min(curve[-1, 0] for curve in curves)
    for k, x in enumerate(found.x):
        values = [np.interp(x, curve[:, 0], curve[:, 1]) for curve in curves]
        assert found.middle[k] == pytest.approx(plain_iqm(values), abs=1e-12)
        low, high = bootstrap_interval(values, plain_iqm, resamples=500)
        assert (found.low[k], found.high[k]) == pytest.approx((low, high), abs=1e-12)


def test_runs_without_a_common_stretch_have_no_curve():
    assert joined_curve([[[0, 1.0], [1, 1.0]], [[2, 1.0], [3, 1.0]]]) is None
    assert joined_curve([[[0, 1.0]], []]) is None
    assert joined_curve([]) is None


def test_scores_are_normalized_by_task_over_all_methods():
    one, other = normalized([[[0.0, 50.0], [100.0]], [[-3.0], [-3.0]]])
    assert [scores.tolist() for scores in one] == [[0.0, 0.5], [1.0]]
    assert [scores.tolist() for scores in other] == [[0.0], [0.0]]  # no run is better than another


@pytest.mark.parametrize("seed", range(5))
def test_the_profile_is_the_share_of_runs_above_each_threshold(seed):
    rng = np.random.default_rng(seed)
    tasks, thresholds = random_tasks(rng), np.linspace(-0.25, 2.25, 11)  # some are equal to scores

    def plain(tasks):
        return [np.mean([np.mean([score > t for score in task]) for task in tasks]) for t in thresholds]

    found = performance_profile(tasks, thresholds, resamples=40)
    np.testing.assert_allclose(found.middle, plain(tasks), atol=1e-12)
    low, high = ends([plain(sample) for sample in resamples_of(tasks, 40, 0)])
    np.testing.assert_allclose(found.low, low, atol=1e-12)
    np.testing.assert_allclose(found.high, high, atol=1e-12)


@pytest.mark.parametrize("seed", range(5))
def test_probability_of_improvement_counts_pairs(seed):
    rng = np.random.default_rng(seed)
    ours, theirs = random_tasks(rng), random_tasks(rng)

    def plain(ours, theirs):
        return np.mean(
            [np.mean([(x > y) + 0.5 * (x == y) for x in one for y in other]) for one, other in zip(ours, theirs, strict=True)]
        )

    found = probability_of_improvement(ours, theirs, resamples=40)
    assert found.value == pytest.approx(plain(ours, theirs), abs=1e-12)
    drawn = [plain(*pair) for pair in zip(resamples_of(ours, 40, 0), resamples_of(theirs, 40, 1), strict=True)]
    assert (found.low, found.high) == pytest.approx(tuple(ends(drawn)), abs=1e-12)
    assert probability_of_improvement(theirs, ours, resamples=1).value == pytest.approx(1 - found.value, abs=1e-12)
    assert probability_of_improvement(ours, ours, resamples=1).value == pytest.approx(0.5, abs=1e-12)


def test_the_iqm_over_tasks_resamples_within_each():
    tasks = random_tasks(np.random.default_rng(3), tasks=4)
    found = overall(tasks, resamples=50)
    assert found.value == pytest.approx(plain_iqm(np.concatenate(tasks)), abs=1e-12)
    drawn = [plain_iqm(np.concatenate(sample)) for sample in resamples_of(tasks, 50, 0)]
    assert (found.low, found.high) == pytest.approx(tuple(ends(drawn)), abs=1e-12)


def test_scores_that_are_missing_are_errors():
    for scores in ([], [[]], [[1.0], [float("nan")]]):
        with pytest.raises(HurtleError, match="at least one run"):
            overall(scores)
    with pytest.raises(HurtleError, match="got 1 and 2"):
        probability_of_improvement([[1.0]], [[1.0], [2.0]])
