"""Compiled loops of the replay buffer: rollout → slots of each row's ring; drawn slots → transitions.

Every function takes arrays only and releases the GIL. Observations and actions are rows of machine words, whatever their dtype.
`buffers/replay.py` says what a slot is.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from hurtle.kernels.uniforms import _GAMMA, _mixed

TERMINATED, TRUNCATED, START, GAP = 1, 2, 4, 8
"""Bits of a slot's flags. A GAP has an observation but no step: the last one of a truncated episode, or a frame before its
first stack."""
MOST_DRAWS = 1000
"""Rejected draws before a sampler gives up."""
compiled: Any = njit(cache=True, nogil=True, error_model="numpy", _nrt=False)  # type: ignore[call-overload]
"""For functions that allocate nothing: without counting references, slices cost nothing."""


@compiled
def _copy(source, into):
    """Copy all words of `into`; both are slices, since an index that could be negative would be checked for every word."""
    for k in range(into.shape[0]):
        into[k] = source[k]


@compiled
def _are_equal(one, other):
    """Whether all words are the same."""
    different = False
    for k in range(other.shape[0]):
        different |= one[k] != other[k]
    return not different


@compiled
def _final_of(t, n, final_steps, final_columns):
    """Where a step's final observation is, or -1."""
    for k in range(final_steps.shape[0]):
        if final_steps[k] == t and final_columns[k] == n:
            return k
    return -1


@compiled
def push(
    obs, last_obs, actions, masks, rewards, terminated, truncated, starts, valid,
    finals, final_steps, final_columns, rows, knows_next,
    s_obs, s_actions, s_masks, s_rewards, s_flags, heads, head_slots, pending, firsts,
):  # fmt: skip
    """Append the valid steps of a rollout to the rings of their rows.

    The rollout: obs [T, N, W] and actions [T, N, A] as words, masks [T, N, M], the others [T, N]. last_obs [N, W] follows its
    last step; whether it does so for every row is `knows_next`. Last observations of truncated episodes are finals [F, W],
    those of final_steps and final_columns [F], or -1. `rows` [N] is the row of each column.

    The rings: s_obs [R, L, F] with F = W, or one frame of a stack; the others [R, L, …]. `heads` [R] counts the slots written
    to each row, `head_slots` are its remainders by L, and `pending` tells whether the slot at the head holds what follows the
    last step. Output: `firsts` [N], the position of each column's step 0, or -1 if it is not valid.

    A row that goes on elsewhere than where its last rollout ended (its envs were reset, or a rollout was thrown away) has
    abandoned that episode, which then counts as truncated.
    """
    length, frame, width = s_obs.shape[1], s_obs.shape[2], obs.shape[2]
    for n in range(rewards.shape[1]):
        row, firsts[n] = rows[n], -1
        head, ring, flags = heads[row], s_obs[row], s_flags[row]
        slot, is_known = head_slots[row], pending[row]  # whether this slot holds what followed the last step
        for t in range(rewards.shape[0]):
            if not valid[t, n]:
                continue
            begins = starts[t, n] or head == 0 or (is_known and not _are_equal(obs[t, n, width - frame :], ring[slot]))
            before = slot - 1 if slot > 0 else length - 1
            if begins and head > 0 and flags[before] & (TERMINATED | TRUNCATED | GAP) == 0:  # the episode was abandoned
                if is_known:
                    flags[before] |= TRUNCATED
                    flags[slot] = GAP
                    s_masks[row, slot] = True
                    head, slot = head + 1, slot + 1 if slot + 1 < length else 0
                else:
                    flags[before] |= GAP
            is_known = False
            if begins:
                for first in range(0, width - frame, frame):  # the frames before the newest
                    _copy(obs[t, n, first:], ring[slot])
                    flags[slot] = GAP
                    head, slot = head + 1, slot + 1 if slot + 1 < length else 0
            if t == 0:
                firsts[n] = head
            _copy(obs[t, n, width - frame :], ring[slot])
            _copy(actions[t, n], s_actions[row, slot])
            _copy(masks[t, n], s_masks[row, slot])
            s_rewards[row, slot] = rewards[t, n]
            ends, cut = terminated[t, n], truncated[t, n] and not terminated[t, n]
            flags[slot] = (TERMINATED if ends else 0) | (TRUNCATED if cut else 0) | (START if starts[t, n] else 0)
            if cut:
                final = _final_of(t, n, final_steps, final_columns)
                if final < 0:  # nothing to bootstrap from
                    flags[slot] |= GAP
                else:
                    head, slot = head + 1, slot + 1 if slot + 1 < length else 0
                    _copy(finals[final, width - frame :], ring[slot])
                    flags[slot] = GAP
                    s_masks[row, slot] = True
            head, slot = head + 1, slot + 1 if slot + 1 < length else 0
        pending[row], heads[row], head_slots[row] = knows_next, head, slot
        if knows_next:
            _copy(last_obs[n, width - frame :], ring[slot])
            flags[slot] = GAP


@compiled
def is_sampleable(position, own, head, pending, length, frames):
    """Whether a transition starts at a position with these flags: a step, with all its frames, whose successor is known."""
    oldest = max(0, head + (1 if pending else 0) - length)
    if position < oldest + frames - 1 or position >= head or own & GAP:
        return False
    return own & TERMINATED != 0 or position + 1 < head or pending


@compiled
def weigh(tree, before, heads, pending, flags, frames, priority):
    """Give the transitions written since `before` (heads) a priority, and those that can no longer be drawn 0."""
    length = flags.shape[1]
    for row in range(heads.shape[0]):
        if heads[row] == before[row]:
            continue
        head = heads[row]
        for position in range(max(0, before[row] - 1, head - length), head):
            if is_sampleable(position, flags[row, position % length], head, pending[row], length, frames):
                leaf = row * length + position % length
                if position >= before[row] or tree[leaf + tree.shape[0] // 2] == 0.0:
                    set_leaf(tree, leaf, priority)
            else:
                set_leaf(tree, row * length + position % length, 0.0)
        for position in range(head, head + (1 if pending[row] else 0) + frames - 1):  # the head, and what has lost frames
            set_leaf(tree, row * length + position % length, 0.0)


# A sum tree [2 × the next power of two]: node k is the sum of nodes 2k and 2k + 1, the leaves are the second half. It is in
# this file because Numba's disk cache does not notice changes in functions of other files.


def new_tree(size: int) -> np.ndarray:
    """A tree for so many leaves, all of priority 0. float64: sums of a million float32 would drift."""
    return np.zeros(2 << max(0, size - 1).bit_length(), np.float64)


@compiled
def set_leaf(tree, leaf, priority):
    """Set the priority of a leaf, and the sums above it."""
    node = leaf + tree.shape[0] // 2
    tree[node] = priority
    node //= 2
    while node:
        tree[node] = tree[2 * node] + tree[2 * node + 1]
        node //= 2


@compiled
def find_leaf(tree, mass):
    """The leaf at `mass` in [0, total): the first whose cumulative sum exceeds it. A leaf of priority 0 is never found."""
    half, node = tree.shape[0] // 2, 1
    while node < half:
        node *= 2
        # Rounding may leave nothing to the right of the last leaf: stay on the side that has some.
        if mass >= tree[node] and tree[node + 1] > 0.0:
            mass -= tree[node]
            node += 1
        elif tree[node] <= 0.0:
            node += 1
    return node - half


@compiled
def _uniform(seed, count):
    """The number `count` of a stream, in [0, 1), with 53 bits."""
    return np.float64(_mixed(seed + (count + np.uint64(1)) * _GAMMA) >> np.uint64(11)) * 2.0**-53


@compiled
def _first_above(ends, number):
    """The index of the first of ascending numbers that is greater."""
    low, high = 0, ends.shape[0] - 1
    while low < high:
        middle = (low + high) // 2
        if ends[middle] > number:
            high = middle
        else:
            low = middle + 1
    return low


@compiled
def draw(seed, drawn, heads, head_slots, pending, flags, frames, ends, out):
    """Draw transitions uniformly: out [B] gets row × length + slot. Returns the numbers drawn so far, or -1 if it finds none.

    `ends` [R] is scratch. Divisions and branches that are hard to predict would take longer than the rest.
    """
    length, rows = flags.shape[1], heads.shape[0]
    total, each, is_even = 0, min(heads[0], length), True
    for row in range(rows):
        stored = min(heads[row], length)
        is_even, total = is_even and stored == each, total + stored
        ends[row] = total
    if total == 0:
        return np.int64(-1)
    for b in range(out.shape[0]):
        for _ in range(MOST_DRAWS):
            bits = _mixed(seed + (np.uint64(drawn) + np.uint64(1)) * _GAMMA)
            drawn += 1
            if is_even:  # a row by the upper half of the bits, a slot by the lower
                row = np.int64(((bits >> np.uint64(32)) * np.uint64(rows)) >> np.uint64(32))
                back = np.int64(((bits & np.uint64(0xFFFFFFFF)) * np.uint64(each)) >> np.uint64(32)) + 1
            else:
                chosen = min(np.int64(np.float64(bits >> np.uint64(11)) * 2.0**-53 * total), total - 1)
                row = _first_above(ends, chosen)
                back = ends[row] - chosen
            slot = head_slots[row] - back
            slot += length if slot < 0 else 0
            if is_sampleable(heads[row] - back, flags[row, slot], heads[row], pending[row], length, frames):
                out[b] = row * length + slot
                break
        else:
            return np.int64(-1)
    return drawn


@compiled
def draw_any(seed, drawn, count, out):
    """Draw numbers below `count` uniformly. Returns the numbers drawn so far."""
    for b in range(out.shape[0]):
        out[b] = min(np.int64(_uniform(seed, np.uint64(drawn)) * count), count - 1)
        drawn += 1
    return drawn


@compiled
def draw_by_priority(seed, drawn, tree, beta, out, weights):
    """Draw leaves by priority, one from each of B equal parts of the total; `weights` [B] gets importance weights up to 1."""
    total, count = tree[1], out.shape[0]
    if not total > 0.0:
        return np.int64(-1)
    half, least = tree.shape[0] // 2, np.inf
    for b in range(count):
        out[b] = find_leaf(tree, (b + _uniform(seed, np.uint64(drawn))) / count * total)
        drawn += 1
        least = min(least, tree[half + out[b]])
    for b in range(count):
        weights[b] = (tree[half + out[b]] / least) ** -beta
    return drawn


@compiled
def set_priorities(tree, leaves, errors, alpha):
    """Give leaves that have a priority a new one, (|error| + 1e-6) ^ alpha; returns the highest, or -1 if not finite.

    Leaf -1 is none.
    """
    half, highest = tree.shape[0] // 2, 0.0
    for b in range(leaves.shape[0]):
        if not np.isfinite(errors[b]):
            return -1.0
    for b in range(leaves.shape[0]):
        priority = (abs(np.float64(errors[b])) + 1e-6) ** alpha
        highest = max(highest, priority)
        if leaves[b] >= 0 and tree[half + leaves[b]] > 0.0:
            set_leaf(tree, leaves[b], priority)
    return highest


@compiled
def _read(ring, slot, out, frames):
    """The observation of a slot: its frame after those of the slots before."""
    length, frame = ring.shape
    at = slot - (frames - 1)
    at += length if at < 0 else 0
    for first in range(0, frames * frame, frame):
        _copy(ring[at], out[first : first + frame])
        at = at + 1 if at + 1 < length else 0


@compiled
def _place(chosen, ring):
    """The row and slot of a number that `draw` has drawn; 32 bits are divided in half the time of 64."""
    length = ring.shape[1]
    small = ring.shape[0] * length < 1 << 32
    row = np.int64(np.uint32(chosen) // np.uint32(length)) if small else chosen // length
    return row, chosen - row * length


@compiled
def _touch(chosen, s_obs, s_rewards):
    """Load something of every slot, all at once: one after another, most of the time would be waiting for memory."""
    length, seen = s_rewards.shape[1], np.float64(0.0)
    for b in range(chosen.shape[0]):
        row, slot = _place(chosen[b], s_rewards)
        after = slot + 1 if slot + 1 < length else 0
        seen += s_rewards[row, slot] + s_obs[row, slot, 0] + s_obs[row, after, 0] + s_obs[row, after, s_obs.shape[2] - 1]
    return seen


@compiled
def gather(
    chosen, s_obs, s_actions, s_masks, s_rewards, s_flags, heads, head_slots, pending, frames, n_step, gamma,
    obs, actions, rewards, next_obs, discounts, masks, next_masks, ids,
):  # fmt: skip
    """The n-step transitions that start at the chosen slots: rewards are discounted sums, discounts those of V(next_obs).

    A sum ends with the episode, and before a step whose successor is not known yet: V of any later observation will do.
    `ids` are position × rows + row: the same slot has another one on the ring's next lap.
    """
    length = s_flags.shape[1]
    discounts[0] = _touch(chosen, s_obs, s_rewards)  # overwritten below
    for b in range(chosen.shape[0]):
        row, slot = _place(chosen[b], s_rewards)
        flags, ahead = s_flags[row], head_slots[row] - slot  # steps from here to the head
        ahead += length if ahead <= 0 else 0
        ids[b] = (heads[row] - ahead) * heads.shape[0] + row
        total, factor, steps, at = np.float32(0.0), np.float32(1.0), 0, slot
        while True:
            total += factor * s_rewards[row, at]
            factor *= gamma
            steps += 1
            if flags[at] & TERMINATED:
                factor, at = np.float32(0.0), slot
                break
            ends = flags[at] & TRUNCATED != 0 or steps in (n_step, ahead)
            at = at + 1 if at + 1 < length else 0
            unknown = steps + 1 == ahead and not pending[row] and flags[at] & TERMINATED == 0
            if ends or unknown or flags[at] & GAP:
                break
        _read(s_obs[row], slot, obs[b], frames)
        _read(s_obs[row], at, next_obs[b], frames)
        _copy(s_actions[row, slot], actions[b])
        _copy(s_masks[row, slot], masks[b])
        _copy(s_masks[row, at], next_masks[b])
        rewards[b], discounts[b] = total, factor


@compiled
def gather_windows(rows, firsts, s_obs, s_actions, s_masks, s_rewards, s_flags, frames, obs, actions, masks, rewards, flags):
    """Consecutive slots of some rows, from position `firsts` on, time-major."""
    length = s_flags.shape[1]
    for b in range(rows.shape[0]):
        row = rows[b]
        for t in range(rewards.shape[0]):
            slot = (firsts[b] + t) % length
            _read(s_obs[row], slot, obs[t, b], frames)
            flags[t, b] = s_flags[row, slot]
            if flags[t, b] & GAP:  # no step: what it has is left from another
                actions[t, b], masks[t, b], rewards[t, b] = 0, True, np.float32(0.0)
            else:
                _copy(s_actions[row, slot], actions[t, b])
                _copy(s_masks[row, slot], masks[t, b])
                rewards[t, b] = s_rewards[row, slot]
