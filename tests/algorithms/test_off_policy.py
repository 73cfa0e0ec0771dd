"""DQN, SAC, XQC, TD3 and PQN as users run them: they learn a tiny task, resume exactly, export, and refuse what cannot be."""

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from sample_envs import Shift

import hurtle
from hurtle.errors import HurtleError
from hurtle.tracking.checkpoints import Checkpoints, load_checkpoint

SLOW = pytest.mark.slow
HOW = {"progress": "quiet", "trackers": (), "eval_episodes": 20, "num_envs": 4, "preset": False, "hidden_sizes": (32, 32)}
REPLAY = {"learning_starts": 64, "capacity": 2_000, "batch_size": 64}
SETTINGS = {
    "dqn": REPLAY,
    "rainbow": {**REPLAY, "num_atoms": 21, "value_low": 0.0, "value_high": 1.0},
    "sac": {**REPLAY, "learning_rate": 3e-3},
    "td3": {**REPLAY, "learning_rate": 3e-3},
    "xqc": {**REPLAY, "learning_rate": 3e-3, "critic_sizes": (32, 32), "num_atoms": 21, "replay_ratio": 0.25},
    "pqn": {"num_steps": 16, "minibatch_size": 32},
}

CONTINUOUS = ("sac", "td3", "xqc")


class Guess(gymnasium.Env):
    """One step: the best action is the observation, 1 for a hit and less the further away; legal actions on request."""

    def __init__(self, continuous=False, masked=False):
        self.continuous, self.masked = continuous, masked
        self.observation_space = spaces.Box(-1, 1, (2,), np.float32)
        self.action_space = spaces.Box(-2, 2, (1,), np.float32) if continuous else spaces.Discrete(4)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.x = self.np_random.uniform(-1, 1, 2).astype(np.float32)
        self.legal = self.np_random.random(4) < 0.5
        self.legal[self.np_random.integers(4)] = True
        return self.x, {"action_mask": self.legal} if self.masked else {}

    def step(self, action):
        if self.masked:
            assert self.legal[action]
        best = int(self.x[0] > 0) + 2 * int(self.x[1] > 0)
        reward = 1.0 - float((action[0] / 2 - self.x[0]) ** 2) if self.continuous else float(action == best)
        return self.x, reward, True, False, {"action_mask": self.legal} if self.masked else {}


def continuous_guess():
    return Guess(continuous=True)


def nested_guess():
    space = spaces.Dict(x=spaces.Box(-1, 1, (2,), np.float32))
    return gymnasium.wrappers.TransformObservation(Guess(continuous=True), lambda x: {"x": x}, space)


def masked_guess():
    return Guess(masked=True)


def env_for(algorithm):
    return continuous_guess if algorithm in CONTINUOUS else Guess


@pytest.mark.parametrize(
    ("algorithm", "options"),
    [
        ("dqn", {}),
        pytest.param("dqn", {"double": False, "dueling": True, "n_step": 3, "target_rate": 0.1, "target_every": 1}, marks=SLOW),
        ("dqn", {"distributional": "qr", "num_atoms": 11, "priority_alpha": 0.6, "rescale_values": True}),
        ("rainbow", {}),
        ("sac", {}),
        ("td3", {}),
        pytest.param("xqc", {}, marks=SLOW),
        ("pqn", {"recurrent": "gru"}),
        ("pqn", {}),
    ],
    ids=str,
)
def test_each_learns_a_tiny_task(algorithm, options, tmp_path):
    """A random policy has 0.25 (0.3 with continuous actions); the loss falls with it."""
    how = {**HOW, **SETTINGS[algorithm], "backend": "serial", **options}
    how |= {"learning_rate": 1e-2, "gamma": 0.5} if algorithm in ("dqn", "rainbow", "pqn") else {}
    how |= {"replay_ratio": 0.25} if algorithm in ("dqn", "rainbow") else {}
    steps, losses = 1_200 if algorithm == "xqc" else 600, []
    run = hurtle.train(
        env_for(algorithm), algorithm=algorithm, total_steps=steps, runs=tmp_path, **how,
        callbacks=[lambda trainer: losses.append(trainer.metrics.get("value_loss", np.nan))],
    )  # fmt: skip
    assert run.evaluation.mean > (0.9 if algorithm in CONTINUOUS else 0.75)
    losses = np.array(losses)[np.isfinite(losses)]
    if algorithm not in ("rainbow", "xqc"):  # whose cross-entropy is bounded by the entropy of the projected target
        assert losses[-5:].mean() < losses[:5].mean()


def weights_of(run):
    return load_checkpoint(Checkpoints(run.path / "checkpoints").latest())["policy"]


@pytest.mark.parametrize(
    ("env", "algorithm", "options"),
    [
        ("cartpole", "dqn", {"priority_alpha": 0.5, "noisy": True}),
        ("cartpole", "sac", {"normalize_observations": True, "reward_mode": "normalize"}),
        ("pendulum", "sac", {}),
        ("pendulum", "td3", {"n_step": 2}),
        ("pendulum", "xqc", {"policy_every": 2, "reward_mode": "sign"}),
        ("cartpole", "pqn", {}),
    ],
)
def test_a_resumed_run_equals_one_that_was_never_stopped(env, algorithm, options, tmp_path):
    how = {**HOW, **SETTINGS[algorithm], "batch_size": 16, "total_steps": 192, "runs": tmp_path, "eval_episodes": 1, **options}
    if algorithm == "pqn":
        del how["batch_size"]
    else:
        how["replay_ratio"] = 0.25
    whole = hurtle.train(env, algorithm=algorithm, name="whole", **how)
    half = hurtle.train(env, algorithm=algorithm, callbacks=[lambda trainer: trainer.steps < 112], **how)
    resumed = hurtle.train(resume=half.path, progress="quiet", trackers=())
    expected, found = weights_of(whole), weights_of(resumed)
    assert resumed.steps == whole.steps
    assert all(torch.equal(expected[name], found[name]) for name in expected)


def test_without_its_replay_buffer_a_run_first_collects_again(tmp_path):
    how = {**HOW, **REPLAY, "runs": tmp_path, "save_replay": False, "eval_episodes": 1}
    run = hurtle.train("cartpole", algorithm="dqn", total_steps=256, **how)
    saved = load_checkpoint(Checkpoints(run.path / "checkpoints").latest())["learner"]
    assert saved["replay"] is None
    shares = []
    hurtle.train(
        resume=run.path, total_steps=512, progress="quiet",
        callbacks=[lambda trainer: shares.append(trainer.metrics["epsilon"])],
    )  # fmt: skip
    assert shares[0] == 1.0
    assert shares[-1] < 1.0


@pytest.mark.parametrize("algorithm", ["dqn", pytest.param("sac", marks=SLOW)])
def test_only_legal_actions_are_taken(algorithm, tmp_path):
    """The env asserts it, in training and in evaluation."""
    how = {
        **HOW,
        **SETTINGS[algorithm],
        "learning_rate": 3e-3,
        "gamma": 0.5,
        "replay_ratio": 0.5,
        "eval_episodes": 200,
        "backend": "serial",
    }
    run = hurtle.train(masked_guess, algorithm=algorithm, total_steps=1_000, runs=tmp_path, **how)
    assert run.evaluation.mean > 0.5  # a random policy has 0.25; the best one 0.6, as the best action may be illegal


@pytest.mark.parametrize(
    ("env", "algorithm", "options"),
    [
        ("cartpole", "dqn", {}),
        pytest.param("cartpole", "rainbow", {}, marks=SLOW),
        pytest.param("cartpole", "dqn", {"dueling": True, "noisy": True, "distributional": "qr", "num_atoms": 5}, marks=SLOW),
        pytest.param("cartpole", "sac", {}, marks=SLOW),
        pytest.param("pendulum", "sac", {"normalize_observations": True}, marks=SLOW),
        pytest.param("pendulum", "td3", {}, marks=SLOW),
        ("pendulum", "xqc", {"normalize_observations": True}),
    ],
)
def test_the_greedy_policy_is_exported(env, algorithm, options, tmp_path):
    how = {**HOW, **SETTINGS[algorithm], "runs": tmp_path, "eval_episodes": 1, **options}
    run = hurtle.train(env, algorithm=algorithm, total_steps=160, **how)
    exported = hurtle.export(run, tmp_path / "policy.onnx")
    assert exported.runtimes == (("onnxruntime",) if algorithm == "rainbow" else ("native", "onnxruntime"))
    loaded, policy = hurtle.load(run.path), hurtle.load(tmp_path / "policy.onnx")
    obs = np.random.default_rng(0).normal(0, 1, (64, *loaded.observation_space.shape)).astype(np.float32)
    np.testing.assert_allclose(policy.act(obs)[0], loaded.act(obs)[0], atol=1e-5)


@pytest.mark.parametrize(
    ("env", "algorithm", "options"),
    [
        ("CartPole-v1", "dqn", {"backend": "serial", "pool_batch_size": 2}),
        ("Pendulum-v1", "td3", {"backend": "serial"}),
        ("breakout", "dqn", {"reward_mode": "sign"}),
        pytest.param("breakout", "sac", {}, marks=SLOW),
        (nested_guess, "xqc", {"backend": "serial"}),
        (Shift, "dqn", {"capacity": 4_000}),
    ],
)
def test_every_kind_of_env(env, algorithm, options, tmp_path):
    how = {**HOW, **SETTINGS[algorithm], "batch_size": 8, "eval_episodes": 1, "replay_ratio": 0.05, **options}
    run = hurtle.train(env, algorithm=algorithm, total_steps=200, runs=tmp_path, **how)
    assert run.steps >= 200


@pytest.mark.parametrize(
    ("env", "options", "message"),
    [
        ("pendulum", {"algorithm": "dqn"}, "needs Discrete actions"),
        ("cartpole", {"algorithm": "td3"}, "needs a Box with finite"),
        ("cartpole", {"algorithm": "dqn", "recurrent": "lstm"}, "set recurrent='none'"),
        ("cartpole", {"algorithm": "dqn", "distributional": "c51", "value_low": 3.0, "value_high": 3.0}, "must be less than"),
        ("cartpole", {"algorithm": "dqn", "capacity": 3}, "capacity"),
        ("pendulum", {"algorithm": "sac", "distribution": "beta"}, "squashed_gaussian"),
        ("cartpole", {"algorithm": "sac", "replay_ratio": 0}, "replay_ratio must be more than 0"),
        ("cartpole", {"algorithm": "xqc"}, "for discrete actions use dqn, sac"),
        ("pendulum", {"algorithm": "xqc", "layer_norm": True}, "set layer_norm=False"),
        ("pendulum", {"algorithm": "xqc", "hidden_sizes": ()}, "at least one width"),
        ("pendulum", {"algorithm": "xqc", "recurrent": "gru"}, "set recurrent='none'"),
        ("pendulum", {"algorithm": "xqc", "reward_mode": "normalize"}, "scales rewards itself"),
        ("pendulum", {"algorithm": "xqc", "gear": "native"}, "encoded by a BatchNormBody"),
    ],
)
def test_what_cannot_be_is_refused(env, options, message, tmp_path):
    with pytest.raises(HurtleError, match=message):
        hurtle.train(env, total_steps=64, runs=tmp_path, **{**HOW, **options})


def test_pqn_has_no_masks(tmp_path):
    with pytest.raises(HurtleError, match="does not support action masks"):
        hurtle.train(masked_guess, algorithm="pqn", total_steps=64, runs=tmp_path, backend="serial", **HOW, **SETTINGS["pqn"])


def test_a_module_of_the_users_own_is_refused(tmp_path):
    class Net(torch.nn.Module):
        def __init__(self, observation_space, action_space):
            super().__init__()
            self.layer = torch.nn.Linear(4, 3)

        def encode(self, obs):
            return self.layer(obs)

        def decode(self, features):
            return torch.distributions.Categorical(logits=features[:, :2]), features[:, 2]

    with pytest.raises(HurtleError, match="trains a QNetwork, got a Net"):
        hurtle.train("cartpole", algorithm="dqn", policy=Net, total_steps=64, runs=tmp_path, **HOW)
