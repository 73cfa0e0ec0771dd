"""`hurtle.export`: a trained policy as one file, checked against the policy it came from before the file gets its name.

run → policy → `PolicyGraph` → ONNX or torch.export, with a card inside → the same numbers? → the file. Trains nothing.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import math
import os
import secrets
import warnings
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from hurtle import __version__
from hurtle.deploy.compiled import CompiledMLP, MLPDescription
from hurtle.deploy.exported import ExportedPolicy, onnx_session
from hurtle.deploy.parity import check_parity
from hurtle.deploy.policy_file import (
    KEY,
    MEMBER,
    SUFFIXES,
    Card,
    PolicyFile,
    import_export_package,
    onnx_hash,
    pt2_hash,
    read_policy_file,
)
from hurtle.deploy.policy_graph import MEAN, STD, PolicyGraph
from hurtle.errors import HurtleError, PolicyFileError
from hurtle.policies.policy import Policy
from hurtle.policies.spaces import layout_to_dict, space_to_dict
from hurtle.runners.config import settings_to_dict
from hurtle.runners.restore import Restored, find_checkpoint, restore
from hurtle.tracking.checkpoints import sync

MOST_ROWS = 1 << 24
"""Largest batch that a file takes."""


@dataclass(frozen=True)
class Export:
    """A file that was written and checked.

    Attributes:
        path: Where it is.
        card: What it says about itself.
        size: Bytes of the file.
        max_difference: Largest difference from the policy, over all runtimes and observations that were tried.
        observations: How many.
        runtimes: Which runtimes were compared.
    """

    path: Path
    card: Card
    size: int
    max_difference: float
    observations: int
    runtimes: tuple[str, ...]

    def __str__(self) -> str:
        inputs, outputs = (", ".join(port.name for port in ports) for ports in (self.card.inputs, self.card.outputs))
        return (
            f"wrote       {self.path} ({self.size / 1024:.0f} KiB)\n"
            f"policy      {self.card.env or 'an env without a name'}, {self.card.algorithm}, {self.card.steps:,} steps\n"
            f"tensors     {inputs} → {outputs}\n"
            f"checked     {self.observations} observations, {' and '.join(self.runtimes)} against torch: "
            f"max difference {self.max_difference:.1e}"
        )


def export(
    run: Any,
    path: str | Path,
    *,
    outputs: tuple[str, ...] = ("action",),
    stochastic: bool = False,
    masked: bool | None = None,
    policy: nn.Module | None = None,
) -> Export:
    """Write a trained policy to one file that runs without Hurtle, and check it.

    The observation normalizer and everything else between the env and the network is inside: `obs` is what the env shows,
    `action` what it takes. A recurrent policy's memory goes in as `state_in_0` … and comes out as `state_out_0` …, and is
    zeros at the start of an episode. Structured observations have one input per leaf: `obs.camera`.

    Args:
        run: A `Run`, a run folder, "latest", or a checkpoint file.
        path: Ends in .onnx, or in .pt2 for torch.export.
        outputs: What to compute, of "action", "value" and what the distribution is made of: "logits", or "mean" and
            "log_std", or "alpha" and "beta"; "heads" means these.
        stochastic: Sample the action, with random numbers drawn inside; else it is the most likely one.
        masked: Take legal actions, `mask`, as an input; None: if the run's env gave some.
        policy: A module built like the one that the run was given, where it was given one as an object.

    Raises:
        HurtleError: The policy cannot be exported like this.
        PolicyFileError: The exported policy computes something else, or the file cannot be written. There is then no file.

    Example:
        >>> run = hurtle.train("cartpole")  # doctest: +SKIP
        >>> print(hurtle.export(run, "cartpole.onnx"))  # doctest: +SKIP
    """
    path = Path(path)
    if path.suffix not in SUFFIXES:
        raise HurtleError(f"The file's name must end in {' or '.join(SUFFIXES)}, got {str(path)!r}.")
    folder, checkpoint = find_checkpoint(run)
    restored = restore(checkpoint, module=policy)
    masked = restored.has_masks if masked is None else masked
    draws = stochastic and path.suffix == ".pt2"  # an ONNX file is given its own random numbers once it is checked
    graph = PolicyGraph(restored.policy, restored.layout, tuple(outputs), masked, stochastic, draws)
    card = _card(restored, folder, graph, masked)
    write = _write_onnx if path.suffix == ".onnx" else _write_pt2
    part = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f".{path.stem}-{os.getpid()}-{secrets.token_hex(4)}{path.suffix}")
        part.touch(exist_ok=False)
        with _quiet():
            write(restored, graph, card, part)
        file = read_policy_file(part)
        exported = Export(path, file.card, part.stat().st_size, *_check(file, restored, graph))
        sync(part)
        part.replace(path)
        sync(path.parent)
    except OSError as error:
        raise PolicyFileError(f"Cannot write {path}: {error.strerror or error}.") from None
    finally:
        if part is not None:
            part.unlink(missing_ok=True)
    return exported


def _check(file: PolicyFile, restored: Restored, graph: PolicyGraph) -> tuple[float, int, tuple[str, ...]]:
    """Largest difference over all runtimes that can run the file; of actions that ONNX samples only that they are actions."""
    worst, count, runtimes = 0.0, 0, ExportedPolicy.runtimes_of(file)
    has_uniforms = any(port.name == "uniforms" for port in graph.inputs)
    for runtime in runtimes:
        policy = ExportedPolicy(file, runtime)
        run = partial(_run_without_uniforms, policy) if has_uniforms else policy.run
        difference, tried = check_parity(restored.policy, graph, run, restored.layout, runtime)
        worst, count = max(worst, difference), max(count, tried)
    return worst, count, tuple("torch.export" if runtime == "torch" else runtime for runtime in runtimes)


def _run_without_uniforms(policy: ExportedPolicy, feeds: dict[str, Any]) -> dict[str, Any]:
    """All outputs but the sampled action, of which only that it is one is looked at."""
    found = policy.run({name: array for name, array in feeds.items() if name != "uniforms"})
    action = found.pop("action", None)
    if action is not None and not all(policy.card.spaces[1].contains(row) for row in action):
        raise PolicyFileError("The exported policy samples actions that are not in its action space. Nothing was written.")
    return found


# What a file says about itself.


def _card(restored: Restored, folder: Path | None, graph: PolicyGraph, masked: bool) -> Card:
    settings, policy = restored.settings, restored.policy
    structure = None
    if restored.layout is not None and restored.action_layout is not None:
        structure = {"observation": layout_to_dict(restored.layout), "action": space_to_dict(restored.action_layout.space)}
    about = _json(folder, "about.json")
    return Card(
        env=_without_folder(str(settings.train.env)) if restored.has_named_env else "",
        env_parameters=settings_to_dict(settings)["env_parameters"],
        algorithm=settings.train.algorithm,
        steps=restored.steps,
        mean_return=_mean_return(folder, restored),
        observation_space=space_to_dict(policy.observation_space),
        action_space=space_to_dict(policy.action_space),
        structure=structure,
        distribution=policy.head.kind,
        deterministic=not graph.stochastic,
        masked=masked,
        inputs=tuple(port for port in graph.inputs if port.name != "uniforms"),
        outputs=tuple(graph.outputs),
        seed=settings.train.seed,
        hurtle=__version__,
        commit=(about.get("git") or {}).get("commit"),
    )


def _without_folder(env: str) -> str:
    """A reference to a user's file by the file's name alone: its folder is nobody else's business."""
    file, separator, name = env.rpartition(".py:")
    return f"{Path(file).name}{separator}{name}" if separator else env


def _mean_return(folder: Path | None, restored: Restored) -> float | None:
    """Of the last evaluation of this checkpoint on the run's own env."""
    evaluated, summary = _json(folder, "evaluation.json"), _json(folder, "summary.json")
    if evaluated.get("env") != str(restored.settings.train.env) or evaluated.get("steps") != restored.steps:
        evaluated = (summary.get("evaluation") or {}) if summary.get("steps") == restored.steps else {}
    mean = evaluated.get("mean")
    return float(mean) if isinstance(mean, int | float) and math.isfinite(mean) else None


def _json(folder: Path | None, name: str) -> dict[str, Any]:
    try:
        found = json.loads((folder / name).read_text()) if folder is not None else {}
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _mlp(policy: Policy, graph: PolicyGraph) -> dict[str, Any] | None:
    """Which tensors of the file are the layers of a plain MLP, for the compiled runtime; None for other networks."""
    try:
        known = MLPDescription.of(policy)
        CompiledMLP(known)
    except HurtleError:  # another network, or spaces that compiled code does not know
        return None
    if known.observation_space is not policy.observation_space:  # integers that come as an array and are made one-hot
        return None
    names = {id(parameter): name for name, parameter in graph.named_parameters()}
    network: Any = graph.policy.network
    linear = [*list(network.actor_body.hidden.children())[::2], network.actor]
    layers = [
        {"weight": names[id(layer.weight)], "bias": names[id(layer.bias)], "activation": described.activation}
        for layer, described in zip(linear, known.layers, strict=True)
    ]
    mean, std, clip = (None, None, 0.0) if policy.normalizer is None else (MEAN, STD, policy.normalizer.clip)
    return {"layers": layers, "mean": mean, "std": std, "clip": clip}


# The two formats.


def _traced(graph: PolicyGraph) -> torch.export.ExportedProgram:
    """The graph as operations on tensors of any batch size."""
    inputs = tuple(torch.zeros(3, *port.shape, dtype=getattr(torch, port.dtype)) for port in graph.inputs)
    with torch.no_grad(), _no_validation():
        graph(*inputs)  # constants that are made at the first call must not be made while tracing
        batch = torch.export.Dim("batch", min=1, max=MOST_ROWS)
        shapes = {"tensors": tuple({0: batch} for _ in inputs)}
        try:
            program = torch.export.export(graph, inputs, dynamic_shapes=shapes, strict=False)
        except Exception as error:
            reason = str(error).strip().splitlines()[0][:300] if str(error).strip() else type(error).__name__
            raise HurtleError(f"torch.export cannot trace the policy's network ({type(error).__name__}: {reason}).") from error
    for node in program.graph.nodes:
        node.meta.pop("stack_trace", None)  # it holds the paths of this machine
    return program


def _write_onnx(restored: Restored, graph: PolicyGraph, card: Card, file: Path) -> None:
    onnx = import_export_package("onnx")
    import_export_package("onnxscript")
    inputs, names = ([port.name for port in ports] for ports in (graph.inputs, graph.outputs))
    try:
        program = torch.onnx.export(
            _traced(graph), (), dynamo=True, input_names=inputs, output_names=names, verbose=False
        )  # fmt: skip
    except HurtleError:
        raise
    except Exception as error:
        raise HurtleError(f"The policy's network has operations that ONNX does not know ({type(error).__name__}).") from error
    assert program is not None
    model = onnx.ModelProto()
    model.ParseFromString(program.model_proto.SerializeToString())
    _tidy(model)
    if graph.stochastic:
        session = onnx_session(model.SerializeToString(), str(file))
        run = partial(_run_session, session, names)
        check_parity(restored.policy, graph, run, restored.layout, "onnxruntime")
        _draw_inside(onnx, model, graph)
    mlp = _mlp(restored.policy, graph)
    if mlp is not None:
        kept = {tensor.name for tensor in model.graph.initializer}
        for layer in mlp["layers"]:
            layer["bias"] = layer["bias"] if layer["bias"] in kept else None  # one of zeros is left out
        wanted = {layer["weight"] for layer in mlp["layers"]} | {name for name in (mlp["mean"], mlp["std"]) if name}
        mlp = mlp if wanted <= kept else None
    card = replace(card, mlp=mlp)
    card = replace(card, sha256=onnx_hash(model, card))
    entry = model.metadata_props.add()
    entry.key, entry.value = KEY, card.to_json()
    file.write_bytes(model.SerializeToString(deterministic=True))


def _run_session(session: Any, names: list[str], feeds: dict[str, Any]) -> dict[str, Any]:
    return dict(zip(names, session.run(names, feeds), strict=True))


def _tidy(model: Any) -> None:
    """Call the first dimension "batch", and leave out what only says how and where the graph was made."""
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
    """Draw the uniforms in the file instead of taking them as an input."""
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


def _write_pt2(restored: Restored, graph: PolicyGraph, card: Card, file: Path) -> None:
    buffer = io.BytesIO()
    torch.export.save(_traced(graph), buffer)
    with zipfile.ZipFile(buffer) as archive:
        card = replace(card, sha256=pt2_hash(archive, card))
        root = archive.namelist()[0].split("/", 1)[0]
    with zipfile.ZipFile(buffer, "a", zipfile.ZIP_STORED) as archive:
        archive.writestr(f"{root}/extra/{MEMBER}", card.to_json())
    file.write_bytes(buffer.getvalue())


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the warnings that torch's exporters have for their own authors."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


@contextlib.contextmanager
def _no_validation() -> Iterator[None]:
    """Without the checks of torch's distributions, which look at the numbers: a graph has none yet."""
    before = torch.distributions.Distribution._validate_args
    torch.distributions.Distribution.set_default_validate_args(False)
    try:
        yield
    finally:
        torch.distributions.Distribution.set_default_validate_args(before)
