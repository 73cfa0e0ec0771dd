"""The compiled update against the torch one: gradients of every head, network and option, full updates, threads, NaN."""

import copy
import itertools
import threading

import numpy as np
import pytest
import torch
from gymnasium import spaces
from made_rollouts import made
from repeating import repeated

from hurtle.algorithms.a2c import A2C
from hurtle.algorithms.a2c_config import A2CConfig
from hurtle.algorithms.a2c_native import NativeA2C
from hurtle.algorithms.algorithm import LearnerSetup
from hurtle.algorithms.ppo import PPO
from hurtle.algorithms.ppo_config import PPOConfig
from hurtle.algorithms.ppo_native import NativePPO
from hurtle.buffers.rollout import Done
from hurtle.emulation.flat_layout import SpaceLayout
from hurtle.errors import HurtleError, NonFiniteError, UnsupportedError
from hurtle.policies.build import PolicyConfig, build_policy

OBS = spaces.Box(-10, 10, (7,), np.float32)
ACTIONS = {
    "categorical": (spaces.Discrete(5), "auto"),
    "multi-categorical": (spaces.MultiDiscrete([3, 4, 2]), "auto"),
    "gaussian": (spaces.Box(-1, 1, (3,)), "gaussian"),
    "beta": (spaces.Box(-1, 1, (2,)), "beta"),
}


def make_policy(kind="categorical", hidden=(32, 20), activation="tanh", separate=True, seed=0, obs=OBS):
    space, distribution = ACTIONS[kind]
    config = PolicyConfig(hidden_sizes=hidden, activation=activation, separate_networks=separate, distribution=distribution)
    policy = build_policy(config, obs, space)
    torch.manual_seed(seed)
    for parameter in policy.parameters():  # away from the initial small outputs and zero biases
        parameter.data.add_(0.2 * torch.randn_like(parameter))
    return policy


def pair(policy, config, **how):
    """The same policy trained by torch and by the kernels."""
    own, setup = copy.deepcopy(policy), LearnerSetup(seed=3, **how)
    if isinstance(config, A2CConfig):
        return A2C(policy, config, setup), NativeA2C(own, config, setup)
    return PPO(policy, config, setup), NativePPO(own, config, setup)


def assert_equal_policies(expected, found, rtol=1e-4, atol=2e-6):
    for (name, p), q in zip(expected.named_parameters(), found.parameters(), strict=True):
        torch.testing.assert_close(q, p, rtol=rtol, atol=atol, msg=lambda text, name=name: f"{name}: {text}")


def assert_equal_metrics(expected, found):
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, rel=1e-4, abs=2e-6, nan_ok=True), name


def gradient(learner):
    """Gradients of the last minibatch, before clipping, in parameter order."""
    flat = np.full(learner.epochs.native.plan.num_weights, np.nan, np.float32)
    learner.epochs.native.plan.unpack(learner.epochs.native._kept["total"], flat)
    return flat


NETWORKS = {
    "separate tanh": {},
    "shared tanh": {"separate": False},
    "shared relu": {"separate": False, "activation": "relu"},
    "separate relu": {"activation": "relu"},
    "deep": {"hidden": (64, 33, 16, 100)},
    "no hidden layer": {"hidden": ()},
    "wide": {"hidden": (200,), "separate": False},
}
LOSSES = {
    "usual": {},
    "values not clipped": {"clip_values": False},
    "advantages as they are": {"normalize_advantages": False},
    "no entropy bonus": {"entropy_coef": 0.0, "value_coef": 1.0},
    "narrow clip": {"clip_range": 0.02, "entropy_coef": 0.1},
}
FOR_ALL = {"usual", "narrow clip", "separate tanh", "shared tanh", "no hidden layer"}
"""Fast for every kind of actions; the other networks and losses treat all kinds alike."""


@pytest.mark.parametrize(
    ("kind", "network", "loss", "masks"),
    [
        pytest.param(*case, False, marks=[pytest.mark.slow] * (case[0] != "categorical" and not FOR_ALL.issuperset(case[1:])))
        for case in [
            *itertools.product(ACTIONS, ["separate tanh"], LOSSES),
            *itertools.product(ACTIONS, list(NETWORKS)[1:], ["usual"]),
        ]
    ]
    + [(kind, "shared tanh", "usual", True) for kind in ("categorical", "multi-categorical")],
)
def test_the_gradient_is_that_of_autograd(kind, network, loss, masks):
    policy = make_policy(kind, **NETWORKS[network])
    rollout = made(policy, steps=20, rows=7, has_masks=masks)
    config = PPOConfig(num_epochs=1, minibatch_size=140, max_grad_norm=1e9, learning_rate=0.0, **LOSSES[loss])
    torch_learner, learner = pair(policy, config)
    assert_equal_metrics(torch_learner.update(rollout), learner.update(rollout))
    expected = torch.cat([parameter.grad.flatten() for parameter in policy.parameters()]).numpy()
    found = gradient(learner)
    assert np.linalg.norm(found - expected) < 1e-4 * np.linalg.norm(expected)
    for parameter, part in zip(
        policy.parameters(), np.split(found, np.cumsum([p.numel() for p in policy.parameters()])[:-1]), strict=True
    ):
        own = parameter.grad.flatten().numpy()
        assert np.linalg.norm(part - own) < 1e-4 * np.linalg.norm(own) + 1e-7


UPDATES = {
    "adam": {},
    "adamw": {"optimizer": "adamw", "weight_decay": 0.1},
    "adam with an L2 penalty": {"weight_decay": 0.1},
    "rmsprop": {"optimizer": "rmsprop", "weight_decay": 0.01},
    "clipped gradients": {"max_grad_norm": 0.01},
    "in order": {"shuffle": False},
    "annealed": {"anneal_clip_range": True},
    "early stop": {"target_kl": 1e-4},
    "priorities": {"priority_alpha": 0.8, "minibatch_size": 48},
    "v-trace": {"vtrace": True},
    "one minibatch": {"minibatch_size": 192},
}


ALSO_SLOW = UPDATES.keys() - {"adam", "priorities", "v-trace"}  # what they add does not depend on all steps being valid


@pytest.mark.parametrize(
    ("case", "invalid"),
    [
        pytest.param(case, invalid, marks=[pytest.mark.slow] * (case in ALSO_SLOW and invalid == 0))
        for case, invalid in itertools.product(UPDATES, [0.0, 0.3])
    ],
)
def test_whole_updates_agree(case, invalid):
    policy = make_policy()
    config = PPOConfig(**{"num_epochs": 3, "minibatch_size": 48, "learning_rate": 1e-3, **UPDATES[case]})
    torch_learner, learner = pair(policy, config)
    for seed, progress in enumerate((0.0, 0.4)):
        rollout = made(policy, steps=16, rows=12, seed=seed, invalid=invalid)
        assert_equal_metrics(torch_learner.update(rollout, progress), learner.update(rollout, progress))
    assert_equal_policies(policy, learner.policy)


def test_observations_that_are_bytes_or_choices_become_the_same_numbers():
    for obs in (
        spaces.Box(0, 255, (3, 4), np.uint8),
        spaces.Discrete(6, start=2),
        spaces.MultiDiscrete([3, 5]),
        spaces.MultiBinary(4),
    ):
        policy = make_policy(obs=obs)
        torch_learner, learner = pair(policy, PPOConfig(num_epochs=2, minibatch_size=64, learning_rate=1e-3))
        rollout = made_of(policy, obs)
        assert_equal_metrics(torch_learner.update(rollout), learner.update(rollout))
        assert_equal_policies(policy, learner.policy)


@pytest.mark.parametrize("share", [0.05, 0.9])
@pytest.mark.parametrize(
    "obs",
    [
        spaces.Box(0, 1, (400,), np.uint8),
        spaces.Box(0, 255, (9, 9), np.uint8),
        spaces.Box(5, 255, (70,), np.uint8),
        spaces.Box(-9, 9, (75,), np.float32),
    ],
    ids=["bits", "bytes", "bytes that have no zero", "floats"],
)
def test_wide_observations_with_few_numbers_that_are_not_zero(obs, share):
    policy = make_policy(obs=obs, hidden=(40,))
    torch_learner, learner = pair(policy, PPOConfig(num_epochs=2, minibatch_size=64, learning_rate=1e-3))
    rollout = made_of(policy, obs)
    torch.manual_seed(0)
    lowest = 0 if obs.low.min() <= 0 else 5
    rollout.obs.masked_fill_(torch.rand(rollout.obs.shape) > share, lowest)
    assert_equal_metrics(torch_learner.update(rollout), learner.update(rollout))
    assert_equal_policies(policy, learner.policy)
    listed = learner.epochs.native._job["list_length"][0] > 0
    assert listed == (share < 0.1 and lowest == 0)


NESTED = spaces.Dict(
    near=spaces.Box(0, 200, (2, 3), np.uint8),
    gold=spaces.Discrete(7, start=-1),
    far=spaces.Box(-100, 100, (3,), np.float64),
    bag=spaces.Tuple([spaces.MultiDiscrete([3, 1, 4]), spaces.MultiBinary(4)]),
)


@pytest.mark.parametrize("activation", ["tanh", "relu"])
@pytest.mark.parametrize("hidden", [(24,), (40, 17)])
def test_encoders_of_nested_observations_have_the_gradients_of_autograd(activation, hidden):
    layout = SpaceLayout(NESTED)
    config = PolicyConfig(hidden_sizes=hidden, activation=activation)
    policy = build_policy(config, layout.flat_space, spaces.Discrete(5), layout)
    rollout, memory = made(policy, steps=16, rows=8), layout.memory(16 * 8)
    NESTED.seed(0)
    for row in memory:
        layout.writer(row)(NESTED.sample())
    rollout.obs.copy_(torch.from_numpy(layout.flat(memory)).view_as(rollout.obs))
    torch.manual_seed(0)
    rollout.actions.random_(5)
    rollout.log_probs.uniform_(-1.8, -1.4)  # those of random bytes are not finite
    rollout.values.normal_()
    torch_learner, learner = pair(policy, PPOConfig(num_epochs=1, minibatch_size=128, max_grad_norm=1e9, learning_rate=0.0))
    assert_equal_metrics(torch_learner.update(rollout), learner.update(rollout))
    found, sizes = gradient(learner), [parameter.numel() for parameter in policy.parameters()]
    for (name, parameter), part in zip(policy.named_parameters(), np.split(found, np.cumsum(sizes)[:-1]), strict=True):
        own = parameter.grad.flatten().numpy()
        assert np.linalg.norm(own) > 0, name
        assert np.linalg.norm(part - own) < 1e-4 * np.linalg.norm(own) + 1e-7, name
    torch_learner, learner = pair(policy, PPOConfig(num_epochs=2, minibatch_size=32, learning_rate=1e-3))
    assert_equal_metrics(torch_learner.update(rollout), learner.update(rollout))
    assert_equal_policies(policy, learner.policy)


def made_of(policy, obs):
    rollout = made(policy, steps=16, rows=8)
    obs.seed(0)
    rollout.obs.copy_(torch.from_numpy(np.stack([obs.sample() for _ in range(16 * 8)])).view_as(rollout.obs))
    return rollout


@pytest.mark.parametrize(
    ("kind", "normalize"),
    [
        pytest.param(kind, normalize, marks=[pytest.mark.slow] * (normalize and kind != "categorical"))
        for kind, normalize in itertools.product(ACTIONS, [False, True])
    ],
)
def test_a2c_agrees(kind, normalize):
    policy = make_policy(kind, separate=False)
    torch_learner, learner = pair(policy, A2CConfig(normalize_advantages=normalize, learning_rate=1e-3))
    for seed in range(3):
        rollout = made(policy, steps=5, rows=9, seed=seed, invalid=0.1)
        assert_equal_metrics(torch_learner.update(rollout), learner.update(rollout))
    assert_equal_policies(policy, learner.policy)


def test_a_rollout_without_a_valid_step_teaches_nothing():
    policy = make_policy()
    for config in (PPOConfig(minibatch_size=64), A2CConfig()):
        _, learner = pair(policy, config)
        metrics = learner.update(made(policy, steps=8, rows=8, invalid=1.0))
        assert np.isnan(metrics["policy_loss"])
        assert_equal_policies(policy, learner.policy, 0, 0)


@pytest.mark.parametrize(
    ("minibatch_size", "optimizer"),
    [
        pytest.param(size, optimizer, marks=[pytest.mark.slow] * (optimizer != "adam" and size != 192))
        for size, optimizer in itertools.product([1024, 512, 192, 50], ["adam", "adamw", "rmsprop"])
    ],
)
@pytest.mark.usefixtures("all_threads")
def test_the_number_of_threads_does_not_change_a_bit(minibatch_size, optimizer, monkeypatch):
    policy = make_policy(hidden=(64, 40))
    rollout = made(policy, steps=64, rows=16)
    config = PPOConfig(minibatch_size=minibatch_size, learning_rate=1e-3, optimizer=optimizer)
    found = []
    for threads in (1, 2, 3, 7):
        _, learner = pair(policy, config, num_threads=threads)
        with monkeypatch.context() as patch:
            if threads == 2:
                patch.setattr("hurtle.native.thread_tuner.ThreadTuner.fitting", lambda tuner, seconds: 1)
            metrics = [learner.update(rollout) for _ in range(2)]
        found.append((metrics, learner.policy))
        learner.epochs.native.close()
    for metrics, trained in found[1:]:
        assert metrics == found[0][0]
        assert_equal_policies(found[0][1], trained, 0, 0)


@pytest.mark.parametrize("minibatch_size", [1024, 512])
def test_the_number_of_threads_may_change_at_any_time(minibatch_size, monkeypatch, other_number_each_call):
    policy = make_policy(hidden=(64, 40))
    rollout = made(policy, steps=64, rows=16)
    config = PPOConfig(minibatch_size=minibatch_size, learning_rate=1e-3)
    (_, expected), (_, got) = pair(policy, config, num_threads=1), pair(policy, config, num_threads=4)
    monkeypatch.setattr("hurtle.native.thread_tuner.ThreadTuner.fitting", lambda tuner, seconds: 1)  # a minibatch per call
    got.update(made(policy, steps=64, rows=16, seed=1))  # makes the tuner
    expected.update(made(policy, steps=64, rows=16, seed=1))
    native = got.epochs.native
    native._tuners[native.tuner.most] = other_number_each_call(native, "tuner")
    for _ in range(3):
        assert got.update(rollout) == expected.update(rollout)
    assert_equal_policies(expected.policy, got.policy, 0, 0)
    native.close()


@pytest.mark.parametrize(
    ("steps", "minibatch_size", "threads"),
    [
        pytest.param(*sizes, threads, marks=[pytest.mark.slow] * (sizes[0] > 2000 and (sizes[0], threads) != (2049, 3)))
        for sizes, threads in itertools.product([(2049, 2048), (4097, 4096), (1023, 512), (1535, 512)], [1, 2, 3])
    ],
)
@pytest.mark.usefixtures("all_threads")
def test_minibatches_of_two_sizes(steps, minibatch_size, threads, monkeypatch):
    """A minibatch with one row fewer must not need more shards than were allocated."""
    obs = spaces.Box(0, 1, (600,), np.uint8)
    policy = make_policy(obs=obs, hidden=(64,))
    rollout = made(policy, steps=steps, rows=1)
    torch.manual_seed(0)
    rollout.obs.copy_(torch.rand(rollout.obs.shape) < 0.02)
    config = PPOConfig(num_epochs=2, minibatch_size=minibatch_size, learning_rate=1e-4)
    torch_learner, learner = pair(policy, config, num_threads=threads)
    for _ in range(2):
        assert_equal_metrics(torch_learner.update(rollout), learner.update(rollout))
    assert_equal_policies(policy, learner.policy)
    job = learner.epochs.native._job[0]
    assert job["list_length"] > 0
    shard = learner.epochs.native._kernels.shard_size(int(job["trained_size"]))
    assert len(learner.epochs.native._kept["gradients"]) == (1 + job["has_copies"]) * job["num_shards"] * shard
    learner.epochs.native.close()


def test_rollouts_that_grow_shrink_and_change_their_share_of_zeros():
    obs = spaces.Box(-9, 9, (64,), np.float32)
    policy = make_policy(obs=obs)
    torch_learner, learner = pair(policy, PPOConfig(num_epochs=1, minibatch_size=64, learning_rate=1e-3))
    for steps, share in ((8, 0.05), (9, 0.05), (9, 1.0), (4, 0.05), (12, 0.05)):
        rollout = made(policy, steps=steps, rows=16, seed=steps)
        torch.manual_seed(steps)
        rollout.obs.masked_fill_(torch.rand(rollout.obs.shape) > share, 0.0)
        assert_equal_metrics(torch_learner.update(rollout), learner.update(rollout))
        assert (learner.epochs.native._job["list_length"][0] > 0) == (share < 1)
    assert_equal_policies(policy, learner.policy)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.usefixtures("all_threads")
def test_nan_stops_all_threads(threads, monkeypatch):
    policy = make_policy()
    _, learner = pair(policy, PPOConfig(num_epochs=2, minibatch_size=256, shuffle=False), num_threads=threads)
    rollout = made(policy, steps=64, rows=8)
    rollout.always_done |= Done.ADVANTAGES
    rollout.advantages.normal_()
    rollout.returns[-1, 0] = torch.nan  # in the second minibatch, in the second thread's shard
    with pytest.raises(NonFiniteError, match="not finite"):
        learner.update(rollout)
    assert learner.epochs.native.steps == 1
    assert all(parameter.isfinite().all() for parameter in learner.policy.parameters())
    learner.epochs.native.close()


@pytest.mark.parametrize("field", ["advantages", "inputs", "log_probs", "returns"])
def test_nan_anywhere_stops_the_update_and_leaves_the_weights(field):
    policy = make_policy()
    _, learner = pair(policy, PPOConfig(num_epochs=1, minibatch_size=64))
    rollout = made(policy, steps=8, rows=8)
    rollout.always_done |= Done.ADVANTAGES
    rollout.advantages.normal_()
    getattr(rollout, field)[3, 2] = torch.nan
    with pytest.raises(NonFiniteError, match="not finite"):
        learner.update(rollout)
    assert_equal_policies(policy, learner.policy, 0, 0)
    learner.update(made(policy, steps=8, rows=8))  # and it continues with good numbers


def test_nan_weights_stop_the_update():
    policy = make_policy()
    _, learner = pair(policy, PPOConfig(num_epochs=1, minibatch_size=64))
    with torch.no_grad():
        next(learner.policy.parameters())[0, 0] = torch.nan
    with pytest.raises(NonFiniteError):
        learner.update(made(policy, steps=8, rows=8))


@pytest.mark.parametrize("optimizer", ["adam", "rmsprop"])
def test_what_one_saves_the_other_goes_on_with(optimizer):
    config = PPOConfig(num_epochs=2, minibatch_size=64, optimizer=optimizer, learning_rate=1e-3)
    policy = make_policy()
    torch_learner, learner = pair(policy, config)
    rollouts = [made(policy, steps=16, rows=8, seed=seed) for seed in range(3)]
    for one in (torch_learner, learner):
        one.update(rollouts[0])
    crossed_torch, crossed_native = PPO(make_policy(seed=9), config), NativePPO(make_policy(seed=8), config)
    for source, target in ((learner, crossed_torch), (torch_learner, crossed_native)):
        target.policy.load_state_dict(source.policy.state_dict())
        target.load_state_dict(copy.deepcopy(source.state_dict()))
    for one in (torch_learner, crossed_torch, crossed_native):
        for rollout in rollouts[1:]:
            one.update(rollout)
        assert_equal_policies(policy, one.policy)


def test_weights_that_a_user_changes_are_those_that_are_trained():
    policy = make_policy()
    torch_learner, learner = pair(policy, PPOConfig(num_epochs=1, minibatch_size=64))
    rollout = made(policy, steps=8, rows=8)
    for one in (torch_learner, learner):
        one.update(rollout)
        with torch.no_grad():
            one.policy.network.actor.weight.mul_(2.0)  # in place
        one.policy.network.critic.bias.data = torch.ones(1)  # another tensor
        one.update(rollout)
    assert_equal_policies(policy, learner.policy)


def test_what_the_kernels_do_not_know_is_named():
    with pytest.raises(UnsupportedError, match="muon"):
        NativePPO(make_policy(), PPOConfig(optimizer="muon"))
    squashed = build_policy(PolicyConfig(distribution="squashed_gaussian"), OBS, spaces.Box(-1, 1, (2,)))
    with pytest.raises(UnsupportedError, match="squashed_gaussian"):
        NativePPO(squashed, PPOConfig())
    more = make_policy()
    more.network.more = torch.nn.Linear(2, 2)
    with pytest.raises(UnsupportedError, match="parameters besides those of its layers"):
        NativePPO(more, PPOConfig())


@repeated
def test_other_python_threads_run_meanwhile():
    policy = make_policy(hidden=(64, 64))
    rollout = made(policy, steps=128, rows=64)
    _, learner = pair(policy, PPOConfig(minibatch_size=2048, num_epochs=8), num_threads=1)
    learner.update(rollout)  # compiled, and its pace is known
    turns, stop = 0, threading.Event()

    def count():
        nonlocal turns
        while not stop.is_set():
            turns += 1

    thread = threading.Thread(target=count)
    thread.start()
    before = turns
    learner.update(rollout)
    during = turns - before
    stop.set()
    thread.join()
    assert during > 1000


def test_observations_of_wide_integers_are_those_of_each_rollout():
    obs = spaces.Box(-100, 100, (4,), np.int32)
    policy = make_policy(obs=obs)
    torch_learner, learner = pair(policy, PPOConfig(num_epochs=1, minibatch_size=64))
    rollout = made(policy, steps=8, rows=8)
    for seed in range(3):
        rollout.obs.copy_(torch.from_numpy(np.random.default_rng(seed).integers(-2, 3, rollout.obs.shape, np.int32)))
        assert_equal_metrics(torch_learner.update(rollout), learner.update(rollout))
    assert_equal_policies(policy, learner.policy)


def test_a_field_that_is_exchanged_is_looked_at_again():
    policy = make_policy()
    torch_learner, learner = pair(policy, PPOConfig(num_epochs=1, minibatch_size=64))
    rollout = made(policy, steps=8, rows=8)
    for _ in range(2):
        assert_equal_metrics(torch_learner.update(rollout), learner.update(rollout))
        rollout.actions = 4 - rollout.actions
    rollout.actions = rollout.actions.int()
    with pytest.raises(HurtleError, match=r"actions must be torch\.int64 of shape"):
        learner.update(rollout)


def test_another_policys_rollout_is_refused():
    _, learner = pair(make_policy(), PPOConfig(num_epochs=1, minibatch_size=64))
    other = make_policy(obs=spaces.Box(-1, 1, (3,)))
    with pytest.raises(HurtleError, match=r"inputs must be torch.float32 of shape \(8, 8, 7\)"):
        learner.update(made(other, steps=8, rows=8))


def test_edits_that_torch_does_not_count_are_seen_too():
    policy = make_policy()
    torch_learner, learner = pair(policy, PPOConfig(num_epochs=1, minibatch_size=64))
    rollout = made(policy, steps=8, rows=8)
    for one in (torch_learner, learner):
        one.update(rollout)
        for parameter in one.policy.parameters():
            parameter.data.mul_(0.5)
            parameter.detach().numpy()[...] += 0.01
        one.update(rollout)
    assert_equal_policies(policy, learner.policy)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.usefixtures("all_threads")
def test_an_interrupt_leaves_weights_moments_and_their_count_together(threads, monkeypatch):
    policy = make_policy()
    _, learner = pair(policy, PPOConfig(num_epochs=2, minibatch_size=128), num_threads=threads)
    rollout = made(policy, steps=16, rows=32)
    call, calls = learner.epochs.native._call, []

    def interrupted(first, last, threads):
        calls.append(call(first, last, threads))
        raise KeyboardInterrupt

    learner.epochs.native._call = interrupted
    with pytest.raises(KeyboardInterrupt):
        learner.update(rollout)
    assert learner.epochs.native.steps == sum(calls) > 0
    weights = learner.epochs.native._packed
    packed = weights.packed.copy()
    weights.pack(transposed=True)
    np.testing.assert_array_equal(packed, weights.packed)  # torch's parameters match the kernels'
    learner.epochs.native._call = call
    learner.update(rollout)


def test_moments_of_another_network_are_refused():
    _, learner = pair(make_policy(), PPOConfig())
    small = make_policy(hidden=(8,))
    other = NativePPO(small, PPOConfig(num_epochs=1, minibatch_size=64))
    other.update(made(small, steps=8, rows=8))
    with pytest.raises(HurtleError, match="built differently"):
        learner.load_state_dict(other.state_dict())


def test_layers_that_a_user_exchanged_are_named():
    policy = make_policy()
    policy.network.actor_body.hidden[1] = torch.nn.GELU()
    with pytest.raises(UnsupportedError, match="its activation is GELU"):
        NativePPO(policy, PPOConfig())
    policy = make_policy()
    policy.network.actor = torch.nn.Linear(20, 5, bias=False)
    with pytest.raises(UnsupportedError, match="Linear with a bias"):
        NativePPO(policy, PPOConfig())


def test_a_parameter_that_is_frozen_later_is_not_trained_silently():
    policy = make_policy()
    _, learner = pair(policy, PPOConfig(num_epochs=1, minibatch_size=64))
    learner.policy.network.critic.bias.requires_grad_(False)
    with pytest.raises(HurtleError, match="frozen"):
        learner.update(made(policy, steps=8, rows=8))


@pytest.mark.parametrize("optimizer", ["adam", "adamw", "rmsprop"])
def test_moments_that_have_faded_are_zero(optimizer):
    """Left alone they become subnormal numbers, which take the CPU many times as long: a long run would get slower."""
    policy = make_policy()
    _, learner = pair(policy, PPOConfig(num_epochs=1, minibatch_size=96, optimizer=optimizer), num_threads=1)
    rollout = made(policy)
    rollout.obs[..., 0] = 0.0  # no gradient for the weights of this input
    native = learner.epochs.native
    for moment in native._moments.values():
        moment.packed[:] = 0.9e-30
    learner.update(rollout)
    for name, moment in native._moments.items():
        moment.unpack()
        found = native.parameters.views(torch.from_numpy(moment.flat))[0]
        if optimizer != "rmsprop" or name == "second_moments":
            assert (found[:, 0] == 0.0).all()
            assert (found[:, 1:] != 0.0).all()
    learner.close()
