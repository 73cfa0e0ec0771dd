"""The replay buffer beside a plain reference: every transition that can be drawn, of random episodes."""

import errno
import gc
import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from replay_worlds import GAMMA, World

import hurtle
from hurtle.buffers import storage
from hurtle.buffers.replay import Replay
from hurtle.buffers.sequences import SequenceReplay
from hurtle.collect import NativeCollector
from hurtle.collect.general_collector import GeneralCollector
from hurtle.collect.inference import Actor
from hurtle.errors import HurtleError
from hurtle.policies.build import PolicyConfig, build_policy


def drawn(replay, size=3000):
    """All that is drawn, by observation."""
    found, batch = {}, replay.sample(size)
    for b in np.unique(batch.ids.numpy(), return_index=True)[1]:
        masks = (None, None) if batch.masks is None else (batch.masks[b].numpy().copy(), batch.next_masks[b].numpy().copy())
        numbers = int(batch.actions[b]), float(batch.rewards[b]), float(batch.discounts[b])
        found[batch.obs[b].numpy().tobytes()] = (*numbers, batch.next_obs[b].numpy().copy(), masks)
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


@pytest.mark.parametrize(
    ("kind", "n_step", "alpha"),
    [
        pytest.param(kind, n_step, alpha, marks=[pytest.mark.slow] * (n_step == 1 and alpha is not None))
        for kind, n_step, alpha in itertools.product(WORLDS, [1, 3], [None, 0.6])
    ],
)
def test_every_transition_is_that_of_the_reference(kind, n_step, alpha):
    world = World(1, **WORLDS[kind])
    replay = Replay(world.new_rollout(5), 600, n_step=n_step, gamma=GAMMA, frame_stack=world.stack, priority_alpha=alpha)
    for _ in range(4):
        replay.add(world.rollout())
        assert_transitions(replay, world)


@pytest.mark.parametrize(
    ("kind", "alpha"),
    [
        pytest.param(kind, alpha, marks=[pytest.mark.slow] * (alpha is None and kind not in ("plain", "stacks", "absent")))
        for kind, alpha in itertools.product(WORLDS, [None, 0.6])
    ],
)
def test_the_oldest_make_room(kind, alpha):
    world = World(2, **WORLDS[kind])
    replay = Replay(world.new_rollout(7), 3 * 20, n_step=2, gamma=GAMMA, frame_stack=world.stack, priority_alpha=alpha)
    for _ in range(9):
        replay.add(world.rollout(7))
        assert_transitions(replay, world, complete=False)
    assert len(replay) == replay.capacity == 60
    newest = {row.steps[-2][0].tobytes() for row in world.rows}
    assert newest <= set(drawn(replay))
    least = 20 - 1 if world.stack == 1 else 1  # slots of final observations and of first frames are no transitions
    assert len(drawn(replay)) > least


@pytest.mark.parametrize("alpha", [pytest.param(None, marks=pytest.mark.slow), 0.6])
@pytest.mark.parametrize("starts", [True, False])
@pytest.mark.parametrize("kind", ["plain", "long episodes", "stacks"])
def test_an_abandoned_episode_counts_as_truncated(kind, starts, alpha):
    world = World(15, **WORLDS[kind])
    replay = Replay(world.new_rollout(5), 900, n_step=3, gamma=GAMMA, frame_stack=world.stack, priority_alpha=alpha)
    for k in range(8):
        replay.add(world.rollout())
        assert_transitions(replay, world)
        if k % 2:
            world.abandon([0, 2], starts)


@pytest.mark.parametrize("kind", ["masks", "absent"])
def test_so_it_does_where_what_followed_is_not_known(kind):
    """Its last step is not sampled, and those before it bootstrap from its observation."""
    world = World(16, ends=0.0, **WORLDS[kind])
    replay = Replay(world.new_rollout(5), 900, n_step=3, gamma=GAMMA)
    replay.add(world.rollout())
    expected = world.transitions(3)
    for row in range(3):
        world.shown[row], world.starting[row] = world.first(), True
    replay.add(world.rollout())
    found = drawn(replay)
    assert set(expected) < set(found)
    for obs, (_, _, total, factor, after, _) in expected.items():
        assert found[obs][1:3] == (pytest.approx(total, abs=1e-5), pytest.approx(factor, abs=1e-6))
        np.testing.assert_array_equal(found[obs][3], after)


def test_a_truncation_without_a_final_observation_is_not_sampled():
    world = World(17, ends=0.3)
    replay = Replay(world.new_rollout(30), 900, gamma=GAMMA)
    rollout = world.rollout(30)
    cut = {row.steps[k][0].tobytes() for row in world.rows for k in range(30) if not isinstance(row.steps[k][4], str)}
    rollout.finals = rollout.finals._replace(steps=torch.full_like(rollout.finals.steps, -1))
    replay.add(rollout)
    assert cut
    assert set(drawn(replay)) == set(world.transitions(1)) - cut


@pytest.mark.parametrize("env", ["cartpole", "CartPole-v1"])
@pytest.mark.parametrize("priority_alpha", [None, 0.6])
def test_rollouts_of_collectors(env, priority_alpha):
    """CartPole's next observation follows from this one: x moves by dt times its speed."""
    parameters = {"max_steps": 30} if env == "cartpole" else {}
    vec = hurtle.make_vec(env, num_envs=4, **parameters)
    policy = build_policy(PolicyConfig(), vec.agent_observation_space, vec.agent_action_space)
    collector = NativeCollector(vec, policy) if env == "cartpole" else GeneralCollector(vec, Actor(policy, 4, 0))
    rollout = collector.new_rollout(7)
    replay = Replay(rollout, 400, gamma=GAMMA, priority_alpha=priority_alpha)
    seen = set()
    for k in range(40):
        if k in (20, 30):  # without the envs' states: new episodes
            collector.load_state_dict(collector.state_dict(with_envs=False))
        collector.collect(rollout)
        replay.add(rollout)  # the same memory every time
        batch = replay.sample(64)
        goes_on = batch.discounts > 0
        moved = batch.obs[goes_on, 0] + 0.02 * batch.obs[goes_on, 1]
        torch.testing.assert_close(batch.next_obs[goes_on, 0], moved, rtol=1e-4, atol=1e-5)
        assert (batch.rewards == 1).all()
        seen |= set(goes_on.tolist())
    assert seen == {True, False}
    vec.close()


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
    slots = torch.cat([replay.sample(1000).ids.clone() for _ in range(60)])
    frequency = torch.bincount(slots)[torch.unique(slots)].double() / len(slots)
    assert len(frequency) == count == 60
    assert (frequency * count - 1).abs().max() < 0.15  # five standard deviations


def test_priorities_decide_how_often_and_weights_correct_it():
    world = World(6, ends=0.0)
    replay = Replay(world.new_rollout(10), 100, gamma=GAMMA, priority_alpha=0.5)
    replay.add(world.rollout(10))
    slots = torch.unique(replay.sample(2000).ids)
    errors = torch.linspace(0.1, 4.0, len(slots))
    replay.update_priorities(slots, errors)
    seen, weights = [], {}
    for _ in range(60):
        batch = replay.sample(1000, beta=0.7)
        seen.append(batch.ids.clone())
        weights |= dict(zip(batch.ids.tolist(), batch.weights.tolist(), strict=True))
        assert batch.weights.max() == 1
    frequency = torch.bincount(torch.cat(seen))[slots].double() / 60_000
    expected = errors.double().add(1e-6).sqrt()
    expected /= expected.sum()
    torch.testing.assert_close(frequency, expected, rtol=0.1, atol=0)
    wanted = (expected / expected.min()) ** -0.7
    torch.testing.assert_close(torch.tensor([weights[slot] for slot in slots.tolist()]).double(), wanted, rtol=1e-4, atol=0)


def test_new_transitions_get_the_highest_priority_and_overwritten_ones_no_longer_count():
    world = World(7, ends=0.0)
    replay = Replay(world.new_rollout(5), 60, gamma=GAMMA, priority_alpha=1.0)
    replay.add(world.rollout())
    replay.update_priorities(torch.unique(replay.sample(1000).ids), torch.full((15,), 1e-3))
    old = replay.sample(15).ids.clone()
    replay.update_priorities(old[:1], torch.tensor([50.0]))
    replay.add(world.rollout())
    seen = torch.bincount(replay.sample(10_000).ids % 60, minlength=60)
    assert seen[seen > 500].numel() == 16  # 15 new ones and the one of 50
    for _ in range(4):
        replay.add(world.rollout())
    before = torch.bincount(replay.sample(10_000).ids, minlength=200)
    replay.update_priorities(old, torch.full((15,), 1e9))  # learned from too late: the slots hold other steps
    after = torch.bincount(replay.sample(10_000).ids, minlength=200)
    assert (before - after).abs().max() < 100
    assert_transitions(replay, world, complete=False)
    with pytest.raises(HurtleError, match="not finite"):
        replay.update_priorities(old, torch.full((15,), torch.nan))


@pytest.mark.parametrize("folder", [None, "disk"])
@pytest.mark.parametrize("alpha", [None, 0.6])
def test_resuming_draws_the_same(alpha, folder, tmp_path):
    world = World(8)
    settings = {"n_step": 2, "priority_alpha": alpha, "seed": 3, "folder": tmp_path if folder else None}
    replay, other = (Replay(world.new_rollout(5), 90, **settings) for _ in range(2))
    for _ in range(9):  # more than once around
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
        (Replay(world.new_rollout(5), 60), "capacity=60, this one capacity=90"),
        (Replay(world.new_rollout(5), 90, priority_alpha=0.6), "priorities=True, this one priorities=False"),
        (Replay(World(9, masked=True).new_rollout(5), 90), "masks=3, this one masks=0"),
        (SequenceReplay(world.new_rollout(5), 90, 4), "class=SequenceReplay"),
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
    slots = [each.sample(32).ids for each in (first, same, another)]
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
        ({"priority_alpha": float("nan")}, "at least 0"),
        ({"frame_stack": 4}, r"of shape \(4, …\), got \(2,\)"),
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
    with pytest.raises(HurtleError, match=r"expects observations of shape \(2,\); got \(4,\)"):
        replay.add(World(0, shape=(4,)).rollout())
    with pytest.raises(HurtleError, match="has 2 rows, the replay buffer 3"):
        replay.add(World(0, num_rows=2).rollout())
    of_a_pool = world.rollout()
    for columns in ([0, 1, 3], [-1, 0, 1], [0, 1]):
        of_a_pool.columns = np.array(columns)
        with pytest.raises(HurtleError, match="must be 3 rows below 3"):
            replay.add(of_a_pool)
    by_priority = Replay(world.new_rollout(5), 60, priority_alpha=1.0)
    by_priority.add(world.rollout())
    ids = by_priority.sample(4).ids
    for wrong in (ids - 10**6, ids + 10**6):
        with pytest.raises(HurtleError, match="do not come from a batch of this replay buffer"):
            by_priority.update_priorities(wrong, torch.ones(4))
    for wrong, errors in ((ids, torch.ones(3)), (ids, torch.ones(4, 1)), (ids.float(), torch.ones(4))):
        with pytest.raises(HurtleError, match="takes the ids of a batch"):
            by_priority.update_priorities(wrong, errors)
    no_stack = World(0, shape=(4, 2))
    with pytest.raises(HurtleError, match="last 3 frames of an observation are not the first"):
        Replay(no_stack.new_rollout(5), 60, frame_stack=4).add(no_stack.rollout())


def test_ages_and_size():
    world = World(14, ends=0.0)
    replay = Replay(world.new_rollout(5), 60)
    assert len(replay) == 0
    replay.add(world.rollout())
    assert len(replay) == 15
    slots = replay.sample(500).ids
    ages = dict(zip(slots.tolist(), replay.ages(slots).tolist(), strict=True))
    assert sorted(ages.values()) == sorted([0, 1, 2, 3, 4] * 3)
    assert replay.nbytes < 60 * 40
