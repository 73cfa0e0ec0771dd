"""Spaces and layouts as plain dicts, for checkpoints and exported policies: they fit in JSON, and loading runs no code.

space ⇄ {"type": "Box", ...}. Knows nothing of policies.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from gymnasium import spaces

from hurtle.emulation.flat_layout import SpaceLayout
from hurtle.errors import HurtleError


class AnyString(spaces.Space[str]):
    """Stands in for a custom space of strings (MiniGrid's missions) after loading: how it samples is not saved."""

    def __init__(self) -> None:
        super().__init__(dtype=str)

    def sample(self, mask: Any = None, probability: Any = None) -> str:
        """The empty string."""
        return ""

    def contains(self, x: Any) -> bool:
        """Whether it is a string."""
        return isinstance(x, str)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, AnyString)

    def __repr__(self) -> str:
        return "AnyString()"


def space_to_dict(space: spaces.Space) -> dict[str, Any]:
    """A space as a dict of JSON types.

    Raises:
        HurtleError: The space is not one of Gymnasium's.

    Example:
        >>> space_to_dict(spaces.Box(-np.inf, 1, (2,)))
        {'type': 'Box', 'low': '-inf', 'high': 1.0, 'shape': [2], 'dtype': 'float32'}
        >>> space_from_dict({"type": "Discrete", "n": 3, "start": 0})
        Discrete(3)
    """
    kind = {"type": type(space).__name__}
    if isinstance(space, spaces.Box):
        low, high = _numbers(space.low), _numbers(space.high)
        return {**kind, "low": low, "high": high, "shape": list(space.shape), "dtype": space.dtype.name}
    if isinstance(space, spaces.Discrete):
        return {**kind, "n": int(space.n), "start": int(space.start), "dtype": space.dtype.name}
    if isinstance(space, spaces.MultiDiscrete):
        return {**kind, "nvec": space.nvec.tolist(), "start": space.start.tolist(), "dtype": space.dtype.name}
    if isinstance(space, spaces.MultiBinary):
        return {**kind, "n": space.n if isinstance(space.n, int) else [int(n) for n in space.n]}
    if isinstance(space, spaces.Dict):
        return {**kind, "spaces": [[_key(key), space_to_dict(child)] for key, child in space.spaces.items()]}
    if isinstance(space, spaces.Tuple | spaces.OneOf):
        return {**kind, "spaces": [space_to_dict(child) for child in space.spaces]}
    if isinstance(space, spaces.Text):
        charset = "".join(sorted(space.character_set))
        return {**kind, "max_length": space.max_length, "min_length": space.min_length, "charset": charset}
    if isinstance(space, spaces.Sequence):
        return {**kind, "space": space_to_dict(space.feature_space), "stack": space.stack}
    if isinstance(space, spaces.Graph):
        edges = None if space.edge_space is None else space_to_dict(space.edge_space)
        return {**kind, "nodes": space_to_dict(space.node_space), "edges": edges}
    if isinstance(space, spaces.Space) and space.dtype is not None and space.dtype.kind == "U":
        return {"type": "AnyString"}
    raise HurtleError(f"Cannot save the space {space}: {type(space).__name__} is not one of Gymnasium's spaces.")


def space_from_dict(saved: dict[str, Any]) -> spaces.Space:
    """The space that `space_to_dict` saved.

    Raises:
        HurtleError: `saved` is not a saved space.
    """
    kind = saved.get("type")
    if kind == "Box":
        shape, dtype = tuple(saved["shape"]), np.dtype(saved["dtype"])
        low, high = _array(saved["low"], shape, dtype), _array(saved["high"], shape, dtype)
        return spaces.Box(low, high, shape, dtype.type)
    if kind == "Discrete":
        given = saved.get("dtype", "int64")  # older Gymnasium versions have no other
        options = {} if given == "int64" else {"dtype": np.dtype(given).type}
        return spaces.Discrete(saved["n"], start=saved["start"], **options)
    if kind == "MultiDiscrete":
        dtype = np.dtype(saved["dtype"])
        return spaces.MultiDiscrete(np.array(saved["nvec"]), dtype=dtype.type, start=np.array(saved["start"]))
    if kind == "MultiBinary":
        return spaces.MultiBinary(saved["n"])
    if kind == "Dict":
        return spaces.Dict([(key, space_from_dict(child)) for key, child in saved["spaces"]])
    if kind in ("Tuple", "OneOf"):
        children = [space_from_dict(child) for child in saved["spaces"]]
        return spaces.Tuple(children) if kind == "Tuple" else spaces.OneOf(children)
    if kind == "Text":
        return spaces.Text(saved["max_length"], min_length=saved["min_length"], charset=saved["charset"])
    if kind == "Sequence":
        return spaces.Sequence(space_from_dict(saved["space"]), stack=saved["stack"])
    if kind == "Graph":
        edges = saved["edges"]
        return spaces.Graph(space_from_dict(saved["nodes"]), None if edges is None else space_from_dict(edges))
    if kind == "AnyString":
        return AnyString()
    raise HurtleError(f"Not a saved space: expected a dict with the type of one of Gymnasium's spaces, got type {kind!r}.")


def layout_to_dict(layout: SpaceLayout) -> dict[str, Any]:
    """A layout as a dict of JSON types: its space, and the maxima of variable-size parts."""
    state = layout.__getstate__()
    limits = {name: dict(limit) if hasattr(limit, "items") else limit for name, limit in state.items() if name != "space"}
    return {"space": space_to_dict(layout.space), **limits}


def layout_from_dict(saved: dict[str, Any]) -> SpaceLayout:
    """The layout that `layout_to_dict` saved."""
    return SpaceLayout(**{**saved, "space": space_from_dict(saved["space"])})


def _numbers(values: np.ndarray) -> Any:
    """Nested lists of numbers, or one number if all are equal; infinities, which JSON lacks, as text."""
    if values.size and (values == values.flat[0]).all():
        return _number(values.flat[0])
    return [_numbers(part) for part in values] if values.ndim > 1 else [_number(value) for value in values]


def _number(value: Any) -> Any:
    value = value.item()
    return value if not isinstance(value, float) or math.isfinite(value) else str(value)


def _array(saved: Any, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    def parsed(value: Any) -> Any:
        if isinstance(value, list):
            return [parsed(part) for part in value]
        return float(value) if isinstance(value, str) else value

    return np.broadcast_to(np.array(parsed(saved), dtype), shape).copy()


def _key(key: Any) -> Any:
    if not isinstance(key, str | int):
        raise HurtleError(f"Cannot save a Dict space with the key {key!r}: keys must be str or int.")
    return key
