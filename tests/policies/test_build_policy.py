"""Which network the spaces and the config select, and how the resulting policy behaves."""

import numpy as np
import pytest
import torch
from gymnasium import spaces

from hurtle.emulation.flat_layout import SpaceLayout
from hurtle.errors import HurtleError, UnknownNameError
from hurtle.policies.build import PolicyConfig, build_policy
from hurtle.policies.cnn import GridCNN, NatureCNN
from hurtle.policies.mlp import MLP
from hurtle.policies.structured import Structured
from hurtle.references import load_reference

VECTOR, TWO = spaces.Box(-1.0, 1.0, (4,)), spaces.Discrete(2)
STRUCTURE = spaces.Dict(a=spaces.Discrete(3), b=spaces.Box(-1, 1, (2,)))
STRUCTURE_LAYOUT = SpaceLayout(STRUCTURE)
FLOATS = spaces.Dict(a=spaces.Box(-1, 1, (3,)), b=spaces.Box(-1, 1, (2,)))


def build(space=VECTOR, actions=TWO, layout=None, **options):
    given = {key: options.pop(key) for key in ("normalize_observations", "module", "seed") if key in options}
    return build_policy(PolicyConfig(**options), space, actions, layout, **given)


def of_layout(space, **options):
    layout = SpaceLayout(space)
    return build(layout.flat_space, layout=layout, **options)


@pytest.mark.parametrize(
    ("space", "network"),
    [
        (VECTOR, MLP),
        (spaces.Discrete(5, start=1), MLP),
        (spaces.MultiDiscrete([2, 3]), MLP),
        (spaces.MultiBinary(4), MLP),
        (spaces.Box(0, 255, (50, 60), np.uint8), MLP),
        (spaces.Box(0, 255, (4, 84, 84), np.uint8), NatureCNN),
        (spaces.Box(0, 255, (36, 36, 3), np.uint8), NatureCNN),
        (spaces.Box(0, 255, (36, 35, 3), np.uint8), GridCNN),
        (spaces.Box(0, 1, (10, 10, 4), np.uint8), GridCNN),
    ],
    ids=str,
)
def test_auto_chooses_by_the_space(space, network):
    policy = build(space)
    assert type(policy.network) is network
    obs = torch.from_numpy(np.stack([space.sample() for _ in range(3)]))
    distribution, value, state = policy(obs)
    assert value.shape == (3,)
    assert state == ()
    assert distribution.sample(torch.rand(3, policy.num_uniforms)).shape == (3,)
    assert (policy.observation_space, policy.action_space) == (space, TWO)


def test_auto_and_layouts():
    assert type(of_layout(STRUCTURE).network) is Structured
    assert type(of_layout(VECTOR).network) is MLP
    assert type(of_layout(FLOATS, policy="mlp").network) is MLP
    discrete = of_layout(spaces.Discrete(5, start=2))  # its flat observation is one integer in a vector
    assert type(discrete.network) is MLP
    assert discrete.network.actor_body.input.num_features == 5
    assert discrete(torch.tensor([[2], [6]]))[1].shape == (2,)


def test_names_choose_too():
    assert type(build(spaces.Box(0, 255, (50, 60), np.uint8), policy="nature_cnn").network) is NatureCNN
    assert type(build(spaces.Box(0, 1, (9, 9)), policy="grid_cnn").network) is GridCNN
    assert type(of_layout(VECTOR, policy="structured").network) is Structured
    with pytest.raises(UnknownNameError, match=r"No policy 'nature'\. Did you mean nature_cnn"):
        build(policy="nature")
    with pytest.raises(HurtleError, match=r"policy='structured' needs an emulated env"):
        build(policy="structured")
    with pytest.raises(HurtleError, match=r"got Dict.*hurtle.emulate\(env\)"):
        build(STRUCTURE)


@pytest.mark.parametrize("sizes", [64, "64", (64, 0), (64, 32.0), None])
def test_hidden_sizes_that_are_none(sizes):
    with pytest.raises(HurtleError, match=r"hidden_sizes must be a tuple .* such as \(64, 64\); got "):
        build(hidden_sizes=sizes)
    assert build(hidden_sizes=[8, 4]).network.actor_body.num_features == 4


def test_actor_and_critic_are_separate_in_mlps_without_memory():
    assert build().network.critic_body is not None
    assert build(separate_networks=False).network.critic_body is None
    assert build(recurrent="lstm").network.critic_body is None
    assert build(spaces.Box(0, 1, (10, 10, 4))).network.critic_body is None
    assert build(spaces.Box(0, 1, (10, 10, 4)), separate_networks=True).network.critic_body is not None
    with pytest.raises(HurtleError, match=r"separate_networks needs a policy without memory, but recurrent is 'lstm'"):
        build(recurrent="lstm", separate_networks=True)


def test_the_config_reaches_the_network():
    policy = build(
        actions=spaces.Box(-1, 1, (2,)), hidden_sizes=(7, 5), activation="relu", log_std_init=-2.0, orthogonal_init=False
    )
    hidden = policy.network.actor_body.hidden
    assert [layer.out_features for layer in hidden[::2]] == [7, 5]
    assert isinstance(hidden[1], torch.nn.ReLU)
    assert policy.network.log_std.tolist() == [-2.0, -2.0]
    assert (hidden[0].bias != 0).any()
    assert build(actions=spaces.Box(-1, 1, (2,)), distribution="beta").head.kind == "beta"


def test_the_seed_decides_the_weights_and_nothing_else():
    torch.manual_seed(11)
    state = torch.get_rng_state()
    one, same, other = (build(seed=seed, recurrent="mingru") for seed in (3, 3, 4))
    assert torch.equal(torch.get_rng_state(), state)
    for name, weight in one.state_dict().items():
        assert torch.equal(weight, same.state_dict()[name])
    assert not torch.equal(one.network.actor.weight, other.network.actor.weight)


NET = """
import torch
class Net(torch.nn.Module):
    def __init__(self, observation_space, action_space):
        super().__init__()
        self.body, self.actor = torch.nn.Linear(observation_space.shape[0], 8), torch.nn.Linear(8, int(action_space.n))
    def encode(self, obs):
        return self.body(obs).relu()
    def decode(self, features):
        return torch.distributions.Categorical(logits=self.actor(features)), features.mean(1)
"""


def test_a_network_from_a_file(tmp_path):
    file = tmp_path / "my_policy.py"
    file.write_text(NET)
    one, same = (build(policy=f"{file}:Net", recurrent="gru", seed=5) for _ in range(2))
    assert type(one.network).__name__ == "Net"
    assert torch.equal(one.network.actor.weight, same.network.actor.weight)
    assert one.memory.size == 8
    with pytest.raises(UnknownNameError, match=r"has no 'Nett'\. Did you mean Net\?"):
        build(policy=f"{file}:Nett")
    of_class = build(module=load_reference(f"{file}:Net"), recurrent="gru", seed=5)
    assert torch.equal(one.network.actor.weight, of_class.network.actor.weight)
    file.write_text(NET.replace("int(action_space.n)", "2"))
    with pytest.raises(HurtleError, match=r"3 logits; got a Categorical over 2"):
        build(policy=f"{file}:Net", actions=spaces.Discrete(3))


# normalizers


def test_normalizers_are_for_floats():
    policy = build(normalize_observations=True)
    assert policy.normalizer.mean.shape == (4,)
    assert {"normalizer.count", "normalizer.mean", "normalizer.m2"} <= set(policy.state_dict())
    assert of_layout(FLOATS, normalize_observations=True).normalizer is not None
    for space in (spaces.Discrete(3), spaces.Box(0, 255, (4, 84, 84), np.uint8), spaces.Box(0, 9, (2,), np.int64)):
        with pytest.raises(HurtleError, match=r"normalize_observations needs float observations, got"):
            build(space, normalize_observations=True)
    with pytest.raises(HurtleError, match=r"float observations, got Box\(0, 255, \(16,\), uint8\)"):
        of_layout(STRUCTURE, normalize_observations=True)


def test_forward_does_not_normalize():
    policy, plain = build(normalize_observations=True), build()
    policy.normalizer.update(np.random.default_rng(0).normal(3.0, 2.0, (5, 2, 4)).astype(np.float32))
    obs = torch.randn(6, 4)
    assert torch.equal(policy(obs)[1], plain(obs)[1])


# the policy itself


@pytest.mark.parametrize("recurrent", ["none", "lstm", "gru", "mingru"])
@pytest.mark.parametrize("space", [VECTOR, spaces.Box(0, 1, (8, 8, 3)), STRUCTURE], ids=["mlp", "cnn", "structured"])
def test_a_sequence_is_its_steps(space, recurrent):
    layout = SpaceLayout(space)
    policy = build(layout.flat_space, spaces.MultiDiscrete([3, 2]), layout, recurrent=recurrent)
    policy.network.actor.weight.data.mul_(300.0)  # so that actions depend on observations and memory
    steps, rows = 6, 3
    memory = layout.memory(steps, rows)
    for row in memory.reshape(steps * rows, -1):
        layout.writer(row)(space.sample())
    obs = torch.from_numpy(layout.flat(memory))
    starts, mask = torch.rand(steps, rows) < 0.3, torch.rand(steps, rows, 5) < 0.7
    distribution, value, last = policy.forward_sequence(obs, policy.initial_state(rows), starts, mask)
    actions = distribution.sample(torch.rand(steps * rows, policy.num_uniforms))
    log_prob = distribution.log_prob(actions)
    assert value.shape == (steps * rows,)
    state = policy.initial_state(rows)
    assert policy.is_recurrent == (recurrent != "none")
    for t in range(steps):
        at_t = slice(t * rows, (t + 1) * rows)
        torch.testing.assert_close(policy.value(obs[t], state, starts[t]), value[at_t], atol=1e-5, rtol=0)
        step, _, state = policy(obs[t], state, mask[t], starts[t])
        torch.testing.assert_close(step.log_prob(actions[at_t]), log_prob[at_t], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(last, state, atol=1e-5, rtol=0)


def test_the_initial_state_may_be_left_out():
    policy = build(recurrent="lstm")
    obs = torch.randn(3, 4)
    assert torch.equal(policy(obs)[1], policy(obs, policy.initial_state(3))[1])


def test_masked_actions_have_no_probability():
    policy = build(actions=spaces.Discrete(4))
    mask = torch.tensor([[True, False, False, True]] * 5)
    distribution, _, _ = policy(torch.randn(5, 4), mask=mask)
    assert (distribution.log_probs.exp()[:, 1:3] == 0).all()


def test_policies_are_saved_and_loaded():
    policy, other = (build(STRUCTURE_LAYOUT.flat_space, layout=STRUCTURE_LAYOUT, recurrent="gru", seed=seed) for seed in (0, 1))
    other.load_state_dict(policy.state_dict())
    obs = torch.from_numpy(STRUCTURE_LAYOUT.flat(STRUCTURE_LAYOUT.memory(2)))
    assert torch.equal(policy(obs)[1], other(obs)[1])
