"""ActionLayout: flat actions ⇄ structured ones, and refusals that name the leaves."""

from __future__ import annotations

import inspect
import pickle

import numpy as np
import pytest
from gymnasium import spaces
from random_spaces import same, sample

from hurtle.emulation.action_layout import ActionLayout
from hurtle.errors import EmulationError

Dict, Tuple, Box, Discrete, MultiDiscrete = spaces.Dict, spaces.Tuple, spaces.Box, spaces.Discrete, spaces.MultiDiscrete


def refusal(function, *args) -> str:
    with pytest.raises(EmulationError) as caught:
        function(*args)
    return str(caught.value)


def random_tree(rng: np.random.Generator, leaf, depth: int) -> spaces.Space:
    if depth == 0 or rng.random() < 0.3:
        return leaf(rng)
    children = [random_tree(rng, leaf, depth - 1) for _ in range(rng.integers(1, 4))]
    return Tuple(children) if rng.random() < 0.5 else Dict({f"key {i}": child for i, child in enumerate(children)})


def discrete_leaf(rng: np.random.Generator) -> spaces.Space:
    shape = tuple(int(n) for n in rng.integers(1, 4, size=rng.integers(1, 3)))
    dtype = rng.choice([np.int64, np.int32, np.int8])
    kind = rng.integers(3)
    if kind == 0:
        return Discrete(int(rng.integers(1, 9)), start=int(rng.integers(-3, 4)))
    if kind == 1:
        return MultiDiscrete(rng.integers(1, 6, shape), start=rng.integers(-3, 4, shape), dtype=dtype)
    return spaces.MultiBinary(shape)


def box_leaf(rng: np.random.Generator) -> spaces.Space:
    shape = tuple(int(n) for n in rng.integers(1, 4, size=rng.integers(3)))
    dtype = np.dtype(rng.choice(["float16", "float32", "float64", "int8", "int32", "uint8", "int64", "bool"]))
    return Box(0, 1 if dtype.kind == "b" else 7, shape, dtype.type)


@pytest.mark.parametrize("leaf", [discrete_leaf, box_leaf])
def test_random_trees_round_trip(leaf):
    for seed in range(200):
        space = random_tree(np.random.default_rng(seed), leaf, 3)
        space.seed(seed)
        layout = ActionLayout(space)
        layout.flat_space.seed(seed)
        action = space.sample()
        flat = layout.encode(action)
        assert layout.flat_space.contains(flat), (seed, space)
        decoded = layout.decode(flat)
        assert space.contains(decoded), (seed, space)
        assert same(layout.encode(decoded), flat), (seed, space)
        assert np.array_equal(np.concatenate(ravelled(decoded)), np.concatenate(ravelled(action))), (seed, space)
        drawn = sample(layout.flat_space)
        assert space.contains(layout.decode(drawn)), (seed, space)
        if layout.flat_space.dtype.kind == "i":  # where floats stand for integers, several decode to one action
            assert same(layout.encode(layout.decode(drawn)), drawn), (seed, space)


def ravelled(value) -> list[np.ndarray]:
    if isinstance(value, dict | tuple):
        return [part for child in (value.values() if isinstance(value, dict) else value) for part in ravelled(child)]
    return [np.ravel(value)]


@pytest.mark.parametrize(
    ("space", "flat_space"),
    [
        (Discrete(4, start=2), Discrete(4)),
        (Dict(only=Discrete(4, start=2)), Discrete(4)),
        (Tuple((Dict(only=Discrete(3)),)), Discrete(3)),
        (MultiDiscrete([2, 3], start=[1, 1]), MultiDiscrete([2, 3])),
        (MultiDiscrete([[2, 3], [4, 5]]), MultiDiscrete([2, 3, 4, 5])),
        (MultiDiscrete([7]), MultiDiscrete([7])),
        (spaces.MultiBinary([2, 2]), MultiDiscrete([2, 2, 2, 2])),
        (Dict({"b": Discrete(5), "a": spaces.MultiBinary(2), "c": MultiDiscrete([3])}), MultiDiscrete([2, 2, 5, 3])),
        (Dict([("b", Discrete(5)), ("a", spaces.MultiBinary(2))]), MultiDiscrete([5, 2, 2])),  # the space's own order
        (Box(-1, 1, (2, 3), np.float64), Box(-1, 1, (2, 3), np.float64)),
        (Box(0, 9, (2,), np.int32), Box(0, 9, (2,), np.int32)),
        (
            Tuple((Box(-1, 1, (2,)), Box(0, 5, (), np.float64))),
            Box(np.array([-1.0, -1, 0]), np.array([1.0, 1, 5]), (3,), np.float64),
        ),
        (Tuple((Box(0, 9, (1,), np.int8), Box(0, 5, (1,), np.uint8))), Box(0, np.array([9, 5]), (2,), np.int16)),
    ],
)
def test_flat_spaces(space: spaces.Space, flat_space: spaces.Space):
    layout = ActionLayout(space)
    assert layout.flat_space == flat_space
    assert layout.flat_space.dtype == flat_space.dtype


def test_decoded_actions_are_as_the_space_holds_them():
    space = Dict(
        jump=Discrete(2),
        look=MultiDiscrete([[3, 3]], start=[[-1, 4]], dtype=np.int32),
        move=Discrete(3, start=-1),
        pair=Tuple((spaces.MultiBinary(2), Discrete(5, start=10))),
    )
    expected = {
        "jump": np.int64(1),
        "look": np.array([[1, 5]], np.int32),
        "move": np.int64(-1),
        "pair": (np.array([0, 1], np.int8), np.int64(14)),
    }
    layout = ActionLayout(space)
    for flat in ([1, 2, 1, 0, 0, 1, 4], np.array([1, 2, 1, 0, 0, 1, 4]), np.array([1, 2, 1, 0, 0, 1, 4], np.int32)):
        assert same(layout.decode(flat), expected)
    assert same(layout.encode(expected), np.array([1, 2, 1, 0, 0, 1, 4]))


def test_choices_of_another_dtype():
    if "dtype" not in inspect.signature(Discrete).parameters:
        pytest.skip("this Gymnasium has no Discrete with a dtype")
    move = Discrete(3, start=-1, dtype=np.int16)
    assert same(ActionLayout(move).decode(0), np.int16(-1))
    layout = ActionLayout(Tuple((move, Discrete(2))))
    assert same(layout.decode([2, 1]), (np.int16(1), np.int64(1)))
    assert same(layout.encode((np.int16(1), 1)), np.array([2, 1]))


def test_single_choices():
    layout = ActionLayout(Discrete(4, start=2))
    for flat in (3, np.int64(3), np.int32(3), np.array(3)):
        assert same(layout.decode(flat), np.int64(5))
    assert refusal(layout.decode, np.array([3])) == ("action: expected a flat action (one integer), got int64 of shape (1,).")
    assert refusal(layout.decode, 1.5) == "action: expected a flat action (one integer), got float 1.5."
    assert same(layout.encode(5), np.int64(3))
    assert same(ActionLayout(Dict(go=Discrete(4))).decode(3), {"go": np.int64(3)})
    assert same(ActionLayout(Dict(go=Discrete(4, start=1))).encode({"go": 4}), np.int64(3))


def test_integers_among_floats_are_rounded_and_clipped():
    space = Tuple((Box(-1, 1, (1,)), Box(-2, 5, (4,), np.int16), Box(0, 1, (2,), np.bool_)))
    layout = ActionLayout(space)
    assert layout.flat_space.dtype == np.float32
    decoded = layout.decode([0.25, -7, 2.4, 2.6, 99, 0.4, 0.6])
    expected = (np.array([0.25], np.float32), np.array([-2, 2, 3, 5], np.int16), np.array([False, True]))
    assert same(decoded, expected)
    widest = Tuple((Box(-np.inf, np.inf, (1,), np.int64), Box(0, 1, (1,))))
    top = ActionLayout(widest).decode([1e30, 0])[0][0]
    assert 2**62 < top <= 2**63 - 1  # the float above 2**63 - 1 would wrap around
    assert ActionLayout(widest).decode([-1e30, 0])[0][0] == -(2**63)


def test_decoded_actions_do_not_change_with_the_flat_one():
    for space in (Box(-1, 1, (2,)), Dict(a=Box(-1, 1, (2, 1))), MultiDiscrete([3, 3]), Dict(a=MultiDiscrete([3, 3]))):
        layout = ActionLayout(space)
        flat = layout.flat_space.sample()
        decoded = layout.decode(flat)
        assert not any(np.shares_memory(part, flat) for part in ravelled(decoded))


def test_flat_actions_of_another_shape_are_refused():
    layout = ActionLayout(Dict(a=Discrete(2), b=Discrete(3)), "act")
    assert refusal(layout.decode, [1]) == "act: expected a flat action of shape (2,), got (1,)."
    assert refusal(ActionLayout(Box(0, 1, (3,))).decode, 0.5) == "action: expected a flat action of shape (3,), got ()."


def test_actions_outside_of_the_space_are_not_encoded():
    layout = ActionLayout(Dict(jump=Discrete(2), move=Discrete(3)))
    assert refusal(layout.encode, {"jump": 2, "move": 0}) == 'action["jump"]: expected an integer from 0 to 1, got 2.'
    message = 'action: missing "move" and unknown "mve" among its keys. Did you mean move?'
    assert refusal(layout.encode, {"jump": 1, "mve": 0}) == message


def test_mixed_kinds_are_refused_by_name():
    space = Dict(aim=Box(-1, 1, (2,)), fire=spaces.MultiBinary(2), walk=Tuple((Discrete(4), Box(0, 1, (1,)))))
    assert refusal(ActionLayout, space) == (
        'action: mixes discrete leaves (action["fire"]: MultiBinary(2), action["walk"][0]: Discrete(4)) with continuous ones '
        '(action["aim"]: Box(-1.0, 1.0, (2,), float32), action["walk"][1]: Box(0.0, 1.0, (1,), float32)); a flat action has '
        "one kind. Switch off action emulation with hurtle.emulate(env, actions=False), use hurtle.make_vec without "
        "emulation (it takes structured actions), or restrict the env to one kind with a wrapper."
    )


@pytest.mark.parametrize(
    "other",
    [spaces.Text(3), spaces.Sequence(Discrete(2)), spaces.Graph(Discrete(2), None), spaces.OneOf((Discrete(2),))],
)
def test_other_spaces_are_refused_by_name(other: spaces.Space):
    message = refusal(ActionLayout, Dict(go=Discrete(2), say=Tuple((other,))))
    assert message.startswith(f'action["say"][0]: {other}: cannot be part of a flat action')
    assert "actions=False" in message


def test_empty_containers_are_refused():
    assert refusal(ActionLayout, Dict(a=Tuple(()))).startswith('action["a"]: an empty Tuple')


def test_layouts_pickle_and_compare():
    space = Dict([((1, 2), Discrete(3, start=1)), ("b", spaces.MultiBinary(2))])
    layout = ActionLayout(space)
    copy = pickle.loads(pickle.dumps(layout))
    assert copy == layout
    assert hash(copy) == hash(layout)
    assert layout != ActionLayout(space, "other")
    assert same(copy.decode([2, 0, 1]), {(1, 2): np.int64(3), "b": np.array([0, 1], np.int8)})
    assert "MultiDiscrete([3 2 2])" in repr(layout)
