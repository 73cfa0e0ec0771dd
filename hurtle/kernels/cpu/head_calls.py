"""The functions of heads.py by address: compiled separately from their callers, and only for the kind of head in use.

Every function takes twelve int64: addresses of arrays at the tile's first row, and sizes.
"""

from __future__ import annotations

from functools import cache

from .exploring import sample_greedy, sample_tanh
from .heads import (
    gaussian_entropy,
    gradient_beta,
    gradient_choices,
    gradient_gaussian,
    gradient_rows,
    sample_beta,
    sample_choices,
    sample_gaussian,
    sample_rows,
    score_beta,
    score_choices,
    score_gaussian,
    score_rows,
)
from .host import CHECKED, TILE, address_of_function, f4, jit
from .memory import ANY, address_of, bools_at, call, floats_at, ints_at
from .policy_table import BETA, EPSILON_GREEDY, GAUSSIAN, SQUASHED_GAUSSIAN


def _sample_choices(nvec, choices, outputs, stride, rows, log_std, uniforms, masks, has_masks, actions, log_probs, scratch):
    given, legal = (floats_at(outputs, ANY), 0, stride, rows), (bools_at(masks, ANY), 0, has_masks != 0)
    drawn, probs, space = floats_at(uniforms, ANY), floats_at(log_probs, ANY), floats_at(scratch, ANY)
    sample_choices(ints_at(nvec, choices), given, drawn, legal, ints_at(actions, ANY), 0, probs, 0, space)


def _sample_gaussian(nvec, choices, outputs, stride, rows, log_std, uniforms, masks, has_masks, actions, log_probs, scratch):
    given, size = (floats_at(outputs, ANY), 0, stride, rows), ints_at(nvec, choices)[0]
    drawn, probs, space = floats_at(uniforms, ANY), floats_at(log_probs, ANY), floats_at(scratch, ANY)
    sample_gaussian(size, given, floats_at(log_std, ANY), 0, drawn, floats_at(actions, ANY), 0, probs, 0, space)


def _sample_beta(nvec, choices, outputs, stride, rows, log_std, uniforms, masks, has_masks, actions, log_probs, scratch):
    given, size = (floats_at(outputs, ANY), 0, stride, rows), ints_at(nvec, choices)[0]
    sample_beta(size, given, floats_at(uniforms, ANY), floats_at(actions, ANY), 0, floats_at(log_probs, ANY), 0)


def _score_choices(nvec, choices, outputs, stride, rows, log_std, masks, has_masks, actions, log_probs, entropies, scratch):
    given, legal = (floats_at(outputs, ANY), 0, stride, rows), (bools_at(masks, ANY), 0, has_masks != 0)
    probs, bonus, space = floats_at(log_probs, ANY), floats_at(entropies, ANY), floats_at(scratch, ANY)
    score_choices(ints_at(nvec, choices), given, legal, ints_at(actions, ANY), probs, bonus, space)


def _score_gaussian(nvec, choices, outputs, stride, rows, log_std, masks, has_masks, actions, log_probs, entropies, scratch):
    given, size = (floats_at(outputs, ANY), 0, stride, rows), ints_at(nvec, choices)[0]
    stds, probs, space = floats_at(log_std, ANY), floats_at(log_probs, ANY), floats_at(scratch, ANY)
    score_gaussian(size, given, stds, 0, floats_at(actions, ANY), 0, probs, 0, space)
    floats_at(entropies, rows)[:] = gaussian_entropy(size, stds, 0)


def _score_beta(nvec, choices, outputs, stride, rows, log_std, masks, has_masks, actions, log_probs, entropies, scratch):
    given, size = (floats_at(outputs, ANY), 0, stride, rows), ints_at(nvec, choices)[0]
    probs, bonus, space = floats_at(log_probs, ANY), floats_at(entropies, ANY), floats_at(scratch, ANY)
    score_beta(size, given, floats_at(actions, ANY), probs, bonus, space)


def _gradient_choices(
    nvec, choices, rows, log_std, masks, has_masks, d_log_probs, d_entropies, scratch, grads, stride, d_log_std
):  # fmt: skip
    legal, into = (bools_at(masks, ANY), 0, has_masks != 0), (floats_at(grads, ANY), 0, stride)
    floats_at(grads, rows * stride)[:] = f4(0.0)
    slopes, bonus, space = floats_at(d_log_probs, ANY), floats_at(d_entropies, TILE), floats_at(scratch, ANY)
    gradient_choices(ints_at(nvec, choices), rows, legal, slopes, bonus, space, into)


def _gradient_gaussian(
    nvec, choices, rows, log_std, masks, has_masks, d_log_probs, d_entropies, scratch, grads, stride, d_log_std
):  # fmt: skip
    size, into = ints_at(nvec, choices)[0], (floats_at(grads, ANY), 0, stride)
    floats_at(grads, rows * stride)[:] = f4(0.0)
    slopes, bonus, space = floats_at(d_log_probs, ANY), floats_at(d_entropies, TILE), floats_at(scratch, ANY)
    gradient_gaussian(size, rows, floats_at(log_std, ANY), 0, slopes, bonus, space, into, floats_at(d_log_std, ANY), 0)


def _gradient_beta(
    nvec, choices, rows, log_std, masks, has_masks, d_log_probs, d_entropies, scratch, grads, stride, d_log_std
):  # fmt: skip
    size, into = ints_at(nvec, choices)[0], (floats_at(grads, ANY), 0, stride)
    floats_at(grads, rows * stride)[:] = f4(0.0)
    slopes, bonus, space = floats_at(d_log_probs, ANY), floats_at(d_entropies, TILE), floats_at(scratch, ANY)
    gradient_beta(size, rows, slopes, bonus, space, into)


def _sample_greedy(nvec, choices, outputs, stride, rows, log_std, uniforms, masks, has_masks, actions, log_probs, scratch):
    count, given, epsilon = ints_at(nvec, choices)[0], floats_at(outputs, ANY), floats_at(log_std, 1)[0]
    drawn, probs, legal = floats_at(uniforms, ANY), floats_at(log_probs, ANY), bools_at(masks, ANY)
    sample_greedy(count, given, stride, rows, epsilon, drawn, legal, has_masks != 0, ints_at(actions, ANY), probs)


def _sample_tanh(nvec, choices, outputs, stride, rows, log_std, uniforms, masks, has_masks, actions, log_probs, scratch):
    size, given, numbers = ints_at(nvec, choices)[0], floats_at(outputs, ANY), floats_at(log_std, ANY)
    drawn, probs = floats_at(uniforms, ANY), floats_at(log_probs, ANY)
    sample_tanh(size, given, stride, rows, numbers, drawn, floats_at(actions, ANY), probs)


_SAMPLE = {
    GAUSSIAN: _sample_gaussian,
    BETA: _sample_beta,
    SQUASHED_GAUSSIAN: _sample_tanh,
    EPSILON_GREEDY: _sample_greedy,
}
_SCORE = {GAUSSIAN: _score_gaussian, BETA: _score_beta}
_GRADIENT = {GAUSSIAN: _gradient_gaussian, BETA: _gradient_beta}


@cache
def sample_address(kind: int) -> int:
    """The address for `call_sample`."""
    return address_of_function(_SAMPLE.get(kind, _sample_choices), 12)


@cache
def score_address(kind: int) -> int:
    """The address for `call_score`."""
    return address_of_function(_SCORE.get(kind, _score_choices), 12)


@cache
def gradient_address(kind: int) -> int:
    """The address for `call_gradient`."""
    return address_of_function(_GRADIENT.get(kind, _gradient_choices), 12)


@jit
def _actions_address(kind, ints, ints_at, floats, floats_at):
    is_choice = kind < GAUSSIAN or kind == EPSILON_GREEDY
    return address_of(ints, ints_at) if is_choice else address_of(floats, floats_at)


# `call_x(address, …)` calls `x` of heads.py through its address.

if CHECKED:

    @jit
    def call_sample(
        address, kind, nvec, outputs, at, stride, rows, log_std, log_std_at, uniforms, masks, masks_at, has_masks,
        ints, ints_at, floats, floats_at, log_probs, log_probs_at, scratch,
    ):  # fmt: skip
        """Call `sample_rows`."""
        sample_rows(
            kind, nvec, outputs, at, stride, rows, log_std, log_std_at, uniforms, masks, masks_at, has_masks,
            ints, ints_at, floats, floats_at, log_probs, log_probs_at, scratch,
        )  # fmt: skip

    @jit
    def call_score(
        address, kind, nvec, outputs, at, stride, rows, log_std, log_std_at, masks, masks_at, has_masks,
        ints, floats, log_probs, entropies, scratch,
    ):  # fmt: skip
        """Call `score_rows`."""
        score_rows(
            kind, nvec, outputs, at, stride, rows, log_std, log_std_at, masks, masks_at, has_masks,
            ints, floats, log_probs, entropies, scratch,
        )  # fmt: skip

    @jit
    def call_gradient(
        address, kind, nvec, outputs, at, stride, rows, log_std, log_std_at, masks, masks_at, has_masks,
        ints, floats, d_log_probs, d_entropies, scratch, grads, grads_at, grads_stride, d_log_std, d_log_std_at,
    ):  # fmt: skip
        """Call `gradient_rows`."""
        gradient_rows(
            kind, nvec, outputs, at, stride, rows, log_std, log_std_at, masks, masks_at, has_masks,
            ints, floats, d_log_probs, d_entropies, scratch, grads, grads_at, grads_stride, d_log_std, d_log_std_at,
        )  # fmt: skip

else:

    @jit
    def call_sample(
        address, kind, nvec, outputs, at, stride, rows, log_std, log_std_at, uniforms, masks, masks_at, has_masks,
        ints, ints_at, floats, floats_at, log_probs, log_probs_at, scratch,
    ):  # fmt: skip
        """Call `sample_rows`."""
        call(
            address,
            (
                address_of(nvec, 0), len(nvec), address_of(outputs, at), stride, rows, address_of(log_std, log_std_at),
                address_of(uniforms, 0), address_of(masks, masks_at), has_masks,
                _actions_address(kind, ints, ints_at, floats, floats_at), address_of(log_probs, log_probs_at),
                address_of(scratch, 0),
            ),
        )  # fmt: skip

    @jit
    def call_score(
        address, kind, nvec, outputs, at, stride, rows, log_std, log_std_at, masks, masks_at, has_masks,
        ints, floats, log_probs, entropies, scratch,
    ):  # fmt: skip
        """Call `score_rows`."""
        call(
            address,
            (
                address_of(nvec, 0), len(nvec), address_of(outputs, at), stride, rows, address_of(log_std, log_std_at),
                address_of(masks, masks_at), has_masks, _actions_address(kind, ints, 0, floats, 0), address_of(log_probs, 0),
                address_of(entropies, 0), address_of(scratch, 0),
            ),
        )  # fmt: skip

    @jit
    def call_gradient(
        address, kind, nvec, outputs, at, stride, rows, log_std, log_std_at, masks, masks_at, has_masks,
        ints, floats, d_log_probs, d_entropies, scratch, grads, grads_at, grads_stride, d_log_std, d_log_std_at,
    ):  # fmt: skip
        """Call `gradient_rows`."""
        call(
            address,
            (
                address_of(nvec, 0), len(nvec), rows, address_of(log_std, log_std_at), address_of(masks, masks_at), has_masks,
                address_of(d_log_probs, 0), address_of(d_entropies, 0), address_of(scratch, 0), address_of(grads, grads_at),
                grads_stride, address_of(d_log_std, d_log_std_at),
            ),
        )  # fmt: skip
