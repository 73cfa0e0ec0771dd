"""Random nested spaces of all kinds, samples that respect the declared maxima, and a strict comparison."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces
from gymnasium.vector.utils import concatenate, create_empty_array

LIMITS = {"max_length": 5, "max_nodes": 4, "max_edges": 6}
DTYPES = ["float16", "float32", "float64", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "bool"]


def random_space(rng: np.random.Generator, depth: int) -> spaces.Space:
    """A space of any kind, at most `depth` levels deep, seeded."""
    space = _tree(rng, depth) if rng.random() < 0.2 else _dict(rng, depth)
    space.seed(int(rng.integers(1 << 30)))
    return space


def _tree(rng: np.random.Generator, depth: int) -> spaces.Space:
    kinds = [_box, _box, _discrete, _multi_discrete, _multi_binary, _text]
    if depth > 1:
        kinds += [_dict, _dict, _dict, _tuple, _tuple, _sequence, _graph, _one_of]
    return kinds[rng.integers(len(kinds))](rng, depth)


def _shape(rng: np.random.Generator) -> tuple[int, ...]:
    return tuple(int(n) for n in rng.integers(1, 4, size=rng.integers(4)))


def _box(rng: np.random.Generator, depth: int = 1) -> spaces.Box:
    dtype = np.dtype(DTYPES[rng.integers(len(DTYPES))])
    low = 0 if dtype.kind in "bu" else int(rng.integers(-5, 5))
    high = 1 if dtype.kind == "b" else low + int(rng.integers(1, 5))
    if dtype.kind == "f" and rng.random() < 0.3:
        return spaces.Box(-np.inf, np.inf, _shape(rng), dtype.type)
    return spaces.Box(low, high, _shape(rng), dtype.type)


def _discrete(rng: np.random.Generator, depth: int = 1) -> spaces.Discrete:
    return spaces.Discrete(int(rng.integers(1, 9)), start=int(rng.integers(-3, 4)))


def _multi_discrete(rng: np.random.Generator, depth: int = 1) -> spaces.MultiDiscrete:
    shape = _shape(rng) or (2,)
    dtype = rng.choice([np.int64, np.int32, np.int8])
    return spaces.MultiDiscrete(rng.integers(1, 6, shape), dtype=dtype, start=rng.integers(-3, 4, shape))


def _multi_binary(rng: np.random.Generator, depth: int = 1) -> spaces.MultiBinary:
    return spaces.MultiBinary(_shape(rng) or 3)


def _text(rng: np.random.Generator, depth: int = 1) -> spaces.Text:
    return spaces.Text(int(rng.integers(1, 8)), min_length=int(rng.integers(2)), charset="abc →é0")


def _dict(rng: np.random.Generator, depth: int) -> spaces.Dict:
    return spaces.Dict({f"key {i}": _tree(rng, depth - 1) for i in range(rng.integers(1, 4))})


def _tuple(rng: np.random.Generator, depth: int) -> spaces.Tuple:
    return spaces.Tuple([_tree(rng, depth - 1) for _ in range(rng.integers(1, 4))])


def _sequence(rng: np.random.Generator, depth: int) -> spaces.Sequence:
    return spaces.Sequence(_tree(rng, depth - 1), stack=bool(rng.integers(2)))


def _graph(rng: np.random.Generator, depth: int) -> spaces.Graph:
    features = [_box, _discrete]
    edges = features[rng.integers(2)](rng) if rng.random() < 0.7 else None
    return spaces.Graph(features[rng.integers(2)](rng), edges)


def _one_of(rng: np.random.Generator, depth: int) -> spaces.OneOf:
    return spaces.OneOf([_tree(rng, depth - 1) for _ in range(rng.integers(1, 4))])


def sample(space: spaces.Space) -> Any:
    """A sample of the space whose sequences and graphs keep to `LIMITS`."""
    if isinstance(space, spaces.Dict):
        return {key: sample(child) for key, child in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(sample(child) for child in space.spaces)
    if isinstance(space, spaces.OneOf):
        choice = space.np_random.integers(len(space.spaces))
        return np.int64(choice), sample(space.spaces[choice])
    if isinstance(space, spaces.Sequence):
        count = int(space.np_random.integers(LIMITS["max_length"] + 1))
        values = [sample(space.feature_space) for _ in range(count)]
        return _stacked(space.feature_space, values) if space.stack else tuple(values)
    if isinstance(space, spaces.Graph):
        num_nodes = int(space.np_random.integers(1, LIMITS["max_nodes"] + 1))
        num_edges = int(space.np_random.integers(LIMITS["max_edges"] + 1))
        nodes = _stacked(space.node_space, [sample(space.node_space) for _ in range(num_nodes)])
        if space.edge_space is None or num_edges == 0:
            return spaces.GraphInstance(nodes, None, None)
        edges = _stacked(space.edge_space, [sample(space.edge_space) for _ in range(num_edges)])
        return spaces.GraphInstance(nodes, edges, space.np_random.integers(num_nodes, size=(num_edges, 2), dtype=np.int32))
    if isinstance(space, spaces.Box):
        return np.asarray(space.sample())  # Gymnasium samples NumPy scalars from integer Boxes of shape ()
    return space.sample()


def _stacked(space: spaces.Space, values: list) -> Any:
    empty = create_empty_array(space, len(values))
    return concatenate(space, values, empty) if values else empty  # Gymnasium stacks no empty list


def same(one: Any, other: Any) -> bool:
    """Whether two values are equal in structure, type, dtype, shape and numbers."""
    if isinstance(one, dict):
        return isinstance(other, dict) and list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, tuple):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, np.ndarray | np.generic):
        return type(one) is type(other) and one.dtype == other.dtype and np.array_equal(one, other)
    return type(one) is type(other) and one == other
