"""Evaluation counts every episode once, without bias, and acts as in training."""

import json

import gymnasium
import numpy as np
import pytest
import torch
from emulation_envs import Quest
from gymnasium import spaces
from hand_made_runs import Fixed, policy_for, write_run
from sample_envs import SNAKES
from torch import nn
from torch.distributions import Categorical

import hurtle
from hurtle.errors import HurtleError, NonFiniteError
from hurtle.native import Box, Discrete, Env, int32
from hurtle.runners.assembly import run_seed
from hurtle.runners.evaluate import Evaluation, evaluate_policy, evaluate_run
from hurtle.runners.playing import eval_seed
from hurtle.runners.tally import Tally


class Lottery(Env):
    """Episodes of 1 or of 50 steps, at random; 1 per step."""

    observation_space = Box(0.0, 1.0, (1,))
    action_space = Discrete(2)
    max_steps = None

    class State:
        left: int32

    def reset(self, state, rng):
        state.left = 50 if rng.random() < 0.5 else 1

    def step(self, state, action, rng):
        state.left -= 1
        return 1.0, state.left == 0

    def observe(self, state, obs):
        obs[0] = 1.0


class Gate(Env):
    """Only one action is legal, and it changes; an illegal one costs 100."""

    observation_space = Box(0.0, 1.0, (1,))
    action_space = Discrete(3)
    max_steps = 6

    class State:
        legal: int32

    def reset(self, state, rng):
        state.legal = 1

    def step(self, state, action, rng):
        reward = 1.0 if action == state.legal else -100.0
        state.legal = 1 + rng.integers(2)
        return reward, False

    def observe(self, state, obs):
        obs[0] = 1.0

    def mask(self, state, mask):
        for i in range(3):
            mask[i] = i == state.legal


class Clock(Env):
    """Observes the episode's length; action 1 pays 1. Episodes have 1 to 6 steps."""

    observation_space = Box(0.0, 100.0, (1,))
    action_space = Discrete(2)
    max_steps = None

    class State:
        time: int32
        end: int32

    def reset(self, state, rng):
        state.end = 1 + rng.integers(6)

    def step(self, state, action, rng):
        state.time += 1
        return float(action), state.time == state.end

    def observe(self, state, obs):
        obs[0] = float(state.time)


class Counter(nn.Module):
    """A memory that counts its steps; outputs whether the count agrees with the clock."""

    def initial_state(self, rows, device=None):
        return (torch.zeros(rows, 1),)

    def step(self, features, state):
        (count,) = state
        return (features == count).float(), (count + 1,)


class Sign(nn.Module):
    """Action 1 if the first feature is positive."""

    def encode(self, obs):
        return obs.flatten(1).float()

    def decode(self, features):
        right = 10 * features[:, :1].sign()
        return Categorical(logits=torch.cat([-right, right], 1)), features.sum(1)


class Broken(gymnasium.Env):
    """Returns NaN where told to, after the start-up checks, and ends after 20 steps unless told not to."""

    observation_space = spaces.Dict({"n": spaces.Discrete(9), "x": spaces.Box(-1, 1, (2,))})
    action_space = spaces.Discrete(2)

    def __init__(self, bad="", plain=False):
        self.bad, self.time = bad, 0
        self.plain = plain
        if plain:
            self.observation_space = spaces.Box(-1, 1, (2,))

    def observe(self):
        x = np.zeros(2, np.float32)
        if self.bad == "observation" and self.time == 15:
            x[1] = np.nan
        return x if self.plain else {"n": np.int64(1), "x": x}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.time = 0
        return self.observe(), {}

    def step(self, action):
        self.time += 1
        reward = float("nan") if self.bad == "reward" and self.time == 15 else 1.0
        return self.observe(), reward, self.time >= 20 and self.bad != "end", False, {}


@pytest.fixture
def uncompiled(monkeypatch):
    """Native envs run as plain Python, as compiling one takes seconds."""

    def plain(*given, backend="auto", **words):
        return hurtle.make_vec(*given, debug=True, **words)

    monkeypatch.setattr("hurtle.runners.evaluate.make_vec", plain)
    monkeypatch.setattr("hand_made_runs.make_vec", plain)


def alone(env, seed, episodes, actions, **parameters):
    """The episodes of one env played alone: (return, length) of each."""
    made = hurtle.make(env, **parameters)
    found = []
    made.reset(seed=seed)
    for _ in range(episodes):
        over = False
        while not over:
            _, _, terminated, truncated, info = made.step(actions)
            over = terminated or truncated
        found.append((info["episode"]["r"], info["episode"]["l"]))
        made.reset()
    return found


def test_every_env_plays_its_quota_however_long_its_episodes_are(uncompiled):
    policy, _, _ = policy_for(Lottery, Fixed([0.0, 1.0]))
    found = evaluate_policy(policy, Lottery, episodes=20, num_envs=8, seed=3)
    expected = [e for i in range(8) for e in alone(Lottery, eval_seed(3) + i, 3 if i < 4 else 2, 0, debug=True)]
    assert sorted(zip(found.returns, found.lengths, strict=True)) == sorted(expected)
    assert found.episodes == 20
    assert 0 < (found.lengths == 50).sum() < 20
    assert found.mean == pytest.approx(np.mean(expected, axis=0)[0])


def test_statistics():
    found = Evaluation.of(np.array([0.0, 1.0, 2.0, 3.0, 100.0]), np.array([1, 2, 3, 4, 5]), True)
    assert (found.mean, found.iqm, found.episodes) == (21.2, 2.0, 5)
    assert found.low < found.mean < found.high
    assert "21.20" in str(found)
    assert "5 deterministic episodes" in str(found)
    assert json.loads(json.dumps(found.summary()))["mean_length"] == 3.0


def test_deterministic_takes_the_mode_and_sampling_is_reproducible(uncompiled):
    policy, _, _ = policy_for("bandit", Fixed([0.0, 0.0, 0.0, 1.0]))
    arguments = {"env": "bandit", "episodes": 1024, "num_envs": 256, "env_parameters": {"reward_noise": 0.0}}
    assert evaluate_policy(policy, **arguments).mean == 1.0
    sampled = evaluate_policy(policy, **arguments, deterministic=False)
    again = evaluate_policy(policy, **arguments, deterministic=False)
    other = evaluate_policy(policy, **arguments, deterministic=False, seed=1)
    chance = np.e / (np.e + 3)
    assert abs(sampled.mean - chance) < 4 * np.sqrt(chance * (1 - chance) / 1024)
    np.testing.assert_array_equal(sampled.returns, again.returns)
    assert (sampled.returns != other.returns).any()
    assert not sampled.deterministic


def test_memory_begins_anew_with_each_episode(uncompiled):
    policy, _, _ = policy_for(Clock, Sign())
    policy.memory = Counter()
    found = evaluate_policy(policy, Clock, episodes=60, num_envs=7)
    np.testing.assert_array_equal(found.returns, found.lengths)  # one wrong count would have cost a reward
    assert len(set(found.lengths)) == 6


def test_masks_are_heeded(uncompiled):
    policy, _, _ = policy_for(Gate, Fixed([5.0, 0.0, 1.0]))
    for deterministic in (True, False):
        found = evaluate_policy(policy, Gate, episodes=10, deterministic=deterministic)
        np.testing.assert_array_equal(found.returns, 6.0)


def test_all_episodes_of_all_agents_count():
    policy, _, _ = policy_for("snake", Fixed([0.0, 5.0, 0.0]), parameters=SNAKES)
    found = evaluate_policy(policy, "snake", episodes=2, num_envs=2, env_parameters=SNAKES)
    expected = []
    for i in range(2):
        env = hurtle.make("snake", **SNAKES)
        env.reset(seed=eval_seed(0) + i)
        for _ in range(SNAKES["max_steps"]):
            _, _, _, _, info = env.step(np.ones(3, int))
            for agent in np.flatnonzero(info.get("_episode", np.zeros(3, bool))):
                expected.append((info["episode"]["r"][agent], info["episode"]["l"][agent]))
    assert sorted(zip(found.returns, found.lengths, strict=True)) == sorted(expected)
    assert found.episodes > 8  # some died and respawned


def test_structured_spaces():
    policy, _, _ = policy_for(Quest, emulate=True)
    found = evaluate_policy(policy, Quest, episodes=6, num_envs=3, backend="serial", emulate=True)
    np.testing.assert_array_equal(found.returns, 15.0)
    np.testing.assert_array_equal(found.lengths, 5)


def test_normalizer_is_applied_and_frozen():
    policy, _, _ = policy_for("cartpole", Sign(), normalize_observations=True)
    mean = torch.tensor([100.0, 0.0, 0.0, 0.0])
    policy.normalizer.update(mean + torch.randn(8, 4, 4), None)  # every position is far below: always action 0
    before = {name: value.clone() for name, value in policy.state_dict().items()}
    found = evaluate_policy(policy, "cartpole", episodes=4, num_envs=4)
    assert sorted(found.returns) == sorted(r for i in range(4) for r, _ in alone("cartpole", eval_seed(0) + i, 1, 0))
    for name, value in policy.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_the_policy_plays_in_eval_mode_and_comes_back_in_its_own():
    policy, _, _ = policy_for("bandit", Fixed([0.0, 0.0, 0.0, 1.0]))
    seen = []
    decode = policy.network.decode
    policy.network.decode = lambda features: seen.append(policy.network.training) or decode(features)
    policy.train()
    evaluate_policy(policy, "bandit", episodes=2)
    assert not any(seen)
    assert policy.training


@pytest.mark.parametrize("emulate", [False, True])
def test_nan_in_an_observation(emulate):
    make = (lambda: Broken("observation")) if emulate else (lambda: Broken("observation", plain=True))
    policy, _, _ = policy_for((lambda: Broken()) if emulate else (lambda: Broken(plain=True)), Fixed([0.0, 1.0]), emulate)
    with pytest.raises(NonFiniteError, match="Env 0 returned an observation with NaN after 15 steps"):
        evaluate_policy(policy, make, episodes=2, num_envs=2, backend="serial", emulate=emulate)


def test_nan_in_a_reward():
    policy, _, _ = policy_for(lambda: Broken(plain=True), Fixed([0.0, 1.0]))
    with pytest.raises(NonFiniteError, match="env 0 has a NaN return"):
        evaluate_policy(policy, lambda: Broken("reward", plain=True), episodes=2, backend="serial")


def test_an_env_that_never_ends():
    policy, _, _ = policy_for(lambda: Broken(plain=True), Fixed([0.0, 1.0]))
    with pytest.raises(HurtleError, match=r"Env 0 has not ended its episode after 50 steps .*TimeLimit"):
        evaluate_policy(policy, lambda: Broken("end", plain=True), episodes=2, backend="serial", max_steps=50)


def test_a_policy_of_another_env():
    policy, _, _ = policy_for("cartpole")
    with pytest.raises(HurtleError, match=r"The policy is for observations in Box.*\(4,\).*trained on another env"):
        evaluate_policy(policy, "pendulum", episodes=1)
    with pytest.raises(HurtleError, match="episodes must be an int of at least 1, got 0"):
        evaluate_policy(policy, "cartpole", episodes=0)


def test_an_envs_own_statistics_win():
    def make():
        env = gymnasium.wrappers.RecordEpisodeStatistics(gymnasium.make("CartPole-v1"))
        return gymnasium.wrappers.TransformReward(env, lambda reward: 0.0)

    policy, _, _ = policy_for(make, Fixed([0.0, 1.0]))
    found = evaluate_policy(policy, make, episodes=3, num_envs=2, backend="serial")
    np.testing.assert_array_equal(found.returns, found.lengths)
    assert found.returns.min() > 5


def test_whole_games_count_not_lives():
    tally = Tally(2, 1, max_steps=100, games=True)
    life = {"episode": {"r": np.array([1.0]), "l": np.array([5])}, "_episode": np.array([True])}
    assert tally.add({**life, "final_info": {**life, "lives": np.array([2])}}, np.array([True])) == 0
    game = {"game": {"r": np.array([7.0]), "l": np.array([9])}, "_game": np.array([True])}
    for _ in range(2):
        assert not tally.complete
        assert tally.add({**life, "final_info": {**life, **game}}, np.array([True])) == 1
    assert tally.complete
    assert [found.tolist() for found in tally.episodes()] == [[7.0, 7.0], [9, 9]]


def test_seeds_are_none_of_training():
    seeds = [eval_seed(seed) for seed in range(1000)]
    assert len(set(seeds)) == 1000
    assert 2**30 <= min(seeds) <= max(seeds) < 2**31
    training = np.array([run_seed(seed) for seed in range(10)])
    assert np.abs(training[:, None] - np.array(seeds[:10])).min() > 100_000  # envs of one vector have neighbouring seeds


def test_evaluate_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path, _ = write_run("runs", "cartpole", parameters={"max_steps": 5}, seed=5)
    found = evaluate_run(path, episodes=10)
    saved = json.loads((path / "evaluation.json").read_text())
    assert saved["returns"] == found.returns.tolist()
    assert (saved["env"], saved["checkpoint"], saved["steps"]) == ("cartpole", "step-000000000100.pt", 100)
    assert (saved["deterministic"], saved["mean"]) == (True, found.mean)
    assert found.lengths.max() <= 5  # the run's own parameters
    np.testing.assert_array_equal(evaluate_run("latest", episodes=10).returns, found.returns)
    file = path / "checkpoints" / "step-000000000100.pt"
    np.testing.assert_array_equal(evaluate_run(file, episodes=10).returns, found.returns)
    assert not evaluate_run(path, episodes=10, sampled=True).deterministic


def test_evaluate_run_prefers_the_best_checkpoint(tmp_path):
    path, _ = write_run(tmp_path, "bandit")
    assert json.loads(evaluated(path).read_text())["checkpoint"] == "step-000000000100.pt"
    other, _ = write_run(tmp_path, "bandit", best=True, steps=7)
    (other / "checkpoints" / "best.pt").rename(path / "checkpoints" / "best.pt")
    saved = json.loads(evaluated(path).read_text())
    assert (saved["checkpoint"], saved["steps"]) == ("best.pt", 7)


def evaluated(path):
    evaluate_run(path, episodes=4)
    return path / "evaluation.json"


def test_evaluate_run_needs_the_env_where_that_was_an_object(tmp_path):
    path, _ = write_run(tmp_path, lambda: Broken(plain=True))
    with pytest.raises(HurtleError, match="an object without a name: pass it as env="):
        evaluate_run(path)
    assert evaluate_run(path, episodes=3, env=lambda: Broken(plain=True)).mean == 20.0


def test_an_empty_run(tmp_path):
    path, _ = write_run(tmp_path, "bandit")
    next((path / "checkpoints").glob("*.pt")).unlink()
    with pytest.raises(HurtleError, match="has no complete checkpoint"):
        evaluate_run(path)
