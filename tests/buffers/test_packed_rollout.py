"""Rollouts as one block of bytes: what arrives is what was sent, whatever was filled, and the rest stays at home."""

import numpy as np
import pytest
import torch
from gymnasium import spaces

from hurtle.buffers.packed_rollout import ALIGNMENT, Packing
from hurtle.buffers.rollout import ROW_FIELDS, STEP_FIELDS, Done, Finals, Rollout
from hurtle.errors import HurtleError
from hurtle.policies.build import PolicyConfig, build_policy

BOX = spaces.Box(-1, 1, (3,))
EVERYTHING = Done.BOOTSTRAP | Done.ADVANTAGES


def policy_of(**settings):
    memory = settings.pop("recurrent", None)
    config = PolicyConfig(hidden_sizes=(4,), **({"recurrent": memory} if memory else {}))
    return build_policy(config, settings.pop("space", BOX), spaces.Discrete(2), **settings)


def filled(policy, steps=5, rows=3, has_masks=False, seed=0, number="1-3"):
    """A rollout with numbers of its own in every field."""
    rollout, dice = Rollout(policy, steps, rows, has_masks), torch.Generator().manual_seed(seed)
    for name in (*STEP_FIELDS, *ROW_FIELDS, "initial_state", "last_state"):
        field = getattr(rollout, name)
        for part in field if isinstance(field, tuple) else [field]:
            if part is not None:
                part.copy_(torch.randint(0, 2 if part.dtype == torch.bool else 100, part.shape, generator=dice))
    rollout.version, rollout.ids = 7, (number,)
    return rollout


def sent(rollout, done=EVERYTHING, all_valid=False, finals=0):
    """The rollout in a block, with a header; it says that it has filled so much."""
    rollout.done, rollout.all_valid = done, all_valid
    packing = Packing(rollout)
    before = rollout.state_dict()
    block = packing.move_into_block(rollout)
    for name in (*STEP_FIELDS, *ROW_FIELDS):
        if before.get(name) is not None:
            assert torch.equal(getattr(rollout, name), before[name])  # moved, not changed
    if finals:
        numbers = torch.arange(finals)
        state = tuple(torch.rand(finals, *part.shape[1:]) for part in rollout.initial_state)
        obs = torch.rand(finals, *rollout.obs.shape[2:]).to(rollout.obs.dtype)
        unused = Finals(torch.tensor([-1]), torch.tensor([0]), obs[:1], tuple(part[:1] for part in state))
        used = Finals(numbers, numbers % rollout.num_rows, obs, state)
        *parts, states = zip(unused, used, strict=True)
        rollout.finals = Finals(*map(torch.cat, parts), tuple(torch.cat(pair) for pair in zip(*states, strict=True)))
    return (packing, *packing.packed(rollout, block))


def received(policy, contents, block, steps=5, rows=3, has_masks=False):
    rollout = Rollout(policy, steps, rows, has_masks)
    packing = Packing(rollout)
    read_only = block.copy()
    read_only.flags.writeable = False
    packing.lend(rollout, contents, read_only)
    return packing, rollout


@pytest.mark.parametrize("recurrent", [None, "lstm"])
@pytest.mark.parametrize("finals", [0, 4])
@pytest.mark.parametrize("normalizes", [False, True])
def test_everything_arrives(recurrent, finals, normalizes):
    policy = policy_of(recurrent=recurrent, normalize_observations=normalizes)
    rollout = filled(policy)
    _, contents, block = sent(rollout, finals=finals)
    _, other = received(policy, contents, block)
    for name in (*STEP_FIELDS, *ROW_FIELDS):
        if getattr(rollout, name) is not None:
            assert torch.equal(getattr(other, name), getattr(rollout, name)), name
    for name in ("initial_state", "last_state"):
        assert all(torch.equal(*pair) for pair in zip(getattr(other, name), getattr(rollout, name), strict=True))
    assert (other.inputs is other.obs) is not normalizes
    assert (other.version, other.ids, other.all_valid, other.done) == (7, ("1-3",), False, EVERYTHING)
    assert len(other.finals.steps) == finals
    for mine, theirs in zip(other.finals[:3], rollout.finals[:3], strict=True):
        assert torch.equal(mine, theirs[1:] if finals else theirs)
    for mine, theirs in zip(other.finals.state, rollout.finals.state, strict=False):
        assert torch.equal(mine, theirs[1:])


def test_masks_and_bytes_arrive():
    policy = policy_of(space=spaces.Box(0, 255, (7, 5), np.uint8))
    rollout = filled(policy, has_masks=True)
    rollout.masks = torch.rand(5, 3, 2) < 0.5
    _, contents, block = sent(rollout)
    _, other = received(policy, contents, block, has_masks=True)
    assert torch.equal(other.masks, rollout.masks)
    assert torch.equal(other.obs, rollout.obs)
    assert other.obs.dtype == torch.uint8


def test_what_nobody_filled_stays_at_home():
    policy = policy_of()
    sizes = {}
    for done, all_valid in ((Done.NOTHING, True), (Done.BOOTSTRAP, True), (EVERYTHING, True), (Done.NOTHING, False)):
        rollout = filled(policy)
        rollout.valid.fill_(all_valid)
        _, contents, block = sent(rollout, done, all_valid)
        _, other = received(policy, contents, block)
        sizes[done, all_valid] = block.nbytes
        assert torch.equal(other.rewards, rollout.rewards)
        assert torch.equal(other.valid, rollout.valid)
        assert torch.equal(other.last_values, rollout.last_values if done or not all_valid else torch.zeros(3))
        assert torch.equal(other.advantages, rollout.advantages if done is EVERYTHING or not all_valid else torch.zeros(5, 3))
    assert sorted(sizes.values()) == list(sizes.values())
    assert len(set(sizes.values())) == 4


def test_a_block_is_not_copied_where_it_is_collected():
    rollout = filled(policy_of())
    packing, contents, block = sent(rollout)
    rollout.rewards[2, 1] = 123.0
    _, other = received(policy_of(), contents, block)
    assert other.rewards[2, 1] == 123.0
    assert all(place.offset % ALIGNMENT == 0 for place in packing._places)


def test_lent_memory_is_given_back():
    policy = policy_of()
    _, contents, block = sent(filled(policy), finals=2)
    packing, other = received(policy, contents, block)
    assert other.lender is not None
    packing.take_back(other)
    assert other.lender is None
    assert not other.rewards.any()
    assert not len(other.finals.steps)
    other.rewards.fill_(1.0)  # its own again, which may be written
    _, contents, block = sent(filled(policy, seed=1), Done.NOTHING, all_valid=True)
    packing.lend(other, contents, block)
    assert torch.equal(other.valid, torch.ones(5, 3, dtype=torch.bool))
    assert not len(other.finals.steps)


def test_blocks_that_lie_askew_are_moved():
    policy = policy_of()
    rollout = filled(policy)
    _, contents, block = sent(rollout)
    askew = np.zeros(block.size + 1, np.uint8)[1:]
    askew[:] = block
    other = Rollout(policy, 5, 3)
    Packing(other).lend(other, contents, askew)
    assert torch.equal(other.values, rollout.values)
    assert other.values.data_ptr() % ALIGNMENT == 0


def test_lent_rollouts_are_joined():
    """Columns of both side by side, finals and names too; the joined one owns its memory."""
    policy = policy_of()
    parts = []
    for seed in range(2):
        _, contents, block = sent(filled(policy, seed=seed, number=f"{seed}-1"), finals=seed * 2)
        parts.append(received(policy, contents, block)[1])
    whole = Rollout(policy, 5, 6)
    whole.join(parts, [0, 3])
    assert torch.equal(whole.rewards, torch.cat([part.rewards for part in parts], dim=1))
    assert whole.ids == ("0-1", "1-1")
    assert whole.finals.rows.tolist() == [3, 4]
    whole.rewards.add_(1.0)
    assert not torch.equal(whole.rewards[:, :3], parts[0].rewards)


def test_rewards_of_a_device_are_refused():
    rollout = filled(policy_of())
    with pytest.raises(HurtleError, match="processed on a device"):
        sent(rollout, Done.REWARDS)
