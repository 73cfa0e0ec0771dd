"""The compiled update of CNNs and memories against autograd: any layout of grids, dense and sparse, any memory and head."""

import itertools
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from gymnasium import spaces
from made_rollouts import made
from test_native_update import ACTIONS, assert_equal_metrics, assert_equal_policies, gradient, pair

from hurtle.algorithms.a2c_config import A2CConfig
from hurtle.algorithms.ppo_config import PPOConfig
from hurtle.errors import HurtleError, UnsupportedError
from hurtle.policies.action_head import ActionHead
from hurtle.policies.build import PolicyConfig, build_policy
from hurtle.policies.mlp import MLP
from hurtle.policies.native_plan import plan_for

GRIDS = {
    "planes of bits": spaces.Box(0, 1, (10, 10, 4), np.uint8),
    "channels first": spaces.Box(0, 1, (4, 10, 10), np.uint8),
    "an odd number of pixels": spaces.Box(0, 1, (7, 9, 10), np.uint8),
    "padded": spaces.Box(0, 1, (2, 5, 6), np.uint8),
    "bytes with bounds": spaces.Box(3, 200, (6, 6, 3), np.uint8),
    "floats": spaces.Box(-1, 1, (8, 8, 2), np.float32),
    "two dimensions": spaces.Box(0, 1, (9, 8), np.uint8),
}


def make_policy(obs, kind="categorical", seed=0, **how):
    space, distribution = ACTIONS[kind]
    policy = build_policy(PolicyConfig(distribution=distribution, **how), obs, space)
    torch.manual_seed(seed)
    for parameter in policy.parameters():  # away from the initial small outputs and zero biases
        parameter.data.add_(0.05 * torch.randn_like(parameter))
    return policy


def fill_grid(rollout, space, nonzero=0.1):
    """Grids with a share of nonzeros."""
    rng, shape = np.random.default_rng(7), tuple(rollout.obs.shape)
    if space.dtype == np.float32:
        numbers = rng.normal(size=shape).astype(np.float32)
    else:
        numbers = rng.integers(space.low, space.high, endpoint=True, size=shape).astype(np.uint8)
    rollout.obs.copy_(torch.from_numpy(np.where(rng.random(shape) < nonzero, numbers, space.low)))


def assert_same_gradient(policy, rollout, minibatch_size, **options):
    config = PPOConfig(num_epochs=1, minibatch_size=minibatch_size, max_grad_norm=1e9, learning_rate=0.0, **options)
    torch_learner, learner = pair(policy, config)
    assert_equal_metrics(torch_learner.update(rollout), learner.update(rollout))
    found, at = gradient(learner), 0
    for name, parameter in policy.named_parameters():
        own = parameter.grad.flatten().numpy()
        part, at = found[at : at + own.size], at + own.size
        assert np.linalg.norm(part - own) < 1e-4 * np.linalg.norm(own) + 1e-7, name
    learner.close()


@pytest.mark.parametrize(
    ("grid", "separate", "nonzero"),
    [*itertools.product(GRIDS, [False], [0.1, 0.9]), ("planes of bits", True, 0.1), ("channels first", True, 0.9)],
)
def test_the_gradient_of_a_cnn_is_that_of_autograd(grid, separate, nonzero):
    policy = make_policy(GRIDS[grid], policy="grid_cnn", separate_networks=separate)
    rollout = made(policy, steps=20, rows=7)
    fill_grid(rollout, GRIDS[grid], nonzero)
    assert_same_gradient(policy, rollout, 140)


def test_whole_updates_of_a_cnn_agree():
    policy = make_policy(GRIDS["planes of bits"], policy="grid_cnn")
    rollout = made(policy, steps=32, rows=8)
    fill_grid(rollout, GRIDS["planes of bits"])
    torch_learner, learner = pair(policy, PPOConfig(num_epochs=3, minibatch_size=64, learning_rate=1e-3))
    for progress in (0.0, 0.4):
        assert_equal_metrics(torch_learner.update(rollout, progress), learner.update(rollout, progress))
    assert_equal_policies(policy, learner.policy, rtol=1e-3, atol=2e-5)
    learner.close()


def test_sparse_and_dense_grids_give_bitwise_equal_gradients():
    space = GRIDS["planes of bits"]
    policy = make_policy(space, policy="grid_cnn")
    rollout = made(policy, steps=16, rows=8)
    fill_grid(rollout, space)
    found = []
    for lists in (True, False):
        _, learner = pair(policy, PPOConfig(num_epochs=1, minibatch_size=128, learning_rate=0.0))
        if not lists:
            learner.epochs.native._list_inputs = lambda obs: 0
        learner.update(rollout)
        found.append(gradient(learner))
        learner.close()
    assert (found[0] == found[1]).all()


def test_large_convolutions_stay_in_torch():
    images = make_policy(spaces.Box(0, 255, (4, 84, 84), np.uint8))
    with pytest.raises(UnsupportedError, match="NatureCNN"):
        plan_for(images)
    with pytest.raises(UnsupportedError, match="4096 outputs"):
        plan_for(make_policy(spaces.Box(0, 1, (30, 30, 3), np.uint8), policy="grid_cnn"))
    changed = make_policy(GRIDS["planes of bits"], policy="grid_cnn")
    changed.network.actor_body.linear[1] = torch.nn.Tanh()
    with pytest.raises(UnsupportedError, match="changed"):
        plan_for(changed)
    with pytest.raises(UnsupportedError, match="not a plain one"):
        plan_for(with_convolution(24))


def with_convolution(filters, *shape):
    """A CNN for 10 x 10 x 4 with another convolution."""
    policy = make_policy(GRIDS["planes of bits"], policy="grid_cnn")
    body = policy.network.actor_body
    body.convolutions[0] = torch.nn.Conv2d(4, filters, *(shape or (3,)))
    with torch.no_grad():
        body.linear[0] = torch.nn.Linear(body.convolutions(torch.zeros(1, 4, 10, 10)).shape[1], 128)
    return policy


@pytest.mark.parametrize("shape", [(32, 3), (16, (2, 5), (2, 1), (0, 2)), (32, 1)])
def test_other_convolutions(shape):
    policy = with_convolution(*shape)
    rollout = made(policy, steps=20, rows=7)
    fill_grid(rollout, GRIDS["planes of bits"])
    assert_same_gradient(policy, rollout, 140)


VECTOR = spaces.Box(-10, 10, (7,), np.float32)
MEMORIES = ("lstm", "gru", "mingru")


@pytest.mark.parametrize(("memory", "kind"), [*itertools.product(MEMORIES, ACTIONS)])
def test_the_gradient_of_a_memory_is_that_of_autograd(memory, kind):
    policy = make_policy(VECTOR, kind, hidden_sizes=(24, 20), recurrent=memory)
    assert_same_gradient(policy, made(policy, steps=20, rows=7), 140)


@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize(
    ("rows", "steps", "segments", "hidden"),
    [(1, 70, 1, (64, 64)), (3, 5, 2, (16,)), (1040, 2, 1040, (33,)), (20, 9, 20, ()), (9, 64, 3, (128,)), (400, 6, 400, ())],
)
def test_any_number_of_segments_and_any_width(memory, rows, steps, segments, hidden):
    policy = make_policy(VECTOR, hidden_sizes=hidden, activation="relu", recurrent=memory)
    assert_same_gradient(policy, made(policy, steps=steps, rows=rows), segments * steps, shuffle=False)


@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize("kind", ["multi-categorical", "gaussian", "beta"])
def test_steps_without_a_decision_count_for_nothing(memory, kind):
    policy = make_policy(VECTOR, kind, recurrent=memory)
    masks = kind == "multi-categorical"
    rollout = made(policy, steps=16, rows=6, has_masks=masks, invalid=0.3)
    if masks:
        rollout.masks[~rollout.valid] = False
    rollout.actions[~rollout.valid] = 0
    assert_same_gradient(policy, rollout, 96)


@pytest.mark.parametrize("memory", MEMORIES)
def test_a_cnn_with_a_memory(memory):
    space = GRIDS["planes of bits"]
    policy = make_policy(space, policy="grid_cnn", recurrent=memory)
    rollout = made(policy, steps=12, rows=6)
    fill_grid(rollout, space)
    assert_same_gradient(policy, rollout, 72)


@pytest.mark.parametrize(
    ("memory", "options"),
    [
        pytest.param(memory, options, marks=[pytest.mark.slow] * (memory not in fast))
        for fast, options in (
            (MEMORIES, {}),
            (("lstm",), {"priority_alpha": 0.8}),
            (("gru",), {"vtrace": True}),
            (("mingru",), {"target_kl": 1e-4}),
        )
        for memory in MEMORIES
    ],
    ids=str,
)
def test_whole_updates_of_a_memory_agree(memory, options):
    policy = make_policy(VECTOR, recurrent=memory)
    torch_learner, learner = pair(policy, PPOConfig(num_epochs=3, minibatch_size=32, learning_rate=1e-3, **options))
    for seed, progress in enumerate((0.0, 0.4)):
        rollout = made(policy, steps=16, rows=6, seed=seed, invalid=0.2 * seed)
        assert_equal_metrics(torch_learner.update(rollout, progress), learner.update(rollout, progress))
    assert_equal_policies(policy, learner.policy, rtol=1e-3, atol=2e-5)
    learner.close()


@pytest.mark.parametrize("memory", MEMORIES)
def test_a2c_with_a_memory(memory):
    policy = make_policy(VECTOR, recurrent=memory)
    torch_learner, learner = pair(policy, A2CConfig(learning_rate=1e-3))
    for seed in range(2):
        rollout = made(policy, steps=8, rows=5, seed=seed, invalid=0.2 * seed)
        assert_equal_metrics(torch_learner.update(rollout), learner.update(rollout))
    assert_equal_policies(policy, learner.policy)
    learner.close()


@pytest.mark.usefixtures("all_threads")
@pytest.mark.parametrize("memory", MEMORIES)
def test_a_memory_learns_the_same_on_any_number_of_threads(memory):
    found = []
    for threads in (1, 2, 3):
        policy = make_policy(VECTOR, recurrent=memory)
        _, learner = pair(policy, PPOConfig(num_epochs=2, minibatch_size=320, learning_rate=1e-3), num_threads=threads)
        learner.update(made(policy, steps=16, rows=40))
        assert learner.threads()[1] == threads
        found.append(torch.cat([part.flatten() for part in learner.policy.parameters()]))
        learner.close()
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_one_learner_takes_rollouts_of_any_size():
    policy = make_policy(VECTOR, recurrent="lstm")
    torch_learner, learner = pair(policy, PPOConfig(num_epochs=1, minibatch_size=96, learning_rate=1e-3))
    for steps, rows in ((16, 6), (96, 3), (8, 24), (16, 6)):
        rollout = made(policy, steps=steps, rows=rows)
        assert_equal_metrics(torch_learner.update(rollout), learner.update(rollout))
    assert_equal_policies(policy, learner.policy, rtol=1e-3, atol=2e-5)
    learner.close()


def test_memories_that_do_not_fit_are_refused():
    discrete, _ = ACTIONS["categorical"]
    separate = build_policy(PolicyConfig(recurrent="gru"), VECTOR, discrete, module=MLP(VECTOR, ActionHead(discrete)))
    with pytest.raises(UnsupportedError, match="a body for the critic alone"):
        plan_for(separate)
    changed = make_policy(VECTOR, recurrent="lstm")
    changed.memory.cell = torch.nn.LSTM(64, 64, bias=False)
    with pytest.raises(UnsupportedError, match="changed"):
        plan_for(changed)
    policy = make_policy(VECTOR, recurrent="lstm")
    _, learner = pair(policy, PPOConfig(num_epochs=1, minibatch_size=96))
    rollout = made(policy)
    rollout.initial_state = rollout.initial_state[:1]
    with pytest.raises(HurtleError, match=r"states of shapes \[\(6, 64\)\] for the policy's memory, which needs"):
        learner.update(rollout)
    learner.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    "how", [{"HURTLE_VECTOR_WIDTH": "4"}, {"HURTLE_VECTOR_WIDTH": "8"}, {"HURTLE_CHECK_KERNELS": "1"}], ids=str
)
def test_other_machines(how):
    """All of this file, with narrower vectors and with checked kernels."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", "not slow", __file__]
    found = subprocess.run(command, env={**os.environ, **how}, capture_output=True, text=True, timeout=900, check=False)
    assert found.returncode == 0, found.stdout
