"""One gradient step of DQN, or of SAC and TD3, on a batch from a replay buffer: losses, gradients, Adam, target networks.

batch → tiles of rows → forward, slopes, backward → Adam on packed weights. Networks are chains of dense layers whose layer 0 is
the input, see `policies/dense_chain.py`. Their arrays come as tuples: (weights, gradients, first moments, second moments).
"""

from __future__ import annotations

import math

import numpy as np

from .host import TILE, entry, f4, jit, joined
from .network import (
    INPUTS,
    OUTPUTS,
    PANELS,
    STRIDE,
    WORK,
    call_backward,
    call_forward,
    call_input_slopes,
    transpose_rows,
)
from .update import flushed, sum_of_squares
from .vector_math import exp

LEARNING_RATE, EPS, MAX_GRAD_NORM, TARGET_RATE = 0, 1, 2, 3
"""Numbers of every step; TARGET_RATE is 0 where targets stay."""
CRITIC_RATE, ADAPTS, TARGET_ENTROPY, ACTOR_STEP, IS_SAC, NOISE, NOISE_CLIP, LOW, HIGH = range(4, 13)
"""Those of SAC and TD3: ADAPTS, ACTOR_STEP and IS_SAC are 0 or 1."""
NUMBERS = 13
BETA1, BETA2 = 0.9, 0.999
LN2 = f4(math.log(2.0))
HALF_LOG_2PI = f4(0.5 * math.log(2.0 * math.pi))


@jit
def _fill(work, layers, source, first, rows, column):
    """Copy rows of a matrix into the input of a network, from a column on."""
    at, stride, width = layers[0, WORK], layers[0, STRIDE], source.shape[1]
    for q in range(rows):
        into, row = work[at + q * stride + column : at + q * stride + column + width], source[first + q]
        for k in range(width):
            into[k] = row[k]


@jit
def _clear_slopes(slopes, layers, rows):
    last = layers.shape[0] - 1
    at, size = layers[last, WORK], rows * layers[last, STRIDE]
    part = slopes[at : at + size]
    for k in range(size):
        part[k] = f4(0.0)


@jit
def _adam(weights, gradients, first, second, layers, rate, eps, clip, steps):
    """Adam on one network's weights, then the transposed copies."""
    beta1, beta2, rest1, rest2 = f4(BETA1), f4(BETA2), f4(1.0 - BETA1), f4(1.0 - BETA2)
    step_size, inverse_root = f4(rate / (1.0 - BETA1**steps)), f4(1.0 / math.sqrt(1.0 - BETA2**steps))
    epsilon, scale = f4(eps), f4(clip)
    for k in range(first.shape[0]):
        gradient = scale * gradients[k]
        first[k] = flushed(beta1 * first[k] + rest1 * gradient)
        second[k] = flushed(beta2 * second[k] + rest2 * gradient * gradient)
        weights[k] -= step_size * first[k] / (f4(math.sqrt(second[k])) * inverse_root + epsilon)
    for n in range(1, layers.shape[0]):
        for panel in range(layers[n, PANELS]):
            transpose_rows(weights, layers, n, panel, 0, layers[n, INPUTS])


@jit
def _move(target, weights, rate, size):
    """Move a target network; only what a forward pass needs."""
    for k in range(size):
        target[k] = weights[k] if rate == 1.0 else target[k] + f4(rate) * (weights[k] - target[k])


@joined
def _clip_of(norm, bound):
    return min(1.0, bound / (norm + 1e-6))


@joined
def _tanh(x):
    """For single numbers; layers have their own."""
    return f4(1.0) - f4(2.0) / (exp(f4(2.0) * x) + f4(1.0))


@joined
def _log_slope(u):
    """log(1 - tanh(u)^2)."""
    return f4(2.0) * (LN2 - u - f4(math.log1p(math.exp(-2.0 * u))) if u > f4(-15.0) else LN2 + u)


@entry
def dqn_step(addresses, lists, numbers, steps, layers, online, target, work, other_work, slopes, batch, masks, errors, results):
    """DQN with double Q-learning where `steps[1]` is 1; `steps[0]` counts this step.

    Args: addresses of forward and backward; the batch: obs, actions int64 [B], rewards, next_obs, discounts, importance.
    Output: TD errors [B]; results: loss, mean Q, mean |TD error|, norm. Returns whether the gradient is finite; if not, nothing
    was changed.
    """
    obs, actions, rewards, next_obs, discounts, importance = batch
    weights, gradients, first, second = online
    count, depth = obs.shape[0], layers.shape[0]
    at, stride, choices = layers[depth - 1, WORK], layers[depth - 1, STRIDE], layers[depth - 1, OUTPUTS]
    gradients[:] = f4(0.0)
    loss, total, distance = 0.0, 0.0, 0.0
    for low in range(0, count, TILE):
        rows = min(TILE, count - low)
        _fill(other_work, layers, next_obs, low, rows, 0)
        call_forward(addresses[0], target, layers, 1, depth, other_work, 0, 0, rows, other_work, lists)
        chooser = other_work
        if steps[1]:
            _fill(work, layers, next_obs, low, rows, 0)
            call_forward(addresses[0], weights, layers, 1, depth, work, 0, 0, rows, work, lists)
            chooser = work
        for q in range(rows):
            best, highest = -1, f4(-np.inf)
            for k in range(choices):
                legal = masks.shape[1] == 0 or masks[low + q, k]
                if legal and (best < 0 or chooser[at + q * stride + k] > highest):
                    best, highest = k, chooser[at + q * stride + k]
            best = 0 if best < 0 else best
            errors[low + q] = rewards[low + q] + discounts[low + q] * other_work[at + q * stride + best]
        _fill(work, layers, obs, low, rows, 0)
        call_forward(addresses[0], weights, layers, 1, depth, work, 0, 0, rows, work, lists)
        _clear_slopes(slopes, layers, rows)
        for q in range(rows):
            place = at + q * stride + actions[low + q]
            error, share = work[place] - errors[low + q], importance[low + q] / f4(count)
            size = abs(error)
            slopes[place] = share * (f4(-1.0) if error < f4(-1.0) else f4(1.0) if error > f4(1.0) else error)
            loss += share * (f4(0.5) * error * error if size < f4(1.0) else size - f4(0.5))
            total += work[place]
            distance += size
            errors[low + q] = -error
        call_backward(addresses[1], weights, layers, 1, depth, work, 0, 0, rows, work, slopes, gradients, 0, lists)
    norm = math.sqrt(sum_of_squares(gradients))
    results[0], results[1], results[2], results[3] = loss, total / count, distance / count, norm
    if not math.isfinite(norm + loss):
        return False
    clip = _clip_of(norm, numbers[MAX_GRAD_NORM])
    _adam(weights, gradients, first, second, layers, numbers[LEARNING_RATE], numbers[EPS], clip, steps[0])
    if numbers[TARGET_RATE] > 0.0:
        _move(target, weights, numbers[TARGET_RATE], first.shape[0])
    return True


@entry
def actor_critic_step(
    addresses, lists, numbers, steps, actor_layers, critic_layers, actor, target_actor, critics, targets, temperature,
    works, batch, noise, errors, results,
):  # fmt: skip
    """SAC or TD3 with any number of critics, which are the rows of their arrays.

    Args: addresses of forward, backward and input slopes; steps: those of critics and of the actor, this one included; the
    batch: obs, actions in (-1, 1), rewards, next_obs, discounts, importance; noise: standard normals [2, B, D] for next and
    current actions; works: actor's and critics' workspaces and slopes, [A], [A], [E, C], [E, C]; temperature: its logarithm
    and two moments. Output: TD errors [B]; results: value loss, mean Q, mean |TD error|, policy loss, entropy, temperature.
    Returns whether gradients are finite; if not, what was about to be stepped is unchanged.
    """
    obs, actions, rewards, next_obs, discounts, importance = batch
    work, _, critic_work, critic_slopes = works
    count, size, ensemble = obs.shape[0], actions.shape[1], critics[0].shape[0]
    last, a_last = critic_layers.shape[0] - 1, actor_layers.shape[0] - 1
    at, stride = critic_layers[last, WORK], critic_layers[last, STRIDE]
    alpha = f4(math.exp(temperature[0])) if numbers[IS_SAC] > 0.0 else f4(0.0)
    share = f4(1.0) / f4(count)
    chosen = np.empty((TILE, size), np.float32)
    log_probs = np.empty(TILE, np.float32)
    critics[1][:] = f4(0.0)
    loss, total, distance = 0.0, 0.0, 0.0
    for low in range(0, count, TILE):
        rows = min(TILE, count - low)
        _fill(work, actor_layers, next_obs, low, rows, 0)
        acting = actor[0] if numbers[IS_SAC] > 0.0 else target_actor
        call_forward(addresses[0], acting, actor_layers, 1, a_last + 1, work, 0, 0, rows, work, lists)
        _act(work, actor_layers, noise[0], low, rows, numbers, numbers[NOISE], chosen, log_probs)
        for e in range(ensemble):
            _fill(critic_work[e], critic_layers, next_obs, low, rows, 0)
            _fill(critic_work[e], critic_layers, chosen, 0, rows, obs.shape[1])
            call_forward(
                addresses[0], targets[e], critic_layers, 1, last + 1, critic_work[e], 0, 0, rows, critic_work[e], lists
            )  # fmt: skip
        for q in range(rows):
            lowest = critic_work[0][at + q * stride]
            for e in range(1, ensemble):
                lowest = min(lowest, critic_work[e][at + q * stride])
            errors[low + q] = rewards[low + q] + discounts[low + q] * (lowest - alpha * log_probs[q])
        for e in range(ensemble):
            own, own_slopes = critic_work[e], critic_slopes[e]
            _fill(own, critic_layers, obs, low, rows, 0)
            _fill(own, critic_layers, actions, low, rows, obs.shape[1])
            call_forward(addresses[0], critics[0][e], critic_layers, 1, last + 1, own, 0, 0, rows, own, lists)
            _clear_slopes(own_slopes, critic_layers, rows)
            for q in range(rows):
                value = own[at + q * stride]
                error, weight = value - errors[low + q], importance[low + q] * share
                own_slopes[at + q * stride] = f4(2.0) * weight * error
                loss += weight * error * error
                total += value
            call_backward(
                addresses[1], critics[0][e], critic_layers, 1, last + 1, own, 0, 0, rows, own, own_slopes, critics[1][e], 0,
                lists,
            )  # fmt: skip
        for q in range(rows):
            mean = f4(0.0)
            for e in range(ensemble):
                mean += critic_work[e][at + q * stride]
            errors[low + q] -= mean / f4(ensemble)
            distance += abs(errors[low + q])
    norm = 0.0
    for e in range(ensemble):
        norm += sum_of_squares(critics[1][e])
    norm = math.sqrt(norm)
    results[0], results[1], results[2] = loss, total / (count * ensemble), distance / count
    if not math.isfinite(norm + loss):
        return False
    clip = _clip_of(norm, numbers[MAX_GRAD_NORM])
    for e in range(ensemble):
        _adam(
            critics[0][e], critics[1][e], critics[2][e], critics[3][e], critic_layers, numbers[CRITIC_RATE], numbers[EPS],
            clip, steps[0],
        )  # fmt: skip
    if numbers[ACTOR_STEP] > 0.0 and not _improve(
        addresses, lists, numbers, steps, actor_layers, critic_layers, actor, critics, temperature, works, obs, noise[1],
        alpha, chosen, log_probs, results,
    ):  # fmt: skip
        return False
    if numbers[TARGET_RATE] > 0.0:
        for e in range(ensemble):
            _move(targets[e], critics[0][e], numbers[TARGET_RATE], critics[2].shape[1])
        if numbers[IS_SAC] == 0.0:
            _move(target_actor, actor[0], numbers[TARGET_RATE], actor[2].shape[0])
    return True


@jit
def _act(work, layers, noise, low, rows, numbers, std, chosen, log_probs):
    """Actions in (-1, 1) from the actor's outputs and normals, and SAC's log-probabilities of them."""
    last, size = layers.shape[0] - 1, chosen.shape[1]
    at, stride = layers[last, WORK], layers[last, STRIDE]
    for q in range(rows):
        row, total = work[at + q * stride : at + (q + 1) * stride], f4(0.0)
        for k in range(size):
            if numbers[IS_SAC] > 0.0:
                log_std = _log_std(row[size + k], numbers)
                raw = row[k] + exp(log_std) * noise[low + q, k]
                chosen[q, k] = _tanh(raw)
                total += f4(-0.5) * noise[low + q, k] * noise[low + q, k] - log_std - HALF_LOG_2PI - _log_slope(raw)
            else:
                bound = f4(numbers[NOISE_CLIP])
                added = max(-bound, min(bound, f4(std) * noise[low + q, k]))
                chosen[q, k] = max(f4(-1.0), min(f4(1.0), _tanh(row[k]) + added))
        log_probs[q] = total


@joined
def _log_std(raw, numbers):
    return f4(numbers[LOW]) + f4(0.5) * f4(numbers[HIGH] - numbers[LOW]) * (_tanh(raw) + f4(1.0))


@jit
def _improve(
    addresses, lists, numbers, steps, actor_layers, critic_layers, actor, critics, temperature, works, obs, noise, alpha,
    chosen, log_probs, results,
):  # fmt: skip
    """The actor's step, up the lowest critic (SAC) or the first (TD3), and the temperature's."""
    weights, gradients, first, second = actor
    work, slopes, critic_work, critic_slopes = works
    is_sac = numbers[IS_SAC] > 0.0
    count, size, ensemble = obs.shape[0], chosen.shape[1], critics[0].shape[0] if is_sac else 1
    last, a_last = critic_layers.shape[0] - 1, actor_layers.shape[0] - 1
    at, stride = critic_layers[last, WORK], critic_layers[last, STRIDE]
    a_at, a_stride = actor_layers[a_last, WORK], actor_layers[a_last, STRIDE]
    in_at, in_stride = critic_layers[0, WORK] + obs.shape[1], critic_layers[0, STRIDE]
    share, no_noise = f4(1.0) / f4(count), 0.0
    gradients[:] = f4(0.0)
    loss, entropy = 0.0, 0.0
    for low in range(0, count, TILE):
        rows = min(TILE, count - low)
        _fill(work, actor_layers, obs, low, rows, 0)
        call_forward(addresses[0], weights, actor_layers, 1, a_last + 1, work, 0, 0, rows, work, lists)
        _act(work, actor_layers, noise, low, rows, numbers, no_noise, chosen, log_probs)
        for e in range(ensemble):
            own = critic_work[e]
            _fill(own, critic_layers, obs, low, rows, 0)
            _fill(own, critic_layers, chosen, 0, rows, obs.shape[1])
            call_forward(addresses[0], critics[0][e], critic_layers, 1, last + 1, own, 0, 0, rows, own, lists)
            _clear_slopes(critic_slopes[e], critic_layers, rows)
        for q in range(rows):
            lowest = 0
            for e in range(1, ensemble):
                if critic_work[e][at + q * stride] < critic_work[lowest][at + q * stride]:
                    lowest = e
            critic_slopes[lowest][at + q * stride] = -share
            loss += alpha * log_probs[q] - critic_work[lowest][at + q * stride]
            entropy -= log_probs[q]
        for e in range(ensemble):
            call_input_slopes(addresses[2], critics[0][e], critic_layers, rows, critic_work[e], critic_slopes[e])
        _clear_slopes(slopes, actor_layers, rows)
        for q in range(rows):
            row, into = work[a_at + q * a_stride : a_at + (q + 1) * a_stride], slopes[a_at + q * a_stride :]
            for k in range(size):
                action, slope = chosen[q, k], f4(0.0)
                for e in range(ensemble):
                    slope += critic_slopes[e][in_at + q * in_stride + k]
                slope = slope * (f4(1.0) - action * action)
                if is_sac:
                    slope += f4(2.0) * alpha * share * action
                    flat = _tanh(row[size + k])
                    of_log_std = slope * exp(_log_std(row[size + k], numbers)) * noise[low + q, k] - alpha * share
                    into[size + k] = of_log_std * f4(0.5) * f4(numbers[HIGH] - numbers[LOW]) * (f4(1.0) - flat * flat)
                into[k] = slope
        call_backward(addresses[1], weights, actor_layers, 1, a_last + 1, work, 0, 0, rows, work, slopes, gradients, 0, lists)
    norm = math.sqrt(sum_of_squares(gradients))
    results[3], results[4], results[5] = loss / count, entropy / count, alpha
    if not math.isfinite(norm + loss):
        return False
    clip = _clip_of(norm, numbers[MAX_GRAD_NORM])
    _adam(weights, gradients, first, second, actor_layers, numbers[LEARNING_RATE], numbers[EPS], clip, steps[1])
    if is_sac and numbers[ADAPTS] > 0.0:
        slope = entropy / count - numbers[TARGET_ENTROPY]
        slope *= _clip_of(abs(slope), numbers[MAX_GRAD_NORM])
        temperature[1] = BETA1 * temperature[1] + (1.0 - BETA1) * slope
        temperature[2] = BETA2 * temperature[2] + (1.0 - BETA2) * slope * slope
        corrected = math.sqrt(temperature[2] / (1.0 - BETA2 ** steps[1])) + numbers[EPS]
        temperature[0] -= numbers[LEARNING_RATE] / (1.0 - BETA1 ** steps[1]) * temperature[1] / corrected
    return True
