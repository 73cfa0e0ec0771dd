"""Plans the record of a space: picks the node class of each space and the byte offset of each leaf.

space → tree of nodes, list of leaves with offsets. Knows nothing of values.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from gymnasium import spaces

from hurtle.emulation.fixed import FIXED, FixedNode
from hurtle.emulation.leaves import Leaf, Tree, space_tree
from hurtle.emulation.nodes import Node
from hurtle.emulation.variable import GraphNode, OneOfNode, SequenceNode, StringNode, TextNode
from hurtle.errors import EmulationError, did_you_mean

Limit = int | Mapping[str, int] | None
"""One maximum for every space that needs one, or a maximum per path."""

STRING_LENGTH = 256
"""UTF-8 bytes reserved for a string whose space declares no maximum (MiniGrid's mission)."""


class Plan:
    """Allocates the bytes of a record, in the order of the tree.

    Args:
        limits: The arguments `max_length`, `max_nodes`, `max_edges` by name.
    """

    def __init__(self, limits: Mapping[str, Limit]):
        self.leaves: list[Leaf] = []
        self._limits = limits
        self._limited: dict[str, list[str]] = {argument: [] for argument in limits}
        self._lead: tuple[int, ...] = ()
        self._padded = False

    def inside(self, *lead: int) -> Plan:
        """A plan for the inside of a variable-size space: its leaves have shape [*lead, …] and may contain zero padding."""
        inner = Plan(self._limits)
        inner.leaves, inner._limited = self.leaves, self._limited
        inner._lead = (*self._lead, *lead)
        inner._padded = True
        return inner

    def tree(self, space: spaces.Space, path: str) -> Tree:
        """The tree of nodes of a space.

        Raises:
            EmulationError: A leaf cannot be emulated, or needs a declared maximum.
        """
        return space_tree(space, path, self._node)

    def leaf(self, path: str, space: spaces.Space, dtype: Any, shape: tuple[int, ...], low: Any, high: Any) -> Leaf:
        """Append a leaf to the record."""
        dtype = np.dtype(dtype)
        low, high = np.asarray(low, dtype), np.asarray(high, dtype)
        if self._padded:
            zero = dtype.type(0)
            low, high = np.minimum(low, zero), np.maximum(high, zero)
        shape = (*self._lead, *shape)
        end = self.leaves[-1].offset + self.leaves[-1].nbytes if self.leaves else 0
        offset = -(-end // dtype.itemsize) * dtype.itemsize
        leaf = Leaf(path, space, dtype, shape, offset, np.broadcast_to(low, shape), np.broadcast_to(high, shape))
        self.leaves.append(leaf)
        return leaf

    def limit(self, argument: str, path: str, kind: str, default: int | None = None) -> int:
        """The maximum that the user declared for the space at `path`.

        Raises:
            EmulationError: No maximum was declared, or it is not a non-negative integer.
        """
        given = self._limits[argument]
        self._limited[argument].append(path)
        if isinstance(given, Mapping):
            given = given.get(path)
        if given is None:
            given = default
        if given is None:
            raise EmulationError(
                f"{path}: a {kind} needs a declared maximum: hurtle.emulate(env, {argument}=N), or {argument}={{{path!r}: N}} "
                f"for this one; with make_vec: make_vec(lambda: hurtle.emulate(MyEnv(), {argument}=N), …)."
            )
        if not isinstance(given, int | np.integer) or given < 0:
            raise EmulationError(f"{path}: {argument} must be an integer of at least 0, got {given!r}.")
        return int(given)

    def string_length(self, path: str) -> int:
        """The bytes reserved for a string of a custom space: `max_length` given for this very path, or the default."""
        if not isinstance(self._limits["max_length"], Mapping):
            return STRING_LENGTH
        return self.limit("max_length", path, "string", STRING_LENGTH)

    def check_limits(self) -> None:
        """Check that every path with a declared maximum exists.

        Raises:
            EmulationError: A path does not; the message names it.
        """
        for argument, given in self._limits.items():
            for path in given if isinstance(given, Mapping) else ():
                if path not in self._limited[argument]:
                    hint = did_you_mean(path, self._limited[argument])
                    raise EmulationError(f"{argument}: nothing at {path!r} needs a maximum. {hint}")

    def _node(self, space: spaces.Space, path: str) -> Node:
        if isinstance(space, FIXED):
            return FixedNode(space, path, self)
        if isinstance(space, spaces.Text):
            return TextNode(space, path, self)
        if isinstance(space, spaces.Sequence):
            return SequenceNode(space, path, self)
        if isinstance(space, spaces.Graph):
            return GraphNode(space, path, self)
        if isinstance(space, spaces.OneOf):
            return OneOfNode(space, path, self)
        if isinstance(space, spaces.Space) and space.dtype is not None and space.dtype.kind == "U":
            return StringNode(space, path, self)
        if space is None:
            what = f"{path.partition('[')[0]}_space"
            raise EmulationError(f"{path}: the env's {what} is None; set it to a Gymnasium space.")
        raise EmulationError(
            f"{path}: cannot emulate {type(space).__name__}, which is not one of Gymnasium's spaces. "
            "Convert it to arrays, or drop it, with hurtle.emulate(env, featurize=function)."
        )
