"""Presets: each makes valid settings, is found by all names of its env, and divides its batch."""

from typing import get_args

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

import hurtle
from hurtle.algorithms.algorithm import algorithm_names
from hurtle.algorithms.ppo_config import PPOConfig, check_divides
from hurtle.envs.registry import names
from hurtle.runners.kinds import Kind, kind_of
from hurtle.runners.presets import preset_for, preset_of_kind, preset_tables
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
        assert set(table) <= {"envs", "kind", *algorithm_names()}
        assert ("envs" in table) + ("kind" in table) <= 1
        if "kind" in table:
            assert table["kind"] in get_args(Kind), name
            continue
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


# Kinds ----------------------------------------------------------------------------------------------------------------


class Blank(gymnasium.Env):
    """An env with any spaces."""

    def __init__(self, observation=None, action=None):
        self.observation_space, self.action_space = observation or NUMBERS, action or spaces.Discrete(2)


NUMBERS, BYTES, IMAGE = spaces.Box(-1, 1, (3,)), spaces.Box(0, 255, (3,), np.uint8), spaces.Box(0, 255, (84, 84, 3), np.uint8)


@pytest.mark.parametrize(
    ("observation", "action", "kind"),
    [
        (NUMBERS, NUMBERS, "continuous"),
        (NUMBERS, spaces.Discrete(2), "discrete"),
        (NUMBERS, spaces.MultiDiscrete([2, 3]), "discrete"),
        (BYTES, spaces.Discrete(2), "discrete"),
        (spaces.Discrete(5), spaces.Discrete(2), "discrete"),
        (IMAGE, NUMBERS, "image"),
        (IMAGE, spaces.Discrete(2), "image"),
        (BYTES, NUMBERS, ""),  # cannot be normalized
        (spaces.Discrete(5), NUMBERS, ""),
        (spaces.Dict(a=NUMBERS), spaces.Discrete(2), ""),
    ],
)
def test_kinds_follow_from_the_spaces(observation, action, kind):
    assert kind_of(Blank, {"observation": observation, "action": action}) == kind


def test_kinds_of_names_vectors_agents_and_what_cannot_be_made():
    assert [kind_of(name, {}) for name in ("pendulum", "cartpole", "snake")] == ["continuous", "discrete", "image"]
    with hurtle.make_vec("snake", num_envs=2) as vec:
        assert kind_of(vec, {}) == "image"
    with hurtle.make_vec("pendulum", num_envs=2) as vec:
        assert kind_of(vec, {}) == "continuous"
    assert kind_of("no_such_env", {}) == kind_of("no_file.py:Env", {}) == kind_of("cartpole", {"no_such": 1}) == ""


def test_envs_without_a_preset_get_that_of_their_kind():
    plain = PPOConfig()
    settings = make_settings("Blank", {"num_envs": 4}, played=Blank)
    assert settings.algorithm.num_epochs == preset_of_kind("discrete", "ppo", {})["num_epochs"] != plain.num_epochs
    assert (settings.algorithm.num_steps, settings.algorithm.minibatch_size) == (512, 64)
    assert make_settings("Blank", {"num_epochs": 3}, played=Blank).algorithm.num_epochs == 3
    assert make_settings("Blank", {"preset": False}, played=Blank).algorithm == plain
    assert make_settings("no_such_env", {}).algorithm == plain
    assert make_settings("pendulum", {}).algorithm.gamma == 0.97  # its own comes first


def test_what_is_named_is_not_made(monkeypatch):
    """Making an env takes time: only where something depends on it."""
    monkeypatch.setattr("hurtle.runners.kinds.kind_of", lambda *_: pytest.fail("looked"))
    make_settings("cartpole", {})
    make_settings("Blank", {"preset": False})
    make_settings("Blank", {"algorithm": "a2c"})
    words = {name for kind in ("continuous", "discrete") for name in preset_of_kind(kind, "ppo", {})}
    settings = make_settings("cartpole", {"preset": False})
    every = {**vars(settings.train), **vars(settings.algorithm)}
    make_settings("Blank", {word: every[word] for word in words})


@pytest.mark.parametrize("num_envs", [1, 2, 3, 5, 8, 50, 64, 65, 1000, 4096])
def test_the_batch_of_a_kind_fits_any_number_of_envs(num_envs):
    found = preset_of_kind("continuous", "ppo", {"num_envs": num_envs})
    batch = num_envs * found["num_steps"]
    check_divides(batch, found["minibatch_size"])
    assert max(1024, 32 * num_envs) <= batch <= max(2048, 32 * num_envs)
    assert batch // 32 <= found["minibatch_size"] <= max(160, batch // 32)


def test_the_minibatches_of_a_kind_fit_the_steps_that_were_asked_for():
    for num_steps in (1, 7, 16, 100, 1000):
        found = preset_of_kind("discrete", "ppo", {"num_envs": 6, "num_steps": num_steps})
        check_divides(6 * num_steps, found["minibatch_size"])
    assert preset_of_kind("discrete", "ppo", {"num_steps": 16}) == preset_of_kind("discrete", "ppo", {}) | {
        "num_steps": 16,
        "minibatch_size": 64,
    }


@pytest.mark.parametrize("given", [{"recurrent": "lstm"}, {"priority_alpha": 0.6}])
def test_whole_segments_keep_the_sizes_of_the_algorithm(given):
    found = preset_of_kind("discrete", "ppo", given)
    assert not {"num_steps", "minibatch_size"} & found.keys()
    assert found["num_epochs"] > 4
