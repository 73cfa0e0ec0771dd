"""Fewer garbage collections while code is compiled: nested, in threads, after errors and forks, and never for good."""

import gc
import os
import threading

import pytest

from hurtle.garbage import RARE_COLLECTIONS
from hurtle.native.build import COMPILING


@pytest.fixture(autouse=True)
def thresholds():
    before = gc.get_threshold()
    gc.set_threshold(700, 10, 200)
    yield
    assert gc.get_threshold() == (700, 10, 200)
    gc.set_threshold(*before)


def test_it_is_rare_inside_and_as_before_afterwards():
    with RARE_COLLECTIONS:
        assert gc.get_threshold() == (50_000, 20, 200)
        with pytest.raises(KeyError), RARE_COLLECTIONS, COMPILING:
            raise KeyError
        assert gc.get_threshold() == (50_000, 20, 200)


def test_threads_that_leave_in_another_order():
    inside, leave = threading.Event(), threading.Event()

    def stay():
        with RARE_COLLECTIONS:
            inside.set()
            leave.wait(10)

    thread = threading.Thread(target=stay)
    with RARE_COLLECTIONS:
        thread.start()
        assert inside.wait(10)
    assert gc.get_threshold()[0] == 50_000
    leave.set()
    thread.join()


def test_a_collector_that_is_off_stays_off():
    gc.set_threshold(0)
    with RARE_COLLECTIONS:
        assert gc.get_threshold()[0] == 0
    gc.set_threshold(700, 10, 200)


def test_a_child_forked_inside_goes_on():
    with COMPILING:
        if (child := os.fork()) == 0:
            with COMPILING:
                os._exit(gc.get_threshold()[0] // 50_000)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
