"""The timer: shares add up, nested stages do not count twice, and asking starts anew."""

import timeit
from time import perf_counter

import pytest

from hurtle.tracking.timing import Timer


@pytest.fixture
def clock(monkeypatch):
    """A clock that only moves when it is told to."""
    now = [0.0]
    monkeypatch.setattr("hurtle.tracking.timing.perf_counter", lambda: now[0])

    def wait(seconds):
        now[0] += seconds

    return wait


def test_shares_add_up_and_start_anew(clock):
    timer = Timer()
    with timer("env"):
        clock(3)
    with timer("learn"):
        clock(4)
    with timer("env"):
        clock(2)
    clock(1)
    assert timer.shares() == pytest.approx({"other": 0.1, "env": 0.5, "learn": 0.4})
    with timer("env"):
        clock(1)
    assert timer.shares() == {"other": 0, "env": 1, "learn": 0}  # a stage that did not run stays listed


def test_a_stage_does_not_count_the_stages_inside_it(clock):
    timer = Timer()
    with timer("env"):
        clock(1)
        with timer("copy"):
            clock(2)
            with timer("env"):
                clock(4)
        clock(1)
    assert timer.shares() == pytest.approx({"other": 0, "env": 6 / 8, "copy": 2 / 8})


def test_asking_inside_a_stage_charges_what_has_passed(clock):
    timer = Timer()
    with timer("env"):
        clock(1)
        assert timer.shares() == {"other": 0, "env": 1}
        clock(2)
    clock(2)
    assert timer.shares() == {"other": 0.5, "env": 0.5}


def test_no_time_at_all_is_other(clock):
    assert Timer().shares() == {"other": 1.0}


def test_an_exception_leaves_the_stage(clock):
    timer = Timer()

    def fails():
        with timer("env"):
            clock(1)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    clock(1)
    assert timer.shares() == {"other": 0.5, "env": 0.5}


def test_the_real_clock_is_charged_and_cheap():
    timer = Timer()

    def stage():
        with timer("env"):
            pass

    assert min(timeit.repeat(stage, number=1000, repeat=20)) / 1000 < 5e-6
    with timer("learn"):
        end = perf_counter() + 0.02
        while perf_counter() < end:
            pass
    shares = timer.shares()
    assert sum(shares.values()) == pytest.approx(1)
    assert 0 < shares["env"] < 1
    assert shares["learn"] > 0


def test_time_that_others_measured_takes_the_place_of_this_clocks(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("hurtle.tracking.timing.perf_counter", lambda: now[0])
    timer = Timer()
    with timer("learn"):
        now[0] += 4.0
    timer.share_out({"collect": 1.0, "learn": 2.0})
    assert timer.shares() == {"collect": 0.25, "learn": 0.5, "other": 0.25}
    now[0] += 1.0
    timer.share_out({"collect": 3.0, "learn": 1.0})  # of more than has passed: told late
    assert timer.shares() == {"collect": 0.75, "learn": 0.25, "other": 0.0}
    now[0] += 1.0
    timer.share_out({})
    assert timer.shares()["other"] == 1.0
