"""Several updates in one call: rollout, gradient steps, rollout, gradient steps, …, without Python in between.

Each phase runs on its own number of threads; barriers separate them. Rollout and gradient steps are called by address.
"""

from __future__ import annotations

import numpy as np

from hurtle.kernels.error_codes import NO_ERROR
from hurtle.native.intrinsics import call_env, nanoseconds

from .host import entry, jit, reordering
from .memory import ANY, doubles_at, floats_at, ints_at, view
from .rollout_job import J
from .sync import wait_for_all
from .update import jobs_at

_ADDRESSES = """
collect collect_call list_inputs listing learn learn_job barrier errors cuts final_steps drawn returns advantages
learning_rates clip_ranges explained
"""
_NUMBERS = """
collectors learners updates minibatches num_steps num_rows num_envs num_metrics num_finals
done failed unlisted collect_ns learn_ns
"""
UPDATES = np.dtype([(name, np.int64) for name in (_ADDRESSES + _NUMBERS).split()])
"""The arguments: addresses of functions, their arguments and arrays, then sizes. `done` counts the updates.

`list_inputs` is 0 if learners read observations as they are. `unlisted`: the last rollout has too many nonzeros to list.
"""
updates_at = view(UPDATES)


@entry
def run_updates(job, thread, threads):
    """Run the updates of the job at that address as one of `threads` threads; returns the lowest error of a rollout.

    It ends early after such an error, if a gradient is not finite, or if observations cannot be listed. Episodes of the u-th
    rollout go to the u-th part of their arrays.
    """
    j = updates_at(job, 1)[0]
    barrier, errors = ints_at(j.barrier, ANY), ints_at(j.errors, j.collectors)
    error, before = np.int64(NO_ERROR), np.int64(0)
    for u in range(j.updates):
        if thread == 0:
            _clear(j)
        if thread < j.collectors and u > 0:
            _advance(j, thread)
        if not wait_for_all(barrier, threads) or j.failed:
            return error
        if thread == 0:
            before = _took(j, before, u > 0)
            _describe_learning(j, u)
        if thread < j.collectors:
            errors[thread] = call_env(j.collect, (j.collect_call, thread, j.collectors))
        if not wait_for_all(barrier, threads):
            return error
        error = _lowest(errors)
        if error != NO_ERROR:
            return error
        if thread == 0:
            now = nanoseconds()
            j.collect_ns += now - before
            before = now
            _finish_rollout(j, u)
        if j.list_inputs:
            if thread == 0:
                j.unlisted = 1 - call_env(j.list_inputs, (j.listing,))
            if not wait_for_all(barrier, threads) or j.unlisted:
                return error
        if thread < j.learners:
            steps = call_env(j.learn, (j.learn_job, thread, j.learners))
            if steps < j.minibatches:
                j.failed = 1
            elif thread == 0:
                j.done = u + 1
    if thread == 0:
        _took(j, before, True)
    return error


@jit
def _took(j, before, has_learned):
    """Count the time since `before` as learning; returns the time now."""
    now = nanoseconds()
    if has_learned:
        j.learn_ns += now - before
    return now


@jit
def _clear(j):
    """Forget the truncated episodes of the last rollout."""
    ints_at(j.cuts, j.num_rows)[:] = 0
    ints_at(j.final_steps, j.num_finals)[:] = -1


@jit
def _advance(j, thread):
    """Move on to the part of the episodes' arrays for the next rollout."""
    own = ints_at(ints_at(j.collect_call, ANY)[2 + 3 * thread], J.size)
    rows, envs = j.num_steps * j.num_rows, j.num_steps * j.num_envs
    own[J.ended] += rows
    own[J.episode_returns] += 4 * rows
    own[J.episode_lengths] += 4 * rows
    if j.num_metrics:
        own[J.over] += envs
        own[J.metrics] += 4 * envs * j.num_metrics


@jit
def _describe_learning(j, u):
    """The minibatches and settings of the u-th update; learners wait meanwhile."""
    learning = jobs_at(j.learn_job, 1)[0]
    learning.first, learning.last = u * j.minibatches, (u + 1) * j.minibatches
    learning.learning_rate = doubles_at(j.learning_rates, j.updates)[u]
    learning.clip_range = doubles_at(j.clip_ranges, j.updates)[u]


@jit
def _finish_rollout(j, u):
    """Count the actions, and see how well the values explain the returns."""
    drawn = ints_at(j.drawn, j.num_rows)
    for row in range(j.num_rows):
        drawn[row] += j.num_steps
    doubles_at(j.explained, j.updates)[u] = _explained(j.returns, j.advantages, j.num_steps * j.num_rows)


@entry
def explained_variance(returns, advantages, size):
    """1 − Var(advantages) / Var(returns) of the arrays at these addresses; NaN if returns do not vary."""
    return _explained(returns, advantages, size)


@jit
def _explained(returns, advantages, size):
    spread = _squares(floats_at(returns, size))
    return np.nan if spread == 0.0 else 1.0 - _squares(floats_at(advantages, size)) / spread


@reordering
def _squares(numbers):
    """The sum of the squared distances from the mean."""
    total, squares = 0.0, 0.0
    for k in range(len(numbers)):
        total += numbers[k]
    mean = total / len(numbers)
    for k in range(len(numbers)):
        squares += (numbers[k] - mean) * (numbers[k] - mean)
    return squares


@jit
def _lowest(errors):
    found = errors[0]
    for k in range(1, len(errors)):
        found = min(found, errors[k])
    return found
