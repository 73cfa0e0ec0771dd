"""Acting for one step of many rows, called from Python between the steps of envs that are not compiled.

observations → normalized → network → sampled actions, log-probs, values → the env's actions. rollout.py does the same inside
its loop over native envs. Given actions can be judged instead of sampled. Knows nothing of envs or losses.
"""

from __future__ import annotations

import math

import numpy as np

from .cells import keep, recall
from .head_calls import call_sample, call_score
from .host import TILE, entry, jit
from .memory import ANY, bools_at, doubles_at, floats_at, ints_at, places_at, table_at, view
from .network import COLUMNS, STRIDE, WORK, call_forward
from .observing import item_size, normalize_f4, normalize_f8, read_nested, read_tile
from .policy_table import LISTED, NUM_INPUTS, NUM_NUMBERS, OBS_DTYPE
from .rollout import draw, highest, send_choices, send_numbers

VALUE, CHOOSE, JUDGE = range(3)
"""What `act` does: only values; actions too; or log-probs of actions that are there already."""
_ARRAYS = """
table weights layers nvec obs inputs masks choices numbers log_probs values sent rows streams drawn mean std entropies
action_start action_low action_range bound_low bound_high x listed_values lists work scratch uniforms states starts
"""
_INTS = """
forward sample score num_layers split actor critic num_values head_kind num_choices action_size mask_size has_masks log_std_at
num_uniforms normalizes is_double is_box scaling memory states_size state_rows
"""
JOB = np.dtype([(name, np.int64) for name in (*_ARRAYS.split(), *_INTS.split())])
"""The arguments: addresses of arrays, and sizes.

`table` describes the inputs, see policy_table.py. From `obs` to `values` the arrays are fields of a rollout; `obs`, as the env
returned them, are read only to normalize them into `inputs`. `rows` are the rows that act, whose `streams` they draw from at
step `drawn`; `sent` gets their actions as the env expects them. If the policy has a memory, `states` are those of all
`state_rows` rows, see cells.py, and `starts` says which of the rows that act begin an episode.
"""
_jobs_at, _words_at = view(JOB), view(np.uint64)


@entry
def act(job, first, count, does):
    """Act for `count` rows, at [first, first + count) of the flat fields; returns how many log-probs are not finite.

    `does` is VALUE, with which no memory changes, CHOOSE or JUDGE.
    """
    j = _jobs_at(job, 1)[0]
    bad = 0
    for tile in range(0, count, TILE):
        bad += _act_for_tile(j, first + tile, tile, min(TILE, count - tile), does)
    return bad


@entry
def read_rows(table, obs, count, into):
    """Read `count` nested observations at an address as network inputs, [count, inputs]."""
    t = ints_at(table, ANY)
    size, x = t[NUM_NUMBERS] * item_size(t[OBS_DTYPE]), floats_at(into, ANY)
    for n in range(count):
        read_nested(t, obs + n * size, x, n * t[NUM_INPUTS])


@jit
def _act_for_tile(j, at, tile, rows, does):
    """Act for `rows` rows, whose fields begin at `at`, and that are those of `rows` from `tile` on."""
    t, x, work = ints_at(j.table, ANY), floats_at(j.x, ANY), floats_at(j.work, ANY)
    values, lists = floats_at(j.listed_values, ANY), places_at(j.lists, ANY)
    weights, layers = floats_at(j.weights, ANY), table_at(j.layers, j.num_layers, COLUMNS)
    if j.normalizes:
        _normalize(j, at, rows, t[NUM_NUMBERS])
    listed = read_tile(t, j.inputs + at * t[NUM_NUMBERS] * item_size(t[OBS_DTYPE]), rows, x, values, lists)
    given, stride, places = (values, t[LISTED], lists) if listed else (x, t[NUM_INPUTS], lists[:0])
    bad, states, acting, starts = 0, floats_at(j.states, j.states_size), ints_at(j.rows, ANY), bools_at(j.starts, ANY)
    if j.memory >= 0:
        for q in range(rows):
            recall(layers, j.memory, states, j.state_rows, acting[tile + q], starts[tile + q], work, q)
    if does != VALUE or j.split == j.num_layers:
        call_forward(j.forward, weights, layers, 0, j.split, given, 0, stride, rows, work, places)
    if j.memory >= 0 and does != VALUE:
        for q in range(rows):
            keep(layers, j.memory, states, j.state_rows, acting[tile + q], work, q)
    if does == CHOOSE:
        bad = _choose(j, layers, weights, work, at, tile, rows)
    elif does == JUDGE:
        _judge(j, layers, weights, work, at, rows)
    if j.split < j.num_layers:  # a separate critic, in the same workspace
        call_forward(j.forward, weights, layers, j.split, j.num_layers, given, 0, stride, rows, work, places)
    found, value, value_stride = floats_at(j.values, ANY), layers[j.critic, WORK], layers[j.critic, STRIDE]
    for q in range(rows):
        found[at + q] = highest(work, value + q * value_stride, j.num_values)
    return bad


@jit
def _normalize(j, at, rows, size):
    """Normalize observations into the rollout's inputs."""
    mean, std, into = doubles_at(j.mean, size), doubles_at(j.std, size + 1), floats_at(j.inputs, ANY)
    for n in range(at, at + rows):
        if j.is_double:
            normalize_f8(j.obs + n * size * 8, size, mean, std, into, n * size)
        else:
            normalize_f4(j.obs + n * size * 4, size, mean, std, into, n * size)


@jit
def _judge(j, layers, weights, work, at, rows):
    """Log-probs of actions under the policy's outputs."""
    size = j.action_size
    call_score(
        j.score, j.head_kind, ints_at(j.nvec, j.num_choices), work, layers[j.actor, WORK], layers[j.actor, STRIDE], rows,
        weights, j.log_std_at, bools_at(j.masks, ANY), at * j.mask_size, j.has_masks, ints_at(j.choices, ANY)[at * size :],
        floats_at(j.numbers, ANY)[at * size :], floats_at(j.log_probs, ANY)[at:], floats_at(j.entropies, ANY),
        floats_at(j.scratch, ANY),
    )  # fmt: skip


@jit
def _choose(j, layers, weights, work, at, tile, rows):
    """Sample actions from the policy's outputs; returns how many log-probs are not finite."""
    size, each, nvec, uniforms = j.action_size, j.num_uniforms, ints_at(j.nvec, j.num_choices), floats_at(j.uniforms, ANY)
    acting, streams, drawn = ints_at(j.rows, ANY), _words_at(j.streams, ANY), ints_at(j.drawn, ANY)
    for q in range(rows):
        row = acting[tile + q]
        draw(streams[row], drawn[row], uniforms, q * each, each)
        drawn[row] += 1
    choices, numbers, log_probs = ints_at(j.choices, ANY), floats_at(j.numbers, ANY), floats_at(j.log_probs, ANY)
    call_sample(
        j.sample, j.head_kind, nvec, work, layers[j.actor, WORK], layers[j.actor, STRIDE], rows, weights, j.log_std_at,
        uniforms, bools_at(j.masks, ANY), at * j.mask_size, j.has_masks, choices, at * size, numbers, at * size, log_probs, at,
        floats_at(j.scratch, ANY),
    )  # fmt: skip
    if j.is_box:
        bounds = (
            floats_at(j.bound_low, size),
            floats_at(j.bound_high, size),
            doubles_at(j.action_low, size),
            doubles_at(j.action_range, size),
        )
        send_numbers(numbers[at * size :], floats_at(j.sent, ANY)[tile * size :], bounds, j.scaling, rows, size)
    else:
        send_choices(choices[at * size :], ints_at(j.sent, ANY)[tile * size :], ints_at(j.action_start, size), rows, size)
    bad = 0
    for q in range(rows):
        bad += not math.isfinite(log_probs[at + q])
    return bad
