"""Read untrusted .onnx files: the card and the weights, if the graph is nothing but arithmetic on tensors.

bytes → protobuf → hash → known operations, bounded sizes → card, tensors. Runs nothing that the file holds.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import numpy as np

from hurtle.deploy.card import MAX_NUMBERS, Card
from hurtle.deploy.operations import is_onnx_operation
from hurtle.errors import HurtleError, PolicyFileError

KEY = "hurtle"
"""Key of the card in the metadata."""
_SIZES = {"ConstantOfShape": (0,), "Expand": (1,), "OneHot": (1,), "Pad": (1,), "Range": (0, 1, 2), "Tile": (1,)}
"""The inputs that decide how much memory an operation takes."""
_MOST_SIZES = 64
"""Most numbers in a tensor of sizes."""
_FOLLOWED: dict[str, int | None] = {
    **dict.fromkeys(("Abs", "Cast", "Gather", "Identity", "Neg", "Reshape", "Slice", "Split", "Squeeze", "Unsqueeze"), 1),
    **dict.fromkeys(("Add", "Concat", "Div", "Max", "Min", "Mul", "Sub"), None),
}
"""Operations that may compute sizes, and how many of their inputs count; None: all."""


def import_export_package(name: str) -> Any:
    """Import a package of the extra `export`.

    Raises:
        HurtleError: It is not installed.
    """
    try:
        return import_module(name)
    except ImportError as error:
        raise HurtleError(f'Exported policies need {name}: pip install "hurtle[export]" ({error}).') from None


def read_onnx(content: bytes) -> tuple[Card, dict[str, np.ndarray]]:
    """The card of a file, and the tensors that its `mlp` lists.

    Raises:
        PolicyFileError: The file is not a policy file; gives the reason.
    """
    onnx = import_export_package("onnx")
    model, card = read_sealed(content)
    _check_operations(model)
    if any(tensor.data_location for tensor in _constants(model.graph)):
        raise PolicyFileError("it keeps weights in other files")
    try:
        _check_sizes(model.graph, onnx.numpy_helper.to_array)
        tensors = {tensor.name: tensor for tensor in model.graph.initializer}
        names = card.layer_tensors
        if not names <= tensors.keys():
            raise PolicyFileError(f"it lacks the tensors {sorted(names - tensors.keys())}")
        return card, {name: onnx.numpy_helper.to_array(tensors[name]) for name in names}
    except (ValueError, TypeError, KeyError) as error:
        raise PolicyFileError(f"its tensors cannot be read ({error})") from None


def read_sealed(content: bytes) -> tuple[Any, Card]:
    """A file as protobuf, and its card, if neither was changed after the export.

    Raises:
        PolicyFileError: The file is not a policy file; gives the reason.
    """
    onnx = import_export_package("onnx")
    from google.protobuf.message import DecodeError

    model = onnx.ModelProto()
    try:
        model.ParseFromString(content)
    except (DecodeError, RuntimeError, ValueError):
        raise PolicyFileError("it is not ONNX, or it is damaged or cut off") from None
    if not model.graph.node:
        raise PolicyFileError("it is not ONNX, or it is damaged or cut off")
    written = {entry.key: entry.value for entry in model.metadata_props}
    if KEY not in written:
        raise PolicyFileError(f"its metadata has no entry {KEY!r}: it was cut off, or is not an export of Hurtle's")
    card = Card.from_json(written[KEY])
    if card.sha256 != onnx_hash(model, card):
        raise PolicyFileError("it is damaged, or was changed after its export")
    return model, card


def onnx_hash(model: Any, card: Card) -> str:
    """Hash of the card and of everything else except the metadata."""
    bare = type(model)()
    bare.CopyFrom(model)
    del bare.metadata_props[:]
    return card.sealed(hashlib.sha256(bare.SerializeToString(deterministic=True)))


def _check_operations(model: Any) -> None:
    """Refuse any operation that is not on the list of known ones.

    Raises:
        PolicyFileError: Names the operation.
    """
    for node in model.graph.node:
        has_graph = any(attribute.HasField("g") or attribute.graphs for attribute in node.attribute)
        if has_graph or not is_onnx_operation(node.domain, node.op_type):
            name = f"{node.domain}.{node.op_type}" if node.domain else node.op_type
            raise PolicyFileError(f"its graph has the operation {name[:80]!r}, which no policy file may have")
    if model.functions or model.training_info:
        raise PolicyFileError("it has functions or a training graph of its own, which no policy needs")
    attributes = [attribute for node in model.graph.node for attribute in node.attribute]
    if model.graph.sparse_initializer or any(each.HasField("sparse_tensor") or each.sparse_tensors for each in attributes):
        raise PolicyFileError("it has sparse tensors, which no policy needs")


def _constants(graph: Any) -> Iterator[Any]:
    """All constant tensors of a graph."""
    yield from graph.initializer
    for node in graph.node:
        for attribute in node.attribute:
            yield from (attribute.t, *attribute.tensors)


def _check_sizes(graph: Any, to_array: Any) -> None:
    """Refuse operations that allocate more memory than any policy needs, or whose sizes cannot be bounded.

    A tensor of sizes is bounded by the product of all constants that go into it; dimensions of other tensors count as 1.
    """
    most = {tensor.name: _most(to_array(tensor)) for tensor in graph.initializer if math.prod(tensor.dims) <= _MOST_SIZES}
    for node in graph.node:
        sizes = [most.get(node.input[k], math.inf) for k in _SIZES.get(node.op_type, ()) if k < len(node.input)]
        if node.op_type != "Constant":
            sizes += [_most(np.array(attribute.ints)) for attribute in node.attribute]
        if not all(size <= MAX_NUMBERS for size in sizes):
            raise PolicyFileError(f"its {node.op_type} {node.name[:80]!r} has a size that is too large, or cannot be bounded")
        if node.op_type in ("Shape", "Size"):
            found: float = 1
        elif node.op_type == "Constant":
            found = math.prod(_most(np.array(_value(attribute, to_array))) for attribute in node.attribute)
        elif node.op_type in _FOLLOWED:
            found = math.prod(most.get(name, math.inf) for name in node.input[: _FOLLOWED[node.op_type]])
        else:
            continue
        most |= dict.fromkeys(node.output, found)


def _value(attribute: Any, to_array: Any) -> Any:
    """The value of a Constant's attribute."""
    if attribute.HasField("t"):
        return to_array(attribute.t)
    return [*attribute.ints, *attribute.floats] or [attribute.i, attribute.f]


def _most(sizes: np.ndarray) -> float:
    """An upper bound for what these sizes can allocate: their product, with 1 / size for small steps; infinite if not sizes."""
    if sizes.ndim > 1 or sizes.size > _MOST_SIZES or sizes.dtype.kind not in "biuf":
        return math.inf
    known = np.abs(sizes[sizes != 0].astype(np.float64))
    with np.errstate(over="ignore"):
        return float(np.prod(np.maximum(known, 1 / known)))
