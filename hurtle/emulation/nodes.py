"""`Node`: a space that is neither Dict nor Tuple, with its leaves; and functions over whole trees of nodes.

value or batch of values ⇄ tree of nodes ⇄ arrays. Knows no particular space.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from gymnasium import spaces

from hurtle.emulation.leaves import Leaf, Tree, check_keys, key_path, kind_of, map_tree, tree_items, tree_leaves
from hurtle.errors import EmulationError

Views = Mapping[Leaf, np.ndarray]
"""The arrays of one record, or of a batch of records: [*lead, *leaf.shape]."""


class Node:
    """A space that is neither Dict nor Tuple, and its leaves in the record.

    Attributes:
        path: Its name in messages, such as `observation["position"]`.
        space: The space.
        fields: Its leaves, nested as `unflatten` returns them.
        leaves: Its leaves, in order.
    """

    path: str
    space: spaces.Space
    fields: Tree
    leaves: tuple[Leaf, ...]

    def store(self, views: Views, value: Any) -> None:
        """Write one value into the arrays of one record."""
        raise NotImplementedError

    def load(self, views: Views) -> Any:
        """Read one value of the space, as a copy."""
        raise NotImplementedError

    def check(self, value: Any, path: str) -> None:
        """Raise an EmulationError whose message begins with `path` unless `value` belongs to the space."""
        raise NotImplementedError

    def store_many(self, views: Views, values: Any, lead: tuple[int, ...]) -> None:
        """Write a batch in the format of `gymnasium.vector` into arrays [*lead, …]."""
        if not lead:
            return self.store(views, values)
        if len(values) != lead[0]:
            raise EmulationError(f"{self.path}: expected a batch of {lead[0]} values, got {len(values)}.")
        for i, value in enumerate(values):
            self.store_many(_rows(views, self.leaves, i), value, lead[1:])

    def load_many(self, views: Views, lead: tuple[int, ...]) -> Any:
        """Read a batch from arrays [*lead, …] as tuples of values."""
        if not lead:
            return self.load(views)
        return tuple(self.load_many(_rows(views, self.leaves, i), lead[1:]) for i in range(lead[0]))

    def item(self, batch: Any, i: int) -> Any:
        """Value i of a batch."""
        return batch[i]


def fields_of(tree: Tree) -> Tree:
    """The leaves of a tree of nodes, nested as `unflatten` returns them."""
    return map_tree(lambda node: node.fields, tree)


def leaves_of(tree: Tree) -> tuple[Leaf, ...]:
    """The leaves of a tree of nodes, in order."""
    return tuple(leaf for node in tree_leaves(tree) for leaf in node.leaves)


def store_tree(tree: Tree, views: Views, value: Any) -> None:
    """Write one structured value."""
    for node, part in tree_items(tree, value):
        node.store(views, part)


def load_tree(tree: Tree, views: Views) -> Any:
    """Read one structured value, as a copy."""
    return map_tree(lambda node: node.load(views), tree)


def store_batch(tree: Tree, views: Views, values: Any, lead: tuple[int, ...]) -> None:
    """Write structured values batched at the leaves, the format of `gymnasium.vector`."""
    for node, part in tree_items(tree, values):
        node.store_many(views, part, lead)


def load_batch(tree: Tree, views: Views, lead: tuple[int, ...]) -> Any:
    """Read structured values batched at the leaves; fixed-size leaves are views."""
    return map_tree(lambda node: node.load_many(views, lead), tree)


def store_rows(tree: Tree, views: Views, batch: Any, count: int) -> None:
    """Write a batch of `count` values into the first rows of the arrays and zero the others."""
    leaves = leaves_of(tree)
    if count:
        store_batch(tree, _rows(views, leaves, slice(count)), batch, (count,))
    for leaf in leaves:
        views[leaf][count:] = 0


def load_rows(tree: Tree, views: Views, count: int) -> Any:
    """Read the batch in the first `count` rows, as a copy."""
    return load_batch(tree, {leaf: views[leaf][:count].copy() for leaf in leaves_of(tree)}, (count,))


def as_batch(tree: Tree, values: Any) -> Any:
    """Turn a list of structured values into a structure of lists."""
    if isinstance(tree, dict):
        return {key: as_batch(child, [value[key] for value in values]) for key, child in tree.items()}
    if isinstance(tree, tuple):
        return tuple(as_batch(child, [value[i] for value in values]) for i, child in enumerate(tree))
    return values


def batch_item(tree: Tree, batch: Any, i: int) -> Any:
    """Value i of a structured batch."""
    if isinstance(tree, dict):
        return {key: batch_item(child, batch[key], i) for key, child in tree.items()}
    if isinstance(tree, tuple):
        return tuple(batch_item(child, batch[k], i) for k, child in enumerate(tree))
    return tree.item(batch, i)


def batch_length(tree: Tree, batch: Any) -> int:
    """The number of values in a structured batch, taken from its first leaf."""
    _, first = next(tree_items(tree, batch))
    return len(first)


def check_batch(tree: Tree, batch: Any, path: str) -> None:
    """Check that a structured batch has the right keys and the same number of values in every leaf.

    Raises:
        EmulationError: It does not; the message names the leaf.
    """
    lengths: list[int] = []

    def visit(tree: Tree, batch: Any, path: str) -> None:
        if isinstance(tree, dict | tuple):
            check_keys(path, tree, batch)
            for key in tree if isinstance(tree, dict) else range(len(tree)):
                visit(tree[key], batch[key], key_path(path, key))
        elif isinstance(batch, str) or not hasattr(batch, "__len__") or getattr(batch, "shape", None) == ():
            raise EmulationError(f"{path}: expected a batch of values, got {kind_of(batch)}.")
        else:
            lengths.append(len(batch))
            if lengths[-1] != lengths[0]:
                raise EmulationError(f"{path}: expected {lengths[0]} values, as in the leaves before it, got {lengths[-1]}.")

    visit(tree, batch, path)


def _rows(views: Views, leaves: tuple[Leaf, ...], index: int | slice) -> Views:
    """Some rows of the arrays; a single entry stays a writable array."""
    return {leaf: views[leaf][index, ...] for leaf in leaves}
