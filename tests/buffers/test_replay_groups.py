"""The replay of one of several seeds: what a buffer of its own holds, also where final observations have been overwritten."""

import pytest
import torch
from gymnasium import spaces

from hurtle.buffers.device_replay import DeviceReplay
from hurtle.buffers.replay_groups import forget, load_group, replay_bytes, state_of_group
from hurtle.buffers.rollout import Finals, Rollout
from hurtle.errors import HurtleError
from hurtle.policies.build import PolicyConfig, build_policy

SEEDS, SHARE, STEPS, CAPACITY = 3, 2, 4, 40
POLICY = build_policy(PolicyConfig(hidden_sizes=(4,)), spaces.Box(-1, 1, (2,)), spaces.Discrete(2))


def made(groups=SEEDS, alpha=0.6):
    like = Rollout(POLICY, STEPS, SHARE * (groups or 1))
    return DeviceReplay(like, CAPACITY * (groups or 1), priority_alpha=alpha, groups=groups)


def rollouts(count, often):
    """Of all seeds; observations are (row, step), and final ones (row, -step)."""
    generator = torch.Generator().manual_seed(0)
    for k in range(count):
        rollout = Rollout(POLICY, STEPS, SHARE * SEEDS)
        steps = torch.arange(STEPS) + k * STEPS
        rollout.obs[..., 0], rollout.obs[..., 1] = torch.arange(SHARE * SEEDS), steps.unsqueeze(1)
        rollout.last_obs[:, 0], rollout.last_obs[:, 1] = torch.arange(SHARE * SEEDS), steps[-1] + 1
        rollout.truncated.copy_(torch.rand(rollout.truncated.shape, generator=generator) < often)
        at, rows = rollout.truncated.nonzero().T
        obs = torch.stack([rows, -steps[at]], 1).float()
        rollout.finals = Finals(at, rows, obs, ())
        yield rollout


def part_of(rollout, k):
    """The rollout of one seed."""
    own = Rollout(POLICY, STEPS, SHARE)
    rows = slice(k * SHARE, (k + 1) * SHARE)
    for name in ("obs", "truncated", "valid"):
        getattr(own, name).copy_(getattr(rollout, name)[:, rows])
    own.last_obs.copy_(rollout.last_obs[rows])
    mine = (rollout.finals.rows >= rows.start) & (rollout.finals.rows < rows.stop)
    own.finals = Finals(*(part[mine] for part in rollout.finals[:3]), ())
    own.finals = own.finals._replace(rows=own.finals.rows - rows.start)
    return own


def everything(replay, group=None):
    """All transitions that can be drawn, as (obs, next obs)."""
    usable = int(replay.counts[2])
    slots = torch.arange(max(0, usable - replay.length + 1), usable)
    first, count = (0, replay.num_rows) if group is None else (group * SHARE, SHARE)
    rows = torch.arange(first, first + count)
    found = replay._read(slots.repeat_interleave(count), rows.repeat(len(slots)), torch.ones(len(slots) * count))
    known = found.weights > 0
    return torch.cat([found.obs[known], found.next_obs[known]], 1)


@pytest.mark.parametrize(("count", "often"), [(2, 0.1), (12, 0.02), (12, 0.1), (30, 0.9)])
def test_a_part_is_the_buffer_of_a_seed(count, often):
    whole, singles = made(), [made(None) for _ in range(SEEDS)]
    for rollout in rollouts(count, often):
        whole.add(rollout)
        for k, single in enumerate(singles):
            single.add(part_of(rollout, k))
    again = made()
    for k, single in enumerate(singles):
        own = made(None)
        own.load_state_dict(state_of_group(whole, k))
        assert own.written == single.written
        found, expected = everything(own), everything(single)
        if often < 0.5:  # else each forgets other final observations
            assert torch.equal(found, expected)
        rows = found[:, 0].unique().tolist()
        assert rows == [k * SHARE, k * SHARE + 1]
        cut = found[:, 3] < 0
        assert (found[cut, 3] == -found[cut, 1]).all(), "its own final observation"
        assert torch.equal(own.priorities, single.priorities)
        load_group(again, k, state_of_group(whole, k))
    for k in range(SEEDS if often < 0.5 else 0):
        assert torch.equal(everything(again, k), everything(whole, k))
    from_singles = made()
    for k, single in enumerate(singles):
        load_group(from_singles, k, single.state_dict())
    for rollout in rollouts(3, often):
        for replay in (from_singles, whole):
            replay.add(rollout)
    if often < 0.05:
        for k in range(SEEDS):
            assert torch.equal(everything(from_singles, k), everything(whole, k))


def test_what_does_not_fit_is_refused_and_can_be_forgotten():
    whole = made()
    for rollout in rollouts(2, 0.1):
        whole.add(rollout)
    with pytest.raises(HurtleError, match="another size or layout"):
        load_group(made(alpha=0.0), 0, state_of_group(whole, 0))
    with pytest.raises(HurtleError, match="another size or layout"):
        load_group(made(), 0, {"description": {}, "rings": {}})
    forget(whole)
    assert len(whole) == 0
    assert not whole.priorities.any()


def test_its_memory_is_what_it_takes():
    replay = made(1, alpha=0.6)
    tensors = [*replay.rings.values(), replay.finals, replay.priorities]
    taken = sum(tensor.nbytes for tensor in tensors)
    assert taken == pytest.approx(replay_bytes(Rollout(POLICY, STEPS, SHARE), CAPACITY), rel=0.01)
