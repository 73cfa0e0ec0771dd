"""The policy's memory in rollouts of native envs: states of rows into the workspace and back, and those of truncated episodes.

rollout.py calls it by address, and only for policies that have a memory: others do not compile it.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from .cells import STATES, keep, recall
from .host import TILE, address_of_function, jit
from .memory import ANY, floats_at, ints_at
from .network import OUTPUTS
from .rollout_job import J, bools, floats, ints, tables

RECALL, KEEP, KEEP_FINAL, RECALL_FINALS = 0, 1, 2, 3
i8 = np.int64


def _remember(job_at, what, first, count, work_at):
    job, work = ints_at(job_at, J.size), floats_at(work_at, ANY)
    layers, memory, rows = tables(job, J.layers), job[J.memory], job[J.num_rows]
    states, finals = floats(job, J.states), work[layers[memory, STATES] :]
    size = len(states) // rows  # of all parts
    if what == RECALL:  # rows [first, first + count), cleared where an episode begins
        beginning = bools(job, J.beginning)
        for q in range(count):
            recall(layers, memory, states, rows, first + q, beginning[first + q], work, i8(q))
    elif what == KEEP:
        for q in range(count):
            keep(layers, memory, states, rows, first + q, work, i8(q))
    elif what == KEEP_FINAL:  # of row `first`, as number `count` of the tile, and in its slot of the rollout
        slots, slot = i8(len(ints(job, J.final_steps))), (ints(job, J.cuts)[first] - 1) * rows + first
        _copy(states, rows, first, finals[: TILE * size], i8(TILE), count, layers[memory, OUTPUTS])
        if slot < slots:
            _copy(states, rows, first, floats(job, J.final_states), slots, slot, layers[memory, OUTPUTS])
    else:
        for q in range(count):
            recall(layers, memory, finals[: TILE * size], i8(TILE), i8(q), False, work, i8(q))


@jit
def _copy(source, rows, row, into, others, other, size):
    """Copy the state of a row of [parts, rows, size] to one of [parts, others, size]."""
    for part in range(len(source) // (rows * size)):
        for k in range(size):
            into[(part * others + other) * size + k] = source[(part * rows + row) * size + k]


@cache
def remember_address() -> int:
    """The address for `rollout.remember`."""
    return address_of_function(_remember, 5)
