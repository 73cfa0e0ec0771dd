"""Sampling from a `DeviceReplay` in one launch: draw a step, sum n rewards, copy what was seen, done and seen next.

random numbers or given steps → transitions. `DeviceReplay._read` is the reference in torch. Knows no policy.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024
"""Words that a program copies at a time."""
FEW_WORDS = 128
"""Words that one warp copies."""


@triton.jit
def _sample_kernel(
    counts, draws, slots, rows, obs, actions, rewards, terminated, truncated, valid, final, finals,
    out_obs, out_actions, out_rewards, out_next, out_discounts, out_known, out_ids,
    length, num_rows, num_finals, gamma, obs_words, action_words, group_rows, batch_size,
    given: tl.constexpr, n_step: tl.constexpr, block: tl.constexpr, action_block: tl.constexpr,
):  # fmt: skip
    """One program per transition and block of its observation's words."""
    b, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    head, num_written, usable = tl.load(counts), tl.load(counts + 1), tl.load(counts + 2)
    if given:
        slot, row = tl.load(slots + b), tl.load(rows + b)
    else:
        filled = tl.minimum(usable, length - 1)
        seed = tl.load(draws)
        slot = usable - 1 - (tl.randint(seed, 2 * b).to(tl.uint32).to(tl.int64) % filled)
        row = b // batch_size * group_rows + tl.randint(seed, 2 * b + 1).to(tl.uint32).to(tl.int64) % group_rows
    total, factor, going, last, known = 0.0, 1.0, 1, slot, 1
    for k in tl.static_range(n_step):
        at = slot + k
        place = (at % length) * num_rows + row
        ends = (tl.load(terminated + place) != 0) | (tl.load(truncated + place) != 0)
        if k > 0:
            going = going * ((at < usable) | ((at < head) & ends)).to(tl.int32)
        is_on = going > 0
        total += tl.where(is_on, factor * tl.load(rewards + place), 0.0)
        factor = tl.where(is_on, factor * gamma, factor)
        known = known * tl.where(is_on, tl.load(valid + place).to(tl.int32), 1)
        last = tl.where(is_on, at, last)
        going = tl.where(is_on & ends, 0, going)
    start, place = (slot % length) * num_rows + row, (last % length) * num_rows + row
    after = ((last + 1) % length) * num_rows + row
    ended = tl.load(terminated + place) != 0
    cut = (tl.load(truncated + place) != 0) & (~ended)
    number = tl.load(final + place)
    has_final = (number >= 0) & (number >= num_written - num_finals)
    has_next = (tl.load(valid + after) != 0) | (last + 1 == head)
    known = tl.where(ended | (cut & has_final) | ((~ended) & (~cut) & has_next), known, 0)
    words = part * block + tl.arange(0, block)
    there = words < obs_words
    tl.store(out_obs + b * obs_words + words, tl.load(obs + start * obs_words + words, mask=there), mask=there)
    following = tl.where(ended, place, after)
    from_ring = tl.load(obs + following * obs_words + words, mask=there & (~cut))
    from_finals = tl.load(finals + tl.maximum(number, 0) % num_finals * obs_words + words, mask=there & cut)
    tl.store(out_next + b * obs_words + words, tl.where(cut, from_finals, from_ring), mask=there)
    if part == 0:
        columns = tl.arange(0, action_block)
        has = columns < action_words
        tl.store(
            out_actions + b * action_words + columns, tl.load(actions + start * action_words + columns, mask=has), mask=has
        )
        tl.store(out_rewards + b, total)
        tl.store(out_discounts + b, tl.where(ended, 0.0, factor))
        tl.store(out_known + b, known.to(tl.float32))
        tl.store(out_ids + b, start)


def sample(
    counts: Tensor, draws: Tensor, given: tuple[Tensor, Tensor] | None, rings: dict[str, Any], finals: Tensor, n_step: int,
    gamma: float, batch_size: int, groups: int = 1,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Draw and read transitions.

    Args:
        counts: Those of a `DeviceReplay`.
        draws: Seed of this draw, int64 [1].
        given: Steps and rows to read instead, int64 [B] each.
        rings: Its rings, [length, rows, …].
        finals: Its final observations, one more than it uses.
        n_step: Rewards to sum.
        gamma: Discount.
        batch_size: B.
        groups: G; each has an equal share of the rows, and B transitions are drawn of each.

    Returns:
        Observations, actions, rewards, next observations, discounts, whether the successor is known (1 or 0), and ids; of one
        group after the other, [G * B, …].
    """
    (length, num_rows), count = rings["rewards"].shape, groups * batch_size
    device, obs, actions = counts.device, rings["obs"], rings["actions"]
    out_obs, out_next = (torch.empty((count, *obs.shape[2:]), dtype=obs.dtype, device=device) for _ in range(2))
    out_actions = torch.empty((count, *actions.shape[2:]), dtype=actions.dtype, device=device)
    numbers = torch.empty((3, count), device=device)
    ids = torch.empty(count, dtype=torch.int64, device=device)
    obs_words, action_words = _words(obs, 2), _words(actions, 2)
    width, action_width = obs_words.shape[-1], action_words.shape[-1]
    block = min(BLOCK, triton.next_power_of_2(width))
    slots, rows = given or (draws, draws)
    flags = [rings[name].view(torch.uint8) for name in ("terminated", "truncated", "valid")]
    _sample_kernel[(count, triton.cdiv(width, block))](
        counts, draws, slots, rows, obs_words, action_words, rings["rewards"], *flags, rings["final"], _words(finals, 1),
        _words(out_obs, 1), _words(out_actions, 1), numbers[0], _words(out_next, 1), numbers[1], numbers[2], ids,
        length, num_rows, len(finals) - 1, gamma, width, action_width, num_rows // groups, batch_size,
        given=given is not None, n_step=n_step, block=block, action_block=triton.next_power_of_2(action_width),
        num_warps=1 if block <= FEW_WORDS else 4,  # many programs wait for memory at once
    )  # fmt: skip
    return out_obs, out_actions, numbers[0], out_next, numbers[1], numbers[2], ids


def _words(tensor: Tensor, lead: int) -> Tensor:
    """A tensor as machine words: [*lead, words], of 4 bytes where they fit."""
    flat = tensor.reshape(*tensor.shape[:lead], -1)
    size = flat.shape[-1] * flat.element_size()
    return flat.view(torch.int32 if size % 4 == 0 else torch.uint8)
