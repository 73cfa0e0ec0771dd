"""Which gear a run uses, the reason it gives, and changing gears."""

import json

import numpy as np
import pytest
import torch
from sample_envs import SHORT_PENDULUM, SNAKES, Levers

import hurtle
from hurtle.algorithms.a2c_native import NativeA2C
from hurtle.algorithms.ppo import PPO, TorchEpochs
from hurtle.algorithms.ppo_native import NativeEpochs
from hurtle.collect.compiled_actor import CompiledActor
from hurtle.collect.general_collector import GeneralCollector
from hurtle.collect.native_collector import NativeCollector
from hurtle.collect.pool_collector import PoolCollector
from hurtle.errors import HurtleError
from hurtle.runners.assembly import assemble
from hurtle.runners.settings import make_settings
from hurtle.tracking.checkpoints import load_checkpoint

SMALL = {"preset": False, "num_envs": 4, "num_steps": 16, "minibatch_size": 32, "num_epochs": 2, "hidden_sizes": (16,)}
QUIET = {"progress": "quiet", "trackers": (), "eval_episodes": 1}


def parts_of(env, **words):
    return assemble(make_settings(env, {**SMALL, **words}), env)


def weights(run):
    return load_checkpoint(max((run.path / "checkpoints").glob("step-*.pt")))["policy"]


NATIVE = {
    "discrete": ("cartpole", {}),
    "continuous": ("pendulum", {"normalize_observations": True, "env_parameters": SHORT_PENDULUM}),
    "beta": ("pendulum", {"distribution": "beta", "env_parameters": SHORT_PENDULUM}),
    "several agents": ("snake", {"policy": "mlp", "minibatch_size": 64, "env_parameters": SNAKES}),
    "bytes": (Levers, {"policy": "mlp", "activation": "relu", "separate_networks": False}),
    "grid": ("breakout", {}),
    "memory": ("memory", {"recurrent": "lstm", "minibatch_size": 32}),
}


@pytest.mark.parametrize("case", NATIVE)
def test_native_envs_are_compiled_as_a_whole(case):
    env, words = NATIVE[case]
    parts = parts_of(env, **words)
    try:
        assert parts.gear.name == "native"
        assert isinstance(parts.collector, NativeCollector)
        assert isinstance(parts.learner.epochs, NativeEpochs)
    finally:
        parts.close()


GENERAL = {
    "its actions are squashed_gaussian": ("pendulum", {"distribution": "squashed_gaussian", "env_parameters": SHORT_PENDULUM}),
    "compile=True": ("cartpole", {"compile": True}),
}


@pytest.mark.parametrize("reason", GENERAL)
def test_everything_else_is_general_and_says_why(reason, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function, **how: function)  # nothing runs; loading the compiler takes seconds
    env, words = GENERAL[reason]
    parts = parts_of(env, **words)
    try:
        assert (parts.gear.name, type(parts.learner), type(parts.learner.epochs)) == ("general", PPO, TorchEpochs)
        assert isinstance(parts.collector, GeneralCollector)
        assert reason in parts.gear.reason
    finally:
        parts.close()
    with pytest.raises(HurtleError, match=f"gear='native' is not possible here: .*{reason}.*a CNN for small grids"):
        parts_of(env, gear="native", **words)


@pytest.mark.parametrize("pool", [None, 2])
def test_the_policy_and_the_update_are_compiled_for_other_envs_too(pool):
    vec = hurtle.make_vec("CartPole-v1", 4, backend="serial", batch_size=pool)
    parts = parts_of(vec)
    try:
        assert parts.gear.name == "native"
        assert type(parts.collector) is (PoolCollector if pool else GeneralCollector)
        assert isinstance(parts.collector.actor, CompiledActor)
        assert isinstance(parts.learner.epochs, NativeEpochs)
        assert parts.gear.reason.startswith("policy and update run compiled; the env is not a native one")
    finally:
        parts.close()
        vec.close()


@pytest.mark.parametrize("how", [{"autoreset_mode": "NextStep"}, {"debug": True}])
def test_a_ready_vector_that_compiled_code_cannot_step(how, tmp_path):
    vec = hurtle.make_vec("cartpole", num_envs=4, **how)
    run = hurtle.train(vec, total_steps=64, runs=str(tmp_path), **SMALL, **QUIET)
    assert run.steps >= 64 - 4  # resets do not count as steps
    assert json.loads((run.path / "about.json").read_text())["gear"] == "native"
    vec.close()


def test_general_may_be_asked_for():
    parts = parts_of("cartpole", gear="general")
    try:
        assert isinstance(parts.collector, GeneralCollector)
        assert type(parts.learner.epochs) is TorchEpochs
        assert parts.gear.reason == "as asked for"
    finally:
        parts.close()


def test_an_update_that_is_not_compiled_stays_in_torch_alone(tmp_path, capsys):
    words = {**SMALL, **QUIET, "progress": "plain", "runs": str(tmp_path)}
    run = hurtle.train("cartpole", total_steps=128, optimizer="muon", **words)
    said = capsys.readouterr()
    assert "native: envs and policy run compiled; the update stays in torch" in said.out + said.err
    assert "muon" in said.out + said.err
    assert json.loads((run.path / "about.json").read_text())["gear"] == "native"


def test_a2c_is_compiled_too(tmp_path):
    settings = make_settings("cartpole", {"algorithm": "a2c", "preset": False})
    parts = assemble(settings, "cartpole")
    assert isinstance(parts.learner, NativeA2C)
    parts.close()


@pytest.mark.parametrize(
    ("env", "optimizer", "recurrent"),
    [
        ("cartpole", "adam", "none"),
        ("CartPole-v1", "adam", "none"),
        pytest.param("cartpole", "adam", "lstm", marks=pytest.mark.slow),
        pytest.param("cartpole", "rmsprop", "none", marks=pytest.mark.slow),
        pytest.param("CartPole-v1", "adam", "mingru", marks=pytest.mark.slow),
    ],
)
def test_a_run_changes_gears_at_a_checkpoint(env, optimizer, recurrent, tmp_path):
    words = {
        **SMALL,
        **QUIET,
        "runs": str(tmp_path),
        "total_steps": 4 * 64,
        "optimizer": optimizer,
        "recurrent": recurrent,
        "normalize_observations": True,
        "backend": "auto" if env == "cartpole" else "serial",
    }
    found = {}
    for first, second in (("native", "native"), ("native", "general"), ("general", "native"), ("general", "general")):
        half = hurtle.train(env, gear=first, callbacks=[lambda trainer: trainer.updates < 2], **words)
        found[first, second] = weights(hurtle.train(resume=half, gear=second))
    for run in found.values():  # the same envs, actions and minibatches: only rounding differs
        for name, expected in found["general", "general"].items():
            torch.testing.assert_close(run[name], expected, rtol=1e-3, atol=1e-5)


def test_both_gears_take_the_same_actions_to_the_same_weights(tmp_path):
    words = {**SMALL, **QUIET, "runs": str(tmp_path), "total_steps": 256, "learning_rate": 1e-3}
    pendulum = {"reward_mode": "normalize", "env_parameters": SHORT_PENDULUM}
    others = ((Levers, {"target_kl": 0.01, "policy": "mlp"}), ("breakout", {}), ("memory", {"recurrent": "gru"}))
    for env, more in (("pendulum", pendulum), *others):
        native, general = (weights(hurtle.train(env, gear=gear, **words, **more)) for gear in ("native", "general"))
        for name, expected in general.items():
            torch.testing.assert_close(native[name], expected, rtol=1e-3, atol=1e-5)


def test_a_nan_stops_the_native_gear_and_names_the_checkpoint(tmp_path):
    def spoil(trainer):
        if trainer.updates == 2:
            with torch.no_grad():
                trainer.policy.network.critic.weight[0, 0] = np.nan

    with pytest.raises(HurtleError, match=r"(?s)not finite.*[Cc]heckpoint"):
        hurtle.train("cartpole", total_steps=1024, callbacks=[spoil], runs=str(tmp_path), checkpoint_every=64, **SMALL, **QUIET)
