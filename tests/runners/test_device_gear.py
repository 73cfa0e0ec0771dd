"""Runs in the device gear, on the CPU: they learn what the general gear learns, resume exactly, and change gears."""

import copy
import json

import gymnasium
import numpy as np
import pytest
import torch
from sample_envs import Levers, Shift

import hurtle
from hurtle.algorithms.a2c_device import DeviceA2C
from hurtle.algorithms.impala import IMPALA
from hurtle.algorithms.impala_device import DeviceIMPALA
from hurtle.algorithms.ppo import PPO
from hurtle.algorithms.ppo_device import DevicePPO
from hurtle.collect.device_collector import DeviceCollector
from hurtle.errors import HurtleError
from hurtle.runners.assembly import assemble
from hurtle.runners.settings import make_settings
from hurtle.tracking.checkpoints import load_checkpoint

SMALL = {"preset": False, "num_envs": 4, "num_steps": 16, "minibatch_size": 32, "num_epochs": 2, "hidden_sizes": (16,)}
QUIET = {"progress": "quiet", "trackers": (), "eval_episodes": 1, "device": "cpu"}
BATCH = 64
NOT_PPO = {"minibatch_size": None, "num_epochs": None, "shuffle": None}
"""Settings that A2C and IMPALA do not have."""


def train(env, tmp_path, updates=3, stop_after=None, batch=BATCH, **words):
    """A short run; settings that are None keep their defaults."""
    callbacks = [] if stop_after is None else [lambda trainer: trainer.updates < stop_after]
    words = {**SMALL, **QUIET, "threads": 1, "runs": str(tmp_path), "learning_rate": 1e-3, **words}
    words = {key: value for key, value in words.items() if value is not None}
    return hurtle.train(env, total_steps=updates * batch, callbacks=callbacks, **words)


def saved(run):
    return load_checkpoint(max((run.path / "checkpoints").glob("step-*.pt")))


def about(run):
    return json.loads((run.path / "about.json").read_text())


def parts_of(env, **words):
    words = {key: value for key, value in {**SMALL, "gear": "device", "device": "cpu", **words}.items() if value is not None}
    return assemble(make_settings(env, words), env)


def assert_same_weights(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-3, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")


def assert_equal_trees(found, expected, where=""):
    """Bitwise equal, except for the time taken and the learning rate, which every update sets."""
    assert type(found) is type(expected), where
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), where
        for key in expected.keys() - {"seconds", "lr"}:
            assert_equal_trees(found[key], expected[key], f"{where}/{key}")
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected), where
        for k, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
            assert_equal_trees(mine, theirs, f"{where}/{k}")
    elif isinstance(expected, torch.Tensor):
        assert torch.equal(found, expected), where
    elif isinstance(expected, np.ndarray):
        assert found.tobytes() == expected.tobytes(), where
    else:
        assert found == expected or found != found, where


# Learning

POLICIES = {
    "discrete": ("cartpole", {"normalize_observations": True}),
    "several choices with masks": (Levers, {}),
    "gaussian": ("pendulum", {"normalize_observations": True, "reward_mode": "normalize"}),
    "beta": ("pendulum", {"distribution": "beta"}),
    "squashed gaussian": ("pendulum", {"distribution": "squashed_gaussian", "target_kl": 0.01}),
    "shared": ("memory", {"separate_networks": False, "activation": "relu"}),
    "convolutions": ("breakout", {"vtrace": True}),
    "lstm": ("memory", {"recurrent": "lstm"}),
    "gru": ("cartpole", {"recurrent": "gru"}),
    "mingru": ("squared", {"recurrent": "mingru", "anneal_clip_range": True}),
    "agents that come and go": (Shift, {"minibatch_size": 192, "batch": 192}),
    "muon": ("cartpole", {"optimizer": "muon"}),
    "a2c": ("cartpole", {"algorithm": "a2c", **NOT_PPO}),
    "impala": ("cartpole", {"algorithm": "impala", "normalize_observations": True, "reward_mode": "normalize", **NOT_PPO}),
    "impala, convolutions": ("breakout", {"algorithm": "impala", **NOT_PPO}),
    "impala, lstm": ("memory", {"algorithm": "impala", "recurrent": "lstm", **NOT_PPO}),
    "impala, agents that come and go": (Shift, {"algorithm": "impala", "batch": 192, **NOT_PPO}),
}


SLOW = {"beta", "gaussian", "squashed gaussian", "gru", "lstm", "mingru", "muon", "a2c", "shared"}
SLOW |= {"impala, convolutions", "impala, lstm", "impala, agents that come and go"}
"""Covered by test_device_collector.py, test_device_ppo.py and test_device_impala.py."""


@pytest.mark.parametrize("case", [pytest.param(case, marks=[pytest.mark.slow] * (case in SLOW)) for case in POLICIES])
def test_the_same_is_learned_as_in_the_general_gear(case, tmp_path):
    """In order, so that minibatches are the same."""
    env, words = POLICIES[case]
    words = {"shuffle": False, **words}
    found, expected = (train(env, tmp_path, gear=gear, **words) for gear in ("device", "general"))
    assert (about(found)["gear"], about(expected)["gear"]) == ("device", "general")
    assert found.steps == expected.steps
    assert found.evaluation is not None
    mine, theirs = saved(found), saved(expected)
    assert_same_weights(mine["policy"], theirs["policy"])
    for name in ("count", "best_return", "best_length"):
        assert mine["progress"]["episodes"][name] == pytest.approx(theirs["progress"]["episodes"][name], nan_ok=True), name


# Resuming


RESUMED = {
    "shuffled": ("cartpole", {"normalize_observations": True}),
    "priorities": ("cartpole", {"priority_alpha": 0.8}),
    "normalized": ("pendulum", {"normalize_observations": True, "reward_mode": "normalize", "optimizer": "rmsprop"}),
    "lstm": ("memory", {"recurrent": "lstm", "vtrace": True}),
    "agents that come and go": (Shift, {"batch": 192}),
    "impala": ("cartpole", {"algorithm": "impala", "num_minibatches": 3, "reward_mode": "normalize", **NOT_PPO}),
    "a2c": ("cartpole", {"algorithm": "a2c", **NOT_PPO}),
}


SLOWLY_RESUMED = {"priorities", "agents that come and go", "a2c"}


@pytest.mark.parametrize("case", [pytest.param(case, marks=[pytest.mark.slow] * (case in SLOWLY_RESUMED)) for case in RESUMED])
def test_a_resumed_run_is_the_same_to_the_bit(case, tmp_path):
    env, words = RESUMED[case]
    whole = train(env, tmp_path, 4, gear="device", **words)
    half = train(env, tmp_path, 4, stop_after=2, gear="device", **words)
    assert half.steps < whole.steps
    rest = hurtle.train(None if isinstance(env, str) else env, resume=half)
    assert rest.steps == whole.steps
    found, expected = saved(rest), saved(whole)
    for key in ("policy", "learner", "collector", "progress"):
        assert_equal_trees(found[key], expected[key], key)


@pytest.mark.parametrize(
    ("optimizer", "chain", "others"),
    [
        ("adam", [("native", "device", "general")], {}),
        pytest.param("adam", [("device", "native", "device")], {}, marks=pytest.mark.slow),
        pytest.param("rmsprop", [("general", "device", "native")], {}, marks=pytest.mark.slow),
        ("rmsprop", [("native", "device", "general")], {"algorithm": "impala", **NOT_PPO}),
        pytest.param("adam", [("device", "general", "device")], {"algorithm": "impala", **NOT_PPO}, marks=pytest.mark.slow),
        pytest.param("rmsprop", [("device", "native", "device")], {"algorithm": "a2c", **NOT_PPO}, marks=pytest.mark.slow),
    ],
)
def test_a_run_changes_gears_at_a_checkpoint(optimizer, chain, others, tmp_path):
    words = {"shuffle": False, "optimizer": optimizer, "normalize_observations": True, "reward_mode": "normalize", **others}
    expected = train("cartpole", tmp_path, 6, gear="general", **words)
    for gears in chain:
        run = train("cartpole", tmp_path, 6, stop_after=2, gear=gears[0], **words)
        run = hurtle.train(resume=run, gear=gears[1], callbacks=[lambda trainer: trainer.updates < 4])
        assert run.stopped_by == "callback"
        run = hurtle.train(resume=run, gear=gears[2])
        told = about(run)
        assert (told["gear"], *(part["gear"] for part in told["resumed"])) == gears
        assert run.steps == expected.steps
        assert_same_weights(saved(run)["policy"], saved(expected)["policy"])


# Parts of a run


@pytest.mark.parametrize(
    ("kind", "words"),
    [(DevicePPO, {}), (DeviceIMPALA, {"algorithm": "impala", **NOT_PPO}), (DeviceA2C, {"algorithm": "a2c", **NOT_PPO})],
)
def test_it_is_updated_on_the_device(kind, words):
    parts = parts_of("cartpole", **words)
    try:
        assert parts.gear.name == "device"
        assert isinstance(parts.collector, DeviceCollector)
        assert isinstance(parts.learner, kind)
        assert "on the CPU" in parts.gear.reason
        assert parts.collector.resumes_exactly
    finally:
        parts.close()


PREPARED = {
    "normalized": ("cartpole", {"normalize_observations": True, "reward_mode": "normalize"}),
    "lstm": ("memory", {"recurrent": "lstm"}),
    "agents that come and go": (Shift, {"optimizer": "rmsprop"}),
    "muon": ("cartpole", {"optimizer": "muon"}),
    "a2c": ("cartpole", {"algorithm": "a2c", **NOT_PPO}),
    "impala": ("cartpole", {"algorithm": "impala", "num_minibatches": 3, "reward_mode": "normalize", **NOT_PPO}),
}


@pytest.mark.parametrize("case", PREPARED)
def test_getting_ready_leaves_everything_as_it_was(case):
    """At the start of a run, and midway, where a resumed run continues."""
    env, words = PREPARED[case]
    parts = parts_of(env, **words)
    try:
        for updates in (0, 2):
            for _ in range(updates):
                parts.collector.collect(parts.rollout)
                parts.learner.update(parts.rollout)
            held = (parts.policy, parts.collector, parts.learner)
            before = copy.deepcopy([part.state_dict() for part in held])
            parts.collector.prepare(parts.rollout)
            parts.learner.prepare(parts.rollout)
            assert_equal_trees([part.state_dict() for part in held], before, case)
    finally:
        parts.close()


@pytest.mark.parametrize(
    ("words", "kind"),
    [({"optimizer": "muon"}, PPO), ({"optimizer": "muon", "algorithm": "impala", **NOT_PPO}, IMPALA)],
)
def test_other_updates_stay_in_torch_and_the_run_says_so(words, kind):
    parts = parts_of("cartpole", **words)
    try:
        assert isinstance(parts.collector, DeviceCollector)
        assert type(parts.learner) is kind
        assert "by torch" in parts.gear.reason
        assert "CUDA graphs" not in parts.gear.reason  # there is no GPU
    finally:
        parts.close()


def test_on_the_cpu_it_must_be_asked_for():
    parts = parts_of("cartpole", gear="auto")
    try:
        assert parts.gear.name == "native"
    finally:
        parts.close()


@pytest.mark.parametrize("env", ["CartPole-v1", lambda: gymnasium.make("CartPole-v1")], ids=["name", "function"])
def test_other_envs_are_refused(env, tmp_path):
    with pytest.raises(HurtleError, match=r"gear='device' is not possible here: the envs are not native ones.*gear='auto'"):
        train(env, tmp_path, gear="device")
    assert not list(tmp_path.iterdir())


def test_actors_are_refused(tmp_path):
    words = {"algorithm": "impala", "runner": "async", "lag": "1", **NOT_PPO}
    with pytest.raises(HurtleError, match="gear='device' is not possible here: actors collect on the CPU"):
        train("cartpole", tmp_path, gear="device", **words)
    assert not list(tmp_path.iterdir())


def test_a_vector_that_resets_later_is_refused(tmp_path):
    vec = hurtle.make_vec("cartpole", num_envs=4, autoreset_mode="NextStep")
    with pytest.raises(HurtleError, match=r"gear='device' is not possible here: .*NEXT_STEP"):
        train(vec, tmp_path, gear="device")
    vec.close()


def test_a_ready_vector_is_trained_on_and_stays_open(tmp_path):
    vec = hurtle.make_vec("cartpole", num_envs=4)
    run = train(vec, tmp_path, 2, gear="device")
    assert run.steps == 2 * BATCH
    assert about(run)["gear"] == "device"
    obs, _ = vec.reset(seed=0)
    assert obs.shape == (4, 4)
    vec.close()


def test_a_nan_stops_the_run_and_names_the_checkpoint(tmp_path):
    def spoil(trainer):
        if trainer.updates == 2:
            with torch.no_grad():
                trainer.policy.network.critic.weight[0, 0] = np.nan

    words = {**SMALL, **QUIET, "runs": str(tmp_path), "checkpoint_every": BATCH, "total_steps": 9 * BATCH}
    with pytest.raises(HurtleError, match=r"(?s)not finite.*[Cc]heckpoint.*step-0"):
        hurtle.train("cartpole", gear="device", callbacks=[spoil], **words)
