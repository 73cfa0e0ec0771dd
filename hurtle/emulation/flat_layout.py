"""`SpaceLayout`: stores values of a structured space as fixed-size records of bytes, without loss.

value → writer → record (bytes, seen as one flat array) → unflatten → tree of views. Knows nothing of envs or parallelism.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import cached_property, partial
from typing import Any

import numpy as np
from gymnasium import spaces

from hurtle.emulation.fixed import FixedNode
from hurtle.emulation.leaves import Leaf, Tree, check_tree, key_source, map_tree, tree_leaves
from hurtle.emulation.nodes import Views, check_batch, fields_of, load_batch, load_tree, store_batch
from hurtle.emulation.plan import Limit, Plan
from hurtle.errors import EmulationError


class SpaceLayout:
    """The place of each leaf of a space in a record of bytes, with functions that write and read values.

    The flat observation is the record viewed as one array: the Box itself if the space is a Box, one vector if all leaves
    share a dtype, and the bytes otherwise. Variable-size spaces are zero-padded to a fixed size.

    Args:
        space: Any tree of Gymnasium spaces.
        name: The first part of every path.
        max_length: Maximum length of a Sequence: one number for all, or `{path: number}`. With a path, also the maximum number
            of UTF-8 bytes of a string of a custom space (default 256).
        max_nodes: Maximum number of nodes of a Graph, likewise.
        max_edges: Maximum number of edges of a Graph, likewise.

    Attributes:
        leaves: Every array of the record, in order.
        nbytes: Size of a record; a multiple of 8 if dtypes are mixed.
        flat_space: The space of the flat observation.
        is_plain: The space itself is a Box, Discrete, MultiDiscrete or MultiBinary.
        is_bytes: The leaves have several dtypes, so the flat observation is the record's bytes.
        is_fixed: Every leaf has a fixed size, so `batch` returns only views.

    Raises:
        EmulationError: A leaf cannot be emulated or needs a maximum; the message names it.

    Example:
        >>> layout = SpaceLayout(spaces.Dict(gold=spaces.Discrete(100), position=spaces.Box(-1, 1, (2,))))
        >>> layout.flat_space
        Box(0, 255, (16,), uint8)
        >>> memory = layout.memory()
        >>> layout.writer(memory)({"gold": 42, "position": np.array([0.5, -0.5], np.float32)})
        >>> layout.unflatten(layout.flat(memory))
        {'gold': array(42), 'position': array([ 0.5, -0.5], dtype=float32)}
    """

    def __init__(
        self,
        space: spaces.Space,
        name: str = "observation",
        *,
        max_length: Limit = None,
        max_nodes: Limit = None,
        max_edges: Limit = None,
    ):
        self.space = space
        self.name = name
        self._limits = {"max_length": max_length, "max_nodes": max_nodes, "max_edges": max_edges}
        plan = Plan(self._limits)
        self._nodes: Tree = plan.tree(space, name)
        plan.check_limits()
        self._fields: Tree = fields_of(self._nodes)
        self.leaves: tuple[Leaf, ...] = tuple(plan.leaves)
        self._dtypes = {leaf.dtype_name: leaf.dtype for leaf in self.leaves}
        self.is_bytes = len(self._dtypes) > 1
        end = self.leaves[-1].offset + self.leaves[-1].nbytes
        step = max(8, *(dtype.itemsize for dtype in self._dtypes.values())) if self.is_bytes else 1
        self.nbytes: int = -(-end // step) * step
        self.is_plain: bool = isinstance(self._nodes, FixedNode)
        self.is_fixed: bool = all(isinstance(node, FixedNode) for node in tree_leaves(self._nodes))
        self.flat_space: spaces.Box = self._make_flat_space()

    @property
    def tree(self) -> Tree:
        """The leaves, nested as `unflatten` returns their values."""
        return self._fields

    def memory(self, *lead: int) -> np.ndarray:
        """New records of zeros: uint8 [*lead, nbytes], aligned to 8 bytes."""
        shape = (*lead, self.nbytes)
        size = int(np.prod(shape))
        return np.zeros(-(-size // 8), np.uint64).view(np.uint8)[:size].reshape(shape)

    def flat(self, memory: np.ndarray) -> np.ndarray:
        """A view of records, uint8 [*lead, nbytes], as flat observations [*lead, *flat_space.shape]."""
        return memory.view(self.flat_space.dtype).reshape(memory.shape[:-1] + self.flat_space.shape)

    def writer(self, memory: np.ndarray) -> Callable[[Any], None]:
        """A function that stores one value in `memory`, uint8 [nbytes]. Make it once per place that is written often.

        Values of the wrong shape or kind of number raise an EmulationError that names the leaf. Bounds are not checked, since
        that would cost as much as a step of a cheap env: run `check` on the first values.
        """
        views = self._views(self._records(memory, 1))
        nodes = tree_leaves(self._nodes)
        places = [views[node.leaf] if isinstance(node, FixedNode) else partial(node.store, views) for node in nodes]
        return self._bind_writer(self._explain, nodes, *places)

    def reader(self, memory: np.ndarray) -> Callable[[], Any]:
        """A function that reads a copy of the structured value in `memory`, uint8 [nbytes]."""
        views = self._views(self._records(memory, 1))
        return lambda: load_tree(self._nodes, views)

    def unflatten(self, flat: Any) -> Any:
        """Flat observations as the tree of the space: views of a NumPy array or torch tensor, never copies.

        A Text becomes `codes` (1 + the index in the sorted charset; 0 is padding) and `length`, a Sequence `values` and
        `length`, a Graph `nodes`, `edges`, `edge_links`, `num_nodes` and `num_edges`, a OneOf `choice` and `options`.

        Args:
            flat: [*lead, *flat_space.shape], on any device, with any number of leading dimensions.
        """
        shape = self.flat_space.shape
        lead = tuple(flat.shape[: flat.ndim - len(shape)])
        if (*lead, *shape) != tuple(flat.shape):
            raise EmulationError(f"{self.name}: expected a flat array [..., {_numbers(shape)}], got {tuple(flat.shape)}.")
        if self.is_plain:
            return flat[..., 0] if isinstance(self.space, spaces.Discrete) else flat
        if not self.is_bytes:
            return map_tree(lambda leaf: _cut(flat, leaf, lead), self._fields)
        if flat.dtype != np.uint8 if isinstance(flat, np.ndarray) else str(flat.dtype) != "torch.uint8":
            raise EmulationError(f"{self.name}: expected the flat bytes as uint8, got {flat.dtype}; unflatten before you cast.")
        typed = self._typed(flat)
        return map_tree(lambda leaf: _cut(typed[leaf.dtype_name], leaf, lead), self._fields)

    def batch(self, memory: np.ndarray) -> Any:
        """Records, uint8 [n, …, nbytes], as a batch of observations in the format of `gymnasium.vector`.

        Fixed-size leaves are views [n, …]; a Text, Sequence, Graph or OneOf is a tuple of copied values.
        """
        return load_batch(self._nodes, self._views(self._records(memory)), memory.shape[:-1])

    def write_batch(self, values: Any, memory: np.ndarray) -> None:
        """Store a batch of observations in the format of `gymnasium.vector` in records, uint8 [n, …, nbytes]."""
        views = self._views(self._records(memory))
        check_batch(self._nodes, values, self.name)
        store_batch(self._nodes, views, values, memory.shape[:-1])

    def check(self, value: Any) -> None:
        """Compare one value with the space: keys, types, shapes, dtypes, bounds, lengths.

        Raises:
            EmulationError: They differ; the message names the leaf, what was expected and what it got.
        """
        check_tree(self._nodes, value, self.name)

    @cached_property
    def dtype(self) -> np.dtype:
        """The structured dtype of a record, with fields nested like the space: `memory.view(layout.dtype)["gold"]`.

        A space that is a single leaf has one field, named like the layout.
        """
        return _record_dtype({self.name: self._fields} if self.is_plain else self._fields, 0, self.nbytes)

    @cached_property
    def _bind_writer(self) -> Callable[..., Callable[[Any], None]]:
        """The factory of writers: takes the target of each leaf and returns straight-line code that fills them."""
        source, keys = _writer_source(self._nodes)
        scope: dict[str, Any] = {"keys": keys, "integers": (int, np.int64), "dtype_of": np.dtype}
        exec(compile(source, f"<writer of {self.name}>", "exec"), scope)
        return scope["bind"]

    def _explain(self, value: Any, error: Exception) -> None:
        """Raise an error that names the wrong leaf of a value that could not be written."""
        if not isinstance(error, EmulationError):
            self.check(value)

    def _records(self, memory: np.ndarray, ndim: int | None = None) -> np.ndarray:
        if memory.dtype != np.uint8 or memory.shape[-1:] != (self.nbytes,) or (ndim is not None and memory.ndim != ndim):
            lead = "" if ndim == 1 else "..., "
            got = f"{memory.dtype} of shape {memory.shape}"
            raise EmulationError(f"{self.name}: expected memory uint8 [{lead}{self.nbytes}], got {got}.")
        return memory

    def _views(self, memory: np.ndarray) -> Views:
        """The array of each leaf, [*lead, *leaf.shape], in records [*lead, nbytes]."""
        typed = self._typed(memory)
        return {leaf: _cut(typed[leaf.dtype_name], leaf, memory.shape[:-1]) for leaf in self.leaves}

    def _typed(self, memory: Any) -> dict[str, Any]:
        """Views of records, uint8 [*lead, nbytes], as arrays of each dtype that occurs in them; NumPy or torch."""
        if isinstance(memory, np.ndarray):
            return {name: memory.view(dtype) for name, dtype in self._dtypes.items()}
        return {name: memory.view(_torch_dtype(self.name, name)) for name in self._dtypes}

    def _make_flat_space(self) -> spaces.Box:
        if self.is_bytes:
            return spaces.Box(0, 255, (self.nbytes,), np.uint8)
        if isinstance(self.space, spaces.Box) and self.space.dtype.isnative:
            return deepcopy(self.space)
        low = np.concatenate([leaf.low.ravel() for leaf in self.leaves])
        high = np.concatenate([leaf.high.ravel() for leaf in self.leaves])
        shape = self.leaves[0].shape if self.is_plain and not isinstance(self.space, spaces.Discrete) else low.shape
        return spaces.Box(low.reshape(shape), high.reshape(shape), shape, low.dtype.type)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, SpaceLayout):
            return NotImplemented
        return (self.space, self.name, self.nbytes, self._limits) == (other.space, other.name, other.nbytes, other._limits)

    def __hash__(self) -> int:
        return hash((self.name, self.nbytes, len(self.leaves)))

    def __repr__(self) -> str:
        return f"SpaceLayout({self.space}, {self.name!r}: {len(self.leaves)} leaves, {self.nbytes} bytes)"

    def __getstate__(self) -> dict[str, Any]:
        return {"space": self.space, "name": self.name, **self._limits}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]


def same_layout(one: SpaceLayout, other: SpaceLayout) -> bool:
    """Whether both spaces are stored the same way: the same leaves in the same places with the same bounds."""

    def about(layout: SpaceLayout) -> list[Any]:
        return [(leaf.path, leaf.dtype, leaf.shape, leaf.low.tobytes(), leaf.high.tobytes()) for leaf in layout.leaves]

    return about(one) == about(other)


def _writer_source(nodes: Tree) -> tuple[str, list[Any]]:
    """The source of `bind(explain, nodes, place 0, place 1, …) → write(value)`, and the keys that it looks up.

    Values that fit as they are go straight into place; all others go through `FixedNode.admit`.
    """
    lines: list[str] = []
    bound: list[str] = []
    keys: list[Any] = []
    places = 0

    def emit(tree: Tree, source: str) -> None:
        nonlocal places
        if isinstance(tree, dict | tuple):
            branch = f"b{len(lines)}"
            lines.append(f"{branch} = {source}")
            for key in tree if isinstance(tree, dict) else range(len(tree)):
                emit(tree[key], f"{branch}[{key_source(key, keys)}]")
            return
        place, places = f"p{places}", places + 1
        if not isinstance(tree, FixedNode):
            lines.append(f"{place}({source})")
            return
        node, admit, dtype, size = f"nodes[{places - 1}]", f"admit{place}", f"dtype{place}", tree.leaf.size
        bound.append(f"{admit}, {dtype} = {node}.admit, dtype_of({node}.leaf.dtype.type)")  # the dtype object that arrays share
        lines.append(f"v = {source}")
        if tree.is_scalar:
            fits = "v.__class__ in integers"
        else:  # NumPy itself refuses another shape of the same size
            fits = "fits"
            lines.append(f"try: fits = v.dtype is {dtype} and v.size == {size}")
            lines.append("except AttributeError: fits = False")
        lines.append(f"{place}[{'...' if tree.leaf.shape else '()'}] = v if {fits} else {admit}(v)")

    emit(nodes, "value")
    prelude, body = "\n    ".join(bound or ["pass"]), "\n            ".join(lines)
    arguments = ", ".join(f"p{i}" for i in range(places))
    return (
        f"def bind(explain, nodes, {arguments}):\n"
        f"    {prelude}\n"
        f"    def write(value):\n"
        f"        try:\n"
        f"            {body}\n"
        f"        except Exception as error:\n"
        f"            explain(value, error)\n"
        f"            raise\n"
        f"    return write\n"
    ), keys


def _cut(array: Any, leaf: Leaf, lead: tuple[int, ...]) -> Any:
    """The view [*lead, *leaf.shape] of a leaf in records that are viewed as [*lead, entries] of its dtype."""
    if not leaf.shape:
        return array[..., leaf.start]
    part = array[..., leaf.start : leaf.start + leaf.size]
    return part if len(leaf.shape) == 1 else part.reshape(lead + leaf.shape)


def _torch_dtype(name: str, dtype_name: str) -> Any:
    import torch

    if not hasattr(torch, dtype_name):
        raise EmulationError(f"{name}: torch has no {dtype_name}; unflatten NumPy arrays, or cast that leaf with featurize.")
    return getattr(torch, dtype_name)


def _record_dtype(fields: Tree, start: int, stop: int) -> np.dtype:
    """The structured dtype of the bytes [start, stop) of a record, which contain `fields`."""
    if isinstance(fields, Leaf):
        return np.dtype((fields.dtype, fields.shape))
    keys = list(fields) if isinstance(fields, dict) else list(range(len(fields)))
    names = [str(key) for key in keys]
    if len(set(names)) < len(names) or "" in names:
        names = [f"field_{i}" for i in range(len(names))]
    formats, offsets = [], []
    for key in keys:
        leaves = tree_leaves(fields[key])
        first, last = leaves[0].offset, leaves[-1].offset + leaves[-1].nbytes
        formats.append(_record_dtype(fields[key], first, last))
        offsets.append(first - start)
    return np.dtype({"names": names, "formats": formats, "offsets": offsets, "itemsize": stop - start})


def _numbers(shape: tuple[int, ...]) -> str:
    return ", ".join(map(str, shape))
