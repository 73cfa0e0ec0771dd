"""The most likely actions instead of sampled ones: functions to call in place of those of `head_calls.sample_address`.

They take the same twelve int64 and ignore uniforms and scratch. Log-probabilities are not computed but written as 0.
"""

from __future__ import annotations

from functools import cache

from .choosing import _best, _beta_mean
from .host import address_of_function, f4
from .memory import ANY, bools_at, floats_at, ints_at
from .policy_table import BETA, GAUSSIAN, SQUASHED_GAUSSIAN


def _mode_choices(nvec, choices, outputs, stride, rows, log_std, uniforms, masks, has_masks, actions, log_probs, scratch):
    options, into, probs = ints_at(nvec, choices), ints_at(actions, ANY), floats_at(log_probs, ANY)
    given, legal, total = floats_at(outputs, ANY), bools_at(masks, ANY if has_masks != 0 else 0), 0
    for c in range(choices):
        total += options[c]
    for q in range(rows):
        first = 0
        for c in range(choices):
            into[q * choices + c] = _best(given, q * stride + first, options[c], legal, q * total + first)
            first += options[c]
        probs[q] = f4(0.0)


def _mode_gaussian(nvec, choices, outputs, stride, rows, log_std, uniforms, masks, has_masks, actions, log_probs, scratch):
    size, given, into = ints_at(nvec, choices)[0], floats_at(outputs, ANY), floats_at(actions, ANY)
    for q in range(rows):
        for d in range(size):
            into[q * size + d] = given[q * stride + d]
        floats_at(log_probs, ANY)[q] = f4(0.0)


def _mode_beta(nvec, choices, outputs, stride, rows, log_std, uniforms, masks, has_masks, actions, log_probs, scratch):
    size, given, into = ints_at(nvec, choices)[0], floats_at(outputs, ANY), floats_at(actions, ANY)
    for q in range(rows):
        for d in range(size):
            into[q * size + d] = _beta_mean(given[q * stride + d], given[q * stride + size + d])
        floats_at(log_probs, ANY)[q] = f4(0.0)


_MODE = {GAUSSIAN: _mode_gaussian, BETA: _mode_beta, SQUASHED_GAUSSIAN: _mode_gaussian}


@cache
def mode_address(kind: int) -> int:
    """The address of the function for a kind of head."""
    return address_of_function(_MODE.get(kind, _mode_choices), 12)
