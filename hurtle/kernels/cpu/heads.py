"""Action distributions for a tile of rows: sample, log-probabilities, entropies and their gradients.

network outputs [rows, stride] → raw actions, log_probs, entropies → gradients of the outputs. `hurtle.policies.distributions`
is the reference; tests/kernels/test_heads.py compares them. Knows nothing of networks or losses.
"""

from __future__ import annotations

import math

import numpy as np

from .exploring import sample_greedy, sample_tanh
from .host import CHECKED, TILE, allocating, entry, f4, jit
from .memory import address_of, floats_at
from .policy_table import BETA, EPSILON_GREEDY, GAUSSIAN, SQUASHED_GAUSSIAN
from .vector_math import cos_turn, digamma, exp, lgamma, log, sigmoid, softplus, trigamma

GAMMA_TRIES = 8
"""Attempts of Marsaglia and Tsang's method for one Gamma; each needs three uniforms."""

_HALF_LOG_2PI = 0.5 * math.log(2.0 * math.pi)
_LOWEST = f4(np.finfo(np.float32).min)
_EDGE = f4(1e-6)
_OTHER_EDGE = f4(1.0 - 1e-6)
_ZERO, _ONE = np.int64(0), np.int64(1)  # a literal 0 has its own type, for which functions would be recompiled

# The scratch consists of tiles of TILE numbers, one per row. Loops run over full tiles, whatever `rows` is, so that every row
# goes through the same instructions. Each loop writes one or two tiles, since the compiler vectorizes only if few pairs of
# tiles might overlap. Tiles for choices, with N outputs and k choices: log-probabilities [N], probabilities [N], actions [k],
# entropies [k], and four temporaries. For a Gaussian: (action - mean) / std [D], and three temporaries. For a Beta: the
# slopes of log_prob and entropy with respect to each output, [2D] each, and two temporaries.
#
# Inside, `given` is (outputs, at, stride, rows), `legal` is (masks, masks_at, has_masks), `into` is (grads, grads_at,
# grads_stride).


def num_uniforms(kind: int, nvec: np.ndarray) -> int:
    """Uniforms per row that `sample_rows` reads."""
    if kind in (GAUSSIAN, SQUASHED_GAUSSIAN):
        return 2 * int(nvec[0])
    if kind == BETA:
        return 2 * GAMMA_TRIES * 3 * int(nvec[0])
    return len(nvec)


def scratch_size(kind: int, nvec: np.ndarray) -> int:
    """Scratch floats needed for a tile of rows."""
    outputs = int(np.sum(nvec))  # for a Beta, half the outputs
    tiles = 2 * outputs + 2 * len(nvec) + 4
    if kind in (GAUSSIAN, SQUASHED_GAUSSIAN):
        tiles = outputs + 3
    elif kind == BETA:
        tiles = 4 * outputs + 2
    return tiles * TILE


@entry
def sample_rows(
    kind, nvec, outputs, at, stride, rows, log_std, log_std_at, uniforms, masks, masks_at, has_masks,
    ints, ints_at, floats, floats_at, log_probs, log_probs_at, scratch,
):  # fmt: skip
    """Sample raw actions for at most TILE rows, as a function of the uniforms.

    Arrays are flat; floats are float32, k is len(nvec). `nvec`, int64, has the options of each choice, or [D] for a Gaussian or
    a Beta. Row q of the network's `outputs` begins at `at + q * stride`, a Gaussian's D numbers of `log_std` at `log_std_at`.
    `uniforms` in [0, 1) are [rows, num_uniforms]. Row q of `masks` (bool, True is legal) begins at `masks_at + q * sum(nvec)`;
    they are read only if `has_masks`. Row q's choices go to `ints` (int64) from `ints_at + q * k` on, other actions to `floats`
    from `floats_at + q * D` on, its log-probability to `log_probs[log_probs_at + q]`. `scratch` has `scratch_size` floats.
    """
    given = outputs, at, stride, rows
    if kind == GAUSSIAN:
        sample_gaussian(nvec[0], given, log_std, log_std_at, uniforms, floats, floats_at, log_probs, log_probs_at, scratch)
    elif kind == BETA:
        sample_beta(nvec[0], given, uniforms, floats, floats_at, log_probs, log_probs_at)
    elif kind == SQUASHED_GAUSSIAN:
        into, probs = floats[floats_at:], log_probs[log_probs_at:]
        sample_tanh(nvec[0], outputs[at:], stride, rows, log_std[log_std_at:], uniforms, into, probs)
    elif kind == EPSILON_GREEDY:
        legal_rows, into, probs = masks[masks_at:], ints[ints_at:], log_probs[log_probs_at:]
        sample_greedy(
            nvec[0], outputs[at:], stride, rows, log_std[log_std_at], uniforms, legal_rows, has_masks != 0, into, probs
        )
    else:
        legal = masks, masks_at, has_masks
        sample_choices(nvec, given, uniforms, legal, ints, ints_at, log_probs, log_probs_at, scratch)


@entry
def score_rows(
    kind, nvec, outputs, at, stride, rows, log_std, log_std_at, masks, masks_at, has_masks,
    ints, floats, log_probs, entropies, scratch,
):  # fmt: skip
    """Log-probabilities and entropies [rows] of at most TILE rows; leaves in `scratch` what `gradient_rows` needs.

    Arguments are those of `sample_rows`; raw actions are given, `ints` [rows, k] or `floats` [rows, D].
    """
    given = outputs, at, stride, rows
    if kind == GAUSSIAN:
        score_gaussian(nvec[0], given, log_std, log_std_at, floats, _ZERO, log_probs, _ZERO, scratch)
        entropy = gaussian_entropy(nvec[0], log_std, log_std_at)
        for q in range(rows):
            entropies[q] = entropy
    elif kind == BETA:
        score_beta(nvec[0], given, floats, log_probs, entropies, scratch)
    else:
        legal = masks, masks_at, has_masks
        score_choices(nvec, given, legal, ints, log_probs, entropies, scratch)


@entry
def gradient_rows(
    kind, nvec, outputs, at, stride, rows, log_std, log_std_at, masks, masks_at, has_masks,
    ints, floats, d_log_probs, d_entropies, scratch, grads, grads_at, grads_stride, d_log_std, d_log_std_at,
):  # fmt: skip
    """Gradients of a loss with respect to the network's outputs, after `score_rows` of the same rows with the same scratch.

    `d_log_probs` [rows] and `d_entropies` [TILE] are the loss's gradients with respect to the log-probabilities and entropies,
    all float32. Row q's `grads_stride` numbers go to `grads` from `grads_at + q * grads_stride` on, zeros beyond the outputs.
    A Gaussian's gradients with respect to log_std are added to `d_log_std` from `d_log_std_at` on, row by row.
    """
    into = grads, grads_at, grads_stride
    grads[grads_at : grads_at + rows * grads_stride] = f4(0.0)
    if kind == GAUSSIAN:
        gradient_gaussian(nvec[0], rows, log_std, log_std_at, d_log_probs, d_entropies, scratch, into, d_log_std, d_log_std_at)
    elif kind == BETA:
        gradient_beta(nvec[0], rows, d_log_probs, d_entropies, scratch, into)
    else:
        legal = masks, masks_at, has_masks
        gradient_choices(nvec, rows, legal, d_log_probs, d_entropies, scratch, into)


@jit
def _total(nvec):
    """`nvec.sum()`, but compiled in a tenth of the time."""
    total = _ZERO
    for options in nvec:
        total += options
    return total


@allocating
def _tile(scratch, n):
    """Tile n of the scratch, which must outlive it. A slice would count references, as slow as a few loops over tiles."""
    if CHECKED:
        return scratch[n * TILE : (n + 1) * TILE]
    return floats_at(address_of(scratch, n * TILE), TILE)


@jit
def _gather(source, at, stride, rows, tile):
    """tile[q] = source[at + q * stride]; zeros beyond the last row."""
    place, step = np.uint64(at), np.uint64(stride)  # unsigned: signed indices would need a check for negative ones
    for q in range(rows):
        tile[q] = source[place]
        place += step
    for q in range(rows, TILE):
        tile[q] = f4(0.0)


@jit
def _scatter(tile, rows, target, at, stride):
    """target[at + q * stride] = tile[q]."""
    place, step = np.uint64(at), np.uint64(stride)
    for q in range(rows):
        target[place] = tile[q]
        place += step


@jit
def _fill(tile, value):
    for q in range(TILE):
        tile[q] = value


# Choices


@jit
def sample_choices(nvec, given, uniforms, legal, ints, ints_at, log_probs, log_probs_at, scratch):
    """Inverse CDF: the first possible option whose cumulative probability exceeds the uniform."""
    rows = given[3]
    total, choices = _total(nvec), len(nvec)
    target, so_far = _tile(scratch, 2 * total), _tile(scratch, 2 * total + 1)  # where `score_rows` keeps actions and entropies
    largest, sums, chosen, picked = _working_tiles(scratch, total, choices)
    for q in range(rows):
        log_probs[log_probs_at + q] = f4(0.0)
    first = _ZERO
    for c in range(choices):
        _exponentials(first, nvec[c], total, given, legal, scratch, largest, sums)
        _gather(uniforms, c, choices, rows, target)
        for q in range(TILE):
            target[q] *= sums[q]
        _fill(so_far, f4(0.0))
        _fill(chosen, f4(-1.0))
        for j in range(nvec[c]):
            _choose(f4(j), _tile(scratch, total + first + j), target, so_far, chosen)
        for q in range(TILE):
            chosen[q] = f4(0.0) if chosen[q] < f4(0.0) else chosen[q]  # NaN
        _fill(picked, f4(0.0))
        for j in range(nvec[c]):
            _pick(f4(j), chosen, _tile(scratch, first + j), picked)
        for q in range(TILE):
            picked[q] = (picked[q] - largest[q]) - log(sums[q])
        for q in range(rows):
            ints[ints_at + q * choices + c] = np.int64(chosen[q])
            log_probs[log_probs_at + q] += picked[q]
        first += nvec[c]


@jit
def score_choices(nvec, given, legal, ints, log_probs, entropies, scratch):
    """Log-softmax of each choice, and its entropy."""
    rows = given[3]
    total, choices = _total(nvec), len(nvec)
    largest, sums, log_sums, picked = _working_tiles(scratch, total, choices)
    for q in range(rows):
        log_probs[q] = f4(0.0)
        entropies[q] = f4(0.0)
    first = _ZERO
    for c in range(choices):
        actions, entropy = _tile(scratch, 2 * total + c), _tile(scratch, 2 * total + choices + c)
        _exponentials(first, nvec[c], total, given, legal, scratch, largest, sums)
        _gather(ints, c, choices, rows, actions)
        for q in range(TILE):
            log_sums[q] = log(sums[q])
        for q in range(TILE):
            sums[q] = f4(1.0) / sums[q]
        _fill(picked, f4(0.0))
        _fill(entropy, f4(0.0))
        for j in range(first, first + nvec[c]):
            logits, probs = _tile(scratch, j), _tile(scratch, total + j)
            _normalize(logits, probs, largest, sums, log_sums)
            _pick(f4(j - first), actions, logits, picked)
            _add_entropy(logits, probs, entropy)
        for q in range(rows):
            log_probs[q] += picked[q]
            entropies[q] += entropy[q]
        first += nvec[c]


@jit
def gradient_choices(nvec, rows, legal, d_log_probs, d_entropies, scratch, into):
    """Gradients with respect to the logits of every choice."""
    masks, masks_at, has_masks = legal
    grads, grads_at, grads_stride = into
    total, choices = _total(nvec), len(nvec)
    slopes, result, _, _ = _working_tiles(scratch, total, choices)
    _gather(d_log_probs, _ZERO, _ONE, rows, slopes)
    first = _ZERO
    for c in range(choices):
        actions, entropy = _tile(scratch, 2 * total + c), _tile(scratch, 2 * total + choices + c)
        for j in range(first, first + nvec[c]):
            log_probs, probs = _tile(scratch, j), _tile(scratch, total + j)
            _choice_gradient(f4(j - first), actions, log_probs, probs, entropy, slopes, d_entropies, result)
            if has_masks:
                for q in range(rows):
                    result[q] = result[q] if masks[masks_at + q * total + j] else f4(0.0)
            _scatter(result, rows, grads, grads_at + j, grads_stride)
        first += nvec[c]


@jit
def _working_tiles(scratch, total, choices):
    n = 2 * (total + choices)
    return _tile(scratch, n), _tile(scratch, n + 1), _tile(scratch, n + 2), _tile(scratch, n + 3)


@jit
def _exponentials(first, options, total, given, legal, scratch, largest, sums):
    """A choice's logits, their exponentials relative to the largest, and the sums of those."""
    outputs, at, stride, rows = given
    masks, masks_at, has_masks = legal
    _fill(largest, f4(-np.inf))
    for j in range(first, first + options):
        _gather(outputs, at + j, stride, rows, _tile(scratch, j))
        _raise_to(largest, _tile(scratch, j))
    if has_masks:
        for q in range(TILE):
            sums[q] = largest[q] - largest[q]  # NaN where the unmasked distribution is NaN, else 0
        _fill(largest, _LOWEST)
        for j in range(first, first + options):
            logits = _tile(scratch, j)
            for q in range(rows):
                logits[q] = logits[q] + sums[q] if masks[masks_at + q * total + j] else _LOWEST
            _raise_to(largest, logits)
    _fill(sums, f4(0.0))
    for j in range(first, first + options):
        _exponential(_tile(scratch, j), largest, _tile(scratch, total + j), sums)


@jit
def _raise_to(largest, logits):
    """The larger one; NaN if one is NaN."""
    for q in range(TILE):
        largest[q] = largest[q] if (logits[q] <= largest[q]) | (largest[q] != largest[q]) else logits[q]


@jit
def _exponential(logits, largest, exponentials, sums):
    for q in range(TILE):
        e = exp(logits[q] - largest[q])
        exponentials[q] = e
        sums[q] += e


@jit
def _choose(option, exponentials, target, so_far, chosen):
    for q in range(TILE):
        so_far[q] += exponentials[q]
    for q in range(TILE):
        here = (chosen[q] < f4(0.0)) & (so_far[q] > target[q]) & (exponentials[q] > f4(0.0))
        chosen[q] = option if here else chosen[q]


@jit
def _pick(option, actions, values, picked):
    for q in range(TILE):
        value = values[q]
        picked[q] = value if actions[q] == option else picked[q]


@jit
def _normalize(logits, exponentials, largest, inverses, log_sums):
    """Replace them by log-probabilities and probabilities."""
    for q in range(TILE):
        logits[q] = (logits[q] - largest[q]) - log_sums[q]
    for q in range(TILE):
        exponentials[q] *= inverses[q]


@jit
def _add_entropy(log_probs, probs, entropy):
    """The entropy; options of probability 0 get log-probability 0, so that they add nothing here or to the gradient."""
    for q in range(TILE):
        log_prob = log_probs[q]
        log_probs[q] = f4(0.0) if probs[q] <= f4(0.0) else log_prob
    for q in range(TILE):
        entropy[q] -= probs[q] * log_probs[q]


@jit
def _choice_gradient(option, actions, log_probs, probs, entropy, slopes, d_entropies, result):
    """The gradient with respect to a logit: [chosen] - p for the log-probability, -p (log p + H) for the entropy."""
    for q in range(TILE):
        chosen = f4(1.0) if actions[q] == option else f4(0.0)
        result[q] = slopes[q] * (chosen - probs[q]) - d_entropies[q] * (probs[q] * (log_probs[q] + entropy[q]))


# Gaussians


@jit
def sample_gaussian(size, given, log_std, log_std_at, uniforms, floats, floats_at, log_probs, log_probs_at, scratch):
    """Box–Muller: uniforms 2d and 2d + 1 give dimension d."""
    outputs, at, stride, rows = given
    radii, turns = _tile(scratch, size), _tile(scratch, size + 1)
    for d in range(size):
        _gather(uniforms, 2 * d, 2 * size, rows, radii)
        _gather(uniforms, 2 * d + 1, 2 * size, rows, turns)
        std = exp(log_std[log_std_at + d])
        means = _tile(scratch, d)
        _gather(outputs, at + d, stride, rows, means)
        for q in range(TILE):
            radii[q] = means[q] + std * _normal(radii[q], turns[q])
        _scatter(radii, rows, floats, floats_at + d, size)
    score_gaussian(size, given, log_std, log_std_at, floats, floats_at, log_probs, log_probs_at, scratch)


@jit
def _normal(uniform, turn):
    return np.sqrt(f4(-2.0) * log(f4(1.0) - uniform)) * cos_turn(turn)


@jit
def score_gaussian(size, given, log_std, log_std_at, floats, floats_at, log_probs, log_probs_at, scratch):
    """Log-densities; leaves the deviations in the scratch."""
    outputs, at, stride, rows = given
    actions, sums = _tile(scratch, size), _tile(scratch, size + 1)
    _fill(sums, f4(0.0))
    for d in range(size):
        deviations = _tile(scratch, d)
        _gather(outputs, at + d, stride, rows, deviations)
        _gather(floats, floats_at + d, size, rows, actions)
        inverse, norm = exp(-log_std[log_std_at + d]), log_std[log_std_at + d] + f4(_HALF_LOG_2PI)
        for q in range(TILE):
            deviations[q] = (actions[q] - deviations[q]) * inverse
        for q in range(TILE):
            sums[q] += f4(-0.5) * (deviations[q] * deviations[q]) - norm
    for q in range(rows):
        log_probs[log_probs_at + q] = sums[q]


@jit
def gaussian_entropy(size, log_std, log_std_at):
    """The same for every row."""
    entropy = f4(0.0)
    for d in range(size):
        entropy += log_std[log_std_at + d] + f4(0.5 + _HALF_LOG_2PI)
    return entropy


@jit
def gradient_gaussian(size, rows, log_std, log_std_at, d_log_probs, d_entropies, scratch, into, d_log_std, d_log_std_at):
    """Gradients with respect to the means and log_std."""
    grads, grads_at, grads_stride = into
    slopes, of_mean, of_log_std = _tile(scratch, size), _tile(scratch, size + 1), _tile(scratch, size + 2)
    _gather(d_log_probs, _ZERO, _ONE, rows, slopes)
    for d in range(size):
        deviations = _tile(scratch, d)
        inverse = exp(-log_std[log_std_at + d])
        for q in range(TILE):
            of_mean[q] = slopes[q] * (deviations[q] * inverse)
        for q in range(TILE):
            of_log_std[q] = slopes[q] * (deviations[q] * deviations[q] - f4(1.0)) + d_entropies[q]
        total = d_log_std[d_log_std_at + d]
        _scatter(of_mean, rows, grads, grads_at + d, grads_stride)
        for q in range(rows):
            total += of_log_std[q]
        d_log_std[d_log_std_at + d] = total


# Betas


@jit
def sample_beta(size, given, uniforms, floats, floats_at, log_probs, log_probs_at):
    """X / (X + Y) of two Gammas; uniforms are [row, dimension, Gamma, attempt, 3]."""
    outputs, at, stride, rows = given
    for q in range(rows):
        log_prob = 0.0
        for d in range(size):
            alpha, beta = _alpha_beta(size, outputs, at + q * stride + d)
            tries = 2 * (q * size + d) * GAMMA_TRIES * 3
            x, y = _gamma(alpha, uniforms, tries), _gamma(beta, uniforms, tries + GAMMA_TRIES * 3)
            action = x / (x + y)
            action = _EDGE if action < _EDGE else action
            action = _OTHER_EDGE if action > _OTHER_EDGE else action
            floats[floats_at + q * size + d] = action
            log_x, log_y = _logs(action)
            log_prob += (alpha - 1.0) * log_x + (beta - 1.0) * log_y - _log_norm(alpha, beta)
        log_probs[log_probs_at + q] = log_prob


@jit
def score_beta(size, given, floats, log_probs, entropies, scratch):
    """Log-densities and entropies; leaves their slopes with respect to each output in the scratch."""
    outputs, at, stride, rows = given
    for q in range(rows):
        log_prob, entropy = 0.0, 0.0
        for d in range(size):
            place = at + q * stride + d
            alpha, beta = _alpha_beta(size, outputs, place)
            total = alpha + beta
            log_x, log_y = _logs(floats[q * size + d])
            norm = _log_norm(alpha, beta)
            of_alpha, of_beta, of_total = digamma(alpha), digamma(beta), digamma(total)
            log_prob += (alpha - 1.0) * log_x + (beta - 1.0) * log_y - norm
            entropy += norm + (total - 2.0) * of_total - (alpha - 1.0) * of_alpha - (beta - 1.0) * of_beta
            bend = (total - 2.0) * trigamma(total)
            slope, other = sigmoid(outputs[place]), sigmoid(outputs[place + size])
            _tile(scratch, d)[q] = (log_x - of_alpha + of_total) * slope
            _tile(scratch, size + d)[q] = (log_y - of_beta + of_total) * other
            _tile(scratch, 2 * size + d)[q] = (bend - (alpha - 1.0) * trigamma(alpha)) * slope
            _tile(scratch, 3 * size + d)[q] = (bend - (beta - 1.0) * trigamma(beta)) * other
        log_probs[q] = log_prob
        entropies[q] = entropy


@jit
def gradient_beta(size, rows, d_log_probs, d_entropies, scratch, into):
    """Gradients with respect to the outputs behind alpha and beta."""
    grads, grads_at, grads_stride = into
    slopes, result = _tile(scratch, 4 * size), _tile(scratch, 4 * size + 1)
    _gather(d_log_probs, _ZERO, _ONE, rows, slopes)
    for j in range(2 * size):
        of_log_prob, of_entropy = _tile(scratch, j), _tile(scratch, 2 * size + j)
        for q in range(TILE):
            result[q] = slopes[q] * of_log_prob[q] + d_entropies[q] * of_entropy[q]
        _scatter(result, rows, grads, grads_at + j, grads_stride)


@jit
def _alpha_beta(size, outputs, place):
    """Alpha and beta, rounded to float32 as in torch, but float64 from here on."""
    alpha, beta = f4(1.0) + softplus(outputs[place]), f4(1.0) + softplus(outputs[place + size])
    return np.float64(alpha), np.float64(beta)


@jit
def _logs(action):
    return math.log(np.float64(action)), math.log1p(-np.float64(action))


@jit
def _log_norm(alpha, beta):
    return lgamma(alpha) + lgamma(beta) - lgamma(alpha + beta)


@jit
def _gamma(shape, uniforms, at):
    """A Gamma of shape ≥ 1 by Marsaglia and Tsang's method: the first accepted attempt, else the last."""
    d = f4(shape) - f4(1.0 / 3.0)
    v = f4(0.0)
    for i in range(at, at + 3 * GAMMA_TRIES, 3):
        normal = _normal(uniforms[i], uniforms[i + 1])
        v = f4(1.0) + normal / np.sqrt(f4(9.0) * d)
        v = _EDGE if v < _EDGE else v
        v = v * v * v
        if log(f4(1.0) - uniforms[i + 2]) < f4(0.5) * normal * normal + d * (f4(1.0) - v + log(v)):
            break
    return d * v
