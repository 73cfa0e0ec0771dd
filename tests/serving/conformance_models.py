"""Models for the tests with real clients: their answers are functions of the request, so that every answer can be checked."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import numpy as np

from hurtle.errors import ServingError
from hurtle.serving.backends.base import Backend, Metadata, TensorSpec
from hurtle.serving.backends.fusing import infer_fused
from hurtle.serving.config import ServeConfig
from hurtle.serving.tensors import DTYPES


class Identity(Backend):
    """y = x, of the datatype that the parameter `datatype` says."""

    def metadata(self):
        datatype = self.parameters.get("datatype", "FP32")
        return Metadata((TensorSpec("x", datatype, (-1, -1)),), (TensorSpec("y", datatype, (-1, -1)),), "test_identity")

    def infer(self, request):
        return {"y": request.inputs["x"]}


class SumDifference(Backend):
    """sum = a + b, difference = a − b."""

    def metadata(self):
        ins = tuple(TensorSpec(name, "INT32", (-1, 4)) for name in ("a", "b"))
        outs = tuple(TensorSpec(name, "INT32", (-1, 4)) for name in ("sum", "difference"))
        return Metadata(ins, outs, "test_sum_difference")

    def _run(self, inputs):
        return {"sum": inputs["a"] + inputs["b"], "difference": inputs["a"] - inputs["b"]}

    def infer(self, request):
        return self._run(request.inputs)

    def infer_batch(self, requests):
        return infer_fused(requests, self._run)


class Slow(Backend):
    """y = x, after `delay` seconds."""

    def metadata(self):
        return Metadata((TensorSpec("x", "FP32", (-1, 1)),), (TensorSpec("y", "FP32", (-1, 1)),), "test_slow")

    def infer(self, request):
        if request.model != "warm-up":
            time.sleep(float(self.parameters["delay"]))
        return {"y": request.inputs["x"]}


class Held(Backend):
    """y = x, while the model `gate` is open."""

    is_open = threading.Event()
    is_open.set()
    running = 0

    def metadata(self):
        return Metadata((TensorSpec("x", "FP32", (-1, 1)),), (TensorSpec("y", "FP32", (-1, 1)),), "test_held")

    def infer(self, request):
        if request.model != "warm-up":
            Held.running += 1
            Held.is_open.wait(timeout=60)
            Held.running -= 1
        return {"y": request.inputs["x"]}


class Gate(Backend):
    """Is opened by x = 1 and shut by x = 0; says how many calls of `held` are running."""

    def metadata(self):
        return Metadata((TensorSpec("x", "FP32", (-1, 1)),), (TensorSpec("running", "INT32", (-1, 1)),), "test_gate")

    def infer(self, request):
        if request.model != "warm-up":
            (Held.is_open.set if request.inputs["x"].any() else Held.is_open.clear)()
        return {"running": np.full(request.inputs["x"].shape, Held.running, np.int32)}


class Switch(Backend):
    """y = x, and calls `flip`, which a test in the same process has set."""

    flip = staticmethod(lambda: None)

    def metadata(self):
        return Metadata((TensorSpec("x", "FP32", (-1, 1)),), (TensorSpec("y", "FP32", (-1, 1)),), "test_switch")

    def infer(self, request):
        if request.model != "warm-up":
            Switch.flip()
        return {"y": request.inputs["x"]}


class Total(Backend):
    """Recurrent: total += x. Fails for x < 0."""

    def metadata(self):
        return Metadata(
            (TensorSpec("x", "FP32", (-1, 1)), TensorSpec("state_in_0", "FP32", (-1, 1))),
            (TensorSpec("total", "FP32", (-1, 1)), TensorSpec("state_out_0", "FP32", (-1, 1))),
            "test_total",
            state=(("state_in_0", "state_out_0"),),
        )

    def infer(self, request):
        if (request.inputs["x"] < 0).any():
            raise ServingError("invalid_argument", "Tensor 'x': expected numbers ≥ 0, got less.")
        total = request.inputs["x"] + request.inputs["state_in_0"]
        return {"total": total, "state_out_0": total}


class Scale(Backend):
    """y = scale · x + version / 8, where the model's file says what scale is: a file with other text is a bad model.

    The folder that the file lies in is the version: an answer shows which version gave it.
    """

    def __init__(self, path, parameters):
        super().__init__(path, parameters)
        self.scale = float(Path(path).read_text())
        self.version = int(path.parent.name) if path.parent.name.isdigit() else 0
        self.delay = float(parameters.get("delay", 0))

    def metadata(self):
        return Metadata((TensorSpec("x", "FP32", (-1, -1)),), (TensorSpec("y", "FP32", (-1, -1)),), "test_scale")

    def _run(self, inputs):
        if self.delay:
            time.sleep(self.delay)
        return {"y": inputs["x"] * self.scale + self.version / 8}

    def infer(self, request):
        return self._run(request.inputs)

    def infer_batch(self, requests):
        return infer_fused(requests, self._run)


def make_conformance_config(folder: Path, **options) -> ServeConfig:
    """A server with all of these, under `folder`."""
    empty = folder / "model.test"
    empty.write_text("")
    models, overrides = [], {}

    def add(name: str, backend: str, **own) -> None:
        models.append(f"{name}={empty}")
        overrides[name] = {"backend": f"conformance_models:{backend}", **own}

    for datatype in DTYPES:
        add(f"identity_{datatype.lower()}", "Identity", parameters={"datatype": datatype})
    add("sum_difference", "SumDifference", max_rows=8)
    add("held", "Held", executor="worker", lanes=1, max_queue=2)
    add("gate", "Gate", executor="inline")
    add("total", "Total")
    add("switch", "Switch", executor="inline")
    repository = folder / "repository"
    for version in ("1", "3"):
        (repository / "scale" / version).mkdir(parents=True)
        (repository / "scale" / version / "model.txt").write_text("2")
    (repository / "other" / "1").mkdir(parents=True)
    (repository / "other" / "1" / "model.txt").write_text("5")
    overrides |= {name: {"backend": "conformance_models:Scale"} for name in ("scale", "other")}
    return ServeConfig(
        models=(*models, str(repository)),
        overrides=overrides,
        **{"http_port": 0, "grpc_port": 0, "max_message_mib": 2.0, "drain": 5.0, **options},
    )
