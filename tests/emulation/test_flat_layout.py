"""SpaceLayout: lossless on random nested spaces, aligned, zero-copy, and with messages that name the leaf."""

from __future__ import annotations

import pickle
import re
import sys

import cloudpickle
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.spaces.utils import flatten
from gymnasium.vector.utils import batch_space, concatenate, create_empty_array
from random_spaces import DTYPES, LIMITS, random_space, same, sample

from hurtle.emulation.flat_layout import SpaceLayout
from hurtle.errors import EmulationError

Dict, Tuple, Box, Discrete = spaces.Dict, spaces.Tuple, spaces.Box, spaces.Discrete
NESTED = Dict(
    inventory=Dict(items=Box(0, 9, (4,), np.int64), gold=Discrete(100, start=1)),
    position=Box(-1, 1, (2,)),
    pair=Tuple((spaces.MultiBinary(3), spaces.MultiDiscrete([3, 4], start=[1, -1]))),
)


def layout_of(space: spaces.Space) -> SpaceLayout:
    return SpaceLayout(space, **LIMITS)


def written(layout: SpaceLayout, value) -> np.ndarray:
    memory = layout.memory()
    layout.writer(memory)(value)
    return memory


def filled(layout: SpaceLayout, values: list) -> np.ndarray:
    memory = layout.memory(len(values))
    for row, value in zip(memory, values, strict=True):
        layout.writer(row)(value)
    return memory


def torch_leaves(tree):
    if isinstance(tree, dict):
        return [leaf for child in tree.values() for leaf in torch_leaves(child)]
    return [leaf for child in tree for leaf in torch_leaves(child)] if isinstance(tree, tuple) else [tree]


def refusal(function, *args, **kwargs) -> str:
    with pytest.raises(EmulationError) as caught:
        function(*args, **kwargs)
    return str(caught.value)


@pytest.mark.parametrize("block", range(8))
def test_random_spaces_round_trip(block: int):
    for seed in range(block * 50, block * 50 + 50):
        space = random_space(np.random.default_rng(seed), depth=4)
        layout = layout_of(space)
        memory = layout.memory()
        write, read = layout.writer(memory), layout.reader(memory)
        for _ in range(3):
            value = sample(space)
            layout.check(value)
            write(value)
            assert same(read(), value), (seed, space)
            assert layout.flat_space.contains(layout.flat(memory)), (seed, space)
            fresh = written(layout, value)  # nothing of the value before is left in the padding
            assert (memory == fresh).all(), (seed, space)


@pytest.mark.parametrize("block", range(4))
def test_random_batches_are_those_of_gymnasium(block: int):
    for seed in range(1000 + block * 25, 1025 + block * 25):
        space = random_space(np.random.default_rng(seed), depth=3)
        layout = layout_of(space)
        values = [sample(space) for _ in range(3)]
        memory = filled(layout, values)
        expected = concatenate(space, values, create_empty_array(space, 3))
        assert same(layout.batch(memory), expected), (seed, space)
        again = layout.memory(3)
        layout.write_batch(layout.batch(memory), again)
        assert (again == memory).all(), (seed, space)
        if layout.is_fixed:
            assert batch_space(space, 3).contains(layout.batch(memory)), (seed, space)


@pytest.mark.parametrize("block", range(4))
def test_torch_unflatten_equals_numpy_and_copies_nothing(block: int):
    for seed in range(2000 + block * 25, 2025 + block * 25):
        space = random_space(np.random.default_rng(seed), depth=3)
        layout = layout_of(space)
        memory = filled(layout, [sample(space) for _ in range(6)])
        for lead in [(6,), (2, 3), (1, 3, 2)]:
            flat = layout.flat(memory.reshape(*lead, layout.nbytes))
            tensor = torch.from_numpy(flat)
            arrays, tensors = torch_leaves(layout.unflatten(flat)), torch_leaves(layout.unflatten(tensor))
            assert len(arrays) == len(tensors) == len(layout.leaves)
            begin, end = tensor.data_ptr(), tensor.data_ptr() + memory.nbytes
            for array, part, leaf in zip(arrays, tensors, layout.leaves, strict=True):
                assert array.shape == tuple(part.shape) == (*lead, *leaf.shape)
                assert str(part.dtype) == f"torch.{array.dtype}"
                assert np.array_equal(part.numpy(), array)
                assert array.size == 0 or np.shares_memory(array, memory)
                assert part.numel() == 0 or begin <= part.data_ptr() < end
                assert part.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()


def test_unflatten_shows_structure_and_values():
    space = Dict(
        graph=spaces.Graph(Box(0, 1, (2,)), Discrete(3)),
        one=spaces.OneOf((Discrete(3), Box(-1, 1, (2,)))),
        sequence=spaces.Sequence(Dict(a=Box(0, 1, (2,)), b=Discrete(5))),
        text=spaces.Text(6, charset="cab"),
    )
    layout = SpaceLayout(space, max_length=3, max_nodes=4, max_edges=5)
    value = {
        "graph": spaces.GraphInstance(np.full((2, 2), 0.5, np.float32), np.array([2]), np.array([[0, 1]], np.int32)),
        "one": (1, np.array([0.25, -1], np.float32)),
        "sequence": ({"a": np.array([1, 0], np.float32), "b": 4},),
        "text": "bac",
    }
    tree = layout.unflatten(layout.flat(written(layout, value)))
    assert tree["text"]["codes"].tolist() == [2, 1, 3, 0, 0, 0]  # 1 + place in the sorted charset
    assert tree["text"]["length"] == 3
    assert tree["sequence"]["values"]["a"].tolist() == [[1, 0], [0, 0], [0, 0]]
    assert tree["sequence"]["values"]["b"].tolist() == [4, 0, 0]
    assert tree["sequence"]["length"] == 1
    assert tree["graph"]["nodes"].tolist() == [[0.5, 0.5]] * 2 + [[0, 0]] * 2
    assert tree["graph"]["edges"].tolist() == [2, 0, 0, 0, 0]
    assert tree["graph"]["edge_links"].tolist() == [[0, 1]] + [[0, 0]] * 4
    assert (tree["graph"]["num_nodes"], tree["graph"]["num_edges"]) == (2, 1)
    assert tree["one"]["choice"] == 1
    assert tree["one"]["options"][0] == 0
    assert tree["one"]["options"][1].tolist() == [0.25, -1]


def test_unflatten_stays_on_the_device():
    layout = SpaceLayout(NESTED)
    tree = layout.unflatten(torch.zeros(5, layout.nbytes, dtype=torch.uint8, device="meta"))
    assert [part.device.type for part in torch_leaves(tree)] == ["meta"] * 5
    assert tree["inventory"]["items"].shape == (5, 4)


def test_unflatten_is_traceable_by_torch_compile():
    layout = SpaceLayout(NESTED)
    memory = filled(layout, [sample(NESTED) for _ in range(4)])

    def network(flat: torch.Tensor) -> torch.Tensor:
        tree = layout.unflatten(flat)
        return tree["position"].sum(-1) + tree["inventory"]["gold"].float() + tree["pair"][1][..., 1]

    flat = torch.from_numpy(layout.flat(memory))
    compiled = torch.compile(network, backend="eager", fullgraph=True)
    assert torch.equal(compiled(flat), network(flat))


def test_writes_show_in_all_views():
    layout = SpaceLayout(NESTED)
    memory = layout.memory(2)
    tree, batch = layout.unflatten(layout.flat(memory)), layout.batch(memory)
    value = sample(NESTED)
    layout.writer(memory[1])(value)
    for view in (tree, batch):
        assert np.array_equal(view["position"][1], value["position"])
        assert view["inventory"]["gold"][1] == value["inventory"]["gold"]
        assert np.array_equal(view["pair"][0][1], value["pair"][0])
        assert np.array_equal(view["pair"][1][1], value["pair"][1])
    records = memory.view(layout.dtype)[:, 0]
    assert np.array_equal(records["inventory"]["items"][1], value["inventory"]["items"])
    assert np.array_equal(records["pair"]["0"][1], value["pair"][0])
    assert np.shares_memory(records, memory)


def test_what_is_read_does_not_change_with_the_memory():
    space = Dict(box=Box(0, 1, (2,)), sequence=spaces.Sequence(Box(0, 1, (2,))), zero=Box(0, 1, ()))
    layout = layout_of(space)
    value = {"box": np.ones(2, np.float32), "sequence": (np.ones(2, np.float32),), "zero": np.array(1, np.float32)}
    memory = written(layout, value)
    got, batch = layout.reader(memory)(), layout.batch(memory[None])
    memory[:] = 0
    assert same(got, value)
    assert batch["sequence"] == ((pytest.approx(np.ones(2)),),)
    assert not batch["box"].any()  # a view


def test_every_leaf_is_aligned():
    small = [Box(0, 255, (3,), np.uint8), Box(-1, 1, (), np.float64), Box(0, 9, (1,), np.int16), Box(0, 1, (5,), np.bool_)]
    large = [Discrete(4), Box(0, 1, (3,), np.float16), Box(0, 1, (1,), np.float32), Box(0, 9, (2,), np.uint64)]
    space = Tuple(small + large)
    layout = SpaceLayout(space)
    assert [leaf.offset for leaf in layout.leaves] == [0, 8, 16, 18, 24, 32, 40, 48]
    assert layout.nbytes == 64
    assert layout.dtype.itemsize == 64
    assert layout.memory(3).ctypes.data % 8 == 0
    for order in range(20):
        mixed = [space.spaces[i] for i in np.random.default_rng(order).permutation(8)]
        layout = SpaceLayout(Tuple(mixed))
        assert all(leaf.offset % leaf.dtype.itemsize == 0 for leaf in layout.leaves)
        assert layout.nbytes % 8 == 0
        value = sample(Tuple(mixed))
        assert same(layout.reader(written(layout, value))(), value)


@pytest.mark.parametrize("dtype", DTYPES)
def test_boxes_of_any_dtype(dtype: str):
    box = Box(0, 1, (2, 3), np.dtype(dtype).type)
    plain = SpaceLayout(box)
    assert plain.flat_space == box
    assert plain.is_plain
    value = sample(box)
    memory = written(plain, value)
    assert np.array_equal(plain.flat(memory), value)
    assert plain.unflatten(plain.flat(memory)).dtype == value.dtype
    mixed = SpaceLayout(Dict(a=Box(0, 1, (1,), np.int8), b=box, c=Box(0, 1, (1,), np.int16)))
    memory = written(mixed, {"a": np.ones(1, np.int8), "b": value, "c": np.ones(1, np.int16)})
    tensor = mixed.unflatten(torch.from_numpy(mixed.flat(memory)))["b"]
    assert str(tensor.dtype) == f"torch.{dtype}"
    assert np.array_equal(tensor.numpy(), value)


def test_dtypes_that_torch_lacks():
    layout = SpaceLayout(Tuple((Box(-1, 1, (1,), np.longdouble), Discrete(2))))
    flat = layout.flat(written(layout, (np.array([0.5], np.longdouble), 1)))
    assert layout.unflatten(flat)[0] == 0.5
    assert "torch has no" in refusal(layout.unflatten, torch.from_numpy(flat)) or np.longdouble is np.float64


def test_flat_spaces_of_one_leaf():
    image = Box(0, 255, (8, 8, 3), np.uint8)
    assert SpaceLayout(image).flat_space == image
    assert SpaceLayout(Discrete(3, start=-1)).flat_space == Box(-1, 1, (1,), np.int64)
    assert SpaceLayout(spaces.MultiBinary([2, 3])).flat_space == Box(0, 1, (2, 3), np.int8)
    multi = spaces.MultiDiscrete([[2, 3], [4, 5]], start=[[0, 1], [2, 3]])
    assert SpaceLayout(multi).flat_space == Box(multi.start, multi.start + multi.nvec - 1, (2, 2), np.int64)
    layout = SpaceLayout(Discrete(3, start=-1))
    flat = layout.flat(filled(layout, [-1, 1, 0]))
    assert flat.tolist() == [[-1], [1], [0]]
    assert layout.unflatten(flat).tolist() == [-1, 1, 0]


def test_flat_space_of_leaves_that_share_a_dtype_has_their_bounds():
    space = Dict(a=Box(-2, 3, (2, 2)), b=Tuple((Box(0, np.inf, ()), Box(np.array([5, 6], np.float32), np.float32(7)))))
    layout = SpaceLayout(space)
    low, high = layout.flat_space.low, layout.flat_space.high
    assert layout.flat_space.dtype == np.float32
    assert low.tolist() == [-2, -2, -2, -2, 0, 5, 6]
    assert high.tolist() == [3, 3, 3, 3, np.inf, 7, 7]
    assert layout.nbytes == 28
    assert not layout.is_plain
    assert layout.unflatten(torch.zeros(3, 7, dtype=torch.bfloat16))["a"].shape == (3, 2, 2)  # a cast flat vector is fine


def test_bounds_of_padding_allow_zero():
    layout = SpaceLayout(spaces.Sequence(Box(2, 5, (1,), np.int32)), max_length=3)
    assert layout.flat_space.low.tolist() == [0, 0, 0, 0]
    assert layout.flat_space.high.tolist() == [5, 5, 5, 3]


def test_mixed_dtypes_are_bytes():
    layout = SpaceLayout(NESTED)
    assert layout.flat_space == Box(0, 255, (layout.nbytes,), np.uint8)
    message = refusal(layout.unflatten, torch.zeros(2, layout.nbytes))
    assert message == "observation: expected the flat bytes as uint8, got torch.float32; unflatten before you cast."
    assert "expected a flat array [..., 72], got (2, 7)" in refusal(layout.unflatten, np.zeros((2, 7), np.uint8))


def test_strings_of_custom_spaces():
    class Words(spaces.Space):
        def __init__(self):
            super().__init__(dtype=str)

    layout = SpaceLayout(Dict(w=Words(), n=Discrete(2)), max_length=3)  # a number is for Sequences only
    for word in ("", "go to the green box", "größer → ∞ \0 😀"):
        assert layout.reader(written(layout, {"w": word, "n": 1}))()["w"] == word
    write = layout.writer(layout.memory())
    assert refusal(write, {"w": None, "n": 1}) == 'observation["w"]: expected a str, got NoneType.'
    message = refusal(write, {"w": "x" * 257, "n": 1})
    assert message.startswith('observation["w"]: expected a string of at most 256 bytes, got 257; pass max_length={')
    short = SpaceLayout(Words(), max_length={"observation": 5})
    assert short.leaves[0].shape == (5,)


def test_minigrid_works_as_it_is():
    pytest.importorskip("minigrid", reason='needs minigrid: pip install "hurtle[minigrid]"')
    import gymnasium
    import minigrid  # noqa: F401

    env = gymnasium.make("MiniGrid-GoToDoor-5x5-v0")
    layout = SpaceLayout(env.observation_space)
    assert cloudpickle.loads(cloudpickle.dumps(layout)) == layout
    for seed in range(3):
        observation, _ = env.reset(seed=seed)
        layout.check(observation)
        got = layout.reader(written(layout, observation))()
        assert got["mission"] == observation["mission"]
        assert np.array_equal(got["image"], observation["image"])


def test_text_codes_do_not_depend_on_the_order_of_the_charset():
    one, two = (SpaceLayout(spaces.Text(5, charset=charset)) for charset in ("xyz", "zyx"))
    assert written(one, "zxy").tolist() == written(two, "zxy").tolist()
    emoji = SpaceLayout(spaces.Text(5, min_length=0, charset="a😀é"))
    assert emoji.reader(written(emoji, "é😀aa"))() == "é😀aa"
    assert emoji.reader(written(emoji, ""))() == ""


def test_layouts_pickle_and_compare():
    limits = {"max_length": 4, "max_nodes": 3, "max_edges": 3}
    space = Dict(a=spaces.Sequence(Discrete(3)), b=NESTED)
    layout = SpaceLayout(space, "obs", **limits)
    value = {"a": (1, 2), "b": sample(NESTED)}
    written(layout, value)  # the generated code exists now, and is left out of the pickle
    for dumps in (pickle.dumps, cloudpickle.dumps):
        copy = pickle.loads(dumps(layout))
        assert copy == layout
        assert hash(copy) == hash(layout)
        assert (written(copy, value) == written(layout, value)).all()
    assert layout != SpaceLayout(space, "obs", **{**limits, "max_length": 5})
    assert layout != SpaceLayout(space, "other", **limits)
    assert layout != "layout"
    assert re.fullmatch(r"SpaceLayout\(Dict.*'obs': 7 leaves, \d+ bytes\)", repr(layout))


def test_keys_of_any_kind_and_sizes_of_zero():
    space = Dict([((1, 2), Discrete(3)), (7, Box(0, 1, (0, 3))), ('a "b"', Box(0, 1, (2,))), ("", spaces.MultiBinary(1))])
    layout = SpaceLayout(space)
    value = sample(space)
    memory = written(layout, value)
    assert same(layout.reader(memory)(), value)
    assert layout.unflatten(torch.from_numpy(layout.flat(memory)))[7].shape == (0, 3)
    assert [leaf.path for leaf in layout.leaves[:2]] == ["observation[(1, 2)]", "observation[7]"]
    assert memory.view(layout.dtype)["field_0"][0] == value[(1, 2)]
    empty = SpaceLayout(Box(0, 1, (0,)))
    assert empty.flat(empty.memory(2)).shape == (2, 0)


def calls_in(function):
    """Python and C functions that a function calls, itself included: its cost on any machine, roughly."""
    count = 0

    def note(frame, event, argument):
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


def test_the_writer_does_much_less_than_flatten():
    part = Dict(hp=Discrete(10), map=Box(0, 1, (4, 4)), position=Box(-1, 1, (3,)), team=Dict(id=Discrete(5), v=Box(0, 1, (2,))))
    space = Dict({f"unit_{i}": part for i in range(4)})
    value = space.sample()
    layout = SpaceLayout(space)
    write = layout.writer(layout.memory())
    assert len(layout.leaves) == 20
    assert 8 * calls_in(lambda: write(value)) < calls_in(lambda: flatten(space, value))
