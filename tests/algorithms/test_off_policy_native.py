"""The compiled gradient steps of DQN, SAC and TD3 against torch's, and the device loop on the CPU against the plain one."""

import copy

import numpy as np
import pytest
import torch
from gymnasium import spaces

import hurtle
from hurtle.algorithms.algorithm import LearnerSetup, find_algorithm
from hurtle.buffers.replay import Transitions
from hurtle.errors import UnsupportedError
from hurtle.kernels.cuda_graphs import Graphs
from hurtle.policies.build import build_policy
from hurtle.policies.policy_config import PolicyConfig
from hurtle.tracking.checkpoints import Checkpoints, load_checkpoint

BOX, TWO_NUMBERS, THREE_CHOICES = spaces.Box(-1, 1, (5,)), spaces.Box(-2, 1, (2,)), spaces.Discrete(3)


def learners(name, hidden=(24, 40), activation="relu", observation_space=BOX, gears=("general", "native"), **settings):
    """The same learner, once for each gear."""
    algorithm = find_algorithm(name)
    config = algorithm.config(**settings)
    network = PolicyConfig(hidden_sizes=hidden, activation=activation, orthogonal_init=False)
    actions = THREE_CHOICES if name == "dqn" else TWO_NUMBERS
    policy = build_policy(network, observation_space, actions, make_network=algorithm.network_maker(config), seed=1)
    policy.network.epsilon.fill_(0.0)
    return [algorithm.make_learner(gear, copy.deepcopy(policy), config, LearnerSetup(seed=3)) for gear in gears]


def batch(size, discrete, masked=False, seed=0):
    rng = torch.Generator().manual_seed(seed)

    def normals(*shape):
        return torch.randn(shape, generator=rng)

    actions = torch.randint(3, (size,), generator=rng) if discrete else normals(size, 2)
    discounts = torch.where(torch.rand(size, generator=rng) < 0.2, 0.0, 0.99)
    masks = torch.rand((size, 3), generator=rng) < 0.6 if masked else None
    weights = torch.rand(size, generator=rng)
    return Transitions(
        normals(size, 5), actions, 3 * normals(size), normals(size, 5), discounts, masks, masks, weights, torch.arange(size)
    )


def assert_equal_weights(one, other):
    for name, trained in one["trained"].items():
        for key, weight in trained["module"].items():
            torch.testing.assert_close(other["trained"][name]["module"][key], weight, atol=2e-6, rtol=1e-4, msg=f"{name} {key}")
        found, expected = (state["trained"][name]["optimizer"]["parts"][0]["state"] for state in (other, one))
        for n, moments in expected.items():
            for key, moment in moments.items():
                torch.testing.assert_close(found[n][key].view_as(moment), moment, atol=1e-6, rtol=1e-3, msg=f"{name} {n} {key}")
    for target, same in zip(one["targets"], other["targets"], strict=True):
        for key, weight in target.items():
            torch.testing.assert_close(same[key], weight, atol=2e-6, rtol=1e-4)


CASES = [
    ("dqn", {}, {}),
    ("dqn", {"hidden": (16,), "activation": "tanh"}, {"double": False, "target_every": 2, "target_rate": 0.5}),
    ("dqn", {"hidden": (7, 65, 33)}, {"max_grad_norm": 0.01}),
    ("sac", {}, {}),
    ("sac", {"hidden": (17,), "activation": "tanh"}, {"num_critics": 3, "temperature": 0.3, "max_grad_norm": 0.1}),
    ("sac", {}, {"num_critics": 1, "critic_learning_rate": 1e-2, "target_entropy": -0.5}),
    ("td3", {}, {}),
    ("td3", {"hidden": (8, 8, 8)}, {"policy_every": 3, "target_noise": 0.7, "target_every": 3}),
]


@pytest.mark.parametrize(("name", "network", "settings"), CASES)
def test_steps_are_those_of_torch(name, network, settings):
    """Weights, moments, target networks, errors and metrics, over six steps of batches that are no multiple of a tile."""
    torch_one, native = learners(name, learning_rate=1e-3, **network, **settings)
    for k in range(6):
        given = batch(100, name == "dqn", masked=name == "dqn" and k % 2 == 1, seed=k)
        (errors, numbers), (own_errors, own_numbers) = (learner.gradient_step(given) for learner in (torch_one, native))
        torch.testing.assert_close(own_errors, errors, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(own_numbers.float(), numbers, atol=1e-4, rtol=1e-4, equal_nan=True)
        for learner in (torch_one, native):
            learner.gradient_steps += 1
            if learner.gradient_steps % learner.config.target_every == 0:
                learner.move_targets()
    native.weights()
    for own, parameter in zip(native.policy.parameters(), torch_one.policy.parameters(), strict=True):
        torch.testing.assert_close(own, parameter, atol=2e-6, rtol=1e-4)
    assert_equal_weights(torch_one.state_dict(), native.state_dict())


@pytest.mark.parametrize("name", ["dqn", "sac", "td3"])
def test_a_run_can_change_gears(name):
    """A state saved by either version continues in the other."""
    torch_one, native = learners(name)
    for k in range(3):
        native.gradient_step(batch(64, name == "dqn", seed=k))
        native.gradient_steps += 1
    saved = copy.deepcopy({**native.state_dict(), "policy": native.policy.state_dict()})
    fresh_torch, fresh_native = learners(name)
    for learner in (fresh_torch, fresh_native):
        learner.policy.load_state_dict(saved["policy"])
        learner.load_state_dict(copy.deepcopy(saved))
    given = batch(64, name == "dqn", seed=9)
    results = [learner.gradient_step(given) for learner in (native, fresh_native, fresh_torch)]
    torch.testing.assert_close(results[1][0], results[0][0], atol=0.0, rtol=0.0)
    torch.testing.assert_close(results[2][0], results[0][0], atol=1e-4, rtol=1e-4)
    assert torch_one.gradient_steps == 0


@pytest.mark.parametrize("name", ["dqn", "sac", "td3"])
def test_results_do_not_depend_on_the_number_of_threads(name, other_number_each_call):
    alone, together = learners(name, gears=("native", "native"))
    alone._most = 1
    for k in range(8):
        results = [learner.gradient_step(batch(300, name == "dqn", seed=k)) for learner in (alone, together)]
        for one, other in zip(*results, strict=True):
            assert torch.equal(one, other) or torch.isnan(one).any()
        if not k:
            other_number_each_call(together, "tuner")
    assert together.threads()[1] == 4
    for one, other in zip(alone.packed.values(), together.packed.values(), strict=True):
        assert np.array_equal(one.weights, other.weights)
        assert np.array_equal(one.second, other.second)
    together.close()


def test_inputs_that_are_not_plain_numbers():
    """One-hot inputs are made anew for each batch, although the buffer's memory is the same."""
    algorithm = find_algorithm("dqn")
    config, network = algorithm.config(), PolicyConfig(hidden_sizes=(16,), activation="relu")
    policy = build_policy(network, spaces.Discrete(5), THREE_CHOICES, make_network=algorithm.network_maker(config))
    both = [algorithm.make_learner(gear, copy.deepcopy(policy), config, LearnerSetup()) for gear in ("general", "native")]
    given = batch(64, True)._replace(obs=torch.randint(5, (64,)), next_obs=torch.randint(5, (64,)))
    for _ in range(3):
        (errors, _), (own_errors, _) = (learner.gradient_step(given) for learner in both)
        torch.testing.assert_close(own_errors, errors, atol=1e-5, rtol=1e-4)
        given.obs.copy_(torch.randint(5, (64,)))


@pytest.mark.parametrize(
    ("name", "settings", "why"),
    [
        ("dqn", {"dueling": True}, "dueling is not compiled"),
        ("dqn", {"noisy": True}, "noisy is not compiled"),
        ("dqn", {"distributional": "qr"}, "distributional=qr is not compiled"),
    ],
)
def test_what_is_not_compiled(name, settings, why):
    with pytest.raises(UnsupportedError, match=why):
        learners(name, gears=("native",), **settings)


def test_a_loss_that_is_not_finite_changes_nothing():
    (native,) = learners("sac", gears=("native",))
    before = copy.deepcopy(native.state_dict()["trained"]["critics"]["module"])
    given = batch(64, False)
    given.rewards[3] = np.inf
    with pytest.raises(hurtle.errors.NonFiniteError, match="value_loss"):
        native.gradient_step(given)
    after = native.state_dict()["trained"]["critics"]["module"]
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("dqn", {"target_every": 3}),
        ("sac", {}),
        ("td3", {"policy_every": 3}),
        ("xqc", {"critic_sizes": (16, 16), "policy_every": 2}),
    ],
)
def test_the_device_loop_takes_the_steps_of_the_plain_one(name, settings):
    """As in a CUDA graph: flat parameters, several steps per launch; with the same batches and noise."""
    plain, _ = learners(name, gears=("general", "general"), **settings)
    algorithm, config = find_algorithm(name), plain.config
    device = algorithm.make_learner("device", copy.deepcopy(plain.policy), config, LearnerSetup(3, graphs=Graphs("cpu")))
    if name != "dqn":
        device.critics.load_state_dict(plain.critics.state_dict())
    batches = iter([batch(64, name == "dqn", seed=k) for k in range(7)])

    class Given:
        def sample(self, size, beta):
            return next(batches)

        def update_priorities(self, ids, errors):
            pass

    device._replay = Given()
    metrics = [device._graphs.run(4, 1.0), device._graphs.run(3, 1.0)]
    for k in range(7):
        plain.gradient_step(batch(64, name == "dqn", seed=k))
        plain.gradient_steps += 1
        if plain.gradient_steps % config.target_every == 0:
            plain.move_targets()
    assert device.gradient_steps == 7
    assert np.isfinite(metrics[1]["value_loss"])
    for own, parameter in zip(device.policy.parameters(), plain.policy.parameters(), strict=True):
        torch.testing.assert_close(own, parameter, atol=1e-5, rtol=1e-3)
    for own, buffer in zip(device.policy.buffers(), plain.policy.buffers(), strict=True):
        torch.testing.assert_close(own, buffer, atol=1e-5, rtol=1e-3)


@pytest.mark.parametrize(
    ("env", "algorithm", "gear"),
    [
        ("cartpole", "dqn", "native"),
        ("CartPole-v1", "dqn", "native"),
        ("pendulum", "sac", "native"),
        ("pendulum", "td3", "device"),
        pytest.param("pendulum", "xqc", "device", marks=pytest.mark.slow),
    ],
)
def test_gears_run_and_resume_with_another(env, algorithm, gear, tmp_path, capfd):
    how = {"progress": "quiet", "trackers": (), "eval_episodes": 2, "num_envs": 4, "runs": tmp_path, "hidden_sizes": (16, 16)}
    how |= {"learning_starts": 32, "capacity": 2_000, "batch_size": 32, "preset": False}
    how |= {"critic_sizes": (16,), "num_atoms": 11} if algorithm == "xqc" else {}
    run = hurtle.train(env, algorithm=algorithm, gear=gear, total_steps=96, **how)
    again = hurtle.train(resume=run.path, gear="general", total_steps=144, progress="quiet", learning_rate=1e-4)
    said = capfd.readouterr().err
    assert ("empty replay buffer" in said) == (gear == "device")
    saved = load_checkpoint(Checkpoints(again.path / "checkpoints").latest())
    assert again.steps >= 144
    assert saved["learner"]["counts"][2] > 0
    rates = [part["optimizer"]["parts"][0]["param_groups"][0]["lr"] for part in saved["learner"]["trained"].values()]
    assert rates == [1e-4] * len(rates)


SHORT = {"progress": "quiet", "trackers": (), "eval_episodes": 2, "num_envs": 4, "hidden_sizes": (16, 16), "total_steps": 128}
SHORT |= {"learning_starts": 32, "capacity": 2_000, "batch_size": 32, "preset": False}


@pytest.fixture(scope="module")
def short_run(tmp_path_factory):
    return hurtle.train("cartpole", algorithm="dqn", learning_rate=1e-2, runs=tmp_path_factory.mktemp("runs"), **SHORT)


@pytest.mark.parametrize("gear", ["native", "general", "device"])
def test_fine_tuning_begins_with_the_weights_that_were_given(gear, short_run, tmp_path):
    """In policy, compiled copies and target networks; and callbacks see the weights of the last update."""
    how, run = {**SHORT, "runs": tmp_path}, short_run
    given = load_checkpoint(Checkpoints(run.path / "checkpoints").latest())["policy"]
    seen = []

    def look(trainer):
        parameters = {name: part.detach().clone() for name, part in trainer.policy.named_parameters()}
        seen.append((parameters, trainer._parts.learner.target.state_dict()))

    hurtle.train(
        "cartpole", algorithm="dqn", gear=gear, fine_tune=str(run.path), learning_rate=1e-5, seed=5, callbacks=[look], **how
    )
    parameters, target = seen[-1]
    moved = max(float((parameters[name] - given[name]).abs().max()) for name in parameters)
    assert 0 < moved < 1e-3
    for name, weight in target.items():
        if name != "epsilon":
            torch.testing.assert_close(weight, given[f"network.{name}"], atol=1e-3, rtol=0.0)
