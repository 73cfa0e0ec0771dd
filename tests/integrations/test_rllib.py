"""Envs in RLlib's registry. What needs Ray with RLlib is skipped without it."""

import gymnasium
import pytest

from hurtle.envs.cartpole import CartPole
from hurtle.errors import HurtleError
from hurtle.integrations.rllib import env_creator, register_env

NEEDS_RLLIB = 'needs pip install "hurtle[rllib]"'


@pytest.fixture(scope="module")
def rllib():
    rllib = pytest.importorskip("ray.rllib", reason=NEEDS_RLLIB, exc_type=ImportError)
    ray = pytest.importorskip("ray")
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield rllib
    ray.shutdown()


def test_the_creator_makes_the_env_with_its_parameters():
    creator = env_creator("cartpole", debug=True, gravity=1.6, max_steps=5)  # debug: nothing is compiled
    assert creator({}).native_spec.env.gravity == pytest.approx(1.6)
    made = creator({"gravity": 3.7})  # RLlib's env_config wins
    assert made.native_spec.env.gravity == pytest.approx(3.7)
    assert made.native_spec.env.max_steps == 5


@pytest.mark.parametrize("env", ["CartPole-v1", CartPole, lambda: gymnasium.make("CartPole-v1")])
def test_the_creator_takes_what_make_takes(env):
    obs, _ = env_creator(env)({}).reset(seed=0)
    assert obs.shape == (4,)


def test_agents_in_one_array_are_refused():
    with pytest.raises(HurtleError, match="has 4 agents in one array; RLlib needs a dict"):
        env_creator("snake")({})


def test_a_missing_ray_is_named_with_its_extra(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "ray.tune.registry", None)
    with pytest.raises(HurtleError, match=r'pip install "hurtle\[rllib\]"'):
        register_env("cartpole")


def test_ppo_of_rllib_trains_on_a_registered_env(rllib):
    from ray.rllib.algorithms.ppo import PPOConfig

    register_env("hurtle_cartpole", "cartpole", max_steps=50)
    config = (
        PPOConfig()
        .environment("hurtle_cartpole", env_config={"gravity": 1.6})
        .env_runners(num_env_runners=0, num_envs_per_env_runner=4, rollout_fragment_length=64)
        .training(train_batch_size_per_learner=256, minibatch_size=64, num_epochs=1)
    )
    algorithm = config.build_algo()
    try:
        result = algorithm.train()
    finally:
        algorithm.stop()
    assert result["env_runners"]["num_env_steps_sampled"] >= 256
    assert 5 < result["env_runners"]["episode_return_mean"] <= 50


def test_a_name_alone_registers_the_env_of_that_name(rllib):
    from ray.tune.registry import ENV_CREATOR, _global_registry

    register_env("acrobot", max_steps=9)
    made = _global_registry.get(ENV_CREATOR, "acrobot")({})
    assert made.native_spec.env.max_steps == 9
    assert made.observation_space.shape == (6,)


def test_pettingzoo_envs_come_as_rllibs_multi_agent_envs(rllib):
    spread = pytest.importorskip("mpe2.simple_spread_v3", reason='needs pip install "hurtle[pettingzoo]"')
    from ray.rllib.env.multi_agent_env import MultiAgentEnv

    for maker in (spread.parallel_env, spread.env):
        made = register_env("spread", maker)({"max_cycles": 3})
        assert isinstance(made, MultiAgentEnv)
        assert sorted(made.action_space) == ["agent_0", "agent_1", "agent_2"]
        obs, _ = made.reset(seed=0)
        obs, rewards, terminated, _, _ = made.step(dict.fromkeys(obs, 1))
        assert set(rewards) <= {"agent_0", "agent_1", "agent_2"}
        assert terminated["__all__"] is False
