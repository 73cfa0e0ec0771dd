"""`Rollout`: shapes, dtypes, indexing, and advantages from its own fields."""

import numpy as np
import pytest
import torch
from gymnasium import spaces

from hurtle.buffers.rollout import Done, Finals, Rollout, gathered, torch_dtype
from hurtle.errors import HurtleError
from hurtle.kernels.gae import gae_reference
from hurtle.policies.build import PolicyConfig, build_policy

BOX = spaces.Box(-1, 1, (3,), np.float32)


def numbered(steps=4, rows=3, recurrent="none", has_masks=True, **spaces_of):
    """A rollout whose every field says which step and row it belongs to: 10 * step + row."""
    obs, actions = spaces_of.get("obs", BOX), spaces_of.get("actions", spaces.Discrete(5))
    policy = build_policy(PolicyConfig(hidden_sizes=(4,), recurrent=recurrent), obs, actions)
    rollout = Rollout(policy, steps, rows, has_masks)
    number = (10 * torch.arange(steps)[:, None] + torch.arange(rows)).float()
    rollout.obs.copy_(number.view(steps, rows, *(1 for _ in obs.shape)).expand_as(rollout.obs))
    for k, name in enumerate(("log_probs", "values", "advantages", "returns")):
        getattr(rollout, name).copy_(number + 1000 * (k + 1))
    rollout.actions.copy_(number.view(steps, rows, *(1 for _ in rollout.actions.shape[2:])).expand_as(rollout.actions))
    if rollout.masks is not None:
        rollout.masks.copy_((number[..., None].long() // torch.tensor([1, 2, 4, 8, 16])) % 2 == 1)
    for k, part in enumerate(rollout.initial_state):
        part.copy_(torch.arange(rows)[:, None].expand_as(part) + 100 * k)
    return rollout


def test_shapes_and_dtypes():
    rollout = numbered(recurrent="lstm")
    assert rollout.obs.shape == (4, 3, 3)
    assert rollout.actions.shape == (4, 3)
    assert rollout.actions.dtype == torch.int64
    assert rollout.masks.shape == (4, 3, 5)
    assert [tuple(part.shape) for part in rollout.initial_state] == [(3, 4), (3, 4)]
    assert rollout.last_values.shape == (3,)
    assert rollout.num_valid == 12
    rollout = numbered(obs=spaces.Discrete(7), actions=spaces.MultiDiscrete([2, 3]))
    assert rollout.obs.shape == (4, 3)
    assert rollout.obs.dtype == torch.int64
    assert rollout.actions.shape == (4, 3, 2)
    assert rollout.masks.shape == (4, 3, 5)
    rollout = numbered(obs=spaces.Box(0, 255, (2, 2), np.uint8), actions=spaces.Box(-1, 1, (2, 2), np.float64))
    assert rollout.obs.dtype == torch.uint8
    assert rollout.actions.shape == (4, 3, 4)
    assert rollout.actions.dtype == torch.float32
    assert rollout.masks is None  # continuous actions have none


@pytest.mark.parametrize(("steps", "rows"), [(0, 3), (-1, 3), (4, 0)])
def test_a_rollout_of_nothing_is_refused(steps, rows):
    policy = build_policy(PolicyConfig(hidden_sizes=(4,)), BOX, spaces.Discrete(5))
    with pytest.raises(HurtleError, match=f"at least one step and one row; got num_steps={steps}, num_rows={rows}"):
        Rollout(policy, steps, rows)


@pytest.mark.parametrize(("given", "stored"), [(np.float64, torch.float64), (np.float32, torch.float32)])
def test_normalized_observations_are_floats_apart_from_the_envs(given, stored):
    """Statistics use every digit of what the env gave."""
    policy = build_policy(PolicyConfig(), spaces.Box(0, 1, (3,), given), spaces.Discrete(2), normalize_observations=True)
    rollout = Rollout(policy, 2, 2)
    assert rollout.obs.dtype == rollout.last_obs.dtype == rollout.finals.obs.dtype == stored
    assert rollout.inputs.dtype == torch.float32
    assert rollout.inputs.data_ptr() != rollout.obs.data_ptr()


def test_without_a_normalizer_the_policy_sees_what_the_env_gave():
    rollout = numbered()
    assert rollout.inputs is rollout.obs
    assert rollout.scaled_rewards is rollout.rewards


def test_room_for_final_observations():
    rollout = numbered(recurrent="lstm", obs=spaces.Box(0, 255, (2, 2), np.uint8))
    policy = build_policy(
        PolicyConfig(hidden_sizes=(4,), recurrent="lstm"), spaces.Box(0, 255, (2, 2), np.uint8), spaces.Discrete(5)
    )
    assert len(rollout.finals.steps) == 0
    finals = rollout.new_finals(3, policy)
    assert finals.steps.tolist() == finals.rows.tolist() == [-1, -1, -1]
    assert finals.obs.shape == (3, 2, 2)
    assert finals.obs.dtype == torch.uint8
    assert [tuple(part.shape) for part in finals.state] == [(3, 4), (3, 4)]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (np.float64, torch.float32),
        (np.float16, torch.float32),
        (np.uint8, torch.uint8),
        (np.int8, torch.int8),
        (np.bool_, torch.bool),
        (np.uint16, torch.int64),
        (np.uint32, torch.int64),
        (np.int64, torch.int64),
    ],
)
def test_dtypes_of_observations(given, expected):
    assert torch_dtype(given) == expected


def test_steps_keep_their_fields_together():
    rollout = numbered()
    chosen = torch.tensor([11, 0, 4])  # step 3 row 2, step 0 row 0, step 1 row 1
    batch = rollout.steps(chosen)
    numbers = torch.tensor([32.0, 0.0, 11.0])
    assert torch.equal(batch.inputs[:, 0], numbers)
    assert torch.equal(batch.actions, numbers.long())
    for k, field in enumerate((batch.log_probs, batch.values, batch.advantages, batch.returns)):
        assert torch.equal(field, numbers + 1000 * (k + 1))
    assert batch.masks.long().matmul(2 ** torch.arange(5)).tolist() == [32 % 32, 0, 11]
    assert batch.starts is None
    assert batch.kept is None


@pytest.mark.parametrize("some_invalid", [False, True])
def test_segments_keep_their_fields_together(some_invalid):
    rollout = numbered(recurrent="lstm")
    rows = torch.tensor([2, 0])
    valid = torch.ones(4, 2, dtype=torch.bool)
    if some_invalid:
        rollout.valid[1, 2] = rollout.valid[3, 0] = rollout.valid[0, 1] = False
        rollout.all_valid = False
        valid = rollout.valid[:, rows]
        assert rollout.num_valid == 9
        assert rollout.valid_steps().tolist() == [0, 2, 3, 4, 6, 7, 8, 10, 11]
    rollout.starts[2, 0] = True
    batch = rollout.segments(rows, torch.tensor([0.5, 2.0]))
    numbers = (10.0 * torch.arange(4)[:, None] + torch.tensor([2.0, 0.0]))[valid]
    assert batch.inputs[..., 0].tolist() == (10.0 * torch.arange(4)[:, None] + torch.tensor([2.0, 0.0])).tolist()  # all of them
    assert torch.equal(batch.actions, numbers.long())
    for k, field in enumerate((batch.log_probs, batch.values, batch.advantages, batch.returns)):
        assert torch.equal(field, numbers + 1000 * (k + 1))
    assert torch.equal(batch.weights, torch.tensor([0.5, 2.0]).expand(4, 2)[valid])
    assert batch.starts.tolist() == [[False, False], [False, False], [False, True], [False, False]]
    assert [part[:, 0].tolist() for part in batch.state] == [[2, 0], [102, 100]]
    assert (batch.kept is None) is not some_invalid


@pytest.mark.parametrize("some_invalid", [False, True])
def test_advantages_are_written_in_place(some_invalid):
    rollout = numbered(steps=9, rows=4)
    rng = np.random.default_rng(0)
    rollout.scaled_rewards = torch.zeros_like(rollout.rewards)  # what is learned from, apart from the env's
    for name in ("rewards", "scaled_rewards", "values", "final_values", "last_values"):
        field = getattr(rollout, name)
        field.copy_(torch.from_numpy(rng.normal(size=field.shape)))
    for name in ("terminated", "truncated"):
        getattr(rollout, name).copy_(torch.from_numpy(rng.random((9, 4)) < 0.2))
    if some_invalid:
        rollout.valid.copy_(torch.from_numpy(rng.random((9, 4)) < 0.7))
        rollout.all_valid = False
    memory = rollout.advantages.data_ptr()
    rollout.compute_advantages(0.97, 0.9)
    names = ("scaled_rewards", "values", "terminated", "truncated", "final_values", "last_values")
    fields = [getattr(rollout, name).numpy() for name in names]
    expected = gae_reference(*fields, 0.97, 0.9, rollout.valid.numpy())
    np.testing.assert_allclose(rollout.advantages, expected, atol=1e-6)
    np.testing.assert_allclose(rollout.returns, expected + rollout.values.numpy(), atol=1e-6)
    assert rollout.advantages.data_ptr() == memory


def test_a_rollouts_state_is_its_own():
    """Writing into it must not reach what the policy hands out as its initial state."""
    policy = build_policy(PolicyConfig(hidden_sizes=(4,), recurrent="gru"), BOX, spaces.Discrete(2))
    rollout = Rollout(policy, 2, 3)
    rollout.initial_state[0].fill_(7.0)
    assert float(Rollout(policy, 2, 3).initial_state[0].sum()) == 0.0


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.bool, torch.float32, torch.int64])
@pytest.mark.parametrize("shape", [(), (3,), (8,), (2, 2, 4), (0,), (5, 8)])
def test_gathering_bytes_by_eight_gives_what_indexing_gives(shape, dtype):
    field = torch.randint(0, 100, (6, 4, *shape), generator=torch.Generator().manual_seed(0)).to(dtype)
    where = torch.tensor([3, 0, 0, 2])
    for dim, taken in ((0, field[where]), (1, field[:, where])):
        found = gathered(field, where, dim)
        assert found.dtype == dtype
        assert torch.equal(found, taken)
    for view in (field[1:], field.transpose(0, 1), field[..., :1] if shape else field[:, 1:]):
        assert torch.equal(gathered(view, where % len(view)), view[where % len(view)])


def test_gathering_bytes_moves_words(monkeypatch):
    seen = []
    get = torch.Tensor.__getitem__
    monkeypatch.setattr(torch.Tensor, "__getitem__", lambda self, index: seen.append(self.dtype) or get(self, index))
    gathered(torch.zeros(3, 2, 16, dtype=torch.uint8), torch.tensor([0]), 1)
    assert seen == [torch.int64]


def cut(rollout, first, last, version=0, done=Done.BOOTSTRAP):
    """Some rows of a rollout as one of their own, with a truncated step in each but the first."""
    policy = build_policy(PolicyConfig(hidden_sizes=(4,), recurrent="lstm"), BOX, spaces.Discrete(5))
    part = Rollout(policy, rollout.num_steps, last - first, True)
    for name in ("obs", "masks", "log_probs", "values", "advantages", "returns", "actions"):
        getattr(part, name).copy_(getattr(rollout, name)[:, first:last])
    for own, whole in zip(part.initial_state, rollout.initial_state, strict=True):
        own.copy_(whole[first:last])
    part.last_values.copy_(torch.arange(first, last))
    rows = torch.arange(1, last - first)
    state = tuple(torch.full((len(rows), 4), float(first)) for _ in range(2)) if len(rows) else ()
    part.finals = Finals(torch.full_like(rows, 2), rows, torch.full((len(rows), 3), float(first)), state)
    part.version, part.done = version, done
    return part


def test_parts_are_joined_side_by_side():
    whole = numbered(rows=6, recurrent="lstm")
    parts = [cut(whole, 0, 1, 7), cut(whole, 1, 4, 5, Done.BOOTSTRAP | Done.ADVANTAGES), cut(whole, 4, 6, 6)]
    joined = numbered(rows=6, recurrent="lstm")
    for name in ("obs", "values", "actions", "last_values"):
        getattr(joined, name).zero_()
    joined.join(parts, [0, 1, 4])
    for name in ("obs", "masks", "log_probs", "values", "advantages", "returns", "actions"):
        assert torch.equal(getattr(joined, name), getattr(whole, name)), name
    for own, given in zip(joined.initial_state, whole.initial_state, strict=True):
        assert torch.equal(own, given)
    assert joined.last_values.tolist() == [0, 1, 2, 3, 4, 5]
    assert (joined.version, joined.done, joined.columns) == (5, Done.BOOTSTRAP, None)
    assert joined.finals.rows.tolist() == [2, 3, 5]
    assert joined.finals.steps.tolist() == [2, 2, 2]
    assert joined.finals.obs[:, 0].tolist() == joined.finals.state[1][:, 0].tolist() == [1, 1, 4]
    parts[1].all_valid = False
    joined.join([parts[1], parts[1]], [1, 1])
    assert joined.columns.tolist() == [1, 2, 3, 1, 2, 3]
    assert not joined.all_valid


def test_rollouts_are_exchanged_without_copying():
    one, other = numbered(), numbered()
    one.version, obs, values = 3, one.obs, other.values
    one.exchange(other)
    assert (one.version, other.version) == (0, 3)
    assert other.obs is obs
    assert one.values is values


def test_a_rollout_is_saved_as_it_is():
    whole = numbered(rows=6, recurrent="lstm")
    part = cut(whole, 1, 4, 5, Done.BOOTSTRAP)
    saved = part.state_dict()
    for name in ("obs", "last_values"):
        getattr(part, name).zero_()
    part.initial_state[0].zero_()
    loaded = cut(numbered(rows=6, recurrent="lstm"), 0, 3)
    loaded.load_state_dict(saved)
    assert torch.equal(loaded.obs, whole.obs[:, 1:4])
    assert torch.equal(loaded.initial_state[0], whole.initial_state[0][1:4])
    assert loaded.last_values.tolist() == [1, 2, 3]
    assert (loaded.version, loaded.done, loaded.columns) == (5, Done.BOOTSTRAP, None)
    assert loaded.finals.rows.tolist() == [1, 2]
    assert loaded.finals.state[1].unique().tolist() == [1]
