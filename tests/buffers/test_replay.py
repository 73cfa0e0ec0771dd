"""The replay buffer beside a plain reference: every transition that can be drawn, of random episodes."""

import errno
import gc
from pathlib import Path

import numpy as np
import pytest
import torch
from replay_worlds import GAMMA, World

from hurtle.buffers import storage
from hurtle.buffers.replay import Replay
from hurtle.errors import HurtleError


def drawn(replay, times=40, size=50):
    """All that is drawn, by observation."""
    found = {}
    for _ in range(times):
        batch = replay.sample(size)
        for b in range(size):
            masks = (None, None) if batch.masks is None else (batch.masks[b].numpy().copy(), batch.next_masks[b].numpy().copy())
            found[batch.obs[b].numpy().tobytes()] = (
                int(batch.actions[b]), float(batch.rewards[b]), float(batch.discounts[b]), batch.next_obs[b].numpy().copy(),
                masks,
            )  # fmt: skip
    return found


def assert_transitions(replay, world, complete=True):
    expected, found = world.transitions(replay.n_step), drawn(replay)
    assert set(found) <= set(expected)
    if complete:
        assert set(found) == set(expected)
    for obs, (action, total, factor, following, (mask, next_mask)) in found.items():
        wanted = expected[obs]
        assert (action, total, factor) == (wanted[0], pytest.approx(wanted[2], abs=1e-5), pytest.approx(wanted[3], abs=1e-6))
        if factor:
            np.testing.assert_array_equal(following, wanted[4])
        if mask is not None:
            np.testing.assert_array_equal(mask, wanted[1])
            if factor:
                np.testing.assert_array_equal(next_mask, wanted[5])


WORLDS = {
    "plain": {},
    "long episodes": {"ends": 0.02},
    "bytes": {"dtype": np.uint8, "shape": (3,)},
    "doubles": {"dtype": np.float64, "shape": (1,)},
    "stacks": {"stack": 4, "shape": (3, 3), "dtype": np.uint8},
    "stacks of floats": {"stack": 3, "shape": (2,)},
    "masks": {"masked": True},
    "absent": {"absent": 0.3},
    "absent, masked stacks": {"absent": 0.2, "masked": True, "stack": 2, "shape": (2, 2)},
}


@pytest.mark.parametrize("alpha", [None, 0.6])
@pytest.mark.parametrize("n_step", [1, 3])
@pytest.mark.parametrize("kind", WORLDS)
def test_every_transition_is_that_of_the_reference(kind, n_step, alpha):
    world = World(1, **WORLDS[kind])
    replay = Replay(world.new_rollout(5), 600, n_step=n_step, gamma=GAMMA, frame_stack=world.stack, priority_alpha=alpha)
    for _ in range(4):
        replay.add(world.rollout())
        assert_transitions(replay, world)


@pytest.mark.parametrize("alpha", [None, 0.6])
@pytest.mark.parametrize("kind", WORLDS)
def test_the_oldest_make_room(kind, alpha):
    world = World(2, **WORLDS[kind])
    replay = Replay(world.new_rollout(7), 3 * 20, n_step=2, gamma=GAMMA, frame_stack=world.stack, priority_alpha=alpha)
    for _ in range(13):
        replay.add(world.rollout(7))
        assert_transitions(replay, world, complete=False)
    assert len(replay) == replay.capacity == 60
    newest = {row.steps[-2][0].tobytes() for row in world.rows}
    assert newest <= set(drawn(replay))
    least = 20 - 1 if world.stack == 1 else 1  # slots of final observations and of first frames are no transitions
    assert len(drawn(replay)) > least


def test_a_rollout_longer_than_the_ring():
    world = World(3)
    replay = Replay(world.new_rollout(50), 30, gamma=GAMMA, priority_alpha=1.0)
    replay.add(world.rollout(50))
    assert_transitions(replay, world, complete=False)


def test_segments_of_pools():
    world, rng = World(4, num_rows=5), np.random.default_rng(0)
    replay = Replay(world.new_rollout(4), 1000, num_rows=5, n_step=2, gamma=GAMMA)
    for _ in range(12):
        rollout = world.rollout(4, columns := rng.permutation(5)[:2])
        rollout.columns = columns
        replay.add(rollout)
    assert_transitions(replay, world)


def test_uniform_draws_are_uniform():
    world = World(5, ends=0.1)
    replay = Replay(world.new_rollout(20), 300, gamma=GAMMA)
    replay.add(world.rollout(20))
    count = len(world.transitions(1))
    slots = torch.cat([replay.sample(1000).slots.clone() for _ in range(60)])
    frequency = torch.bincount(slots)[torch.unique(slots)].double() / len(slots)
    assert len(frequency) == count == 60
    assert (frequency * count - 1).abs().max() < 0.15  # five standard deviations


def test_priorities_decide_how_often_and_weights_correct_it():
    world = World(6, ends=0.0)
    replay = Replay(world.new_rollout(10), 100, gamma=GAMMA, priority_alpha=0.5)
    replay.add(world.rollout(10))
    slots = torch.unique(replay.sample(2000).slots)
    errors = torch.linspace(0.1, 4.0, len(slots))
    replay.update_priorities(slots, errors)
    found = [replay.sample(1000, beta=0.7) for _ in range(1)]
    seen, weights = [], {}
    for _ in range(60):
        batch = replay.sample(1000, beta=0.7)
        seen.append(batch.slots.clone())
        weights |= dict(zip(batch.slots.tolist(), batch.weights.tolist(), strict=True))
    frequency = torch.bincount(torch.cat(seen))[slots].double() / 60_000
    expected = errors.double().add(1e-6).sqrt()
    expected /= expected.sum()
    torch.testing.assert_close(frequency, expected, rtol=0.1, atol=0)
    wanted = (expected / expected.min()) ** -0.7
    torch.testing.assert_close(torch.tensor([weights[slot] for slot in slots.tolist()]).double(), wanted, rtol=1e-4, atol=0)
    assert found[0].weights.max() == 1


def test_new_transitions_get_the_highest_priority_and_overwritten_ones_no_longer_count():
    world = World(7, ends=0.0)
    replay = Replay(world.new_rollout(5), 60, gamma=GAMMA, priority_alpha=1.0)
    replay.add(world.rollout())
    replay.update_priorities(torch.unique(replay.sample(1000).slots), torch.full((15,), 1e-3))
    old = replay.sample(15).slots.clone()
    replay.update_priorities(old[:1], torch.tensor([50.0]))
    replay.add(world.rollout())
    seen = torch.bincount(replay.sample(10_000).slots, minlength=60)
    assert seen[seen > 500].numel() == 16  # 15 new ones and the one of 50
    for _ in range(4):
        replay.add(world.rollout())
    replay.update_priorities(old, torch.full((15,), 1e9))  # learned from too late: the slots hold other steps
    assert_transitions(replay, world, complete=False)
    with pytest.raises(HurtleError, match="not finite"):
        replay.update_priorities(old, torch.full((15,), torch.nan))


@pytest.mark.parametrize("folder", [None, "disk"])
@pytest.mark.parametrize("alpha", [None, 0.6])
def test_resuming_draws_the_same(alpha, folder, tmp_path):
    world = World(8)
    settings = {"n_step": 2, "priority_alpha": alpha, "seed": 3, "folder": tmp_path if folder else None}
    replay, other = (Replay(world.new_rollout(5), 90, **settings) for _ in range(2))
    replay.add(world.rollout())
    replay.sample(16)
    torch.save(replay.state_dict(), tmp_path / "replay.pt")
    other.load_state_dict(torch.load(tmp_path / "replay.pt"))
    rollout = world.rollout()
    for each in (replay, other):
        each.add(rollout)
    for _ in range(5):
        for own, its in zip(replay.sample(16), other.sample(16), strict=True):
            assert own is its is None or torch.equal(own, its)


def test_another_replay_is_not_loaded_and_nothing_changes():
    world = World(9)
    replay = Replay(world.new_rollout(5), 90)
    replay.add(world.rollout())
    before = replay.sample(500).obs.unique().clone()
    for other, why in (
        (Replay(world.new_rollout(5), 60), "use its capacity"),
        (Replay(world.new_rollout(5), 90, priority_alpha=0.6), "priority_alpha"),
    ):
        with pytest.raises(HurtleError, match=why):
            replay.load_state_dict(other.state_dict())
    assert torch.equal(replay.sample(500).obs.unique(), before)


def test_the_same_seed_draws_the_same():
    world = World(10)
    rollout = world.rollout()
    first, same, another = (Replay(rollout, 90, seed=seed) for seed in (1, 1, 2))
    for each in (first, same, another):
        each.add(rollout)
    slots = [each.sample(32).slots for each in (first, same, another)]
    assert torch.equal(slots[0], slots[1])
    assert not torch.equal(slots[0], slots[2])


def test_a_file_has_no_name_and_its_room_is_taken_at_once(tmp_path):
    world = World(11)
    files = Path("/proc/self/fd")
    before = set(files.iterdir()) if files.is_dir() else None
    replay = Replay(world.new_rollout(5), 300_000, folder=tmp_path)
    assert f"in {tmp_path}" in repr(replay)
    assert not list(tmp_path.iterdir())
    replay.add(world.rollout())
    del replay
    gc.collect()
    if before is not None:
        assert set(files.iterdir()) <= before


def test_what_does_not_fit(tmp_path, monkeypatch):
    world = World(12)
    monkeypatch.setattr(storage, "available_memory", lambda: 1000)
    assert Replay(world.new_rollout(5), 300).storage.folder is not None
    assert Replay(world.new_rollout(5), 300, folder="memory").storage.folder is None

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(storage, "_reserve", full)
    with pytest.raises(HurtleError, match="does not fit on the disk"):
        Replay(world.new_rollout(5), 300, folder=tmp_path)
    with pytest.raises(HurtleError, match=r"cannot be kept in .*nowhere: No such file"):
        Replay(world.new_rollout(5), 300, folder=tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"capacity": 0}, "capacity must be an int"),
        ({"capacity": 2.5}, "capacity must be an int"),
        ({"n_step": 0}, "n_step must be an int"),
        ({"capacity": 8}, "at least 9"),
        ({"n_step": 40}, "at least 126"),
        ({"gamma": 1.1}, "between 0 and 1"),
        ({"priority_alpha": -1.0}, "at least 0"),
        ({"frame_stack": 4}, r"theirs have the shape \(2,\)"),
    ],
)
def test_impossible_settings_are_refused(settings, why):
    with pytest.raises(HurtleError, match=why):
        Replay(World(0).new_rollout(5), **{"capacity": 60, **settings})


def test_other_mistakes():
    world = World(13)
    replay = Replay(world.new_rollout(5), 60)
    with pytest.raises(HurtleError, match="add a rollout first"):
        replay.sample(4)
    replay.add(world.rollout())
    with pytest.raises(HurtleError, match="batch_size must be at least 1"):
        replay.sample(0)
    with pytest.raises(HurtleError, match=r"observations: \(4,\), expected \(2,\)"):
        replay.add(World(0, shape=(4,)).rollout())
    with pytest.raises(HurtleError, match="has 2 rows, the replay buffer 3"):
        replay.add(World(0, num_rows=2).rollout())
    no_stack = World(0, shape=(4, 2))
    with pytest.raises(HurtleError, match="last 3 frames of an observation are not the first"):
        Replay(no_stack.new_rollout(5), 60, frame_stack=4).add(no_stack.rollout())


def test_ages_and_size():
    world = World(14, ends=0.0)
    replay = Replay(world.new_rollout(5), 60)
    assert len(replay) == 0
    replay.add(world.rollout())
    assert len(replay) == 15
    slots = replay.sample(500).slots
    ages = dict(zip(slots.tolist(), replay.ages(slots).tolist(), strict=True))
    assert sorted(ages.values()) == sorted([0, 1, 2, 3, 4] * 3)
    assert replay.nbytes < 60 * 40
