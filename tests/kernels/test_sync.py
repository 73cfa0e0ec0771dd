"""The barrier: nobody passes before all are there, and everyone leaves on an abort."""

import threading
import time

import numpy as np
from numba import njit

from hurtle.kernels.loader import load_kernels

sync = load_kernels().sync
wait_for_all = sync.wait_for_all


@njit(nogil=True)
def count_together(barrier, threads, rounds, mine, counts):
    """Each round, add to the own count, wait, and look whether everyone has; returns how often someone had not."""
    wrong = 0
    for r in range(rounds):
        counts[mine] += 1
        if not wait_for_all(barrier, threads):
            return -1
        for k in range(threads):
            wrong += counts[k] != r + 1
        if not wait_for_all(barrier, threads):
            return -1
    return wrong


def in_threads(count, function):
    found = [None] * count

    def run(k):
        found[k] = function(k)

    threads = [threading.Thread(target=run, args=(k,)) for k in range(count)]
    for thread in threads:
        thread.start()
    return threads, found


def test_nobody_passes_before_all_are_there_also_with_more_threads_than_cores():
    count_together(sync.new_barrier(), 1, 1, 0, np.zeros(1, np.int64))  # compiled
    for count in (2, 5):
        barrier, counts = sync.new_barrier(), np.zeros(count, np.int64)
        threads, found = in_threads(count, lambda k, n=count, b=barrier, c=counts: count_together(b, n, 300, k, c))
        for thread in threads:
            thread.join(timeout=300)
        assert found == [0] * count


def test_an_abort_frees_those_who_wait():
    barrier, counts = sync.new_barrier(), np.zeros(3, np.int64)
    threads, found = in_threads(2, lambda k: count_together(barrier, 3, 1, k, counts))  # the third never comes
    time.sleep(0.05)
    sync.abort(barrier)
    for thread in threads:
        thread.join(timeout=300)
    assert found == [-1, -1]
