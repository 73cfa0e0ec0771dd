"""The tree of a space: how Dict and Tuple nest, the path of each leaf, and its place in the record.

space → `space_tree` → nested dicts and tuples with anything at the leaves → `map_tree`. Knows no particular leaf.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import numpy as np
from gymnasium import spaces

from hurtle.errors import EmulationError, did_you_mean

Tree = Any  # nested dicts and tuples; anything else is a leaf


@dataclass(frozen=True, eq=False)
class Leaf:
    """One array of a record.

    A Box, Discrete, MultiDiscrete or MultiBinary is one leaf. Variable-size spaces have several: a Text, for example, has
    `observation["mission"].codes` and `observation["mission"].length`.
    """

    path: str
    """Its name as users write it: `observation["inventory"]["items"]`."""
    space: spaces.Space
    """The space it belongs to."""
    dtype: np.dtype
    shape: tuple[int, ...]
    offset: int
    """Its first byte in the record, a multiple of the item size."""
    low: np.ndarray
    """Lowest value of each entry, with `shape` and `dtype`; includes 0 where entries can be padding."""
    high: np.ndarray

    @cached_property
    def dtype_name(self) -> str:
        """The name of the dtype, the same in NumPy and torch."""
        return self.dtype.name

    @cached_property
    def size(self) -> int:
        """Number of entries."""
        return prod(self.shape)

    @cached_property
    def start(self) -> int:
        """Offset of its first entry in the record, in entries of its dtype."""
        return self.offset // self.dtype.itemsize

    @cached_property
    def nbytes(self) -> int:
        """Number of bytes in the record."""
        return self.size * self.dtype.itemsize


def space_tree(space: spaces.Space, path: str, leaf: Callable[[spaces.Space, str], Any]) -> Tree:
    """Dicts and tuples nested like the space, with `leaf(space, path)` in place of each leaf.

    Raises:
        EmulationError: A Dict or Tuple is empty.
    """
    if not isinstance(space, spaces.Dict | spaces.Tuple):
        return leaf(space, path)
    if len(space.spaces) == 0:
        raise EmulationError(
            f"{path}: an empty {type(space).__name__} has nothing to learn from; remove it or add a space to it."
        )
    if isinstance(space, spaces.Dict):
        return {key: space_tree(child, key_path(path, key), leaf) for key, child in space.spaces.items()}
    return tuple(space_tree(child, f"{path}[{i}]", leaf) for i, child in enumerate(space.spaces))


def map_tree(function: Callable[[Any], Any], tree: Tree) -> Tree:
    """The same dicts and tuples with `function(leaf)` in place of each leaf.

    Example:
        >>> map_tree(abs, {"a": -1, "b": (-2, 3)})
        {'a': 1, 'b': (2, 3)}
    """
    if isinstance(tree, dict):
        return {key: map_tree(function, child) for key, child in tree.items()}
    if isinstance(tree, tuple):
        return tuple(map_tree(function, child) for child in tree)
    return function(tree)


def tree_leaves(tree: Tree) -> list[Any]:
    """The leaves of a tree in order."""
    found: list[Any] = []
    map_tree(found.append, tree)
    return found


def tree_items(tree: Tree, value: Any) -> Iterator[tuple[Any, Any]]:
    """Pairs of each leaf of a tree and the matching part of a value of the same structure."""
    if isinstance(tree, dict | tuple):
        for key in tree if isinstance(tree, dict) else range(len(tree)):
            yield from tree_items(tree[key], value[key])
    else:
        yield tree, value


def key_path(path: str, key: Any) -> str:
    """The path of an entry of a Dict, with string keys in double quotes."""
    return f'{path}["{key}"]' if isinstance(key, str) else f"{path}[{key!r}]"


def key_source(key: Any, keys: list[Any]) -> str:
    """A Dict's key in generated code: a literal, or an entry appended to `keys` where it has none."""
    if type(key) in (str, int):
        return repr(key)
    keys.append(key)
    return f"keys[{len(keys) - 1}]"


def check_keys(path: str, tree: Tree, value: Any) -> None:
    """Check that `value` is a mapping with the keys (or a tuple with the length) of this level of the tree.

    Raises:
        EmulationError: It is not; the message names the keys.
    """
    if isinstance(tree, tuple):
        if not isinstance(value, tuple | list):
            raise EmulationError(f"{path}: expected a tuple of {len(tree)}, got {kind_of(value)}.")
        if len(value) != len(tree):
            raise EmulationError(f"{path}: expected a tuple of {len(tree)}, got {len(value)} values.")
        return
    if not isinstance(value, Mapping):
        raise EmulationError(f"{path}: expected a dict with the keys {_quoted(tree)}, got {kind_of(value)}.")
    missing = [key for key in tree if key not in value]
    unknown = [key for key in value if key not in tree]
    if missing or unknown:
        parts = [f"missing {_quoted(missing)}"] * bool(missing) + [f"unknown {_quoted(unknown)}"] * bool(unknown)
        hint = f" {did_you_mean(str(unknown[0]), map(str, tree))}" if unknown else ""
        raise EmulationError(f"{path}: {' and '.join(parts)} among its keys.{hint}")


def check_tree(tree: Tree, value: Any, path: str) -> None:
    """Run `leaf.check(value, path)` on each leaf, and compare the keys on the way.

    Raises:
        EmulationError: The value does not belong to the space; the message names the leaf.
    """
    if not isinstance(tree, dict | tuple):
        tree.check(value, path)
        return
    check_keys(path, tree, value)
    for key in tree if isinstance(tree, dict) else range(len(tree)):
        check_tree(tree[key], value[key], key_path(path, key))


def kind_of(value: Any) -> str:
    """A short description of a value for messages: `float32 of shape (3,)`, `str`."""
    if isinstance(value, np.ndarray | np.generic):
        return f"{value.dtype} of shape {value.shape}"
    return f"{type(value).__name__} {value!r}" if isinstance(value, bool | int | float) else type(value).__name__


def _quoted(keys: Any) -> str:
    return ", ".join(f'"{key}"' if isinstance(key, str) else repr(key) for key in keys)
