"""The policy for nested observations: any space builds and trains, and padding never matters."""

import numpy as np
import pytest
import torch
from gymnasium import spaces
from random_spaces import LIMITS, random_space, sample

from hurtle.emulation.flat_layout import SpaceLayout
from hurtle.emulation.leaves import map_tree, tree_leaves
from hurtle.policies.action_head import ActionHead
from hurtle.policies.leaf_encoders import EMBEDDING_SIZE, LEAF_SIZE, encoder_of
from hurtle.policies.saved_spaces import AnyString
from hurtle.policies.structured import Structured

HEAD = ActionHead(spaces.MultiDiscrete([3, 2]))
EVERY_KIND = spaces.Dict(
    camera=spaces.Box(0, 255, (40, 48, 3), np.uint8),
    map=spaces.Box(0.0, 1.0, (2, 7, 7)),
    gold=spaces.Discrete(9, start=-4),
    doors=spaces.MultiDiscrete([2, 5], start=[0, 3]),
    keys=spaces.MultiBinary(4),
    body=spaces.Tuple([spaces.Box(-1.0, 1.0, (3,)), spaces.Box(-np.inf, np.inf, (), np.float64)]),
    heard=spaces.Text(8, charset="abc "),
    seen=spaces.Sequence(spaces.Dict(kind=spaces.Discrete(4), words=spaces.Sequence(spaces.Text(3, charset="xy")))),
    web=spaces.Graph(spaces.Box(-1.0, 1.0, (2,)), spaces.Discrete(3)),
    ways=spaces.Graph(spaces.Discrete(5), None),
    held=spaces.OneOf([spaces.Discrete(3), spaces.Box(-1.0, 1.0, (2,)), spaces.Text(4, charset="pq")]),
    mission=AnyString(),
)


def memory_of(layout, count, value_of=sample):
    memory = layout.memory(count)
    for row in memory:
        layout.writer(row)(value_of(layout.space))
    return memory


def flat_obs(layout, memory):
    return torch.from_numpy(layout.flat(memory).copy())


def fill_padding(space, tree):
    """Write junk into all padding: `tree` contains writable views of one record."""
    if isinstance(space, spaces.Dict | spaces.Tuple):
        for key in space.spaces if isinstance(space, spaces.Dict) else range(len(space.spaces)):
            fill_padding(space.spaces[key], tree[key])
    elif isinstance(space, spaces.Text | AnyString):
        tree["codes"][int(tree["length"]) :] = 2
    elif isinstance(space, spaces.Sequence):
        fill_rows(space.feature_space, tree["values"], int(tree["length"]))
    elif isinstance(space, spaces.Graph):
        fill_rows(space.node_space, tree["nodes"], int(tree["num_nodes"]))
        if space.edge_space is not None:
            fill_rows(space.edge_space, tree["edges"], int(tree["num_edges"]))
        tree["edge_links"][int(tree["num_edges"]) :] = 99
    elif isinstance(space, spaces.OneOf):
        for i, option in enumerate(tree["options"]):
            if i != int(tree["choice"]):
                junk(option)
            else:
                fill_padding(space.spaces[i], option)


def fill_rows(space, tree, count):
    junk(map_tree(lambda leaf: leaf[count:], tree))
    for i in range(count):
        fill_padding(space, map_tree(lambda leaf, i=i: leaf[i, ...], tree))


def junk(tree):
    for leaf in tree_leaves(tree):
        leaf[...] = 1 if leaf.dtype == bool else 77


def every_kind_sample(space):
    value = {key: sample(child) for key, child in space.spaces.items() if key != "mission"}
    nodes = value["ways"].nodes
    value["ways"] = spaces.GraphInstance(nodes, None, np.zeros((len(nodes), 2), np.int32))  # links without features
    return value | {"mission": "fetch the key"[: int(space.np_random.integers(14))]}


def check(space, value_of=sample, rows=24):
    layout = SpaceLayout(space, **LIMITS)
    network = Structured(layout, HEAD, (32,))
    memory = memory_of(layout, rows, value_of)
    features = network.encode(flat_obs(layout, memory))
    distribution, value = network.decode(features)
    assert features.shape == (rows, network.num_features)
    assert torch.isfinite(features).all()

    # rows are independent
    torch.testing.assert_close(network.encode(flat_obs(layout, memory[3:4])), features[3:4], atol=1e-5, rtol=1e-5)

    loss = distribution.log_prob(torch.zeros(rows, 2, dtype=torch.int64)).sum() + value.square().sum()
    names, parameters = zip(*network.named_parameters(), strict=True)
    for name, grad in zip(names, torch.autograd.grad(loss, parameters, allow_unused=True), strict=True):
        assert grad is not None, name
        assert torch.isfinite(grad).all(), name
    for row in memory:
        fill_padding(space, layout.unflatten(layout.flat(row)))
    torch.testing.assert_close(network.encode(flat_obs(layout, memory)), features, atol=1e-6, rtol=0)
    return names, torch.autograd.grad(network.encode(flat_obs(layout, memory)).square().sum(), parameters, allow_unused=True)


@pytest.mark.parametrize("seed", range(20))
def test_random_spaces(seed):
    check(random_space(np.random.default_rng(seed), depth=4))


def test_every_kind_of_space():
    EVERY_KIND.seed(1)
    names, grads = check(EVERY_KIND, every_kind_sample)
    unreached = {n for n, grad in zip(names, grads, strict=True) if grad is None or not grad.any()}
    assert unreached == {"actor.weight", "actor.bias", "critic.weight", "critic.bias"}  # these come after the features


def test_padding_is_where_the_test_says():
    """The junk does change the record, so that the equality above means something."""
    layout = SpaceLayout(EVERY_KIND, **LIMITS)
    EVERY_KIND.seed(2)
    memory = memory_of(layout, 4, every_kind_sample)
    before = memory.copy()
    for row in memory:
        fill_padding(EVERY_KIND, layout.unflatten(layout.flat(row)))
    assert (memory != before).mean() > 0.01
    values = [layout.reader(row)() for row in memory]
    assert [value["heard"] for value in values] == [layout.reader(row)()["heard"] for row in before]


def changed(space, one, other):
    """Whether a network tells two observations apart."""
    layout = SpaceLayout(space, **LIMITS)
    memory = layout.memory(2)
    layout.writer(memory[0])(one)
    layout.writer(memory[1])(other)
    features = Structured(layout, HEAD).encode(flat_obs(layout, memory))
    return (features[0] - features[1]).abs().max().item() > 1e-4


def test_it_sees_what_differs():
    text = spaces.Text(4, charset="ab")
    assert changed(text, "ab", "ba")  # order
    assert changed(text, "aa", "aaa")  # length
    numbers = spaces.Sequence(spaces.Box(-9, 9, (1,)))
    assert changed(numbers, (np.float32([1]),), (np.float32([1]), np.float32([1])))
    assert changed(numbers, (), (np.float32([0]),))
    graph = spaces.Graph(spaces.Box(-1, 1, (1,)), None)
    nodes = np.float32([[0.1], [0.9], [-0.5]])
    links = [spaces.GraphInstance(nodes, None, np.int32([pair])) for pair in ([0, 1], [1, 0], [0, 2])]
    assert changed(graph, links[0], links[1])
    assert changed(graph, links[0], links[2])
    either = spaces.OneOf([spaces.Discrete(2), spaces.Discrete(2)])
    assert changed(either, (0, 1), (1, 1))


def test_large_numbers_stay_in_range():
    space = spaces.Dict(x=spaces.Box(-np.inf, np.inf, (1,)), small=spaces.Box(-2.0, 2.0, (1,)))
    layout = SpaceLayout(space)
    body = Structured(layout, HEAD).actor_body.tree.entries
    by_key = dict(zip(space.spaces, body, strict=True))
    assert by_key["x"].compressed
    assert not by_key["small"].compressed
    first = by_key["x"].hidden[0]
    expected = (first.weight * np.log(1e6 + 1.0)).squeeze(1).tanh()
    torch.testing.assert_close(by_key["x"](torch.tensor([[1e6]]))[0], expected)
    torch.testing.assert_close(by_key["x"](torch.tensor([[-1e6]]))[0], -expected)


def test_leaves_have_the_encoders_of_their_kind():
    sizes = {key: encoder_of(space, "tanh", True).num_features for key, space in EVERY_KIND.spaces.items()}
    assert sizes["camera"] == 512
    assert sizes["map"] == 128
    assert sizes["gold"] == EMBEDDING_SIZE
    assert sizes["doors"] == 2 * EMBEDDING_SIZE
    assert sizes["keys"] == LEAF_SIZE
    assert sizes["body"] == 2 * LEAF_SIZE
    assert sizes["heard"] == LEAF_SIZE + 1
    assert sizes["held"] == EMBEDDING_SIZE + EMBEDDING_SIZE + LEAF_SIZE + LEAF_SIZE + 1


def test_a_sequence_that_may_hold_nothing_is_no_error():
    layout = SpaceLayout(spaces.Dict(a=spaces.Sequence(spaces.Box(-1, 1, (2,))), b=spaces.Discrete(2)), max_length=0)
    memory = layout.memory(3)
    assert Structured(layout, HEAD).encode(flat_obs(layout, memory)).shape == (3, 64)


def test_separate_networks():
    layout = SpaceLayout(spaces.Dict(a=spaces.Discrete(2), b=spaces.Box(-1, 1, (2,))))
    network = Structured(layout, HEAD, (8,), separate_networks=True)
    assert network.num_features == 16
    _, value = network.decode(network.encode(flat_obs(layout, layout.memory(2))))
    grads = torch.autograd.grad(value.sum(), list(network.actor_body.parameters()), allow_unused=True)
    assert all(grad is None or not grad.any() for grad in grads)
