"""Compiled loops of the replay buffer: rollout → slots of each row's ring; drawn slots → transitions.

Every function takes arrays only and releases the GIL. Observations and actions are rows of machine words, whatever their dtype.
`buffers/replay.py` says what a slot is.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from hurtle.kernels.sum_tree import find_leaf, set_leaf
from hurtle.kernels.uniforms import _GAMMA, _mixed

TERMINATED, TRUNCATED, START, GAP = 1, 2, 4, 8
"""Bits of a slot's flags. A GAP has an observation but no step: the last one of a truncated episode, or a frame before its
first stack."""
MOST_DRAWS = 1000
"""Slots that are drawn in vain before a sampler gives up."""


@njit(cache=True, nogil=True)
def _write(ring, slot, source, frame):
    """Copy the last `frame` words of an observation into a slot."""
    first = source.shape[0] - frame
    for k in range(frame):
        ring[slot, k] = source[first + k]


@njit(cache=True, nogil=True)
def push(
    obs, last_obs, finals, final_of, actions, masks, rewards, terminated, truncated, starts, valid, rows, knows_next,
    s_obs, s_actions, s_masks, s_rewards, s_flags, heads, pending, firsts,
):  # fmt: skip
    """Append the valid steps of a rollout to the rings of their rows.

    Args:
        obs: [T, N, W], as words; `last_obs` [N, W] follows its last step.
        finals: Last observations of truncated episodes [F, W]; `final_of` [T, N] is the index of a step's, or -1.
        actions: [T, N, A]; `masks` [T, N, M].
        rewards: [T, N], as are the flags.
        rows: The row of each column. [N]
        knows_next: Whether `last_obs` is what follows each row's last step.
        s_obs: The rings [R, L, F]: F = W, or one frame of a stack. The others that begin with s_ are [R, L, …], too.
        heads: Slots written to each row so far; the next one goes to `heads % L`. [R]
        pending: Whether the slot at the head holds the observation that follows the last step. [R]
        firsts: Output: the position of each column's step 0, or -1 if it is not valid. [N]
    """
    length, frame, width = s_obs.shape[1], s_obs.shape[2], obs.shape[2]
    for n in range(rewards.shape[1]):
        row, firsts[n] = rows[n], -1
        head, ring, flags = heads[row], s_obs[row], s_flags[row]
        for t in range(rewards.shape[0]):
            if not valid[t, n]:
                continue
            if starts[t, n] or head == 0:
                first = 0
                while first + frame < width:  # the frames before the newest
                    for k in range(frame):
                        ring[head % length, k] = obs[t, n, first + k]
                    flags[head % length] = GAP
                    head, first = head + 1, first + frame
            slot = head % length
            if t == 0:
                firsts[n] = head
            _write(ring, slot, obs[t, n], frame)
            for k in range(actions.shape[2]):
                s_actions[row, slot, k] = actions[t, n, k]
            for k in range(masks.shape[2]):
                s_masks[row, slot, k] = masks[t, n, k]
            s_rewards[row, slot] = rewards[t, n]
            cut = truncated[t, n] and not terminated[t, n]
            flags[slot] = (
                (TERMINATED if terminated[t, n] else 0) | (TRUNCATED if cut else 0) | (START if starts[t, n] else 0)
            )
            head += 1
            if cut:
                if final_of[t, n] < 0:  # nothing to bootstrap from
                    flags[slot] |= GAP
                else:
                    _write(ring, head % length, finals[final_of[t, n]], frame)
                    flags[head % length] = GAP
                    for k in range(masks.shape[2]):
                        s_masks[row, head % length, k] = True
                    head += 1
        pending[row] = knows_next
        if knows_next:
            _write(ring, head % length, last_obs[n], frame)
            flags[head % length] = GAP
        heads[row] = head


@njit(cache=True, nogil=True)
def is_sampleable(position, head, pending, length, frames, flags):
    """Whether a transition starts at a position of a row: a step, with all frames it needs, whose successor is known."""
    oldest = max(0, head + (1 if pending else 0) - length)
    if position < oldest + frames - 1 or position >= head:
        return False
    own = flags[position % length]
    if own & GAP:
        return False
    return own & TERMINATED != 0 or position + 1 < head or pending


@njit(cache=True, nogil=True)
def weigh(tree, before, heads, pending, flags, frames, priority):
    """Give the transitions written since `before` (heads) a priority, and those that can no longer be drawn 0."""
    length = flags.shape[1]
    for row in range(heads.shape[0]):
        if heads[row] == before[row]:
            continue
        head = heads[row]
        for position in range(max(0, before[row] - 1, head - length), head):
            if is_sampleable(position, head, pending[row], length, frames, flags[row]):
                leaf = row * length + position % length
                if position >= before[row] or tree[leaf + tree.shape[0] // 2] == 0.0:
                    set_leaf(tree, leaf, priority)
            else:
                set_leaf(tree, row * length + position % length, 0.0)
        for position in range(head, head + (1 if pending[row] else 0) + frames - 1):  # the head, and what has lost frames
            set_leaf(tree, row * length + position % length, 0.0)


@njit(cache=True, nogil=True)
def _uniform(seed, count):
    """The number `count` of a stream, in [0, 1), with 53 bits."""
    return np.float64(_mixed(seed + (count + np.uint64(1)) * _GAMMA) >> np.uint64(11)) * 2.0**-53


@njit(cache=True, nogil=True)
def draw(seed, drawn, heads, pending, flags, frames, out):
    """Draw transitions uniformly: out [B] gets row × length + slot. Returns the numbers drawn so far, or -1 if it finds none."""
    length, rows = flags.shape[1], heads.shape[0]
    ends = np.empty(rows, np.int64)
    total = 0
    for row in range(rows):
        total += min(heads[row], length)
        ends[row] = total
    if total == 0:
        return np.int64(-1)
    for b in range(out.shape[0]):
        for _ in range(MOST_DRAWS):
            chosen = min(np.int64(_uniform(seed, np.uint64(drawn)) * total), total - 1)
            drawn += 1
            row = np.searchsorted(ends, chosen, side="right")
            stored = min(heads[row], length)
            position = heads[row] - (ends[row] - chosen)
            if stored and is_sampleable(position, heads[row], pending[row], length, frames, flags[row]):
                out[b] = row * length + position % length
                break
        else:
            return np.int64(-1)
    return drawn


@njit(cache=True, nogil=True)
def draw_any(seed, drawn, count, out):
    """Draw numbers below `count` uniformly. Returns the numbers drawn so far."""
    for b in range(out.shape[0]):
        out[b] = min(np.int64(_uniform(seed, np.uint64(drawn)) * count), count - 1)
        drawn += 1
    return drawn


@njit(cache=True, nogil=True)
def draw_by_priority(seed, drawn, tree, out, chances):
    """Draw by priority, one from each of B equal parts of the total; `chances` [B] gets each one's probability."""
    total, count = tree[1], out.shape[0]
    if not total > 0.0:
        return np.int64(-1)
    half = tree.shape[0] // 2
    for b in range(count):
        out[b] = find_leaf(tree, (b + _uniform(seed, np.uint64(drawn))) / count * total)
        drawn += 1
        chances[b] = tree[half + out[b]] / total
    return drawn


@njit(cache=True, nogil=True)
def set_priorities(tree, leaves, priorities):
    """Set the priorities of leaves that still have one."""
    half = tree.shape[0] // 2
    for b in range(leaves.shape[0]):
        if tree[half + leaves[b]] > 0.0:
            set_leaf(tree, leaves[b], priorities[b])


@njit(cache=True, nogil=True)
def _read(ring, slot, out, frames):
    """The observation of a slot: its frame after those of the slots before."""
    length, frame = ring.shape
    for f in range(frames):
        at = (slot - (frames - 1 - f)) % length
        for k in range(frame):
            out[f * frame + k] = ring[at, k]


@njit(cache=True, nogil=True)
def gather(
    chosen, s_obs, s_actions, s_masks, s_rewards, s_flags, heads, pending, frames, n_step, gamma,
    obs, actions, rewards, next_obs, discounts, masks, next_masks,
):  # fmt: skip
    """The n-step transitions that start at the chosen slots: rewards are discounted sums, discounts those of V(next_obs).

    A sum ends with the episode, and before a step whose successor is not known yet: V of any later observation will do.
    """
    length = s_flags.shape[1]
    for b in range(chosen.shape[0]):
        row, slot = chosen[b] // length, chosen[b] % length
        flags, head = s_flags[row], heads[row]
        ahead = (head - slot - 1) % length + 1  # steps from here to the head
        total, factor, steps = np.float32(0.0), np.float32(1.0), 0
        while True:
            at = (slot + steps) % length
            total += factor * s_rewards[row, at]
            factor *= gamma
            steps += 1
            if flags[at] & TERMINATED:
                factor = np.float32(0.0)
                break
            after = (slot + steps) % length
            unknown = steps + 1 == ahead and not pending[row] and not flags[after] & TERMINATED
            if flags[at] & TRUNCATED or steps == n_step or steps == ahead or unknown or flags[after] & GAP:
                break
        following = slot if factor == 0.0 else slot + steps
        _read(s_obs[row], slot, obs[b], frames)
        _read(s_obs[row], following % length, next_obs[b], frames)
        for k in range(actions.shape[1]):
            actions[b, k] = s_actions[row, slot, k]
        for k in range(masks.shape[1]):
            masks[b, k] = s_masks[row, slot, k]
            next_masks[b, k] = s_masks[row, following % length, k]
        rewards[b], discounts[b] = total, factor


@njit(cache=True, nogil=True)
def gather_windows(rows, firsts, s_obs, s_actions, s_masks, s_rewards, s_flags, frames, obs, actions, masks, rewards, flags):
    """Consecutive slots of some rows, from position `firsts` on, time-major: obs [T, B, W] …"""
    length = s_flags.shape[1]
    for b in range(rows.shape[0]):
        row = rows[b]
        for t in range(rewards.shape[0]):
            slot = (firsts[b] + t) % length
            _read(s_obs[row], slot, obs[t, b], frames)
            for k in range(actions.shape[2]):
                actions[t, b, k] = s_actions[row, slot, k]
            for k in range(masks.shape[2]):
                masks[t, b, k] = s_masks[row, slot, k]
            rewards[t, b] = s_rewards[row, slot]
            flags[t, b] = s_flags[row, slot]
