"""Replayed sequences beside what the rows did."""

import numpy as np
import pytest
import torch
from replay_worlds import World

from hurtle.buffers.sequences import SequenceReplay
from hurtle.errors import HurtleError

SLOW = pytest.mark.slow
WORLDS = {
    "plain": {},
    "masks": {"masked": True},
    "absent": {"absent": 0.2},
    "stacks": {"stack": 3, "shape": (2, 2), "dtype": np.uint8},
}


def expected_of(world, length):
    """By the state before its first step: the row and the slots of every sequence that is complete."""
    found = {}
    for row in range(world.num_rows):
        slots, places = world.slots(row)
        for step, state in world.rows[row].begun:
            if step < len(places) and places[step] + length <= len(slots):
                found[state] = (row, slots[places[step] : places[step] + length])
    return found


def assert_sequences(replay, world, complete):
    expected = expected_of(world, replay.sequence_length)
    found = set()
    batch = replay.sample_sequences(320)
    for b in np.unique(batch.ids.numpy(), return_index=True)[1]:
        state = float(batch.state[0][b, 0])
        found.add(state)
        for t, slot in enumerate(expected[state][1]):
            obs, action, reward, *flags = slot
            own = [bool(field[t, b]) for field in (batch.terminated, batch.truncated, batch.starts, batch.valid)]
            assert own == flags
            if flags[-1]:
                assert torch.equal(batch.obs[t, b], torch.from_numpy(obs))
                assert (int(batch.actions[t, b]), float(batch.rewards[t, b])) == (action, reward)
                continue
            assert (int(batch.actions[t, b]), float(batch.rewards[t, b])) == (0, 0.0)
            if obs.shape == batch.obs[t, b].shape:  # the final observation of a truncated episode
                assert torch.equal(batch.obs[t, b], torch.from_numpy(obs))
    assert not complete or found == set(expected)
    return found


@pytest.mark.parametrize(
    ("length", "alpha"), [(3, 0.9), (9, None), pytest.param(3, None, marks=SLOW), pytest.param(9, 0.9, marks=SLOW)]
)
@pytest.mark.parametrize("kind", WORLDS)
def test_every_sequence_is_what_happened(kind, length, alpha):
    world = World(1, recurrent="gru", **WORLDS[kind])
    replay = SequenceReplay(world.new_rollout(4), 600, length, frame_stack=world.stack, priority_alpha=alpha)
    for k in range(8):
        replay.add(world.rollout(4))
        if k > 4:
            assert_sequences(replay, world, complete=True)


@pytest.mark.parametrize("alpha", [pytest.param(None, marks=SLOW), 0.9])
@pytest.mark.parametrize("kind", WORLDS)
def test_the_oldest_make_room(kind, alpha):
    world = World(2, recurrent="gru", **WORLDS[kind])
    replay = SequenceReplay(world.new_rollout(4), 3 * 40, 6, frame_stack=world.stack, priority_alpha=alpha)
    for k in range(30):
        replay.add(world.rollout(4))
        if k > 4 and k % 2:
            found = assert_sequences(replay, world, complete=False)
    newest = max(found)
    assert newest > sorted(expected_of(world, 6))[-4]
    assert min(found) > sorted(expected_of(world, 6))[30]


def test_priorities_are_those_of_sequences():
    world = World(3, recurrent="gru", ends=0.0)
    replay = SequenceReplay(world.new_rollout(4), 300, 4, priority_alpha=1.0)
    for _ in range(5):
        replay.add(world.rollout(4))
    slots = torch.unique(replay.sample_sequences(500).ids)
    assert len(slots) == 15
    errors = torch.full((15,), 1e-3)
    errors[4] = 100.0
    replay.update_priorities(slots, errors)
    batch = replay.sample_sequences(1000, beta=0.5)
    assert (batch.ids == slots[4]).float().mean() > 0.99
    assert batch.weights.max() == 1


def test_overwritten_sequences_keep_no_priority():
    world = World(7, recurrent="gru", ends=0.0)
    replay = SequenceReplay(world.new_rollout(4), 60, 4, priority_alpha=1.0)
    for _ in range(3):
        replay.add(world.rollout(4))
    old = torch.unique(replay.sample_sequences(500).ids)
    assert sorted(set((replay.ages(old)).tolist())) == [0, 4, 8]
    for _ in range(9):
        replay.add(world.rollout(4))
    replay.update_priorities(old, torch.full((len(old),), 1e9))
    frequency = torch.unique(replay.sample_sequences(2000).ids, return_counts=True)[1]
    assert frequency.max() < 2 * frequency.min()


def test_segments_of_pools_where_a_row_has_several_columns():
    world = World(4, recurrent="gru")
    replay = SequenceReplay(world.new_rollout(4), 600, 6)
    for _ in range(6):
        rollout = world.rollout(4, columns := [2, 0, 2, 1])
        rollout.columns = np.array(columns)
        replay.add(rollout)
    assert_sequences(replay, world, complete=True)


def test_resuming_draws_the_same(tmp_path):
    world = World(5, recurrent="gru")
    replay, other = (SequenceReplay(world.new_rollout(4), 300, 6, priority_alpha=0.5, seed=3) for _ in range(2))
    for _ in range(4):
        replay.add(world.rollout(4))
    replay.sample_sequences(4)
    torch.save(replay.state_dict(), tmp_path / "replay.pt")
    other.load_state_dict(torch.load(tmp_path / "replay.pt"))
    rollout = world.rollout(4)
    for each in (replay, other):
        each.add(rollout)
    for own, its in zip(replay.sample_sequences(8), other.sample_sequences(8), strict=True):
        same = zip(own, its, strict=True) if isinstance(own, tuple) else [(own, its)]
        assert all(a is b is None or torch.equal(a, b) for a, b in same)
    with pytest.raises(HurtleError, match="num_steps=4, this one num_steps=3"):
        SequenceReplay(world.new_rollout(3), 300, 6, priority_alpha=0.5).load_state_dict(replay.state_dict())


def test_mistakes():
    world = World(6, recurrent="gru")
    with pytest.raises(HurtleError, match="sequence_length must be an int"):
        SequenceReplay(world.new_rollout(4), 300, 0)
    with pytest.raises(HurtleError, match="a capacity of at least 45"):
        SequenceReplay(world.new_rollout(4), 30, 10)
    replay = SequenceReplay(world.new_rollout(4), 300, 10)
    replay.add(world.rollout(4))
    with pytest.raises(HurtleError, match="no sequence of 10 steps yet"):
        replay.sample_sequences(2)
    with pytest.raises(HurtleError, match="batch_size"):
        replay.sample_sequences(0)
    with pytest.raises(HurtleError, match="use sample_sequences"):
        replay.sample(2)
    with pytest.raises(HurtleError, match="n_step are not settings of sequences"):
        SequenceReplay(world.new_rollout(4), 300, 10, n_step=3)
