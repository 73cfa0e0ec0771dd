"""Sampling from a device's replay buffer in Triton's interpreter, against the same in torch."""

import pytest
import torch
from replay_worlds import GAMMA, World
from test_replay import WORLDS

from hurtle.buffers.device_replay import DeviceReplay


def filled(kind, n_step, alpha=0.0, capacity=60, groups=None):
    world = World(0, num_rows=2 * groups if groups else 3, **WORLDS[kind])
    replay = DeviceReplay(world.new_rollout(5), capacity, n_step=n_step, gamma=GAMMA, priority_alpha=alpha, groups=groups)
    for _ in range(6):
        replay.add(world.rollout())
    return world, replay


@pytest.mark.parametrize(
    ("kind", "n_step"),
    [
        ("plain", 1),
        ("bytes", 1),
        ("absent", 3),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in (("plain", 3), ("bytes", 3), ("absent", 1))),
    ],
)
def test_the_kernel_reads_what_torch_reads(kind, n_step):
    _, replay = filled(kind, n_step, alpha=0.5)
    torch.manual_seed(0)
    expected = replay.sample(40, 0.4)
    replay.fused = True
    torch.manual_seed(0)
    found = replay.sample(40, 0.4)
    there = expected.weights > 0
    assert torch.equal(found.ids, expected.ids)
    torch.testing.assert_close(found.weights, expected.weights)
    for name in ("obs", "actions", "rewards", "discounts"):
        torch.testing.assert_close(getattr(found, name), getattr(expected, name), msg=name)
    bootstraps = there & (expected.discounts > 0)
    assert torch.equal(found.next_obs[bootstraps], expected.next_obs[bootstraps])
    assert bootstraps.any()


def test_uniform_draws_are_uniform_and_differ():
    """Few of them: the interpreter takes 20 ms for each."""
    world, replay = filled("plain", 1, capacity=21)
    replay.fused = True
    drawn = [replay.sample(32) for _ in range(2)]
    assert not torch.equal(drawn[0].ids, drawn[1].ids)
    counts = torch.bincount(torch.cat([part.ids for part in drawn]), minlength=replay.capacity)
    assert (counts > 0).sum() == len(replay)
    assert counts.max() < 4 * counts[counts > 0].float().mean()
    newest = {row.steps[-1][0].tobytes() for row in world.rows}
    assert newest <= {obs.numpy().tobytes() for part in drawn for obs in part.obs}


def test_groups():
    """Given steps are read as torch reads them; drawn ones are of each group's own rows, and of all of these."""
    _, replay = filled("plain", 3, alpha=0.5, groups=3)
    batches = []
    for fused in (False, True):
        replay.fused = fused
        torch.manual_seed(0)
        batches.append(replay.sample(8, 0.4))
    for name in ("obs", "actions", "rewards", "discounts", "weights", "ids"):
        one, other = (getattr(part, name) for part in batches)
        torch.testing.assert_close(one, other, msg=name)
        assert one.shape[:2] == (3, 8)
    _, replay = filled("plain", 1, capacity=60, groups=3)
    replay.fused = True
    rows = replay.sample(10).ids % replay.num_rows
    assert [sorted(set(part)) for part in rows.tolist()] == [[0, 1], [2, 3], [4, 5]]
