"""The replay buffer of devices, on the CPU, against the same plain reference as `Replay`."""

import numpy as np
import pytest
import torch
from replay_worlds import GAMMA, World
from test_replay import WORLDS

from hurtle.buffers.device_replay import DeviceReplay
from hurtle.errors import HurtleError

SLOW = pytest.mark.slow
KINDS = [kind for kind in WORLDS if "stack" not in kind]


def filled(world, capacity, n_step=1, alpha=0.0, rollouts=6):
    replay = DeviceReplay(world.new_rollout(5), capacity, n_step=n_step, gamma=GAMMA, priority_alpha=alpha)
    for _ in range(rollouts):
        replay.add(world.rollout())
    return replay


def check(world, replay, n_step, draws=600):
    """Every sampled transition is one of the reference's; returns their observations."""
    expected, seen = world.transitions(n_step), set()
    torch.manual_seed(0)
    batch = replay.sample(draws)
    for b in np.flatnonzero(batch.weights.numpy() > 0):
        key = batch.obs[b].numpy().tobytes()
        action, mask, total, factor, after, next_mask = expected[key]
        assert batch.actions[b] == action
        assert float(batch.rewards[b]) == pytest.approx(total, abs=1e-5)
        assert float(batch.discounts[b]) == pytest.approx(factor, abs=1e-6)
        if factor:
            assert np.array_equal(batch.next_obs[b].numpy(), after)
        if batch.masks is not None:
            assert np.array_equal(batch.masks[b].numpy(), mask)
            assert not factor or np.array_equal(batch.next_masks[b].numpy(), next_mask)
        seen.add(key)
    return seen


@pytest.mark.parametrize(
    ("n_step", "alpha"), [(1, 0.0), (3, 0.6), pytest.param(1, 0.6, marks=SLOW), pytest.param(3, 0.0, marks=SLOW)]
)
@pytest.mark.parametrize("kind", KINDS)
def test_every_transition_is_that_of_the_reference(kind, n_step, alpha):
    world = World(0, **WORLDS[kind])
    seen = check(world, filled(world, 1000, n_step, alpha), n_step)
    share = len(seen) / len(world.transitions(n_step))
    assert share > (0.3 if "absent" in kind else 0.95)  # of absent agents, some transitions are left out


@pytest.mark.parametrize("alpha", [0.0, 0.6])
def test_the_oldest_make_room(alpha):
    world = World(1)
    replay = filled(world, capacity=60, n_step=2, alpha=alpha, rollouts=20)
    seen = check(world, replay, 2)
    kept = {step[0].tobytes() for row in world.rows for step in row.steps[-19:]}
    assert seen <= kept
    assert len(seen) > 50
    assert len(replay) == 57


def test_an_abandoned_episode_is_not_joined_with_the_next():
    world = World(2, ends=0.0)
    replay = filled(world, 300, rollouts=2)
    lost = {row.steps[-1][0].tobytes() for row in world.rows}
    world.abandon(range(3), starts=True)
    replay.add(world.rollout())
    assert not lost & check(world, replay, 1)


def test_forgotten_final_observations_have_no_weight():
    """Only truncations, and many: most of their final observations are gone, and none is mistaken for another."""
    world = World(3, ends=0.9)
    replay = filled(world, 900, rollouts=50)
    assert replay.counts[1] > replay.num_finals
    assert check(world, replay, 1)


def test_priorities_decide_how_often_and_weights_correct_it():
    world = World(4, ends=0.0)
    replay = filled(world, 300, alpha=1.0, rollouts=4)
    ids = replay.sample(200, 1.0).ids.unique()
    errors = torch.arange(len(ids)).float()
    replay.update_priorities(ids, errors)
    batch = replay.sample(40_000, 1.0)
    counts = torch.stack([(batch.ids == one).sum() for one in ids]).float()
    expected = errors / errors.sum() * counts.sum()
    assert (counts[5:] / expected[5:] - 1).abs().max() < 0.3
    weight = {int(i): float(w) for i, w in zip(batch.ids, batch.weights, strict=True)}
    known = [k for k in range(5, len(ids)) if int(ids[k]) in weight]
    products = [weight[int(ids[k])] * float(errors[k] + 1e-6) for k in known]
    assert max(products) == pytest.approx(min(products), rel=1e-3)


def test_it_is_saved_and_loaded():
    world = World(5)
    replay = filled(world, 300, alpha=0.5)
    other = DeviceReplay(world.new_rollout(5), 300, gamma=GAMMA, priority_alpha=0.5)
    other.load_state_dict(replay.state_dict())
    batches = []
    for each in (replay, other):
        torch.manual_seed(1)
        batches.append(each.sample(64))
    assert all(one is None or torch.equal(one, two) for one, two in zip(*batches, strict=True))
    assert len(other) == len(replay)
    with pytest.raises(HurtleError, match="another size"):
        DeviceReplay(world.new_rollout(5), 600).load_state_dict(replay.state_dict())


@pytest.mark.parametrize("alpha", [0.0, 0.6])
@pytest.mark.parametrize("kind", ["plain", "masks"])
def test_groups_are_drawn_from_their_own_rows(kind, alpha):
    """All of them, and by their own priorities: those of one group do not change what is drawn of another."""
    world = World(8, num_rows=6, **WORLDS[kind])
    replay = DeviceReplay(world.new_rollout(5), 600, gamma=GAMMA, priority_alpha=alpha, groups=3)
    for _ in range(6):
        replay.add(world.rollout())
    torch.manual_seed(0)
    batch = replay.sample(300)
    assert batch.obs.shape == (3, 300, 2)
    owners = {step[0].tobytes(): n for n, row in enumerate(world.rows) for step in row.steps}
    drawn = [{obs.numpy().tobytes() for obs in group} for group in batch.obs]
    for n, seen in enumerate(drawn):
        assert {owners[key] for key in seen} == {2 * n, 2 * n + 1}
        own = sum(len(row.steps) for row in world.rows[2 * n : 2 * n + 2])
        assert len(seen) > 0.9 * own - 2  # with masks, the newest steps are not known yet
    if not alpha:
        return
    errors = torch.ones(3, 300)
    errors[1], errors[2] = 1e3, torch.nan  # the last one's are not known
    before = replay.priorities.clone()
    replay.update_priorities(batch.ids, errors)
    assert replay.highest.tolist() == pytest.approx([1.0, 1e3**alpha, 1.0], rel=1e-4)
    assert torch.equal(replay.priorities[batch.ids[2]], before[batch.ids[2]])
    assert (replay.sample(300).weights.amax(1) == 1.0).all()


def test_rows_that_groups_cannot_share():
    with pytest.raises(HurtleError, match="3 rows cannot be shared evenly by 2 seeds"):
        DeviceReplay(World(0).new_rollout(5), 300, groups=2)


@pytest.mark.parametrize("kind", ["absent", "masks"])
def test_a_step_whose_successor_is_not_known_is_not_drawn_by_priority(kind):
    world = World(6, **WORLDS[kind])
    replay = filled(world, 300, alpha=0.6, rollouts=1)
    for _ in range(3):
        batch = replay.sample(200)
        drawn = {batch.obs[b].numpy().tobytes() for b in range(200)}
        newest = {row.steps[-1][0].tobytes() for row in world.rows if row.steps}
        assert kind == "absent" or not drawn & newest  # of absent agents, the newest step may be an older one
        assert int(batch.ids.max()) < replay.written * replay.num_rows
        replay.add(world.rollout())


def test_rollouts_of_pools_are_refused():
    world = World(7)
    replay, rollout = filled(world, 300), world.rollout()
    rollout.columns = np.arange(3)
    with pytest.raises(HurtleError, match="not those of a pool"):
        replay.add(rollout)


def test_too_small():
    with pytest.raises(HurtleError, match="use at least 21"):
        DeviceReplay(World(0).new_rollout(5), 20)
