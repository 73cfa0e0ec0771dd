"""Presets: each makes valid settings, is found by all names of its env, and divides its batch."""

import pytest

from hurtle.algorithms.algorithm import algorithm_names
from hurtle.algorithms.ppo_config import check_divides
from hurtle.envs.registry import names
from hurtle.runners.presets import preset_for, preset_tables
from hurtle.runners.settings import make_settings

AGENTS = {"snake": 4}
MUJOCO = ["Ant", "HalfCheetah", "Hopper", "Humanoid", "InvertedDoublePendulum", "InvertedPendulum"]
MUJOCO = [f"{name}-v5" for name in [*MUJOCO, "Reacher", "Swimmer", "Walker2d"]]
OTHERS = ["atari/Pong", *MUJOCO]


@pytest.mark.parametrize("env", [*names(), *OTHERS])
def test_every_preset_makes_settings_and_divides_its_batch(env):
    preset = preset_for(env, "ppo")
    assert preset, f"{env} has no preset"
    settings = make_settings(env, {})
    words = vars(settings.train) | vars(settings.policy) | vars(settings.algorithm)
    assert {word: words[word] for word in preset} == preset
    check_divides(
        settings.algorithm.num_steps * settings.train.num_envs * AGENTS.get(env, 1), settings.algorithm.minibatch_size
    )


def test_no_table_is_for_an_env_or_algorithm_that_does_not_exist():
    known = {*names(), *OTHERS}
    for name, table in preset_tables().items():
        assert set(table) <= {"envs", *algorithm_names()}
        patterns = table.get("envs", [name])
        assert any(pattern in known or "*" in pattern or "[" in pattern for pattern in patterns), name
        for algorithm in set(table) & set(algorithm_names()):
            make_settings(patterns[0], {"algorithm": algorithm})


@pytest.mark.parametrize(
    ("gymnasium_id", "twin"),
    [
        ("CartPole-v1", "cartpole"),
        ("Acrobot-v1", "acrobot"),
        ("MountainCar-v0", "mountain_car"),
        ("MountainCarContinuous-v0", "mountain_car_continuous"),
        ("Pendulum-v1", "pendulum"),
    ],
)
def test_gymnasium_ids_share_the_preset_of_their_twin(gymnasium_id, twin):
    assert preset_for(gymnasium_id, "ppo") == preset_for(twin, "ppo") != {}


def test_the_ocean_envs_share_one_configuration_but_for_memory():
    ocean = preset_for("bandit", "ppo")
    assert ocean["entropy_coef"] == 0.01
    for env in ("password", "squared", "stochastic"):
        assert preset_for(env, "ppo") == ocean
    assert preset_for("memory", "ppo") == ocean | {"recurrent": "lstm"}


def test_all_atari_games_and_nothing_else():
    assert preset_for("atari/Breakout", "ppo")["policy"] == "nature_cnn"
    assert preset_for("breakout", "ppo")["policy"] == "grid_cnn"  # MinAtar's
    assert preset_for("ALE/Pong-v5", "ppo") == {}  # raw frames: a different env


def test_cartpole_is_that_of_the_literature():
    settings = make_settings("cartpole", {})
    assert (settings.train.num_envs, settings.algorithm.num_steps, settings.algorithm.num_epochs) == (8, 32, 20)
    assert (settings.algorithm.gamma, settings.algorithm.gae_lambda, settings.algorithm.learning_rate) == (0.98, 0.8, 1e-3)
    assert settings.algorithm.anneal_clip_range
    assert settings.train.total_steps == 100_000
