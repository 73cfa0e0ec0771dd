"""Settings: precedence, types, ranges, TOML files, and messages that name the setting."""

import subprocess
import sys
from dataclasses import fields

import numpy as np
import pytest

from hurtle.algorithms.algorithm import algorithm_names
from hurtle.algorithms.ppo_config import PPOConfig, check_divides
from hurtle.errors import HurtleError, UnknownNameError
from hurtle.runners.settings import (
    TrainConfig,
    make_settings,
    read_settings_file,
    setting_types,
    settings_from_dict,
    settings_to_dict,
)
from hurtle.runners.values import fit
from hurtle.tracking.run_folder import RunFolder

PLAIN = "my_env.py:MyEnv"  # no preset


@pytest.fixture
def toml(tmp_path):
    def write(text):
        (tmp_path / "my.toml").write_text(text)
        return tmp_path / "my.toml"

    return write


def refused(match, kind=HurtleError, **values):
    with pytest.raises(kind, match=match):
        make_settings(PLAIN, values)


def test_every_setting_is_in_one_part_only():
    for algorithm in algorithm_names():
        names = [field.name for part in vars(settings_from_dict({"algorithm": algorithm})).values() for field in fields(part)]
        assert len(names) == len(set(names)) == len(setting_types(algorithm))


def test_preset_file_and_overrides_in_order(toml):
    file = toml("gamma = 0.97\nnum_steps = 64\n")
    settings = make_settings("cartpole", {"num_steps": 16}, file)
    assert settings.train.env == "cartpole"
    assert settings.algorithm.gae_lambda == 0.8  # preset
    assert settings.algorithm.gamma == 0.97  # file over preset
    assert settings.algorithm.num_steps == 16  # override over file
    assert settings.algorithm.value_coef == 0.5  # default


def test_presets_can_be_left_out(toml):
    assert make_settings("cartpole", {"preset": False}).algorithm == PPOConfig()
    assert make_settings("cartpole", {}, toml("preset = false")).algorithm == PPOConfig()


def test_the_algorithm_decides_which_settings_there_are(toml):
    settings = make_settings(PLAIN, {"algorithm": "a2c", "num_steps": 7})
    assert type(settings.algorithm).__name__ == "A2CConfig"
    assert settings.algorithm.num_steps == 7
    refused("clip_range is a setting of ppo, not of a2c", UnknownNameError, algorithm="a2c", clip_range=0.1)
    refused("No algorithm 'poo'. Did you mean ppo", UnknownNameError, algorithm="poo")
    assert make_settings(PLAIN, {}, toml("algorithm = 'a2c'")).train.algorithm == "a2c"


def test_an_unknown_setting_gets_a_suggestion():
    refused(r"No setting clip_rang\. Did you mean clip_range\?", UnknownNameError, clip_rang=0.1)
    refused("`hurtle train --help` lists them", UnknownNameError, zzzzzz=1)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("num_envs", "eight", "num_envs must be a whole number, got 'eight'"),
        ("num_steps", 0.5, "num_steps must be a whole number, got 0.5"),
        ("num_envs", True, "num_envs must be a whole number, got True"),
        ("num_envs", None, "num_envs must be a whole number, got None"),
        ("gamma", "high", "gamma must be a number, got 'high'"),
        ("gamma", float("nan"), "gamma must be a number, got nan"),
        ("shuffle", 1, "shuffle must be true or false, got 1"),
        ("name", 3, "name must be text, got 3"),
        ("hidden_sizes", (64, "wide"), "hidden_sizes must be a whole number, got 'wide'"),
        ("reward_mode", "clip", "reward_mode must be one of raw, sign, normalize, got 'clip'"),
        ("recurrent", "rnn", "recurrent must be one of none, lstm, gru, mingru, got 'rnn'"),
        ("trackers", ["wandbb"], "trackers must be one of tensorboard, wandb, mlflow, got 'wandbb'"),
        ("env_parameters", 3, "env_parameters must be a dict"),
        ("env_parameters", {"reward": np.zeros(3)}, "env_parameters holds numbers, text"),
        ("gamma", 1.5, "gamma must be from 0 to 1, got 1.5"),
        ("gae_lambda", -0.1, "gae_lambda must be from 0 to 1, got -0.1"),
        ("clip_range", 0, "clip_range must be more than 0, got 0.0"),
        ("num_envs", 0, "num_envs must be 1 or more, got 0"),
        ("total_steps", -5, "total_steps must be 1 or more, got -5"),
        ("hidden_sizes", [64, 0], r"hidden_sizes must be 1 or more, got \(64, 0\)"),
        ("entropy_coef", -1, "entropy_coef must be 0 or more, got -1.0"),
        ("target_kl", 0.0, "target_kl must be more than 0, got 0.0"),
        ("device", "gpu", "device must be cpu, cuda, cuda:N"),
        ("optimizer", "sgd", "optimizer must be one of adam, adamw, rmsprop, muon, got 'sgd'"),
        ("seed", 2**63, r"seed must be from 0 to 2\*\*63 - 1, got 9223372036854775808"),
        ("seed", -1, r"seed must be from 0 to 2\*\*63 - 1, got -1"),
        ("learning_rate", float("inf"), "learning_rate must be finite, got inf"),
        ("learning_rate", 10**400, "learning_rate must be a number"),
        ("clip_range", "inf", "clip_range must be finite, got inf"),
        ("entropy_coef", float("inf"), "entropy_coef must be finite, got inf"),
        ("value_coef", float("inf"), "value_coef must be finite, got inf"),
        ("gamma", float("inf"), "gamma must be from 0 to 1, got inf"),
        ("stop_at_return", -float("inf"), "stop_at_return must be finite, got -inf"),
        ("pool_batch_size", 9, "pool_batch_size must be at most num_envs=8, got 9"),
    ],
)
def test_a_bad_value_is_refused_by_name(name, value, message):
    refused(message, **{name: value})


def test_values_that_mean_the_same_are_taken():
    values = {
        "total_steps": 1e6,
        "num_steps": "1e2",
        "minibatch_size": np.int64(50),
        "gamma": 1,
        "hidden_sizes": [32, 32],
        "target_kl": "none",
        "stop_at_return": -110,
        "trackers": "wandb",
        "separate_networks": "true",
        "env_parameters": {"gravity": np.float32(0.5), "sizes": (1, 2)},
    }
    settings = make_settings(PLAIN, values)
    assert settings.train.total_steps == 1_000_000
    assert type(settings.train.total_steps) is int
    assert (settings.algorithm.num_steps, settings.algorithm.minibatch_size) == (100, 50)
    assert type(settings.algorithm.minibatch_size) is int
    assert type(settings.algorithm.gamma) is float
    assert settings.policy.hidden_sizes == (32, 32)
    assert settings.policy.separate_networks is True
    assert settings.algorithm.target_kl is None
    assert settings.train.stop_at_return == -110.0
    assert settings.train.trackers == ("wandb",)
    assert settings.train.env_parameters == {"gravity": 0.5, "sizes": [1, 2]}


def test_bounds_may_be_infinite():
    settings = make_settings(PLAIN, {"max_grad_norm": "inf", "observation_clip": float("inf"), "seed": 2**63 - 1})
    assert settings.algorithm.max_grad_norm == settings.train.observation_clip == float("inf")
    assert settings.train.seed == 2**63 - 1


def test_whole_numbers_keep_all_digits():
    assert fit("9007199254740993", int) == 2**53 + 1
    assert fit(2**53 + 1, int) == 2**53 + 1
    assert fit("1_000_000", int) == 1_000_000


def test_env_parameters_are_read_as_python_literals():
    pairs = fit(["gravity=1.6", "length=7", "flip=true", "sizes=[1, 2]", "mode=easy", "name='x=y'"], dict[str, object])
    assert pairs == {"gravity": 1.6, "length": 7, "flip": True, "sizes": [1, 2], "mode": "easy", "name": "x=y"}
    with pytest.raises(ValueError, match=r"NAME=VALUE pairs such as gravity=1.6, got 'gravity'"):
        fit(["gravity"], dict[str, object])


def test_an_env_that_is_no_name_is_called_by_its_own():
    class MyEnv:
        pass

    assert make_settings(MyEnv, {}).train.env == "MyEnv"
    with pytest.raises(HurtleError, match="needs an env"):
        make_settings(None, {})


def test_files_may_have_tables(toml):
    file = toml(
        "env = 'cartpole'\n[train]\nnum_envs = 4\n[policy]\nhidden_sizes = [32]\n"
        "[ppo]\nclip_range = 0.1\n[a2c]\ngamma = 0.5\n[env_parameters]\ngravity = 1.6\n"
    )
    settings = make_settings(None, {}, file)
    assert (settings.train.env, settings.train.num_envs, settings.policy.hidden_sizes) == ("cartpole", 4, (32,))
    assert (settings.algorithm.clip_range, settings.algorithm.gamma) == (0.1, 0.98)
    assert settings.train.env_parameters == {"gravity": 1.6}
    assert make_settings(None, {"algorithm": "a2c"}, file).algorithm.gamma == 0.5


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("clip_rang = 0.1", r"No setting clip_rang in .*my\.toml\. Did you mean clip_range\?"),
        ("[ppo]\nclip_rang = 0.1", r"No setting clip_rang in .*my\.toml"),
        ("[a2c]\ngama = 0.1", r"No setting gama in .*my\.toml\. Did you mean gamma"),  # unused, but still an error
        ("num_envs = 'eight'", r"num_envs in .*my\.toml must be a whole number, got 'eight'"),
        ("gamma = 0.9\n[ppo]\ngamma = 0.8", r"gamma in .*my\.toml: set twice, the second time in \[ppo\]"),
        ("gamma = ", r"my\.toml is not a TOML file: Invalid value"),
        ("[trpo]\ngamma = 0.9", r"No setting trpo in .*my\.toml"),
    ],
)
def test_mistakes_in_a_file_name_the_file(toml, text, message):
    with pytest.raises(HurtleError, match=message):
        make_settings(PLAIN, {}, toml(text))


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(HurtleError, match=r"Cannot read the settings file .*none.toml: No such file"):
        make_settings(PLAIN, {}, tmp_path / "none.toml")


@pytest.mark.parametrize("algorithm", algorithm_names())
def test_config_toml_reads_back_equal(tmp_path, algorithm):
    values = {"algorithm": algorithm, "env_parameters": {"gravity": 1.6, "mode": 'it\'s "so"'}, "hidden_sizes": ()}
    settings = make_settings("cartpole", values | {"separate_networks": False, "stop_at_return": 475.0, "num_workers": None})
    run = RunFolder.create(tmp_path, env="cartpole", algorithm=algorithm)
    run.write_config(settings_to_dict(settings))
    assert settings_from_dict(run.read_config()) == settings
    assert make_settings("cartpole", {}, run.path / "config.toml") == settings
    assert set(read_settings_file(run.path / "config.toml")) == set(setting_types(algorithm))  # None too, so no preset applies


def test_minibatches_must_divide_the_batch():
    check_divides(1024, 256)
    with pytest.raises(HurtleError, match=r"minibatch_size=100 does not divide the batch of 1024 .* fit: 64 or 128;"):
        check_divides(1024, 100)
    with pytest.raises(HurtleError, match=r"minibatch_size=256 is more than the batch of 96 .* fit: 96;"):
        check_divides(96, 256)
    with pytest.raises(HurtleError, match=r"fit: 1 or 7;"):
        check_divides(7, 2)


def test_settings_load_no_torch():
    code = "import sys, hurtle, hurtle.cli, hurtle.runners.settings; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_settings_that_the_api_promises():
    promised = (
        "env algorithm total_steps seed device num_envs backend num_workers pool_batch_size env_parameters "
        "step_timeout restart_workers curriculum unsafe normalize_observations observation_clip reward_mode reward_clip "
        "stop_at_return eval_every eval_episodes eval_sampled "
        "checkpoint_every keep_checkpoints runs name progress curve trackers gear compile precision threads fine_tune preset "
        "runner lag num_actors actor_devices num_learners "
        "address num_collectors collector_cpus collector_gpus collector_timeout collector_wait"
    )
    assert {field.name for field in fields(TrainConfig)} == set(promised.split())
