"""What SpaceLayout refuses: the messages name the leaf, what was expected and what came."""

from __future__ import annotations

import numpy as np
import pytest
from gymnasium import spaces
from random_spaces import same, sample

from hurtle.emulation.flat_layout import SpaceLayout
from hurtle.errors import EmulationError, HurtleError

Dict, Tuple, Box, Discrete = spaces.Dict, spaces.Tuple, spaces.Box, spaces.Discrete
NESTED = Dict(
    inventory=Dict(items=Box(0, 9, (4,), np.int64), gold=Discrete(100, start=1)),
    position=Box(-1, 1, (2,)),
    pair=Tuple((spaces.MultiBinary(3), spaces.MultiDiscrete([3, 4], start=[1, -1]))),
)


def written(layout: SpaceLayout, value) -> np.ndarray:
    memory = layout.memory()
    layout.writer(memory)(value)
    return memory


def refusal(function, *args, **kwargs) -> str:
    with pytest.raises(EmulationError) as caught:
        function(*args, **kwargs)
    return str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"inventory": {"items": np.zeros(3, np.float32), "gold": 1}},
            'observation["inventory"]["items"]: expected int64 of shape (4,), got float32 of shape (3,).',
        ),
        (
            {"inventory": {"items": np.zeros(4, np.float32), "gold": 1}},
            'observation["inventory"]["items"]: expected int64 of shape (4,), got float32 of shape (4,).',
        ),
        (
            {"inventory": {"items": [1, 2, [3]], "gold": 1}},
            'observation["inventory"]["items"]: expected int64 of shape (4,), got list.',
        ),
        (
            {"inventory": {"items": np.array([0, 1, 10, 11]), "gold": 1}},
            'observation["inventory"]["items"]: expected values from 0 to 9, got 10 at [2].',
        ),
        (
            {"inventory": {"itms": np.zeros(4, np.int64), "gold": 1}},
            'observation["inventory"]: missing "items" and unknown "itms" among its keys. Did you mean items?',
        ),
        ({"inventory": {"gold": 1}}, 'observation["inventory"]: missing "items" among its keys.'),
        ({"inventory": [1, 2]}, 'observation["inventory"]: expected a dict with the keys "items", "gold", got list.'),
        ({"position": np.array([0, np.nan])}, 'observation["position"]: expected values from -1.0 to 1.0, got nan at [1].'),
        ({"position": np.array([0, 1.5])}, 'observation["position"]: expected values from -1.0 to 1.0, got 1.5 at [1].'),
        ({"position": None}, 'observation["position"]: expected float32 of shape (2,), got NoneType.'),
        ({"pair": (np.ones(3, np.int8),)}, 'observation["pair"]: expected a tuple of 2, got 1 values.'),
        ({"pair": 3}, 'observation["pair"]: expected a tuple of 2, got int 3.'),
        (
            {"pair": (np.array([0, 2, 0]), np.array([1, 1]))},
            'observation["pair"][0]: expected values from 0 to 1, got 2 at [1].',
        ),
        (
            {"pair": (np.zeros(3, np.int8), np.array([3, 3]))},
            'observation["pair"][1]: expected values from -1 to 2, got 3 at [1].',
        ),
    ],
)
def test_check_names_the_leaf(change: dict, message: str):
    layout = SpaceLayout(NESTED)
    good = sample(NESTED)
    layout.check(good)
    assert refusal(layout.check, {**good, **change}) == message


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_check_lets_rounding_pass(dtype):
    layout = SpaceLayout(Box(np.array([0, -np.inf, -1000], dtype), np.array([1, np.inf, 1000], dtype), (3,), dtype))
    layout.check(np.array([1 + 4 * np.finfo(dtype).eps, 9, 1000.0001], dtype))
    layout.check(np.array([-1e-7, -9, -1000.0001], dtype))
    assert refusal(layout.check, np.array([1.00001, 0, 0], dtype)).startswith("observation: expected values from 0.0 to 1.0")
    assert "from -1000.0 to 1000.0" in refusal(layout.check, np.array([1, 0, 1000.01], dtype))
    whole = SpaceLayout(Box(np.finfo(dtype).min, np.finfo(dtype).max, (), dtype))
    whole.check(np.array(np.finfo(dtype).max))


def test_check_of_integers():
    layout = SpaceLayout(Discrete(4, start=2))
    for good in (2, np.int64(5), np.int8(3), np.array(4)):
        layout.check(good)
    assert refusal(layout.check, 6) == "observation: expected an integer from 2 to 5, got 6."
    assert refusal(layout.check, np.float32(3)) == "observation: expected an integer from 2 to 5, got float32 of shape ()."
    assert refusal(layout.check, 2.5) == "observation: expected an integer from 2 to 5, got float 2.5."
    assert refusal(layout.check, np.array([3])) == "observation: expected an integer from 2 to 5, got int64 of shape (1,)."
    with pytest.raises(ValueError, match="from 2 to 5"):
        layout.check(6)
    assert issubclass(EmulationError, HurtleError)


def test_check_lets_numbers_through_that_are_stored_well():
    SpaceLayout(Box(np.float32(0.1), np.float32(0.3), (1,))).check(np.array([0.1]))  # a float64 below the float32 bound
    SpaceLayout(Box(0, 255, (2,), np.uint8)).check([0, 255])
    SpaceLayout(spaces.MultiBinary(2)).check(np.array([True, False]))
    assert "from 0 to 255, got 256" in refusal(SpaceLayout(Box(0, 255, (2,), np.uint8)).check, [0, 256])
    assert "from 0 to 255, got -1" in refusal(SpaceLayout(Box(0, 255, (2,), np.uint8)).check, [0, -1])
    assert "got inf" in refusal(SpaceLayout(Box(-1, 1, (1,), np.float16)).check, np.array([1e9]))


def test_the_writer_explains_what_it_cannot_store():
    layout = SpaceLayout(NESTED)
    write = layout.writer(layout.memory())
    value = sample(NESTED)
    value["inventory"] = {"items": np.zeros(3, np.int64), "gold": 1}
    assert refusal(write, value) == 'observation["inventory"]["items"]: expected int64 of shape (4,), got int64 of shape (3,).'
    assert 'missing "position"' in refusal(write, {key: value[key] for key in ("inventory", "pair")})


def test_memory_of_the_wrong_kind():
    layout = SpaceLayout(NESTED)
    expected = "observation: expected memory uint8 [72], got uint8 of shape (2, 72)."
    assert refusal(layout.writer, layout.memory(2)) == expected
    assert "expected memory uint8 [..., 72], got float32" in refusal(layout.batch, np.zeros((2, 72), np.float32))


@pytest.mark.parametrize("empty", [Dict(), Tuple(())])
def test_empty_containers_are_refused(empty: spaces.Space):
    kind = type(empty).__name__
    message = refusal(SpaceLayout, Dict(a=Discrete(2), b=Dict(c=empty)))
    assert message == f'observation["b"]["c"]: an empty {kind} has nothing to learn from; remove it or add a space to it.'


def test_unknown_spaces_are_refused():
    class Strange(spaces.Space):
        pass

    message = refusal(SpaceLayout, Tuple((Discrete(2), Strange())))
    assert message.startswith("observation[1]: cannot emulate Strange")
    assert "featurize" in message


@pytest.mark.parametrize("name", ["observation", "action"])
def test_no_space_at_all_is_refused(name: str):
    what = f"{name}_space"
    expected = f"{name}: the env's {what} is None; set it to a Gymnasium space."
    assert refusal(SpaceLayout, None, name) == expected


def test_missing_maximum_names_leaf_and_argument():
    sequence = Dict(items=spaces.Sequence(Discrete(3)))
    assert refusal(SpaceLayout, sequence) == (
        'observation["items"]: a Sequence needs a declared maximum: hurtle.emulate(env, max_length=N), or '
        "max_length={'observation[\"items\"]': N} for this one; "
        "with make_vec: make_vec(lambda: hurtle.emulate(MyEnv(), max_length=N), …)."
    )
    graph = spaces.Graph(Box(0, 1, (2,)), Discrete(3))
    assert "emulate(env, max_nodes=N)" in refusal(SpaceLayout, graph)
    assert "emulate(env, max_edges=N)" in refusal(SpaceLayout, graph, max_nodes=3)
    assert SpaceLayout(spaces.Graph(Discrete(2), None), max_nodes=3).leaves[0].shape == (3,)
    two = Dict(a=spaces.Sequence(Discrete(3)), b=spaces.Sequence(spaces.Sequence(Discrete(3))))
    limits = {'observation["a"]': 2, 'observation["b"]': 3, 'observation["b"][*]': 4}
    assert [leaf.shape for leaf in SpaceLayout(two, max_length=limits).leaves] == [(2,), (), (3, 4), (3,), ()]
    message = refusal(SpaceLayout, sequence, max_length={'observation["items"]': 2, 'observation["itms"]': 2})
    assert message == 'max_length: nothing at \'observation["itms"]\' needs a maximum. Did you mean observation["items"]?'
    assert "must be an integer of at least 0, got 'x'" in refusal(SpaceLayout, sequence, max_length="x")


def test_too_long_is_refused_and_never_cut():
    text = SpaceLayout(Dict(mission=spaces.Text(4, charset="abc", min_length=2)))
    write = text.writer(text.memory())
    for function in (text.check, write):
        message = 'observation["mission"]: expected a text of at most 4 characters, got 5.'
        assert refusal(function, {"mission": "abcab"}) == message
        message = "observation[\"mission\"]: expected characters of the charset 'abc', got 'd'."
        assert refusal(function, {"mission": "abd"}) == message
        assert refusal(function, {"mission": 7}) == 'observation["mission"]: expected a str, got int 7.'
    letters = SpaceLayout(spaces.Text(4))  # all letters and digits
    message = "observation: expected characters of the charset '0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcd' …, got ' '."
    assert refusal(letters.check, "a b") == message
    assert "at least 2 characters, got 1" in refusal(text.check, {"mission": "a"})

    sequence = SpaceLayout(Dict(items=spaces.Sequence(Discrete(3))), max_length=2)
    write = sequence.writer(sequence.memory())
    for function in (sequence.check, write):
        message = refusal(function, {"items": (0, 1, 2)})
        assert message.startswith('observation["items"]: expected a Sequence of at most 2 values, got 3; pass max_length={')
    assert refusal(sequence.check, {"items": (0, 5)}) == 'observation["items"][1]: expected an integer from 0 to 2, got 5.'
    assert "expected a tuple of at most 2 values, got int" in refusal(sequence.check, {"items": 1})


def test_graphs_that_do_not_fit():
    layout = SpaceLayout(spaces.Graph(Box(0, 1, (2,)), Discrete(3)), "graph", max_nodes=2, max_edges=2)
    write = layout.writer(layout.memory())

    def graph(num_nodes: int, edges, links) -> spaces.GraphInstance:
        return spaces.GraphInstance(np.zeros((num_nodes, 2), np.float32), edges, links)

    for function in (layout.check, write):
        assert "expected a Graph of at most 2 nodes, got 3; pass max_nodes={" in refusal(function, graph(3, None, None))
        three = graph(2, np.zeros(3, np.int64), np.zeros((3, 2), np.int32))
        assert "expected a Graph of at most 2 edges, got 3; pass max_edges={" in refusal(function, three)
        uneven = graph(2, np.zeros(1, np.int64), np.zeros((2, 2), np.int32))
        assert refusal(function, uneven) == "graph: expected as many edges as edge_links, got 1 and 2."
    strange = graph(2, np.zeros(1, np.int64), np.array([[0, 2]]))
    assert refusal(layout.check, strange) == "graph.edge_links: expected nodes from 0 to 1, got 2."
    short_links = graph(2, np.zeros(1, np.int64), np.array([[0]]))
    message = "graph.edge_links: expected integers of shape (1, 2), got int64 of shape (1, 1)."
    assert refusal(layout.check, short_links) == message
    wrong_edge = graph(2, np.array([7]), np.array([[0, 1]]))
    assert refusal(layout.check, wrong_edge) == "graph.edges[0]: expected an integer from 0 to 2, got 7."
    assert "expected a GraphInstance, got int 3" in refusal(layout.check, 3)
    links_only = SpaceLayout(spaces.Graph(Discrete(5), None), max_nodes=3, max_edges=2)
    value = spaces.GraphInstance(np.array([4, 2, 0]), None, np.array([[0, 1], [2, 0]], np.int32))
    assert same(links_only.reader(written(links_only, value))(), value)
    assert "expected None, as the Graph has no edge_space" in refusal(links_only.check, value._replace(edges=np.zeros(2)))
    assert "edges" not in links_only.unflatten(links_only.flat(links_only.memory()))


def test_one_of_that_does_not_fit():
    layout = SpaceLayout(spaces.OneOf((Discrete(2), Box(0, 1, (2,)))), "choice")
    assert refusal(layout.check, (2, 0)) == "choice: expected a choice from 0 to 1, got 2."
    assert refusal(layout.check, 1) == "choice: expected a tuple (choice, value), got int 1."
    assert refusal(layout.check, (0, 2)) == "choice.options[0]: expected an integer from 0 to 1, got 2."


def test_stacked_sequences_and_their_checks():
    space = spaces.Sequence(Dict(a=Box(0, 1, (2,)), b=Discrete(5)), stack=True)
    layout = SpaceLayout(space, "s", max_length=4)
    value = {"a": np.ones((3, 2), np.float32), "b": np.array([1, 2, 3])}
    layout.check(value)
    assert same(layout.reader(written(layout, value))(), value)
    message = 's["b"]: expected 3 values, as in the leaves before it, got 2.'
    assert refusal(layout.check, {"a": value["a"], "b": np.array([1, 2])}) == message
    assert refusal(layout.check, {"a": value["a"], "b": np.array([1, 2, 7])}).startswith('s[2]["b"]: expected an integer')


def test_batches_that_do_not_fit():
    layout = SpaceLayout(Dict(a=Box(0, 1, (3,)), t=spaces.Text(4)))
    memory = layout.memory(2)
    message = 'observation["a"]: expected a batch of shape (2, 3), got (2, 1).'
    assert refusal(layout.write_batch, {"a": np.ones((2, 1)), "t": ("a", "b")}, memory) == message
    message = 'observation["t"]: expected 2 values, as in the leaves before it, got 1.'
    assert refusal(layout.write_batch, {"a": np.ones((2, 3)), "t": ("a",)}, memory) == message
    assert 'missing "t"' in refusal(layout.write_batch, {"a": np.ones((2, 3))}, memory)
    assert 'observation["a"]: expected a batch of values, got int 3.' in refusal(layout.write_batch, {"a": 3, "t": "a"}, memory)
    nested = layout.memory(2, 1)
    layout.write_batch({"a": np.ones((2, 1, 3)), "t": (("ab",), ("c",))}, nested)
    assert layout.batch(nested)["t"] == (("ab",), ("c",))
