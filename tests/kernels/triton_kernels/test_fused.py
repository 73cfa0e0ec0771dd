"""The fused MLP and CNN in Triton's interpreter; tests/gpu runs the same checks on a GPU."""

import numpy as np
import pytest
import torch
from gymnasium import spaces

triton = pytest.importorskip("triton")

from checks_fused import BOX, DISCRETE, check_acting, check_empty, check_gradients, check_nan, check_seeds  # noqa: E402
from made_rollouts import MadeRollout, fill  # noqa: E402
from test_epochs_together import Made  # noqa: E402

from hurtle.algorithms.a2c_config import A2CConfig  # noqa: E402
from hurtle.algorithms.a2c_device import DeviceA2C  # noqa: E402
from hurtle.algorithms.algorithm import LearnerSetup  # noqa: E402
from hurtle.algorithms.impala_config import IMPALAConfig  # noqa: E402
from hurtle.algorithms.impala_device import DeviceIMPALA  # noqa: E402
from hurtle.algorithms.ppo_config import PPOConfig  # noqa: E402
from hurtle.algorithms.ppo_device import DevicePPO  # noqa: E402
from hurtle.kernels.triton import mlp  # noqa: E402
from hurtle.kernels.triton.grid_cnn import FusedGridCNN  # noqa: E402
from hurtle.kernels.triton.mlp import FusedMLP  # noqa: E402
from hurtle.policies.build import PolicyConfig, build_policy  # noqa: E402
from hurtle.policies.mlp import MLP  # noqa: E402
from hurtle.policies.native_plan import grid_cnn_shape, mlp_shape  # noqa: E402
from hurtle.policies.plain_mlp import UnsupportedError  # noqa: E402
from hurtle.policies.policy import Policy  # noqa: E402

SPACES = {"choices": DISCRETE, "numbers": BOX}
GRID, WIDER_ROWS = (4, 6, 3), (7, 9, 7)


@pytest.fixture(autouse=True)
def _few_programs(monkeypatch):
    """Each takes time, and the fewer there are, the more blocks there are for each."""
    monkeypatch.setattr(mlp, "PROGRAMS_PER_UNIT", 2)


@pytest.mark.parametrize(
    ("actions", "options"),
    [
        ("choices", {}),
        ("choices", {"activation": "relu", "masked": True}),
        ("choices", {"grid": GRID}),
        pytest.param("choices", {"grid": WIDER_ROWS, "masked": True, "steps": 1}, marks=pytest.mark.slow),
        ("numbers", {"normalizes": True}),
        pytest.param("choices", {"normalizes": True}, marks=pytest.mark.slow),
        pytest.param("numbers", {}, marks=pytest.mark.slow),
        pytest.param("numbers", {"activation": "relu"}, marks=pytest.mark.slow),
    ],
)
def test_acting(actions, options):
    check_acting(SPACES[actions], **{"steps": 2, **options})


@pytest.mark.parametrize(
    ("actions", "clip_values"),
    [
        ("numbers", False),
        pytest.param("choices", True, marks=pytest.mark.slow),  # with masks, weights and activations it is below
        pytest.param("choices", False, marks=pytest.mark.slow),
        pytest.param("numbers", True, marks=pytest.mark.slow),
    ],
)
def test_gradients(actions, clip_values):
    check_gradients(SPACES[actions], 1e-5, clip_values=clip_values)


@pytest.mark.parametrize(
    ("actions", "options"),
    [
        ("choices", {"parts": ("masks", "valid")}),
        pytest.param("numbers", {}, marks=pytest.mark.slow),
        pytest.param("choices", {"grid": GRID, "normalizes": False}, marks=pytest.mark.slow),
    ],
)
def test_gradients_without_clipping(actions, options):
    check_gradients(SPACES[actions], 1e-5, clips=False, **options)


def test_gradients_with_relu():
    check_gradients(DISCRETE, 1e-5, activation="relu", parts=("masks",))


@pytest.mark.parametrize("options", [{}, pytest.param({"grid": GRID}, marks=pytest.mark.slow)])
def test_gradients_of_masked_weighted_and_partly_invalid_steps(options):
    check_gradients(DISCRETE, 1e-5, parts=("masks", "valid", "weights"), **options)
    check_gradients(DISCRETE, 1e-5, parts=("valid",), normalizes=False, clip_values=False, **options)


@pytest.mark.slow  # one of another size is in the test above
@pytest.mark.parametrize("grid", [(10, 10, 4), WIDER_ROWS, (3, 3, 1)])
def test_gradients_of_a_cnn(grid):
    check_gradients(DISCRETE, 1e-5, grid=grid)


@pytest.mark.parametrize(
    ("settings", "masked", "invalid"),
    [
        ({}, True, 0.3),
        pytest.param({"vtrace": True}, False, 0.0, marks=pytest.mark.slow),
        pytest.param({"priority_alpha": 0.7, "minibatch_size": 48}, False, 0.0, marks=pytest.mark.slow),
    ],
)
def test_an_update_is_that_of_the_policy(settings, masked, invalid):
    """With fused kernels and without: all that lies between a rollout and a minibatch."""
    results = []
    for is_fused in (False, True):
        space = spaces.Box(-10, 10, (7,), np.float32)
        policy = build_policy(PolicyConfig(hidden_sizes=(16, 16)), space, DISCRETE, seed=2)
        config = PPOConfig(**{"num_epochs": 2, "minibatch_size": 24, "learning_rate": 1e-2, **settings})
        ppo = DevicePPO(policy, config, LearnerSetup(3))
        if is_fused:
            ppo.fuse(FusedMLP(mlp_shape(policy), ppo.parameters.values))
        rollout = MadeRollout(policy, 8, 6, masked)
        fill(rollout, policy, invalid=invalid)
        metrics = ppo.update(rollout) | ppo.pending(wait=True)
        results.append((ppo.parameters.values.clone(), metrics))
    (expected, wanted), (found, metrics) = results
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert metrics == pytest.approx(wanted, rel=1e-3, abs=1e-5)


@pytest.mark.parametrize(
    ("make", "config", "action_space", "is_grid"),
    [
        (DeviceIMPALA, IMPALAConfig(num_minibatches=3, learning_rate=1e-2), DISCRETE, False),
        pytest.param(DeviceIMPALA, IMPALAConfig(learning_rate=1e-2), BOX, False, marks=pytest.mark.slow),
        pytest.param(DeviceIMPALA, IMPALAConfig(num_minibatches=2, learning_rate=1e-2), DISCRETE, True, marks=pytest.mark.slow),
        (DeviceA2C, A2CConfig(learning_rate=1e-2), DISCRETE, False),
    ],
)
def test_updates_without_clipping_are_those_of_the_policy(make, config, action_space, is_grid):
    """In torch, with the kernel of the loss, and with those of the whole policy; absent agents and masks."""
    results = []
    for way in ("torch", "loss", "fused"):
        space = spaces.Box(0, 1, GRID, np.uint8) if is_grid else spaces.Box(-10, 10, (7,), np.float32)
        network = PolicyConfig(policy="grid_cnn") if is_grid else PolicyConfig(hidden_sizes=(16, 16))
        policy = build_policy(network, space, action_space, seed=2)
        learner = make(policy, config, LearnerSetup(3))
        learner._has_loss_kernel = way == "loss"
        if way == "fused":
            shape = grid_cnn_shape(policy) if is_grid else mlp_shape(policy)
            learner.fuse((FusedGridCNN if is_grid else FusedMLP)(shape, learner.parameters.values))
        rollout = MadeRollout(policy, 8, 7, action_space is DISCRETE)
        fill(rollout, policy, invalid=0.3)
        metrics = learner.update(rollout) | learner.pending(wait=True)
        results.append((learner.parameters.values.clone(), metrics))
    expected, wanted = results[0]
    for found, metrics in results[1:]:
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        assert metrics == pytest.approx(wanted, rel=1e-3, abs=1e-5)


@pytest.mark.parametrize("options", [{}, pytest.param({"grid": GRID}, marks=pytest.mark.slow)])
def test_minibatches_without_valid_steps_are_skipped(options):
    check_empty(**options)


@pytest.mark.parametrize(
    ("config", "observations", "why"),
    [
        (PolicyConfig(hidden_sizes=(64,)), spaces.Box(-1, 1, (4,)), "not exactly two"),
        (PolicyConfig(hidden_sizes=(64, 32)), spaces.Box(-1, 1, (4,)), "share one width"),
        (PolicyConfig(separate_networks=False), spaces.Box(-1, 1, (4,)), "share layers"),
        (PolicyConfig(recurrent="gru"), spaces.Box(-1, 1, (4,)), "has a memory"),
        (PolicyConfig(), spaces.Box(0, 1, (10, 10, 4), np.uint8), "has a convolution"),
        (PolicyConfig(), spaces.Box(-1, 1, (99,)), "at most 64 floats"),
        (PolicyConfig(), spaces.Box(0, 9, (4,), np.uint8), "at most 64 floats"),
    ],
)
def test_other_policies_are_refused_with_a_reason(config, observations, why):
    with pytest.raises(UnsupportedError, match=why):
        mlp_shape(build_policy(config, observations, DISCRETE))


@pytest.mark.parametrize(
    ("config", "observations", "why"),
    [
        (PolicyConfig(), spaces.Box(-1, 1, (4,)), "not a GridCNN"),
        (PolicyConfig(recurrent="gru"), spaces.Box(0, 1, (10, 10, 4), np.uint8), "has a memory"),
        (PolicyConfig(separate_networks=True), spaces.Box(0, 1, (10, 10, 4), np.uint8), "body for the critic"),
        (PolicyConfig(policy="grid_cnn"), spaces.Box(0, 255, (10, 10, 4), np.uint8), "rescaled"),
        (PolicyConfig(), spaces.Box(0, 1, (10, 12, 4), np.uint8), "wider than 10"),
        (PolicyConfig(), spaces.Box(0, 1, (14, 10, 13), np.uint8), "more than 127 numbers"),
    ],
)
def test_other_cnns_are_refused_with_a_reason(config, observations, why):
    with pytest.raises(UnsupportedError, match=why):
        grid_cnn_shape(build_policy(config, observations, DISCRETE))
    with pytest.raises(UnsupportedError, match="at most 15 choices"):
        grid_cnn_shape(build_policy(PolicyConfig(), spaces.Box(0, 1, (10, 10, 4), np.uint8), spaces.Discrete(16)))


def test_gradients_of_rounded_operands():
    check_gradients(DISCRETE, 1e-3, precision="tf32")  # the interpreter's products of bf16 are wrong: only tests/gpu has those


def test_a_box_of_integers_is_refused():
    box = spaces.Box(0, 5, (2,), np.int32)
    with pytest.raises(UnsupportedError, match="Box of integers"):
        mlp_shape(build_policy(PolicyConfig(), spaces.Box(-1, 1, (4,)), box))


def test_networks_that_only_look_like_an_mlp_are_refused():
    class Own(MLP):
        pass

    made = build_policy(PolicyConfig(), spaces.Box(-1, 1, (4,)), DISCRETE)
    own = Own(spaces.Box(-1, 1, (4,)), made.head)
    with pytest.raises(UnsupportedError, match="a Own, which is not one of Hurtle's own"):
        mlp_shape(Policy(made.observation_space, made.action_space, own, made.head))
    for place, module, why in (
        (1, torch.nn.GELU(), "activation is GELU"),
        (1, torch.nn.ReLU(), "not exactly two hidden layers"),
        (2, torch.nn.LayerNorm(64), "a LayerNorm where a float32 Linear"),
    ):
        policy = build_policy(PolicyConfig(), spaces.Box(-1, 1, (4,)), DISCRETE)
        policy.network.critic_body.hidden[place] = module
        with pytest.raises(UnsupportedError, match=why):
            mlp_shape(policy)


@pytest.mark.parametrize("precision", [pytest.param("float32", marks=pytest.mark.slow), "tf32"])
@pytest.mark.filterwarnings("ignore:invalid value encountered")
def test_a_gpus_nan_is_not_rounded_away(precision):
    check_nan(DISCRETE, precision=precision)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:invalid value encountered")
def test_a_nan_in_a_cnn_is_not_lost():
    check_nan(DISCRETE, grid=GRID)


@pytest.mark.parametrize(("actions", "options"), [("numbers", {"normalizes": True}), ("choices", {"masked": True})])
def test_the_kernels_of_several_seeds(actions, options):
    check_seeds(SPACES[actions], **options)


def test_updates_of_several_seeds_are_those_of_their_policies():
    """With a KL stop, which two seeds reach before the third."""
    made = Made("cartpole", "ppo", {"hidden_sizes": (16, 16), "target_kl": 1e-5, "num_epochs": 2, "minibatch_size": 32})
    results, kernels = [], None
    for is_fused in (False, True):
        learner, collector, rollout = made.together()
        if is_fused:
            kernels = FusedMLP(mlp_shape(learner.learners[0].policy), learner.weights().flat)
            learner.fuse(kernels)
        collector.collect(rollout)
        learner.update(rollout)
        states = [{"counts": learner.optimizer.count.clone()}, learner.weights().flat.clone(), learner.seed_metrics]
        results.append(states)
    (counts, weights, metrics), (found_counts, found_weights, found_metrics) = results
    assert kernels is not None
    assert counts["counts"].tolist() == found_counts["counts"].tolist() == [4, 2, 2]
    torch.testing.assert_close(found_weights, weights, rtol=1e-3, atol=2e-5)
    for own, expected in zip(found_metrics, metrics, strict=True):
        assert own == pytest.approx(expected, rel=1e-3, abs=1e-5)
