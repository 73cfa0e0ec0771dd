"""The tree of a space: how Dict and Tuple nest, how a leaf is called, and where in a record it lies.

space → `space_tree` → nested dicts and tuples with anything at the leaves → `map_tree`. Knows no kind of leaf.
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

Tree = Any  # nested dicts and tuples; whatever is neither is a leaf


@dataclass(frozen=True, eq=False)
class Leaf:
    """One array of a record.

    A Box, Discrete, MultiDiscrete or MultiBinary is one leaf. Spaces of varying size have several: a Text, say, has
    `observation["mission"].codes` and `observation["mission"].length`.
    """

    path: str
    """How users write it: `observation["inventory"]["items"]`."""
    space: spaces.Space
    """The space it belongs to."""
    dtype: np.dtype
    shape: tuple[int, ...]
    offset: int
    """Its first byte in the record, a multiple of its item size."""
    low: np.ndarray
    """Smallest value of each entry, of `shape` and `dtype`; entries that can be padding allow 0."""
    high: np.ndarray

    @cached_property
    def dtype_name(self) -> str:
        """The dtype as NumPy and torch both call it."""
        return self.dtype.name

    @cached_property
    def size(self) -> int:
        """How many entries it has."""
        return prod(self.shape)

    @cached_property
    def start(self) -> int:
        """Its first entry, counted in entries of its dtype from the beginning of the record."""
        return self.offset // self.dtype.itemsize

    @cached_property
    def nbytes(self) -> int:
        """How many bytes of the record it takes."""
        return self.size * self.dtype.itemsize


def space_tree(space: spaces.Space, path: str, leaf: Callable[[spaces.Space, str], Any]) -> Tree:
    """Dicts and tuples nested like the space, with `leaf(space, path)` in place of each leaf.

    Raises:
        EmulationError: A Dict or Tuple without entries.
    """
    if not isinstance(space, spaces.Dict | spaces.Tuple):
        return leaf(space, path)
    if len(space.spaces) == 0:
        raise EmulationError(
            f"{path}: an empty {type(space).__name__} holds nothing to learn from; remove it or give it a space."
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
    """Each leaf of a tree with what a value of the same structure holds there."""
    if isinstance(tree, dict | tuple):
        for key in tree if isinstance(tree, dict) else range(len(tree)):
            yield from tree_items(tree[key], value[key])
    else:
        yield tree, value


def key_path(path: str, key: Any) -> str:
    """The path of a Dict's entry, with text keys in double quotes."""
    return f'{path}["{key}"]' if isinstance(key, str) else f"{path}[{key!r}]"


def key_source(key: Any, keys: list[Any]) -> str:
    """A Dict's key in generated code: itself, or, where it has no plain notation, an entry of `keys`."""
    if type(key) in (str, int):
        return repr(key)
    keys.append(key)
    return f"keys[{len(keys) - 1}]"


def check_keys(path: str, tree: Tree, value: Any) -> None:
    """Whether `value` is a mapping with the keys (or a tuple of the length) of this level of the tree.

    Raises:
        EmulationError: It is not; names the keys.
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
        EmulationError: The value does not belong to the space; names the leaf.
    """
    if not isinstance(tree, dict | tuple):
        tree.check(value, path)
        return
    check_keys(path, tree, value)
    for key in tree if isinstance(tree, dict) else range(len(tree)):
        check_tree(tree[key], value[key], key_path(path, key))


def kind_of(value: Any) -> str:
    """A value in a few words, for messages: `float32 of shape (3,)`, `str`."""
    if isinstance(value, np.ndarray | np.generic):
        return f"{value.dtype} of shape {value.shape}"
    return f"{type(value).__name__} {value!r}" if isinstance(value, bool | int | float) else type(value).__name__


def _quoted(keys: Any) -> str:
    return ", ".join(f'"{key}"' if isinstance(key, str) else repr(key) for key in keys)
