"""Choosing the number of threads: simulated machines, whose speed is a function of the number of threads and of time."""

import numpy as np
import pytest

from hurtle.native.thread_tuner import TRIES, ThreadTuner, ladder
from hurtle.native.threads import _quotas

CALL = 0.002  # seconds that a call takes on one thread of a quiet machine


def rate(count, speed_up, noise, seconds=3.0, seed=1, call=CALL):
    """Work per second with a fixed number of threads, or with those that a tuner chooses."""
    rng, done, clock = np.random.default_rng(seed), 0.0, 0.0
    while clock < seconds:
        threads = count.count if isinstance(count, ThreadTuner) else count
        took = call / speed_up(threads, clock) * (1.0 + rng.exponential(noise))
        clock, done = clock + took, done + 1.0
        if isinstance(count, ThreadTuner):
            count.took(1.0, took)
    return done / clock


@pytest.mark.parametrize("noise", [0.0, pytest.param(0.3, marks=pytest.mark.slow), 2.0])
@pytest.mark.parametrize(
    ("most", "speed_up"),
    [
        (2, lambda n, t: n**0.9),  # a quiet machine
        (16, lambda n, t: n**0.8),
        (2, lambda n, t: 1.0 if n == 1 else 0.1),  # a barrier waits for a core that is not running
        (16, lambda n, t: 1.0 / n**2),
        (2, lambda n, t: 1.0 if n == 1 else 0.9),
        (12, lambda n, t: min(n, 4) * (1.0 if n <= 4 else 0.5)),  # a quota of four cores
        (16, lambda n, t: 1.0),
    ],
    ids=["two", "sixteen", "stalls", "many stalls", "nearly as good", "quota", "no difference"],
)
def test_it_is_nearly_as_fast_as_the_best_fixed_number(most, speed_up, noise):
    def mean_rate(make):
        return np.mean([rate(make(), speed_up, noise, seed=seed) for seed in range(4 if noise else 1)])

    best = max(mean_rate(lambda n=n: n) for n in ladder(most))
    assert mean_rate(lambda: ThreadTuner(most)) > 0.9 * best


@pytest.mark.parametrize("call", [pytest.param(2e-5, marks=pytest.mark.slow), 2e-3, 0.1, 1.0])
def test_it_follows_a_machine_that_gets_busy_and_quiet_again(call):
    tuner = ThreadTuner(4)
    quiet, busy = (lambda n, t: n), (lambda n, t: 1.0 / n)
    while_it_changes = max(3.0, 300 * call)  # long trials of a slow number are rare
    for speed_up, best in ((quiet, 4), (busy, 1), (quiet, 4)):
        rate(tuner, speed_up, 0.1, seconds=while_it_changes, call=call)
        assert tuner.best == best


def test_a_short_run_finds_it_within_a_few_calls():
    tuner = ThreadTuner(16)
    for _ in range(1 + 5):
        tuner.took(1.0, CALL / tuner.count)
    assert not tuner.searching
    assert tuner.best == 16
    tuner = ThreadTuner(16)
    for _ in range(1 + 3):
        tuner.took(1.0, CALL * tuner.count)
    assert not tuner.searching
    assert tuner.best == 1


@pytest.mark.parametrize("slower", [2, 100, 400])
def test_what_slower_numbers_cost_is_bounded(slower):
    """So much slower with two threads: it is tried, but rarely."""
    tuner, clock, spent = ThreadTuner(2), 0.0, 0.0
    while clock < 100.0:
        took = CALL if tuner.count == 1 else slower * CALL
        clock, spent = clock + took, spent + took * (tuner.count == 2)
        tuner.took(1.0, took)
    assert 0.0 < spent * (slower - 1) / slower < 0.045 * clock


def test_calls_of_different_sizes_are_compared_by_their_work():
    tuner = ThreadTuner(2)
    for k in range(300):
        work = 1.0 + 9.0 * (k % 3)
        tuner.took(work, work * CALL / tuner.count)
    assert tuner.best == 2


def test_a_call_that_was_stopped_for_hours_is_no_error():
    tuner = ThreadTuner(4)
    for _ in range(3):
        for _ in range(40):
            tuner.took(1.0, CALL / tuner.count)
        tuner.took(1.0, 1e5)
    rate(tuner, lambda n, t: n, 0.0, seconds=20.0)
    assert tuner.best == 4


def test_work_that_fits_is_little_at_first_and_for_trials():
    tuner = ThreadTuner(2)
    assert tuner.fitting(0.1) == 1
    tuner.took(1.0, 1e-5)
    assert tuner.fitting(0.1) == 200  # 2 ms
    sizes = set()
    for _ in range(300):
        work = tuner.fitting(0.1)
        sizes.add((tuner.count, work))
        tuner.took(work, work * 1e-5 / tuner.count)
    assert max(work for threads, work in sizes if threads == 2) == pytest.approx(20_000, abs=1)
    assert all(work <= 401 for threads, work in sizes if threads == 1)
    alone = ThreadTuner(1)
    alone.took(1.0, 1e-5)
    assert alone.fitting(0.1) == pytest.approx(10_000, abs=1)


@pytest.mark.parametrize(
    ("most", "adapts", "counts"), [(1, True, [1]), (6, True, [1, 2, 4, 6]), (8, True, [1, 2, 4, 8]), (6, False, [6])]
)
def test_numbers_to_choose_from(most, adapts, counts):
    tuner = ThreadTuner(most, adapts)
    assert (tuner.most, tuner.count) == (most, counts[0])
    assert tuner._counts == counts
    tried = set()
    for _ in range(3 * TRIES * len(counts)):
        tried.add(tuner.count)
        tuner.took(1.0, 1.0)
    assert tried == set(counts)


def test_quotas_of_control_groups(tmp_path):
    def write(name, text):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    root = tmp_path / "fs"
    second = write("second", "0::/pod/own\n")
    assert _quotas(root, second) == []
    write("fs/pod/own/cpu.max", "max 100000\n")
    write("fs/pod/cpu.max", "350000 100000\n")
    assert _quotas(root, second) == [3]
    first = write("first", "4:memory:/pod\n3:cpu,cpuacct:/pod\n")
    write("fs/cpu,cpuacct/pod/cpu.cfs_quota_us", "250000\n")
    write("fs/cpu,cpuacct/pod/cpu.cfs_period_us", "100000\n")
    write("fs/cpu,cpuacct/cpu.cfs_quota_us", "-1\n")
    write("fs/cpu,cpuacct/cpu.cfs_period_us", "100000\n")
    assert _quotas(root, first) == [2]
    assert _quotas(root, tmp_path / "none") == []
