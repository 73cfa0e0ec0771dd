"""Cards that contradict themselves, or speak of more than memory holds, are refused before anything is made of them."""

import json
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
from export_helpers import OBSERVATIONS
from file_helpers import assert_refused, onnx_with, pt2_members, pt2_with, set_to
from gymnasium import spaces

from hurtle.deploy import card as cards
from hurtle.deploy.card import MAX_NUMBERS, Card
from hurtle.deploy.exported import ExportedPolicy
from hurtle.deploy.policy_file import read_policy_file
from hurtle.deploy.pt2_file import MEMBER
from hurtle.emulation.flat_layout import SpaceLayout
from hurtle.errors import HurtleError, PolicyFileError
from hurtle.policies.saved_spaces import layout_to_dict, space_to_dict

BAD_CARDS = {
    "another format": set_to("format", 2),
    "no format": lambda card: card.pop("format"),
    "an unknown entry": set_to("colour", "red"),
    "no env": lambda card: card.pop("env"),
    "no inputs": lambda card: card.pop("inputs"),
    "an env that is a number": set_to("env", 3),
    "an env that is a list": set_to("env", ["cartpole"]),
    "steps as text": set_to("steps", "100"),
    "steps as a bool": set_to("steps", True),
    "a flag as text": set_to("deterministic", "yes"),
    "parameters as a list": set_to("env_parameters", []),
    "a return as text": set_to("mean_return", "high"),
    "an unknown distribution": set_to("distribution", "cauchy"),
    "another distribution": set_to("distribution", "beta"),
    "inputs as text": set_to("inputs", "obs"),
    "inputs as null": set_to("inputs", None),
    "no observation": set_to("inputs", []),
    "a tensor without a name": set_to("inputs", 0, "name", None),
    "another name": set_to("inputs", 0, "name", "observation"),
    "another output": set_to("outputs", 1, "name", "mean"),
    "an output that is there twice": set_to("outputs", 1, "name", "value"),
    "an unknown dtype": set_to("inputs", 0, "dtype", "float33"),
    "another dtype": set_to("outputs", 1, "dtype", "float64"),
    "a negative shape": set_to("inputs", 0, "shape", [-5]),
    "a shape as text": set_to("inputs", 0, "shape", "five"),
    "another shape": set_to("inputs", 0, "shape", [6]),
    "another shape of the output": set_to("outputs", 1, "shape", [9]),
    "a mask that no input is": set_to("masked", True),
    "a memory that never comes out": lambda card: card["inputs"].append(
        {"name": "state_in_0", "dtype": "float32", "shape": [8]}
    ),
    "an unknown space": set_to("observation_space", "type", "Sphere"),
    "a space as text": set_to("observation_space", "Box"),
    "a space of negative shape": set_to("observation_space", "shape", [-1]),
    "a space of another shape": set_to("observation_space", "shape", [4]),
    "a space larger than memory": set_to("observation_space", "shape", [1 << 50]),
    "no actions": set_to("action_space", "n", 0),
    "fewer actions": set_to("action_space", "n", 3),
    "actions as text": set_to("action_space", "n", "four"),
    "a structure without entries": set_to("structure", {}),
    "a structure as text": set_to("structure", "Dict"),
}


@pytest.mark.parametrize("change", [pytest.param(change, id=name) for name, change in BAD_CARDS.items()])
def test_cards_that_are_wrong(good, put, change):
    assert_refused(put(onnx_with(good[".onnx"], change), ".onnx"))


@pytest.mark.parametrize("change", [pytest.param(change, id=name) for name, change in list(BAD_CARDS.items())[:12]])
def test_cards_of_pt2_files_that_are_wrong(good, put, change):
    assert_refused(put(pt2_with(good[".pt2"], change_card=change), ".pt2"))


@pytest.fixture
def written(good):
    """A good card as JSON has it."""
    return json.loads(pt2_members(good[".pt2"])[f"extra/{MEMBER}"])


@pytest.mark.parametrize("text", ["", "null", "[]", "3", "{", '{"format": 1}', "[" * 100_000, '{"format": NaN}'])
def test_cards_that_are_no_cards(text):
    with pytest.raises(PolicyFileError):
        Card.from_json(text)


def test_a_card_that_is_too_long(written, monkeypatch):
    text = json.dumps(written)
    assert Card.from_json(text).steps == written["steps"]
    monkeypatch.setattr(cards, "MAX_CARD", len(text) - 1)
    with pytest.raises(PolicyFileError, match="too long"):
        Card.from_json(text)


@pytest.mark.parametrize("error", [MemoryError, ImportError])
def test_errors_that_are_not_the_cards_are_not_called_its_own(written, monkeypatch, error):
    def fail(saved):
        raise error

    monkeypatch.setattr(cards, "space_from_dict", fail)
    with pytest.raises(error):
        Card.from_json(json.dumps(written))


def test_parameters_that_json_has_not(written):
    card = Card.from_json(json.dumps(written))
    for value in (float("nan"), np.float32(1.0), {1}):
        with pytest.raises(HurtleError, match=r"env_parameters .* cannot be written"):
            replace(card, env_parameters={"gravity": value}).to_json()


# Sizes.

BOX = {"type": "Box", "low": 0.0, "high": 1.0, "shape": [1 << 10], "dtype": "float64"}
HALF = {**BOX, "shape": [MAX_NUMBERS // 2]}


def structure(space, **limits):
    """A structured observation, and an action that is as it was."""
    limits = {"max_length": None, "max_nodes": None, "max_edges": None, **limits}
    return set_to("structure", {"observation": {"space": space, "name": "observation", **limits}, "action": BOX})


def triple(space):
    return {"type": "Dict", "spaces": [["a", space], ["b", space], ["c", space]]}


def sequence(space):
    return {"type": "Sequence", "space": space, "stack": False}


TOO_LARGE = {
    "three halves": structure(triple(HALF)),
    "three halves in a tuple": structure({"type": "Tuple", "spaces": [HALF] * 3}),
    "three halves to choose from": structure({"type": "OneOf", "spaces": [HALF] * 3}),
    "three halves as an action": lambda card: (structure(BOX)(card), set_to("structure", "action", triple(HALF))(card)),
    "a long sequence": structure(sequence(BOX), max_length=1 << 18),
    "a sequence of sequences": structure(sequence(sequence(BOX)), max_length=1 << 8),
    "a sequence with a maximum of its own": structure(sequence(BOX), max_length={"observation": 2**60}),
    "a sequence without a maximum": structure(sequence(BOX)),
    "a sequence of a negative length": structure(sequence(BOX), max_length=-1),
    "a sequence that is True long": structure(sequence(BOX), max_length=True),
    "many nodes": structure({"type": "Graph", "nodes": BOX, "edges": None}, max_nodes=1 << 18),
    "many edges": structure({"type": "Graph", "nodes": BOX, "edges": BOX}, max_nodes=1, max_edges=1 << 18),
    "many links": structure({"type": "Graph", "nodes": BOX, "edges": None}, max_nodes=1, max_edges=1 << 24),
    "a long text": structure({"type": "Text", "max_length": 1 << 40, "min_length": 0, "charset": "ab"}),
    "a long string": structure({"type": "AnyString"}, max_length={"observation": 1 << 40}),
    "many bits": structure({"type": "MultiBinary", "n": 1 << 40}),
    "planes of bits": structure({"type": "MultiBinary", "n": [1 << 20, 1 << 20]}),
    "a negative number of bits": structure({"type": "MultiBinary", "n": -8}),
    "a flat observation": set_to("observation_space", {**BOX, "shape": [1 << 13, 1 << 13]}),
    "dimensions without end": set_to("observation_space", {**BOX, "shape": [MAX_NUMBERS] * 100_000}),
    "a shape of True": set_to("observation_space", {**BOX, "shape": [True]}),
    "long numbers": set_to("observation_space", {**BOX, "dtype": "S100000000"}),
    "long actions": set_to("action_space", {"type": "Discrete", "n": 4, "start": 0, "dtype": "S100000000"}),
    "a wide memory": lambda card: [
        card[end].append({"name": f"state_{way}_0", "dtype": "float32", "shape": [MAX_NUMBERS]})
        for end, way in (("inputs", "in"), ("outputs", "out"))
    ],
    "a tensor of text": set_to("outputs", 0, "dtype", "U1000"),
}


@pytest.mark.parametrize("change", [pytest.param(change, id=name) for name, change in TOO_LARGE.items()])
def test_what_no_memory_holds_is_refused_before_it_is_made(written, change):
    change(written)
    text = json.dumps(written)
    tracemalloc.start()
    try:
        with pytest.raises(PolicyFileError, match=r"numbers|arrays"):
            Card.from_json(text)
        assert tracemalloc.get_traced_memory()[1] < 30e6
    finally:
        tracemalloc.stop()


LAYOUTS = {
    **{name: (space, {"max_length": 3}) for name, space in OBSERVATIONS.items()},
    "choices": (spaces.OneOf([spaces.Discrete(3), spaces.Box(0, 1, (2, 5)), spaces.Text(9)]), {}),
    "bits": (spaces.Tuple([spaces.MultiBinary([2, 3]), spaces.MultiDiscrete([[2, 3], [4, 5]])]), {}),
    "graph": (spaces.Graph(spaces.Box(0, 1, (3,)), spaces.Discrete(4)), {"max_nodes": 5, "max_edges": 7}),
    "graph without features": (spaces.Graph(spaces.Box(0, 1, (3,)), None), {"max_nodes": 5}),
    "nested": (
        spaces.Dict(
            a=spaces.Sequence(spaces.Tuple([spaces.Sequence(spaces.Box(0, 1, (2,)))])), b=spaces.Sequence(spaces.Text(4))
        ),
        {"max_length": {'observation["a"]': 4, 'observation["a"][*][0]': 6, 'observation["b"]': 2}},
    ),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_sizes_are_counted_as_they_are_laid_out(name):
    space, limits = LAYOUTS[name]
    layout = SpaceLayout(space, **limits)
    saved = json.loads(json.dumps(layout_to_dict(layout)))
    assert cards._numbers(saved["space"], saved, "observation") == sum(leaf.size for leaf in layout.leaves)
    assert json.loads(json.dumps(space_to_dict(space))) == saved["space"]


def test_spaces_and_layouts_are_made_once(good, put, monkeypatch):
    made, make = [], cards.space_from_dict
    monkeypatch.setattr(cards, "space_from_dict", lambda saved: made.append(saved) or make(saved))
    policy = ExportedPolicy(read_policy_file(put(good[".onnx"], ".onnx")))
    policy.for_rows()
    assert made == [policy.card.observation_space, policy.card.action_space]
    assert policy.card.layouts is policy.card.layouts
