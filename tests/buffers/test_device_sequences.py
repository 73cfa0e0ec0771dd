"""Sequences in a device's memory, on the CPU, against the rollouts they were cut from."""

import numpy as np
import pytest
import torch
from replay_worlds import World

from hurtle.buffers.device_sequences import FIELDS, DeviceSequences
from hurtle.errors import HurtleError

STEPS = 4
WORLDS = {"plain": {}, "masks": {"masked": True}, "bytes": {"shape": (2, 4), "dtype": np.uint8}}


def filled(kind="plain", length=9, capacity=3 * STEPS * 6, alpha=0.9, rollouts=10):
    """A buffer of six rollouts of three rows, and all that was added."""
    world = World(1, recurrent="gru", **WORLDS[kind])
    replay, added = DeviceSequences(world.new_rollout(STEPS), capacity, length, alpha), []
    for _ in range(rollouts):
        added.append(world.rollout(STEPS))
        replay.add(added[-1])
    return world, replay, added


def check(batch, added, length):
    """Every sequence is a stretch of what was added; returns where they begin, as (rollout, row)."""
    names = [name for name in FIELDS if getattr(added[0], name) is not None]
    whole = {name: torch.cat([getattr(rollout, name) for rollout in added]) for name in names}
    begun = {float(part): (k, n) for k, rollout in enumerate(added) for n, part in enumerate(rollout.initial_state[0][:, 0])}
    found = []
    for b, state in enumerate(batch.state[0][:, 0].tolist()):
        k, row = begun[state]
        for name, field in whole.items():
            assert torch.equal(getattr(batch, name)[:, b], field[k * STEPS : k * STEPS + length, row]), name
        found.append((k, row))
    return found


@pytest.mark.parametrize(("kind", "length"), [("plain", 9), ("masks", 3), ("bytes", 8)])
def test_every_sequence_is_what_happened_and_the_oldest_make_room(kind, length):
    _, replay, added = filled(kind, length)
    found = check(replay.sample_sequences(300), added, length)
    first, last = len(added) - 6, len(added) - -(-length // STEPS)
    assert set(found) == {(k, row) for k in range(first, last + 1) for row in range(3)}
    assert replay.num_sequences == len(set(found))
    assert len(replay) == replay.capacity == 3 * STEPS * 6


def test_before_there_is_a_whole_sequence_none_can_be_drawn():
    _, replay, _ = filled(rollouts=2)
    assert replay.num_sequences == 0
    _, replay, added = filled(rollouts=3)
    assert replay.num_sequences == 3
    assert {k for k, _ in check(replay.sample_sequences(50), added, 9)} == {0}


def test_priorities_are_those_of_sequences():
    _, replay, added = filled(alpha=0.5)
    torch.manual_seed(0)
    ids = torch.arange(18)
    errors = torch.where(ids == replay.sample_sequences(1).ids, 400.0, 4.0)
    errors[0] = torch.nan
    replay.update_priorities(ids, errors)
    batch = replay.sample_sequences(4000, beta=1.0)
    counts = torch.bincount(batch.ids, minlength=18)
    priorities = replay.priorities.flatten()
    assert set(priorities.round(decimals=3).tolist()) == {0.0, 1.0, 2.0, 20.0}  # 0: not complete; 1: not known
    assert torch.allclose(counts / 4000, priorities / priorities.sum(), atol=0.03)
    assert torch.allclose(batch.weights, 1.0 / priorities[batch.ids], rtol=1e-4)
    newest = added[-1]
    replay.add(newest)
    assert replay.priorities.max() == replay.highest == pytest.approx(20.0, rel=1e-4)
    assert replay.ages(torch.tensor([(replay.written - 1) % 6 * 3])).tolist() == [0]


def test_without_priorities_all_are_as_likely():
    _, replay, _ = filled(alpha=0.0)
    torch.manual_seed(0)
    batch = replay.sample_sequences(3000)
    counts = torch.bincount(batch.ids, minlength=18)[replay.priorities.flatten() > 0]
    assert torch.allclose(counts / 3000, torch.tensor(1 / 12), atol=0.03)
    assert (batch.weights == 1).all()


def test_what_was_abandoned_ends_there():
    world, replay, added = filled(rollouts=5)
    world.abandon([1], starts=True)
    ended = (added[-1].terminated | added[-1].truncated)[-1]
    replay.add(world.rollout(STEPS))
    last = replay.rings["truncated"][4, -1]
    assert last[1] == (not added[-1].terminated[-1, 1])
    assert torch.equal(last[[0, 2]], added[-1].truncated[-1, [0, 2]])
    assert not ended[1]


def test_it_is_saved_and_goes_on():
    world, replay, _ = filled(rollouts=4)
    again = DeviceSequences(world.new_rollout(STEPS), replay.capacity, 9, 0.9)
    again.load_state_dict(replay.state_dict())
    following = world.rollout(STEPS)
    samples = []
    for each in (replay, again):
        each.add(following)
        torch.manual_seed(0)
        samples.append(each.sample_sequences(64))
    for one, other in zip(*samples, strict=True):
        assert one is other is None or all(torch.equal(*pair) for pair in zip(one, other, strict=True))
    with pytest.raises(HurtleError, match="another size or layout"):
        DeviceSequences(world.new_rollout(STEPS), replay.capacity, 8).load_state_dict(replay.state_dict())


def test_what_it_cannot_hold():
    world, replay, _ = filled(rollouts=1)
    with pytest.raises(HurtleError, match=r"capacity=40 is too small for sequences of 9 steps of 3 rows: use at least 48"):
        DeviceSequences(world.new_rollout(STEPS), 40, 9)
    with pytest.raises(HurtleError, match="rollout has 3 rows and 5 steps"):
        replay.add(world.rollout(5))
    absent = World(0, recurrent="gru", absent=0.5).rollout(STEPS)
    with pytest.raises(HurtleError, match="agents are always present"):
        replay.add(absent)
