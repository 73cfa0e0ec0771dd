"""`policy_bytes`: a `PolicyGraph` as the bytes of an ONNX or torch.export file, with its card inside.

graph → traced program → ONNX or archive → tidied → card with a hash → bytes. Writes no file. A file that samples is compared
with the policy here, while its uniforms are still an input.
"""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hurtle import __version__
from hurtle.deploy.card import Card, Feeds
from hurtle.deploy.compiled import CompiledMLP, MLPDescription
from hurtle.deploy.exported import onnx_session
from hurtle.deploy.onnx_file import KEY, import_export_package, onnx_hash
from hurtle.deploy.parity import check_parity
from hurtle.deploy.policy_graph import MEAN, STD, PolicyGraph
from hurtle.deploy.pt2_file import MEMBER, members_of, pt2_hash
from hurtle.deploy.restore import Restored
from hurtle.errors import HurtleError
from hurtle.policies.plain_mlp import plain_mlp

MOST_ROWS = 1 << 24
"""Largest batch of a .pt2 file."""


def policy_bytes(restored: Restored, graph: PolicyGraph, card: Card, path: Path, progress: Callable[[str], None]) -> bytes:
    """The contents of the file; the card gets its hash, and the layers of a plain MLP.

    Args:
        restored: The trained policy.
        graph: The graph to export.
        card: The metadata.
        path: Ends in .onnx or .pt2; named in errors.
        progress: Called with the name of each step that takes seconds.

    Raises:
        HurtleError: The network cannot be traced, or has operations that the format does not know.
        PolicyFileError: An ONNX file would sample from another distribution than the policy.
    """
    write = _onnx_bytes if path.suffix == ".onnx" else _pt2_bytes
    with _quiet():
        return write(restored, graph, card, path, progress)


def _traced(graph: PolicyGraph) -> torch.export.ExportedProgram:
    """The graph as operations on tensors of any batch size."""
    inputs = tuple(torch.zeros(3, *port.shape, dtype=getattr(torch, port.dtype)) for port in graph.inputs)
    with torch.no_grad(), _no_validation():
        graph(*inputs)  # some constants are made at the first call, which must not be traced
        batch = torch.export.Dim("batch", min=1, max=MOST_ROWS)
        shapes = {"tensors": tuple({0: batch} for _ in inputs)}
        try:
            program = torch.export.export(graph, inputs, dynamic_shapes=shapes, strict=False)
        except (ImportError, MemoryError):
            raise
        except Exception as error:  # torch's many types, and the network's own
            reason = str(error).strip().splitlines()[0][:300] if str(error).strip() else type(error).__name__
            raise HurtleError(f"torch.export cannot trace the policy's network ({type(error).__name__}: {reason}).") from error
    for node in program.graph.nodes:
        node.meta.pop("stack_trace", None)  # it contains paths of this machine
    return program


def _onnx_bytes(restored: Restored, graph: PolicyGraph, card: Card, path: Path, progress: Callable[[str], None]) -> bytes:
    progress("loading onnx")
    onnx = import_export_package("onnx")
    import_export_package("onnxscript")
    inputs, names = ([port.name for port in ports] for ports in (graph.inputs, graph.outputs))
    progress("tracing the network")
    traced = _traced(graph)
    progress("converting it to ONNX")
    try:
        with _library_kept():
            program = torch.onnx.export(traced, (), dynamo=True, input_names=inputs, output_names=names, verbose=False)
    except (ImportError, MemoryError):
        raise
    except Exception as error:  # many types
        raise HurtleError(f"The policy's network has operations that ONNX does not know ({type(error).__name__}).") from error
    assert program is not None
    model = onnx.ModelProto()
    model.ParseFromString(program.model_proto.SerializeToString())
    _tidy(model)
    if graph.stochastic:
        session = onnx_session(model.SerializeToString(), str(path))
        run = partial(_run_session, session, names)
        check_parity(restored.policy, graph, run, restored.layout, "onnxruntime")
        _draw_inside(onnx, model, graph)
    mlp = _mlp(graph)
    if mlp is not None:
        kept = {tensor.name for tensor in model.graph.initializer}
        for layer in mlp["layers"]:
            layer["bias"] = layer["bias"] if layer["bias"] in kept else None  # torch leaves out a bias of zeros
        wanted = {layer["weight"] for layer in mlp["layers"]} | {name for name in (mlp["mean"], mlp["std"]) if name}
        mlp = mlp if wanted <= kept else None
    card = replace(card, mlp=mlp)
    card = replace(card, sha256=onnx_hash(model, card))
    entry = model.metadata_props.add()
    entry.key, entry.value = KEY, card.to_json()
    return model.SerializeToString(deterministic=True)


def _run_session(session: Any, names: list[str], feeds: Feeds) -> Feeds:
    return dict(zip(names, session.run(names, feeds), strict=True))


def _tidy(model: Any) -> None:
    """Name the first dimension "batch", and drop metadata about how and where the graph was made."""
    del model.metadata_props[:]
    model.producer_name, model.producer_version, model.doc_string = "hurtle", __version__, ""
    graph = model.graph
    graph.name = "policy"
    for part in (*graph.node, *graph.initializer, *graph.value_info, *graph.input, *graph.output):
        del part.metadata_props[:]
        part.doc_string = ""
    for value in (*graph.value_info, *graph.input, *graph.output):
        for dimension in value.type.tensor_type.shape.dim:
            if dimension.dim_param:
                dimension.dim_param = "batch"


def _draw_inside(onnx: Any, model: Any, graph: PolicyGraph) -> None:
    """Draw the uniforms inside the graph instead of taking them as an input."""
    make = onnx.helper
    uniforms = next(value for value in model.graph.input if value.name == "uniforms")
    first = graph.inputs[0].name
    size, ends = graph.policy.num_uniforms, onnx.TensorProto.INT64
    rows = [
        make.make_node("Shape", [first], ["uniforms.rows"], start=0, end=1),
        make.make_node("Concat", ["uniforms.rows", "uniforms.size"], ["uniforms.shape"], axis=0),
        make.make_node("ConstantOfShape", ["uniforms.shape"], ["uniforms.like"]),
        make.make_node("RandomUniformLike", ["uniforms.like"], ["uniforms.drawn"], low=0.0, high=1.0),
        make.make_node("Min", ["uniforms.drawn", "uniforms.most"], ["uniforms"]),  # some libraries round up to 1
    ]
    most = np.nextafter(np.float32(1.0), np.float32(0.0))
    model.graph.initializer.append(make.make_tensor("uniforms.most", onnx.TensorProto.FLOAT, [], [most]))
    model.graph.initializer.append(make.make_tensor("uniforms.size", ends, [1], [size]))
    model.graph.input.remove(uniforms)
    nodes = [*rows, *model.graph.node]
    del model.graph.node[:]
    model.graph.node.extend(nodes)


def _pt2_bytes(restored: Restored, graph: PolicyGraph, card: Card, path: Path, progress: Callable[[str], None]) -> bytes:
    progress("tracing the network")
    program, buffer = _traced(graph), io.BytesIO()
    program._example_inputs = None  # torch would pickle them, and unpickle them when it loads the file
    torch.export.save(program, buffer)
    with zipfile.ZipFile(buffer) as archive:
        card = replace(card, sha256=pt2_hash(members_of(archive), card))
        root = archive.namelist()[0].split("/", 1)[0]
    with zipfile.ZipFile(buffer, "a", zipfile.ZIP_STORED) as archive:
        archive.writestr(f"{root}/extra/{MEMBER}", card.to_json())
    return buffer.getvalue()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence the warnings that torch's exporters print for their own developers."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


@contextlib.contextmanager
def _library_kept() -> Iterator[None]:
    """Let torch.onnx translate its operator library once per process instead of once per export, half of a small export's time.

    The exporter asks a lazily imported module for the library; inside, the module answers with the first result. A version of
    torch without that module is left alone.
    """
    try:
        apis: Any = import_module("torch.onnx._internal._lazy_import").onnxscript_apis
        translate = apis.get_torchlib_ops
    except (ImportError, AttributeError):
        translate = None
    if translate is None or "get_torchlib_ops" in vars(apis):
        yield
        return
    apis.get_torchlib_ops = lambda: _library(translate)
    try:
        yield
    finally:
        del apis.get_torchlib_ops


@cache
def _library(translate: Callable[[], Any]) -> Any:
    return translate()


@contextlib.contextmanager
def _no_validation() -> Iterator[None]:
    """Switch off the argument checks of torch's distributions, which need values: a graph has none yet."""
    before = torch.distributions.Distribution._validate_args
    torch.distributions.Distribution.set_default_validate_args(False)
    try:
        yield
    finally:
        torch.distributions.Distribution.set_default_validate_args(before)


def _mlp(graph: PolicyGraph) -> dict[str, Any] | None:
    """The tensors of the file that are the layers of a plain MLP, for the compiled runtime; None for other networks."""
    policy = graph.policy
    try:
        known = MLPDescription.of(policy)
        CompiledMLP(known)
    except HurtleError:  # another network, or spaces that the compiled runtime does not know
        return None
    if known.observation_space is not policy.observation_space:  # an emulated array of integers, which is made one-hot
        return None
    names = {id(parameter): name for name, parameter in graph.named_parameters()}
    layers = [
        {"weight": names[id(layer.linear.weight)], "bias": names[id(layer.linear.bias)], "activation": layer.activation}
        for layer in plain_mlp(policy).actor
    ]
    mean, std, clip = (None, None, 0.0) if policy.normalizer is None else (MEAN, STD, policy.normalizer.clip)
    return {"layers": layers, "mean": mean, "std": std, "clip": clip}
