"""Torch modules of ours trained by Stable-Baselines3."""

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from integration_policies import Continuous, Discrete
from torch import nn

import hurtle
from hurtle.errors import HurtleError

sb3 = pytest.importorskip("stable_baselines3", reason='needs pip install "hurtle[sb3]"')

from stable_baselines3.common.evaluation import evaluate_policy  # noqa: E402

from hurtle.integrations.sb3 import SB3VecEnv, make_sb3_vec, sb3_policy  # noqa: E402

SETTINGS = {"n_steps": 32, "batch_size": 256, "n_epochs": 20, "gamma": 0.98, "gae_lambda": 0.8, "learning_rate": 3e-3}


@pytest.mark.slow  # that modules learn, the structured one below shows
def test_ppo_learns_cartpole_with_a_module():
    vec = make_sb3_vec("cartpole", 8)
    model = sb3.PPO(sb3_policy(Discrete), vec, seed=0, device="cpu", **SETTINGS)
    before, _ = evaluate_policy(model, vec, n_eval_episodes=16, deterministic=False)
    model.learn(24_576)
    after, _ = evaluate_policy(model, vec, n_eval_episodes=16, deterministic=False)
    assert before < 40
    assert after > 120


def test_ppo_trains_a_module_and_saves_it(tmp_path):
    vec = make_sb3_vec("cartpole", 8)
    model = sb3.PPO(sb3_policy(Discrete), vec, seed=0, device="cpu", **SETTINGS)
    assert isinstance(model.policy.module, Discrete)
    before = model.policy.module.actor.weight.clone()
    model.learn(1024)
    assert not torch.equal(model.policy.module.actor.weight, before)
    model.save(tmp_path / "model")
    loaded = sb3.PPO.load(tmp_path / "model", device="cpu")
    obs = vec.reset()
    assert np.array_equal(loaded.predict(obs, deterministic=True)[0], model.predict(obs, deterministic=True)[0])
    assert torch.equal(loaded.policy.module.actor.weight, model.policy.module.actor.weight)


def test_an_existing_module_is_trained_in_place():
    vec = make_sb3_vec("cartpole", 2)
    module = Discrete(vec.observation_space, vec.action_space)
    before = module.actor.weight.clone()
    sb3.A2C(sb3_policy(module), vec, device="cpu").learn(100)
    assert not torch.equal(module.actor.weight, before)


def test_the_numbers_are_those_of_sb3s_own_policy_with_the_same_weights():
    vec = make_sb3_vec("cartpole", 2)
    own = sb3.PPO("MlpPolicy", vec, policy_kwargs={"net_arch": {"pi": [64], "vf": [64]}}, device="cpu").policy
    module = Discrete(vec.observation_space, vec.action_space)
    layers = own.mlp_extractor.policy_net[0], own.mlp_extractor.value_net[0]
    module.body[0].weight.data = torch.cat([layer.weight.data for layer in layers])
    module.actor.load_state_dict(own.action_net.state_dict())
    module.critic.load_state_dict(own.value_net.state_dict())
    ours = sb3.PPO(sb3_policy(module), vec, device="cpu").policy
    obs, actions = torch.randn(6, 4), torch.tensor([0, 1, 0, 1, 1, 0])
    their_values, their_log_prob, their_entropy = own.evaluate_actions(obs, actions)
    values, log_prob, entropy = ours.evaluate_actions(obs, actions)
    assert torch.allclose(log_prob, their_log_prob, atol=1e-6)
    assert torch.allclose(entropy, their_entropy, atol=1e-6)
    assert torch.allclose(values, their_values, atol=1e-6)
    assert torch.equal(values, ours.predict_values(obs))
    best, _, best_log_prob = ours(obs, deterministic=True)
    assert torch.equal(best, own(obs, deterministic=True)[0])
    assert torch.allclose(best_log_prob, ours.get_distribution(obs).probs.max(1).values.log(), atol=1e-6)
    assert ours.predict(obs[0].numpy(), deterministic=True)[0] == best[0]


@pytest.mark.parametrize("independent", [True, False])
def test_continuous_actions(independent):
    vec = make_sb3_vec("pendulum", 4)
    policy = sb3_policy(lambda observations, actions: Continuous(observations, actions, independent))
    model = sb3.PPO(policy, vec, n_steps=32, batch_size=64, n_epochs=2, device="cpu").learn(256)
    values, log_prob, entropy = model.policy.evaluate_actions(torch.zeros(5, 3), torch.zeros(5, 1))
    assert (values.shape, log_prob.shape, entropy.shape) == ((5, 1), (5,), (5,))
    assert model.policy.module.log_std.item() != 0.0
    assert model.predict(vec.reset())[0].shape == (4, 1)


def test_a_module_without_the_two_methods_is_refused():
    vec = make_sb3_vec("cartpole", 2)
    with pytest.raises(HurtleError, match=r"Linear has no encode and no decode"):
        sb3_policy(nn.Linear(4, 2))
    with pytest.raises(HurtleError, match=r"Linear has no encode and no decode"):
        sb3.PPO(sb3_policy(lambda observations, actions: nn.Linear(4, 2)), vec, device="cpu")


def test_structured_observations_reach_the_module_through_emulation():
    class Parity(gymnasium.Env):
        """Choose 1 when the number shown is odd; the position is noise of another dtype."""

        observation_space = spaces.Dict({"number": spaces.Discrete(4), "position": spaces.Box(-1.0, 1.0, (2,), np.float64)})
        action_space = spaces.Discrete(2)

        def _observe(self):
            self.number = int(self.np_random.integers(4))
            return {"number": self.number, "position": self.np_random.uniform(-1, 1, 2)}

        def reset(self, seed=None, options=None):
            super().reset(seed=seed)
            self.time = 0
            return self._observe(), {}

        def step(self, action):
            reward = float(action == self.number % 2)
            self.time += 1
            return self._observe(), reward, False, self.time == 16, {}

    vec = hurtle.make_vec(Parity, 4, backend="serial", emulate=True)
    assert vec.single_observation_space.dtype == np.uint8  # two dtypes: bytes

    class Structured(nn.Module):
        def __init__(self, observation_space, action_space):
            super().__init__()
            self.table, self.critic = nn.Embedding(4, 2), nn.Linear(2, 1)

        def encode(self, obs):
            parts = vec.unflatten(obs)
            assert parts["position"].dtype == torch.float64
            return self.table(parts["number"]) + 0.0 * parts["position"].float()

        def decode(self, features):
            return torch.distributions.Categorical(logits=features), self.critic(features)

    model = sb3.PPO(sb3_policy(Structured), SB3VecEnv(vec), n_steps=64, learning_rate=0.02, gamma=0.5, seed=0, device="cpu")
    model.learn(1024)
    choice = model.policy.module.table.weight.argmax(1)
    assert choice.tolist() == [0, 1, 0, 1]
    vec.close()
