"""Spaces as JSON and back."""

import json

import numpy as np
import pytest
from gymnasium import Space, spaces
from random_spaces import LIMITS, random_space

from hurtle.emulation.flat_layout import SpaceLayout
from hurtle.errors import HurtleError
from hurtle.policies.saved_spaces import AnyString, layout_from_dict, layout_to_dict, space_from_dict, space_to_dict


def through_json(saved):
    return json.loads(json.dumps(saved, allow_nan=False))


@pytest.mark.parametrize("seed", range(40))
def test_random_spaces_come_back_equal(seed):
    space = random_space(np.random.default_rng(seed), depth=4)
    again = space_from_dict(through_json(space_to_dict(space)))
    assert again == space
    layout = SpaceLayout(space, **LIMITS)
    restored = layout_from_dict(through_json(layout_to_dict(layout)))
    assert restored == layout
    assert [(leaf.path, leaf.offset) for leaf in restored.leaves] == [(leaf.path, leaf.offset) for leaf in layout.leaves]


@pytest.mark.parametrize(
    "space",
    [
        spaces.Box(np.array([-np.inf, 0.1, -3.0], np.float32), np.array([np.inf, 0.2, np.inf], np.float32)),
        spaces.Box(np.array([[0.1, 1 / 3]]), np.array([[0.7, 1e300]]), dtype=np.float64),
        spaces.Box(0, 2**64 - 1, (2,), np.uint64),
        spaces.Box(-(2**63), 2**63 - 1, (), np.int64),
        spaces.Box(0, 1, (2, 2), np.bool_),
        spaces.MultiBinary(3),
        spaces.MultiBinary((2, 3)),
        spaces.MultiDiscrete([[2, 3]], start=[[-1, 4]], dtype=np.int8),
        spaces.Dict([("b", spaces.Discrete(2)), ("a", spaces.Discrete(3)), (7, spaces.Discrete(4))]),
    ],
    ids=str,
)
def test_odd_ones_come_back_equal(space):
    again = space_from_dict(through_json(space_to_dict(space)))
    assert again == space
    assert again.dtype == space.dtype
    if isinstance(space, spaces.Dict):
        assert list(again.spaces) == list(space.spaces)  # order matters for byte records


def test_an_image_is_short():
    saved = space_to_dict(spaces.Box(0, 255, (84, 84, 4), np.uint8))
    assert saved == {"type": "Box", "low": 0, "high": 255, "shape": [84, 84, 4], "dtype": "uint8"}


class Mission(Space):
    """A custom space of strings, like MiniGrid's."""

    def __init__(self):
        super().__init__(dtype=str)

    def sample(self, mask=None, probability=None):
        return "go"

    def contains(self, x):
        return isinstance(x, str)


def test_custom_strings_keep_their_layout():
    layout = SpaceLayout(spaces.Dict(mission=Mission(), x=spaces.Discrete(3)), max_length={'observation["mission"]': 9})
    restored = layout_from_dict(through_json(layout_to_dict(layout)))
    assert isinstance(restored.space["mission"], AnyString)
    assert restored.nbytes == layout.nbytes
    memory = layout.memory()
    layout.writer(memory)({"mission": "fetch", "x": 1})
    assert restored.reader(memory)() == {"mission": "fetch", "x": 1}


def test_what_cannot_be_saved_is_named():
    class Odd(Space):
        pass

    with pytest.raises(HurtleError, match=r"Cannot save the space .*Odd is not one of Gymnasium's"):
        space_to_dict(Odd())
    with pytest.raises(HurtleError, match=r"key \(1, 2\): keys must be str or int"):
        space_to_dict(spaces.Dict({(1, 2): spaces.Discrete(2)}))
    with pytest.raises(HurtleError, match=r"Not a saved space: .* got type 'Bax'"):
        space_from_dict({"type": "Bax"})
