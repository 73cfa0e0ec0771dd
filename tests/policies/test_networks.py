"""MLPs and CNNs: shapes, initialization, inputs of all kinds, and what actor and critic share."""

import math

import numpy as np
import pytest
import torch
from gymnasium import spaces

from hurtle.errors import HurtleError, UnknownNameError
from hurtle.policies.action_head import ActionHead
from hurtle.policies.cnn import GridCNN, NatureCNN
from hurtle.policies.mlp import MLP

VECTOR, TWO = spaces.Box(-1.0, 1.0, (4,)), ActionHead(spaces.Discrete(2))
ATARI, MINATAR = spaces.Box(0, 255, (4, 84, 84), np.uint8), spaces.Box(0, 1, (10, 10, 6), np.bool_)


def singular_values(weight):
    return torch.linalg.svdvals(weight.detach().flatten(1))


def check_orthogonal(layer, gain):
    torch.testing.assert_close(singular_values(layer.weight), torch.full((min(layer.weight.flatten(1).shape),), gain))
    assert (layer.bias == 0).all()


@pytest.mark.parametrize(
    "network", [MLP(VECTOR, TWO), NatureCNN(ATARI, TWO), GridCNN(MINATAR, TWO)], ids=lambda n: type(n).__name__
)
def test_layers_are_orthogonal_with_the_gains_of_ppo(network):
    layers = [m for m in network.modules() if isinstance(m, torch.nn.Linear | torch.nn.Conv2d)]
    assert len(layers) in (6, 4 + 2, 2 + 2)
    for layer in layers:
        gain = {network.actor: 0.01, network.critic: 1.0}.get(layer, math.sqrt(2.0))
        check_orthogonal(layer, gain)


def test_without_orthogonal_init_torchs_own_is_left():
    torch.manual_seed(5)
    network = MLP(VECTOR, TWO, orthogonal_init=False)
    torch.manual_seed(5)
    torch.testing.assert_close(network.actor_body.hidden[0].weight, torch.nn.Linear(4, 64).weight)


def test_log_std_is_a_parameter_that_does_not_depend_on_the_observation():
    head = ActionHead(spaces.Box(-1.0, 1.0, (3,)))
    network = MLP(VECTOR, head)
    assert isinstance(network.log_std, torch.nn.Parameter)
    assert network.log_std.tolist() == [0.0, 0.0, 0.0]
    assert MLP(VECTOR, head, log_std_init=-1.5).log_std.tolist() == [-1.5] * 3
    distribution, _ = network.decode(network.encode(torch.randn(6, 4)))
    torch.testing.assert_close(distribution.entropy(), torch.full((6,), 3 * (0.5 + 0.5 * math.log(2 * math.pi))))
    assert MLP(VECTOR, TWO).log_std is None


@pytest.mark.parametrize("separate", [True, False])
@pytest.mark.parametrize(
    "make", [lambda **o: MLP(VECTOR, TWO, **o), lambda **o: GridCNN(MINATAR, TWO, **o)], ids=["mlp", "cnn"]
)
def test_what_actor_and_critic_share(make, separate):
    network = make(separate_networks=separate)
    space = VECTOR if isinstance(network, MLP) else MINATAR
    obs = torch.from_numpy(np.stack([space.sample() for _ in range(8)]))
    distribution, value = network.decode(network.encode(obs))
    actor = {n for n, _ in network.named_parameters() if n.startswith("actor")}
    critic = {n for n, _ in network.named_parameters() if n.startswith("critic")}
    assert actor | critic == {n for n, _ in network.named_parameters()}

    def touched(loss):
        parameters = dict(network.named_parameters())
        grads = torch.autograd.grad(loss, list(parameters.values()), retain_graph=True, allow_unused=True)
        grads = dict(zip(parameters, grads, strict=True))
        return {name for name, grad in grads.items() if grad is not None and grad.abs().sum() > 0}

    by_policy = touched(distribution.log_prob(torch.zeros(8, dtype=torch.int64)).sum())
    by_value = touched(value.sum())
    if separate:
        assert by_policy == actor
        assert by_value == critic
        assert network.num_features == 2 * network.actor_body.num_features
    else:
        assert critic == {"critic.weight", "critic.bias"}
        assert by_policy == actor
        assert by_value == (actor | critic) - {"actor.weight", "actor.bias"}


def test_encode_and_decode_have_the_shapes_of_the_contract():
    for network, space in (
        (MLP(VECTOR, TWO, (32,), "relu", False), VECTOR),
        (NatureCNN(ATARI, TWO), ATARI),
        (GridCNN(MINATAR, TWO), MINATAR),
    ):
        obs = torch.from_numpy(np.stack([space.sample() for _ in range(3)]))
        features = network.encode(obs)
        assert features.shape == (3, network.num_features)
        distribution, value = network.decode(features)
        assert value.shape == (3,)
        assert distribution.sample(torch.rand(3, 1)).shape == (3,)
    assert (MLP(VECTOR, TWO, (32,)).num_features, network.num_features, NatureCNN(ATARI, TWO).num_features) == (64, 128, 512)


def test_the_mlp_is_what_it_says():
    network = MLP(VECTOR, TWO, (5, 3), "relu", False)
    obs, body = torch.randn(6, 4), network.actor_body.hidden
    by_hand = (obs @ body[0].weight.T).relu() @ body[2].weight.T
    torch.testing.assert_close(network.encode(obs), by_hand.relu())
    torch.testing.assert_close(network.decode(by_hand.relu())[1], by_hand.relu() @ network.critic.weight[0])
    with pytest.raises(UnknownNameError, match=r"No activation 'rellu'\. Did you mean relu"):
        MLP(VECTOR, TWO, activation="rellu")
    assert MLP(VECTOR, TWO, (), separate_networks=False).encode(obs).tolist() == obs.tolist()


def seen(space, obs):
    """The features of an MLP without hidden layers: its inputs."""
    return MLP(space, TWO, (), separate_networks=False).encode(torch.as_tensor(obs))


def test_inputs_become_vectors():
    assert seen(spaces.Discrete(3, start=2), [2, 4]).tolist() == [[1, 0, 0], [0, 0, 1]]
    assert seen(spaces.Discrete(3), [[1], [2]]).tolist() == [[0, 1, 0], [0, 0, 1]]  # emulated: one more axis
    assert seen(spaces.Discrete(3, start=2), [0, 9]).tolist() == [[1, 0, 0], [0, 0, 1]]  # an absent agent's zeros are fine
    assert seen(spaces.MultiDiscrete([2, 3], start=[0, -1]), [[1, -1], [0, 1]]).tolist() == [[0, 1, 1, 0, 0], [1, 0, 0, 0, 1]]
    assert seen(spaces.MultiBinary((2, 2)), [[[0, 1], [1, 0]]]).tolist() == [[0, 1, 1, 0]]
    assert seen(spaces.Box(0, 1, (2,), np.bool_), [[True, False]]).tolist() == [[1, 0]]
    assert seen(spaces.Box(-9, 9, (1, 2), np.float64), np.array([[[2.5, -9.0]]])).dtype == torch.float32
    assert seen(spaces.Box(0, 1000, (2,), np.int32), np.array([[7, 1000]])).tolist() == [[7, 1000]]


def test_bytes_are_scaled_by_their_bounds():
    assert seen(spaces.Box(0, 255, (2,), np.uint8), np.array([[0, 255]], np.uint8)).tolist() == [[0.0, 1.0]]
    assert seen(spaces.Box(0, 1, (2,), np.uint8), np.array([[0, 1]], np.uint8)).tolist() == [[0.0, 1.0]]
    uneven = spaces.Box(np.array([0, 10], np.uint8), np.array([4, 20], np.uint8), dtype=np.uint8)
    assert seen(uneven, np.array([[1, 15]], np.uint8)).tolist() == [[0.25, 0.5]]


def test_structured_spaces_are_refused():
    with pytest.raises(HurtleError, match=r"takes Box, Discrete, .* got Dict.*policy='structured'"):
        MLP(spaces.Dict(a=VECTOR), TWO)


# images


def test_nature_cnn_has_the_layers_of_the_paper():
    network = NatureCNN(ATARI, ActionHead(spaces.Discrete(6)))
    shapes = [tuple(m.weight.shape) for m in network.actor_body.modules() if hasattr(m, "weight")]
    assert shapes == [(32, 4, 8, 8), (64, 32, 4, 4), (64, 64, 3, 3), (512, 3136)]


@pytest.mark.parametrize(
    ("network", "first", "last"), [(NatureCNN, (3, 40, 50), (40, 50, 3)), (GridCNN, (6, 10, 12), (10, 12, 6))]
)
def test_channels_may_come_first_or_last(network, first, last):
    torch.manual_seed(0)
    one = network(spaces.Box(0, 255, first, np.uint8), TWO)
    torch.manual_seed(0)
    other = network(spaces.Box(0, 255, last, np.uint8), TWO)
    obs = torch.randint(256, (2, *first), dtype=torch.uint8)
    torch.testing.assert_close(one.encode(obs), other.encode(obs.permute(0, 2, 3, 1)))
    white, bright = torch.full((1, *first), 255, dtype=torch.uint8), torch.ones(1, *first)
    torch.testing.assert_close(one.encode(white), one.actor_body.linear(one.actor_body.convolutions(bright)))


def test_planes_of_bools_bytes_and_floats_are_the_same_to_a_grid_cnn():
    planes = torch.rand(3, 10, 10, 6) < 0.5
    features = []
    for dtype in (np.bool_, np.uint8, np.float32):
        torch.manual_seed(0)
        network = GridCNN(spaces.Box(0, 1, (10, 10, 6), dtype), TWO)
        features.append(network.encode(planes.to(getattr(torch, np.dtype(dtype).name))))
    assert torch.equal(features[0], features[1])
    assert torch.equal(features[0], features[2])
    assert (features[0] != 0).any()


@pytest.mark.parametrize("shape", [(2, 2, 3), (1, 7, 1), (9, 9), (10, 10, 10)])
def test_grids_may_be_tiny_flat_or_have_many_planes(shape):
    network = GridCNN(spaces.Box(0, 1, shape), TWO)
    assert network.encode(torch.rand(2, *shape)).shape == (2, 128)


def test_images_that_do_not_fit_are_refused():
    with pytest.raises(HurtleError, match=r"at least 36 pixels a side, got \(4, 84, 35\); use grid_cnn"):
        NatureCNN(spaces.Box(0, 255, (4, 84, 35), np.uint8), TWO)
    with pytest.raises(HurtleError, match=r"grid_cnn needs a Box of shape .* got Discrete\(2\)"):
        GridCNN(spaces.Discrete(2), TWO)
