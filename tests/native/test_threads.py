"""The helper threads: nothing hangs and no shard outlives its call, even after Ctrl-C, an error, a fork or close()."""

import os
import threading
import time

import numpy as np
import pytest

import hurtle
from hurtle.errors import HurtleError
from hurtle.native.threads import ShardThreads


def test_results_come_in_shard_order():
    threads = ShardThreads(10, 3)
    assert threads.run(lambda lo, hi: (lo, hi)) == [(0, 3), (3, 6), (6, 10)]
    threads.close()


def test_an_error_in_any_shard_is_raised_after_all_are_done():
    threads = ShardThreads(2, 2)
    done = []

    def job(lo, hi):
        if lo == 0:
            raise ValueError("shard 0")
        time.sleep(0.05)
        done.append(lo)

    with pytest.raises(ValueError, match="shard 0"):
        threads.run(job)
    assert done == [1]
    assert threads.run(lambda lo, hi: lo) == [0, 1]  # nothing left over from before
    threads.close()


def test_ctrl_c_waits_for_the_running_shard_and_leaves_no_stale_result():
    threads = ShardThreads(2, 2)
    done = []

    def interrupted(lo, hi):
        if lo == 0:
            raise KeyboardInterrupt
        time.sleep(0.05)
        done.append(lo)
        return "old"

    with pytest.raises(KeyboardInterrupt):
        threads.run(interrupted)
    assert done == [1]
    assert threads.run(lambda lo, hi: "new") == ["new", "new"]
    threads.close()


def test_a_closed_pool_refuses_to_run_and_its_threads_have_ended():
    before = set(threading.enumerate())
    threads = ShardThreads(2, 2)
    assert set(threading.enumerate()) - before
    threads.close()
    assert not set(threading.enumerate()) - before
    with pytest.raises(HurtleError, match="closed"):
        threads.run(lambda lo, hi: None)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_has_threads_of_its_own():
    threads, unused = ShardThreads(2, 2), ShardThreads(2, 2)
    threads.run(lambda lo, hi: lo)
    child = os.fork()
    if child == 0:
        unused.close()  # does not wait for threads that only the parent has
        os._exit(0 if threads.run(lambda lo, hi: lo) == [0, 1] else 1)
    deadline = time.monotonic() + 300
    while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0):
        assert time.monotonic() < deadline, "the child hangs"
        time.sleep(0.01)
    assert os.waitstatus_to_exitcode(ended[1]) == 0
    threads.close()
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
