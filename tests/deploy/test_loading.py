"""A loaded policy acts as it did in training, takes what envs give, gives what they take, and says what is wrong."""

import sys

import gymnasium
import numpy as np
import pytest
import torch
from emulation_envs import Quest
from gymnasium import spaces
from hand_made_runs import Fixed, policy_for, write_run

import hurtle
from hurtle.deploy.loading import load
from hurtle.errors import CheckpointError, HurtleError, NonFiniteError
from hurtle.runners.evaluate import evaluate_run
from hurtle.tracking.checkpoints import load_checkpoint, save_checkpoint
from hurtle.vector.factory import make_vec


class Numbers(gymnasium.Env):
    """An int as observation, and actions that do not begin at 0."""

    observation_space = spaces.Discrete(5, start=1)
    action_space = spaces.Discrete(3, start=-1)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return 1 + int(self.np_random.integers(5)), {}

    def step(self, action):
        assert action in (-1, 0, 1)
        return 3, float(action), True, False, {}


def observations(policy, count, seed=0):
    return np.random.default_rng(seed).normal(size=(count, *policy.observation_space.shape)).astype(np.float32)


def scrambled(policy, seed=0):
    """The same policy with weights that prefer something."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in policy.parameters():
            weight.copy_(0.3 * torch.randn(weight.shape, generator=generator))
    return policy


def loaded(tmp_path, env, **options):
    """A run with scrambled weights, loaded; and the policy that was saved."""
    module = options.get("module")
    wanted = {key: value for key, value in options.items() if key != "module"}
    policy = scrambled(policy_for(env, module, **wanted)[0])
    path, _ = write_run(tmp_path, env, weights_of=policy, **options)
    return load(path, policy=module), policy


def test_acts_as_the_policy_that_was_saved(tmp_path):
    policy, saved = loaded(tmp_path, "cartpole", hidden_sizes=(16, 8))
    obs = observations(policy, 32)
    with torch.no_grad():
        distribution, values, _ = saved(torch.from_numpy(obs))
    np.testing.assert_array_equal(policy.act(obs), distribution.mode().numpy())
    np.testing.assert_allclose(policy.value(obs), values.numpy(), rtol=1e-6)
    assert 0 < policy.act(obs).sum() < 32  # both actions occur
    assert policy.steps == 100
    assert policy.settings["hidden_sizes"] == [16, 8]
    assert policy.module.observation_space.shape == (4,)


def test_one_observation_gives_an_action_that_the_env_takes(tmp_path):
    policy, _ = loaded(tmp_path, "cartpole")
    env = hurtle.make("cartpole")
    obs, _ = env.reset(seed=0)
    action = policy.act(obs)
    assert type(action) is int
    env.step(action)
    batch = observations(policy, 8)
    assert [policy.act(row) for row in batch] == policy.act(batch).tolist()
    assert type(policy.value(obs)) is float
    assert policy.act(obs.tolist()) == policy.act(obs.astype(np.float64)) == policy.act(torch.from_numpy(obs)) == action


def test_box_actions_stay_in_bounds(tmp_path):
    policy, _ = loaded(tmp_path, "pendulum")
    env = hurtle.make("pendulum")
    obs, _ = env.reset(seed=0)
    action = policy.act(obs)
    assert env.action_space.contains(action)
    actions = policy.act(1000 * observations(policy, 64))
    assert actions.shape == (64, 1)
    assert np.abs(actions).max() == env.action_space.high.max()


def test_discrete_spaces_that_do_not_begin_at_0(tmp_path):
    policy, _ = loaded(tmp_path, Numbers)
    found = [policy.act(obs) for obs in range(1, 6)]
    assert {type(action) for action in found} == {int}
    assert set(found) <= {-1, 0, 1}
    np.testing.assert_array_equal(policy.act(np.arange(1, 6)), found)
    with pytest.raises(HurtleError, match=r"expected one of Discrete\(5, start=1\), got 0"):
        policy.act(0)


def test_structured_spaces(tmp_path):
    policy, _ = loaded(tmp_path, Quest, emulate=True)
    assert policy.observation_space == Quest.observation_space
    assert policy.action_space == Quest.action_space
    env = Quest()
    obs, _ = env.reset(seed=0)
    action = policy.act(obs)
    assert env.action_space.contains(action)
    flat, _ = hurtle.emulate(Quest()).reset(seed=0)
    assert str(policy.act(flat)) == str(action)  # as an emulated env gives it
    with make_vec(Quest, 3, backend="serial") as vec:
        batch, _ = vec.reset(seed=0)
        actions = policy.act(batch)
        assert actions["move"].shape == (3,)
        assert actions["use"].shape == (3, 2)
        assert actions["move"][0] == action["move"]
        vec.step(actions)
    with pytest.raises(HurtleError, match="gold"):
        policy.act({**obs, "inventory": {"items": obs["inventory"]["items"]}})


@pytest.mark.parametrize(
    ("obs", "message"),
    [
        (np.zeros(3, np.float32), r"expected float32 \[4\], or a batch \[B, 4\].*got float32 \[3\]"),
        (np.zeros((2, 2, 4), np.float32), r"got float32 \[2, 2, 4\]"),
        (np.zeros(4, np.complex64), r"got complex64 \[4\]"),
        (np.zeros((0, 4), np.float32), r"got float32 \[0, 4\]"),
        ("left", "expected float32"),
        ({"x": 1}, "got dict"),
        ([[1.0], [1.0, 2.0]], "got list"),
    ],
)
def test_observations_that_do_not_fit(tmp_path, obs, message):
    policy, _ = loaded(tmp_path, "cartpole")
    with pytest.raises(HurtleError, match=message):
        policy.act(obs)


def test_floats_are_no_bytes_and_nan_is_no_number(tmp_path):
    squared, _ = loaded(tmp_path, "squared")
    with pytest.raises(HurtleError, match=r"expected uint8 \[7, 7, 2\].*got float32 \[7, 7, 2\]"):
        squared.act(np.zeros((7, 7, 2), np.float32))
    cartpole, _ = loaded(tmp_path, "cartpole")
    with pytest.raises(NonFiniteError, match="NaN"):
        cartpole.act(np.array([0.0, np.nan, 0.0, 0.0]))


def test_masks(tmp_path):
    policy, _ = loaded(tmp_path, "bandit")
    obs = np.ones((4, 1), np.float32)
    np.testing.assert_array_equal(policy.act(obs, mask=np.eye(4, dtype=bool)), [0, 1, 2, 3])
    assert policy.act(obs[0], mask=[0, 0, 1, 0]) == 2
    with pytest.raises(HurtleError, match=r"mask: expected bool \[4, 4\], got bool \[4\]"):
        policy.act(obs, mask=np.ones(4, bool))
    pendulum, _ = loaded(tmp_path, "pendulum")
    with pytest.raises(HurtleError, match=r"have no masks"):
        pendulum.act(np.zeros(3, np.float32), mask=[True])


@pytest.mark.parametrize("kind", ["lstm", "gru", "mingru"])
def test_memory(tmp_path, kind):
    policy, saved = loaded(tmp_path, "pendulum", recurrent=kind)
    obs = observations(policy, 6)
    with torch.no_grad():
        starts = torch.tensor([[True], *[[False]] * 5])
        distribution, _, _ = saved.forward_sequence(torch.from_numpy(obs)[:, None], saved.initial_state(1), starts)
    expected = saved.head.env_actions(distribution.mode().numpy())

    own = [policy.act(row) for row in obs]
    np.testing.assert_allclose(own, expected, atol=1e-4)
    policy.reset()
    np.testing.assert_array_equal([policy.act(row) for row in obs], own)

    state, carried = policy.initial_state(), []
    for row in obs:
        action, state = policy.act(row, state)
        carried.append(action)
    np.testing.assert_array_equal(carried, own)
    afresh = [policy.act(row, policy.initial_state())[0] for row in obs]
    assert not np.allclose(afresh[1:], own[1:])  # it does remember


def test_memory_of_a_batch(tmp_path):
    policy, _ = loaded(tmp_path, "pendulum", recurrent="lstm")
    first, second = observations(policy, 3), observations(policy, 3, seed=1)
    fresh = policy.act(second)
    policy.reset()
    policy.act(first)
    values = policy.value(second)
    policy.reset(np.array([False, True, False]))
    mixed = policy.act(second)
    np.testing.assert_array_equal(mixed[1], fresh[1])
    assert (mixed[[0, 2]] != fresh[[0, 2]]).all()
    assert values.shape == (3,)
    with pytest.raises(HurtleError, match=r"keeps the state of 3 episodes and got 1 observations: call reset\(\)"):
        policy.act(first[0])
    with pytest.raises(HurtleError, match=r"reset takes a mask of bool \[3\], got bool \[2\]"):
        policy.reset([True, False])
    with pytest.raises(HurtleError, match=r"state: expected tensors \[\[3, 64\], \[3, 64\]\] for 3 observations"):
        policy.act(first, policy.initial_state(2))
    policy.reset()
    policy.act(first[0])


def test_a_policy_without_memory_takes_any_batch(tmp_path):
    policy, _ = loaded(tmp_path, "cartpole")
    obs = observations(policy, 4)
    policy.act(obs)
    policy.reset([True, False, False, True])
    policy.act(obs[0])
    assert policy.act(obs[0], ()) == (policy.act(obs[0]), ())


def test_sampling_is_reproducible(tmp_path):
    module = Fixed([0.0, 0.0, 0.0, 1.0])
    path, _ = write_run(tmp_path, "bandit", module=module)
    obs = np.ones((5000, 1), np.float32)
    drawn = [load(path, policy=Fixed([0.0] * 4)).act(obs, deterministic=False) for _ in range(2)]
    np.testing.assert_array_equal(*drawn)
    chance = np.e / (np.e + 3)
    assert abs((drawn[0] == 3).mean() - chance) < 4 * np.sqrt(chance * (1 - chance) / 5000)
    policy = load(path, policy=module)
    one = [policy.act(obs[0], deterministic=False) for _ in range(50)]
    assert len(set(one)) > 1
    assert policy.act(obs[0]) == 3


def test_normalizer_is_applied(tmp_path):
    policy = scrambled(policy_for("cartpole", normalize_observations=True)[0])
    policy.normalizer.update(5 + 3 * torch.randn(64, 2, 4), None)
    path, _ = write_run(tmp_path, "cartpole", weights_of=policy, normalize_observations=True)
    obs = np.random.default_rng(0).normal(5, 3, (16, 4)).astype(np.float32)
    with torch.no_grad():
        expected = policy.value(policy.normalizer.normalize(torch.from_numpy(obs)))
        without = policy.value(torch.from_numpy(obs))
    np.testing.assert_allclose(load(path).value(obs), expected, rtol=1e-6)
    assert not np.allclose(expected, without, rtol=1e-2)


MODULE = """
import torch
from torch import nn
from torch.distributions import Categorical

class Mine(nn.Module):
    def __init__(self, observation_space, action_space):
        super().__init__()
        self.head = nn.Linear(observation_space.shape[0], action_space.n)
    def encode(self, obs):
        return obs
    def decode(self, features):
        return Categorical(logits=self.head(features)), features.sum(1)
"""


def test_a_module_from_a_file_is_built_again(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(MODULE)
    policy, saved = loaded(tmp_path, "cartpole", policy=f"{file}:Mine")
    assert type(policy.module.network).__name__ == "Mine"
    assert torch.equal(policy.module.network.head.weight, saved.network.head.weight)


def test_a_module_given_as_an_object_is_needed_again(tmp_path):
    path, _ = write_run(tmp_path, "bandit", module=Fixed([0.0, 0.0, 2.0, 0.0]))
    with pytest.raises(HurtleError, match=r"a module of your own: pass one that is built alike, hurtle.load\(path, policy="):
        load(path)
    assert load(path, policy=Fixed([0.0] * 4)).act(np.ones(1, np.float32)) == 2
    with pytest.raises(CheckpointError, match="built differently: "):
        load(path, policy=Wide())


class Wide(Fixed):
    def __init__(self):
        super().__init__([0.0] * 4)
        self.more = torch.nn.Linear(2, 2)


def test_the_env_is_not_needed(tmp_path):
    path, _ = write_run(tmp_path, "cartpole")
    file = path / "checkpoints" / "step-000000000100.pt"
    state = load_checkpoint(file)
    state["settings"]["env"] = "NoSuchEnv-v9"
    save_checkpoint(file, state)
    assert load(file).act(np.zeros(4, np.float32)) in (0, 1)


def test_paths(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path, _ = write_run("runs", "bandit")

    class Run:
        pass

    run = Run()
    run.path = path
    for source in (path, str(path), run, "latest", path / "checkpoints" / "step-000000000100.pt"):
        assert load(source).act(np.ones(1, np.float32)) in range(4)
    with pytest.raises(HurtleError, match="There is no run nowhere"):
        load("nowhere")
    damaged = path / "checkpoints" / "step-000000000100.pt"
    damaged.write_bytes(damaged.read_bytes()[:-100])
    with pytest.raises(CheckpointError):
        load(damaged)


def test_pickled_code_is_not_run(tmp_path):
    class Bomb:
        def __reduce__(self):
            return (sys.exit, (3,))

    file = tmp_path / "bomb.pt"
    torch.save({"format": 1, "policy": Bomb()}, file)
    with pytest.raises(CheckpointError):
        load(file)


def test_what_training_leaves_behind(tmp_path):
    quick = {"num_envs": 2, "num_steps": 8, "minibatch_size": 8, "num_epochs": 1, "eval_episodes": 2}
    quiet = {"progress": "quiet", "trackers": (), "runs": str(tmp_path), "backend": "serial"}
    run = hurtle.train(Quest, total_steps=32, **quick, **quiet)
    policy = load(run)
    env = Quest()
    obs, _ = env.reset(seed=0)
    assert env.action_space.contains(policy.act(obs))
    assert policy.steps == 32
    assert run.evaluation.mean == evaluate_run(run, episodes=2, env=Quest).mean == 15.0
