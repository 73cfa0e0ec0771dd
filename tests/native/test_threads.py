"""The helper threads: nothing hangs and no part outlives its call, even after Ctrl-C, an error, a fork or close()."""

import gc
import os
import threading
import time
from functools import cache

import numpy as np
import pytest
from numba import njit

import hurtle
from hurtle.errors import HurtleError
from hurtle.native.build import address_of_entry
from hurtle.native.intrinsics import array_at
from hurtle.native.threads import Crew, shard_edges

FAILS, WAITS, DONE = 0, 1, 2  # thread that fails, microseconds that helpers wait, and who is done


@njit(nogil=True)
def part(arguments, thread, threads):
    """Ten times the thread's index plus the number of threads, after waiting; the thread at FAILS raises."""
    words = array_at(arguments, (16,), np.int64)
    if words[FAILS] == thread:
        raise ValueError("a part fails")
    waited = 0
    for k in range(words[WAITS] * 1000 if thread else 0):
        waited += (k * waited) & 3
    words[DONE + thread] += 1 + (waited & 0)
    return 10 * thread + threads


@cache
def part_address():
    return address_of_entry(part)


def arguments(fails=-1, waits=0):
    words = np.zeros(16, np.int64)
    words[FAILS], words[WAITS] = fails, waits
    return words


def run(crew, words, threads, on_error=None):
    return crew.run(part_address(), words.ctypes.data, threads, on_error)


@pytest.fixture
def crew():
    made = Crew(5)
    yield made
    made.close()


def test_shards_cover_everything_and_begin_at_cache_lines():
    assert shard_edges(10, 3).tolist() == [0, 3, 6, 10]
    assert shard_edges(1000, 3).tolist() == [0, 256, 640, 1000]
    assert shard_edges(7, 1).tolist() == [0, 7]


def test_results_come_in_the_order_of_the_threads(crew):
    for threads in (1, 3, 2, 5, 5, 1, 4):
        for _ in range(200):
            assert run(crew, arguments(), threads) == [10 * k + threads for k in range(threads)]


def test_helpers_that_fell_asleep_wake_up(crew):
    for _ in range(5):
        time.sleep(0.01)  # a thousand times as long as they look for a call
        assert run(crew, arguments(), 3) == [3, 13, 23]
        assert run(crew, arguments(waits=1000), 2) == [2, 12]  # and the leader, which is done at once


@pytest.mark.parametrize("fails", [0, 1, 2])
def test_an_error_is_raised_when_all_are_done(crew, fails):
    words = arguments(fails, waits=500)
    asked = []
    with pytest.raises(ValueError, match="a part fails"):
        run(crew, words, 3, lambda: asked.append(True))
    assert words[DONE : DONE + 3].tolist() == [int(k != fails) for k in range(3)]
    assert asked == [True]
    assert run(crew, arguments(), 3) == [3, 13, 23]  # nothing left over from before


class Interrupted:
    """The functions of a crew, with Ctrl-C pressed when one of them begins or has ended."""

    def __init__(self, calls, name, before):
        self._calls, self._name, self._before, self._pressed = calls, name, before, False

    def __getattr__(self, name):
        function = getattr(self._calls, name)
        if name != self._name:
            return function

        def pressed(*numbers):
            if self._before and not self._pressed:
                self._pressed = True
                raise KeyboardInterrupt
            function(*numbers)
            if not self._pressed:
                self._pressed = True
                raise KeyboardInterrupt

        return pressed


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize(("name", "fails", "error"), [("lead", -1, KeyboardInterrupt), ("join", 0, ValueError)])
def test_ctrl_c_waits_for_those_who_are_at_work(crew, name, fails, error, before, monkeypatch):
    words = arguments(fails, waits=500)
    with monkeypatch.context() as patch:
        patch.setattr(crew, "_calls", Interrupted(crew._calls, name, before))
        with pytest.raises(error):
            run(crew, words, 3)
    was_called = not (name == "lead" and before)
    assert words[DONE : DONE + 3].tolist() == [int(was_called and fails != 0), int(was_called), int(was_called)]
    assert run(crew, arguments(), 3) == [3, 13, 23]


def test_two_threads_cannot_use_it_at_once(crew):
    errors = []

    def other():
        try:
            run(crew, arguments(), 2)
        except HurtleError as error:
            errors.append(str(error))

    def meanwhile():
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()

    with pytest.raises(ValueError, match="a part fails"):
        run(crew, arguments(fails=0), 2, meanwhile)
    assert len(errors) == 1
    assert "at the same time" in errors[0]


class Owner:
    """Has a crew that it is called by when a part fails."""

    def __init__(self):
        self.crew = Crew(3)

    def on_error(self):
        pass


@pytest.mark.parametrize("fails", [-1, 0, 2])
def test_a_call_keeps_nothing_alive(fails):
    before, owner = set(threading.enumerate()), Owner()
    helpers = set(threading.enumerate()) - before
    try:
        run(owner.crew, arguments(fails), 3, owner.on_error)
    except ValueError:
        assert fails >= 0
    del owner
    gc.collect()
    for helper in helpers:
        helper.join(300)
        assert not helper.is_alive()


def test_a_start_that_fails_leaves_no_helper(monkeypatch):
    before, start = set(threading.enumerate()), threading.Thread.start

    def fail_at_second(thread):
        if len(set(threading.enumerate()) - before) == 1:
            raise RuntimeError("can't start new thread")
        start(thread)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fail_at_second)
        with pytest.raises(RuntimeError, match="can't start"):
            Crew(4)
    for helper in set(threading.enumerate()) - before:
        helper.join(300)
        assert not helper.is_alive()


def test_helpers_end_with_close_or_with_the_crew():
    for by_close in (True, False):
        before, crew = set(threading.enumerate()), Crew(3)
        run(crew, arguments(), 3)
        helpers = set(threading.enumerate()) - before
        assert len(helpers) == 2
        if by_close:
            crew.close()
            assert not any(helper.is_alive() for helper in helpers)
            crew.close()
        else:
            del crew
            gc.collect()
            for helper in helpers:
                helper.join(300)
                assert not helper.is_alive()


def test_a_closed_crew_starts_again(crew):
    run(crew, arguments(), 3)
    crew.close()
    assert run(crew, arguments(), 2) == [2, 12]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_has_helpers_of_its_own(crew):
    unused = Crew(2)
    run(crew, arguments(), 2)
    run(unused, arguments(), 2)
    child = os.fork()
    if child == 0:
        unused.close()  # does not wait for threads that only the parent has
        os._exit(0 if run(crew, arguments(), 2) == [2, 12] else 1)
    deadline = time.monotonic() + 300
    while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0):
        assert time.monotonic() < deadline, "the child hangs"
        time.sleep(0.01)
    assert os.waitstatus_to_exitcode(ended[1]) == 0
    assert run(crew, arguments(), 2) == [2, 12]
    unused.close()


def test_many_threads_may_make_envs_at_once(tmp_path, monkeypatch):
    from hurtle.native import build

    monkeypatch.setenv("HURTLE_CACHE_DIR", str(tmp_path))
    build.cache_folder.cache_clear()
    errors = []

    def make():
        try:
            vec = hurtle.make_vec("bandit", 4, num_actions=7)
            vec.reset(seed=0)
            vec.step(np.zeros(4, np.int64))
        except BaseException as error:
            errors.append(error)

    makers = [threading.Thread(target=make) for _ in range(4)]
    for maker in makers:
        maker.start()
    for maker in makers:
        maker.join(300)
        assert not maker.is_alive()
    build.cache_folder.cache_clear()
    assert errors == []
