"""Evaluation in compiled code plays the episodes that torch plays, and keeps what was played when it is stopped."""

import os
import signal

import numpy as np
import pytest
import torch
from hand_made_runs import policy_for, write_run
from sample_envs import SHORT_CARTPOLE, SHORT_PENDULUM, SNAKES, Levers, Masked

from hurtle.cli import main
from hurtle.collect.native_player import NativePlayer
from hurtle.errors import HurtleError
from hurtle.runners import evaluate as module
from hurtle.runners.evaluate import evaluate_policy
from hurtle.runners.tally import Tally

CASES = {
    "choices": ("cartpole", SHORT_CARTPOLE, {}),
    "normalized": ("cartpole", SHORT_CARTPOLE, {"normalize_observations": True}),
    "gaussian": ("pendulum", SHORT_PENDULUM, {}),
    "beta": ("pendulum", SHORT_PENDULUM, {"distribution": "beta"}),
    "agents": ("snake", SNAKES, {"policy": "mlp"}),
    "masks": (Masked, {}, {}),
    "several choices": (Levers, {}, {}),
    "memory": ("memory", {}, {"recurrent": "lstm"}),
    "agents with memories": ("snake", SNAKES, {"policy": "mlp", "recurrent": "gru"}),
    "grid": ("asterix", {"max_steps": 17}, {}),
}


@pytest.fixture
def no_torch(monkeypatch):
    """Fails if evaluation runs step by step."""

    def refuse(*arguments):
        raise AssertionError("played by torch")

    return lambda: monkeypatch.setattr(module, "_play", refuse)


@pytest.mark.parametrize(
    ("case", "deterministic"),
    [
        pytest.param(case, deterministic, marks=[pytest.mark.slow] * (deterministic == (case not in ("normalized", "memory"))))
        for case in CASES
        for deterministic in (True, False)
    ],
)
def test_compiled_code_plays_the_same_episodes(case, deterministic, no_torch):
    env, parameters, options = CASES[case]
    policy, _, _ = policy_for(env, parameters=parameters, **options)
    if policy.normalizer is not None:
        policy.normalizer.update(np.random.default_rng(0).normal(1, 3, (10, 5, 4)).astype(np.float32))
    with torch.no_grad():  # a new policy's outputs are nearly equal, and rounding could tip them
        for parameter in policy.parameters():
            parameter.mul_(1.5)
    before = {name: value.clone() for name, value in policy.state_dict().items()}
    asked = {"episodes": 50, "num_envs": 20, "seed": 3, "env_parameters": parameters, "deterministic": deterministic}
    expected = evaluate_policy(policy, env, gear="general", **asked)
    no_torch()
    found = evaluate_policy(policy, env, **asked)
    assert found.episodes == expected.episodes >= 50

    def in_order(evaluation):
        return sorted(zip(evaluation.lengths.tolist(), evaluation.returns.round(4).tolist(), strict=True))

    np.testing.assert_allclose(in_order(found), in_order(expected), rtol=1e-4, atol=1e-3)
    for name, value in policy.state_dict().items():
        torch.testing.assert_close(value, before[name], rtol=0, atol=0)


@pytest.mark.parametrize(("env", "recurrent"), [("CartPole-v1", "none"), ("Pendulum-v1", "none"), ("CartPole-v1", "lstm")])
def test_most_likely_actions_in_other_envs_are_compiled_too(env, recurrent, monkeypatch):
    policy, _, _ = policy_for(env, normalize_observations=True, recurrent=recurrent)
    size = policy.observation_space.shape[0]
    policy.normalizer.update(np.random.default_rng(0).normal(0.1, 0.5, (10, 5, size)).astype(np.float32))
    asked = {"episodes": 3, "num_envs": 2, "backend": "serial", "seed": 3}
    expected = evaluate_policy(policy, env, gear="general", **asked)
    sampled = evaluate_policy(policy, env, deterministic=False, **asked)
    monkeypatch.setattr("hurtle.runners.playing.TorchRows", None)
    found = evaluate_policy(policy, env, **asked)
    np.testing.assert_array_equal(found.lengths, expected.lengths)
    np.testing.assert_allclose(found.returns, expected.returns, rtol=1e-3)
    assert not np.array_equal(sampled.returns, found.returns)


def test_policies_that_compiled_code_does_not_know_are_played_by_torch(monkeypatch):
    policy, _, _ = policy_for("pendulum", distribution="squashed_gaussian")
    monkeypatch.setattr(module, "NativePlayer", None)
    assert evaluate_policy(policy, "pendulum", episodes=3).episodes == 3


def test_a_run_is_evaluated_in_its_gear(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(
        module,
        "_play",
        lambda *arguments: seen.append("torch") or arguments[3].add_ended(*[np.ones(2, bool)] * 2, *[np.ones(2)] * 2),
    )
    path, _ = write_run(tmp_path, "cartpole", parameters=SHORT_CARTPOLE, gear="general")
    module.evaluate_run(path, episodes=2)
    assert seen == ["torch"]


def test_an_unfinished_tally_counts_only_rounds_that_every_env_has_finished():
    tally = Tally(6, 3, max_steps=100)

    def step(*ended):
        over = np.isin(np.arange(3), ended)
        tally.add_ended(over, over, np.arange(3.0), np.full(3, 1 + len(ended)))

    step(0)
    step(0, 1)
    assert tally.is_biased
    np.testing.assert_array_equal(tally.episodes()[0], [0, 0, 1])  # everything so far
    step(1, 2)
    assert not tally.is_biased
    np.testing.assert_array_equal(tally.episodes()[0], [0, 1, 2])  # each env's first
    step(2)
    assert tally.complete
    assert len(tally.episodes()[0]) == 6


def stop_after(monkeypatch, calls):
    """Ctrl-C in the n-th stretch."""
    play = NativePlayer.play
    left = [calls]

    def stopped(self):
        left[0] -= 1
        if not left[0]:
            os.kill(os.getpid(), signal.SIGINT)
        return play(self)

    monkeypatch.setattr(NativePlayer, "play", stopped)


@pytest.fixture
def heard():
    """A shell's background jobs ignore Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("heard")
def test_ctrl_c_keeps_what_was_played(tmp_path, monkeypatch, capsys):
    path, policy = write_run(tmp_path, "cartpole", parameters=SHORT_CARTPOLE)
    arguments = {"env": "cartpole", "num_envs": 8, "env_parameters": SHORT_CARTPOLE}
    stop_after(monkeypatch, 2)
    found = evaluate_policy(policy, episodes=100_000, keep_stopped=True, **arguments)
    assert found.stopped == "stopped by Ctrl-C before 100000 were played"
    assert 8 <= found.episodes < 100_000
    assert found.episodes % 8 == 0  # complete rounds
    assert str(found).endswith("episodes) stopped by Ctrl-C before 100000 were played")
    assert found.summary()["stopped"] == found.stopped
    stop_after(monkeypatch, 2)
    assert main(["eval", str(path), "--episodes", "100000", "--num-envs", "8"]) == 130
    assert "stopped by Ctrl-C before 100000 were played" in capsys.readouterr().out
    stop_after(monkeypatch, 1)
    with pytest.raises(KeyboardInterrupt):
        evaluate_policy(policy, episodes=100_000, **arguments)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_episode_that_never_ends_is_an_error(no_torch):
    policy, _, _ = policy_for("pendulum", parameters=SHORT_PENDULUM)
    no_torch()
    with pytest.raises(HurtleError, match=r"has not ended its episode after 5 steps \(max_steps\)"):
        evaluate_policy(policy, "pendulum", episodes=3, env_parameters=SHORT_PENDULUM, max_steps=5)
