"""Variable-size spaces (Text, custom strings, Sequence, Graph, OneOf): padded leaves and a length.

value ⇄ arrays zero-padded up to a maximum; longer values are an error, never cut. Knows nothing of the tree around it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from gymnasium import spaces

from hurtle.emulation.leaves import Tree, check_tree, kind_of
from hurtle.emulation.nodes import (
    Node,
    Views,
    as_batch,
    batch_item,
    batch_length,
    check_batch,
    fields_of,
    leaves_of,
    load_rows,
    load_tree,
    store_rows,
    store_tree,
)
from hurtle.errors import EmulationError

if TYPE_CHECKING:
    from hurtle.emulation.plan import Plan

_SHOWN_CHARACTERS = 40
"""Characters of a charset shown in messages."""


class StringNode(Node):
    """A custom space of strings, such as MiniGrid's MissionSpace: UTF-8 bytes padded with 0."""

    def __init__(self, space: spaces.Space, path: str, plan: Plan):
        self._place(space, path, plan, np.uint8, plan.string_length(path), 255)

    def _place(self, space: spaces.Space, path: str, plan: Plan, dtype: Any, max_length: int, high: int) -> None:
        self.path, self.space, self._max = path, space, max_length
        self._codes = plan.leaf(f"{path}.codes", space, dtype, (max_length,), 0, high)
        self._length = plan.leaf(f"{path}.length", space, np.int32, (), 0, max_length)
        self.fields = {"codes": self._codes, "length": self._length}
        self.leaves = (self._codes, self._length)

    def store(self, views: Views, value: Any) -> None:
        """Write the codes and the length."""
        codes = self._encode(value, self.path)
        target, count = views[self._codes], len(codes)
        target[:count] = codes
        target[count:] = 0
        views[self._length][...] = count

    def load(self, views: Views) -> str:
        """Read the string."""
        return self._decode(views[self._codes][: int(views[self._length])])

    def check(self, value: Any, path: str) -> None:
        """Check that it is a string of allowed length."""
        self._encode(value, path)

    def _encode(self, value: Any, path: str) -> np.ndarray:
        if not isinstance(value, str):
            raise EmulationError(f"{path}: expected a str, got {kind_of(value)}.")
        codes = np.frombuffer(value.encode("utf-8", "surrogatepass"), np.uint8)
        if len(codes) > self._max:
            raise _too_many(path, "a string", self._max, "bytes", len(codes), f"max_length={{{self.path!r}: {len(codes)}}}")
        return codes

    def _decode(self, codes: np.ndarray) -> str:
        return codes.tobytes().decode("utf-8", "surrogatepass")


class TextNode(StringNode):
    """A Text: code k is character k - 1 of the sorted charset; 0 is padding."""

    def __init__(self, space: spaces.Text, path: str, plan: Plan):
        self._min = space.min_length
        characters = sorted(space.character_set)  # the order of a set differs between processes
        self._points = _code_points("".join(characters))
        self._place(space, path, plan, np.int32, space.max_length, len(characters))

    def check(self, value: Any, path: str) -> None:
        """Check that it is a string of allowed length and characters."""
        if len(self._encode(value, path)) < self._min:
            raise EmulationError(f"{path}: expected a text of at least {self._min} characters, got {len(value)}.")

    def _encode(self, value: Any, path: str) -> np.ndarray:
        if not isinstance(value, str):
            raise EmulationError(f"{path}: expected a str, got {kind_of(value)}.")
        if len(value) > self._max:
            raise EmulationError(f"{path}: expected a text of at most {self._max} characters, got {len(value)}.")
        points = _code_points(value)
        codes = np.searchsorted(self._points, points)
        strange = self._points.take(codes, mode="clip") != points
        if strange.any():
            known = self._decode(np.arange(1, len(self._points) + 1))
            charset = f"{known[:_SHOWN_CHARACTERS]!r}{' …' if len(known) > _SHOWN_CHARACTERS else ''}"
            raise EmulationError(f"{path}: expected characters of the charset {charset}, got {value[int(strange.argmax())]!r}.")
        return codes + 1

    def _decode(self, codes: np.ndarray) -> str:
        return self._points[codes - 1].tobytes().decode("utf-32-le", "surrogatepass")


class SequenceNode(Node):
    """A Sequence: its feature space with one more dimension, and the number of real entries."""

    def __init__(self, space: spaces.Sequence, path: str, plan: Plan):
        self.path, self.space, self._stack = path, space, space.stack
        self._max = plan.limit("max_length", path, "Sequence")
        self._tree: Tree = plan.inside(self._max).tree(space.feature_space, f"{path}[*]")
        self._length = plan.leaf(f"{path}.length", space, np.int32, (), 0, self._max)
        self.fields = {"values": fields_of(self._tree), "length": self._length}
        self.leaves = (*leaves_of(self._tree), self._length)

    def store(self, views: Views, value: Any) -> None:
        """Write all entries, leaf by leaf."""
        count = self._count(value, self.path)
        store_rows(self._tree, views, value if self._stack else as_batch(self._tree, value), count)
        views[self._length][...] = count

    def load(self, views: Views) -> Any:
        """Read a tuple of values, or one batch if the space stacks."""
        count = int(views[self._length])
        batch = load_rows(self._tree, views, count)
        return batch if self._stack else tuple(batch_item(self._tree, batch, i) for i in range(count))

    def check(self, value: Any, path: str) -> None:
        """Check that it is a tuple (or a batch) of values of the feature space, and not too long."""
        if self._stack:
            check_batch(self._tree, value, path)
        elif not isinstance(value, tuple | list):
            raise EmulationError(f"{path}: expected a tuple of at most {self._max} values, got {kind_of(value)}.")
        for i in range(self._count(value, path)):
            check_tree(self._tree, batch_item(self._tree, value, i) if self._stack else value[i], f"{path}[{i}]")

    def _count(self, value: Any, path: str) -> int:
        count = batch_length(self._tree, value) if self._stack else len(value)
        if count > self._max:
            raise _too_many(path, "a Sequence", self._max, "values", count, f"max_length={{{self.path!r}: {count}}}")
        return count


class GraphNode(Node):
    """A Graph: node and edge features with one more dimension, the links, and the numbers of real nodes and edges.

    A graph without edges is read back as Gymnasium samples it, with None for edges and links.
    """

    def __init__(self, space: spaces.Graph, path: str, plan: Plan):
        self.path, self.space = path, space
        self._max_nodes = plan.limit("max_nodes", path, "Graph")
        self._max_edges = plan.limit("max_edges", path, "Graph", default=0 if space.edge_space is None else None)
        self._nodes: Tree = plan.inside(self._max_nodes).tree(space.node_space, f"{path}.nodes[*]")
        self._edges: Tree = ()
        if space.edge_space is not None:
            self._edges = plan.inside(self._max_edges).tree(space.edge_space, f"{path}.edges[*]")
        last = max(self._max_nodes - 1, 0)
        self._links = plan.leaf(f"{path}.edge_links", space, np.int32, (self._max_edges, 2), 0, last)
        self._num_nodes = plan.leaf(f"{path}.num_nodes", space, np.int32, (), 0, self._max_nodes)
        self._num_edges = plan.leaf(f"{path}.num_edges", space, np.int32, (), 0, self._max_edges)
        self.fields = {
            "nodes": fields_of(self._nodes),
            **({"edges": fields_of(self._edges)} if self._edges != () else {}),
            "edge_links": self._links,
            "num_nodes": self._num_nodes,
            "num_edges": self._num_edges,
        }
        features = (*leaves_of(self._nodes), *leaves_of(self._edges))
        self.leaves = (*features, self._links, self._num_nodes, self._num_edges)

    def store(self, views: Views, value: Any) -> None:
        """Write the features, the links and both counts."""
        num_nodes, num_edges = self._counts(value, self.path)
        store_rows(self._nodes, views, value.nodes, num_nodes)
        store_rows(self._edges, views, value.edges, num_edges)
        if num_edges:
            views[self._links][:num_edges] = value.edge_links
        views[self._links][num_edges:] = 0
        views[self._num_nodes][...] = num_nodes
        views[self._num_edges][...] = num_edges

    def load(self, views: Views) -> spaces.GraphInstance:
        """Read a GraphInstance, as a copy."""
        num_nodes, num_edges = int(views[self._num_nodes]), int(views[self._num_edges])
        nodes = load_rows(self._nodes, views, num_nodes)
        if not num_edges:
            return spaces.GraphInstance(nodes, None, None)
        edges = load_rows(self._edges, views, num_edges) if self._edges != () else None
        return spaces.GraphInstance(nodes, edges, views[self._links][:num_edges].copy())

    def check(self, value: Any, path: str) -> None:
        """Check that nodes and edges belong to their spaces and every link joins two existing nodes."""
        if not isinstance(value, spaces.GraphInstance):
            raise EmulationError(f"{path}: expected a GraphInstance, got {kind_of(value)}.")
        num_nodes, num_edges = self._counts(value, path)
        for i in range(num_nodes):
            check_tree(self._nodes, batch_item(self._nodes, value.nodes, i), f"{path}.nodes[{i}]")
        if not num_edges:
            return
        for i in range(num_edges if self._edges != () else 0):
            check_tree(self._edges, batch_item(self._edges, value.edges, i), f"{path}.edges[{i}]")
        links = np.asarray(value.edge_links)
        if links.shape != (num_edges, 2) or links.dtype.kind not in "iu":
            expected = f"integers of shape {(num_edges, 2)}"
            raise EmulationError(f"{path}.edge_links: expected {expected}, got {kind_of(links)}.")
        wrong = links[(links < 0) | (links >= num_nodes)]
        if wrong.size:
            raise EmulationError(f"{path}.edge_links: expected nodes from 0 to {num_nodes - 1}, got {wrong[0]}.")

    def _counts(self, value: Any, path: str) -> tuple[int, int]:
        check_batch(self._nodes, value.nodes, f"{path}.nodes")
        num_nodes = batch_length(self._nodes, value.nodes)
        num_edges = 0 if value.edge_links is None else len(value.edge_links)
        features = num_edges
        if self._edges == () and value.edges is not None:
            raise EmulationError(f"{path}.edges: expected None, as the Graph has no edge_space, got {kind_of(value.edges)}.")
        if self._edges != ():
            if value.edges is not None:
                check_batch(self._edges, value.edges, f"{path}.edges")
            features = 0 if value.edges is None else batch_length(self._edges, value.edges)
        if features != num_edges:
            raise EmulationError(f"{path}: expected as many edges as edge_links, got {features} and {num_edges}.")
        for count, most, what in ((num_nodes, self._max_nodes, "nodes"), (num_edges, self._max_edges, "edges")):
            if count > most:
                raise _too_many(path, "a Graph", most, what, count, f"max_{what}={{{self.path!r}: {count}}}")
        return num_nodes, num_edges


class OneOfNode(Node):
    """A OneOf: every option has its own leaves, zero for all but the chosen option."""

    def __init__(self, space: spaces.OneOf, path: str, plan: Plan):
        self.path, self.space = path, space
        self._choice = plan.leaf(f"{path}.choice", space, np.int64, (), 0, len(space.spaces) - 1)
        inner = plan.inside()
        self._options = tuple(inner.tree(option, f"{path}.options[{i}]") for i, option in enumerate(space.spaces))
        self.fields = {"choice": self._choice, "options": fields_of(self._options)}
        self.leaves = (self._choice, *leaves_of(self._options))

    def store(self, views: Views, value: Any) -> None:
        """Write the choice and its value; clear the other options."""
        choice = self._chosen(value, self.path)
        for leaf in leaves_of(self._options[:choice] + self._options[choice + 1 :]):
            views[leaf][...] = 0
        store_tree(self._options[choice], views, value[1])
        views[self._choice][...] = choice

    def load(self, views: Views) -> tuple[np.int64, Any]:
        """Read the choice and its value."""
        choice = np.int64(views[self._choice])
        return choice, load_tree(self._options[choice], views)

    def check(self, value: Any, path: str) -> None:
        """Check that it is a pair of a choice and a value of that option."""
        choice = self._chosen(value, path)
        check_tree(self._options[choice], value[1], f"{path}.options[{choice}]")

    def _chosen(self, value: Any, path: str) -> int:
        if not isinstance(value, tuple) or len(value) != 2 or not isinstance(value[0], int | np.integer):
            raise EmulationError(f"{path}: expected a tuple (choice, value), got {kind_of(value)}.")
        if not 0 <= value[0] < len(self._options):
            raise EmulationError(f"{path}: expected a choice from 0 to {len(self._options) - 1}, got {value[0]}.")
        return int(value[0])


def _too_many(path: str, kind: str, most: int, unit: str, count: int, argument: str) -> EmulationError:
    return EmulationError(f"{path}: expected {kind} of at most {most} {unit}, got {count}; pass {argument} or more.")


def _code_points(text: str) -> np.ndarray:
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), "<u4")
