"""DLRM behind `hurtle serve`: requests of 100 rows, 16 at a time, fused by batch mode or one by one by worker mode.

python benchmarks/serve_dlrm.py --device cuda    # with a GPU; saves benchmarks/results/serve-dlrm-cuda.md and .json
python benchmarks/serve_dlrm.py --quick          # smoke run on the CPU; saves nothing

The client is `hurtle bench serve`'s generator over gRPC, in separate processes. benchmarks/serve.py measures the same model on
one core with h2load. The server's answers are compared with the model's own before anything is timed.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from record import save, short, table

from hurtle.errors import HurtleError
from hurtle.serving.backends.dlrm import DENSE, LENGTHS, OUTPUT, VALUES, DLRMBackend
from hurtle.serving.backends.dlrm_model import NUM_DENSE, NUM_SPARSE, make_model
from hurtle.serving.config import ServeConfig
from hurtle.serving.load.generator import Setting
from hurtle.serving.load.probe import Plan, ask, plan
from hurtle.serving.load.processes import measure
from hurtle.serving.load.request import Target
from hurtle.serving.messages import InferRequest
from hurtle.serving.protos import ModelInferResponse
from hurtle.serving.server import ServerThread

NAME = "dlrm"
ROWS, CONCURRENT = 100, 16
FUSED = ROWS * CONCURRENT
GOAL = 2.0
"""The goal: requests/s of batch mode over those of worker mode."""
TABLE_ROWS = 1000
SIZES: dict[str, dict[str, Any]] = {
    "tiny": {"width": 4, "bottom": (), "top": ()},
    "small": {"width": 8, "bottom": (32,), "top": (32,)},
    "medium": {"width": 16, "bottom": (64, 32), "top": (64, 32)},
    "large": {"width": 64, "bottom": (512, 256), "top": (512, 256)},
}
"""Embeddings and hidden layers. The smaller the model, the larger the share of the call overhead, which batches share."""


def dlrm_file(folder: Path, size: str) -> Path:
    """A model with random weights."""
    path = folder / size / f"{NAME}.npz"
    path.parent.mkdir()
    make_model(path, TABLE_ROWS, **SIZES[size])
    return path


def describe_sizes() -> str:
    """The sizes, for reports."""
    about = [f"{n}: width {v['width']}, bottom {v['bottom']}, top {v['top']}" for n, v in SIZES.items()]
    return f"DLRM's sizes: {'; '.join(about)}; 26 tables of {TABLE_ROWS:,} rows, one id for each feature of a row."


def dlrm_inputs(rows: int = ROWS) -> dict[str, np.ndarray]:
    """A request: 13 numbers and 26 ids per row, as in the advertising data that the model was designed for."""
    rng = np.random.default_rng(1)
    lengths = np.ones(NUM_SPARSE * rows, np.int32)
    return {
        DENSE: rng.uniform(-1, 1, (rows, NUM_DENSE)).astype(np.float32),
        LENGTHS: lengths,
        VALUES: rng.integers(0, TABLE_ROWS, len(lengths), dtype=np.int32),
    }


def dlrm_scores(file: Path, inputs: dict[str, np.ndarray], **parameters: str) -> np.ndarray:
    """The model's own answer."""
    return DLRMBackend(file, parameters).infer(InferRequest(NAME, inputs))[OUTPUT]


def check(made: Plan, expected: np.ndarray, tolerance: float) -> None:
    """Check that the server's answer is the model's."""
    message = ModelInferResponse()
    message.ParseFromString(asyncio.run(ask(made)))
    found = np.frombuffer(message.raw_output_contents[0], np.float32)
    np.testing.assert_allclose(found, expected, rtol=tolerance, atol=tolerance)


def measured(file: Path, device: str, precision: str, seconds: float, rounds: int, processes: int) -> dict[str, Any]:
    """Measure both modes in turn, with servers that run side by side."""
    inputs = dlrm_inputs()
    parameters = {"device": device, "precision": precision}
    expected = dlrm_scores(file, inputs, **parameters)
    shared: dict[str, Any] = {"models": (str(file),), "backend": "dlrm", "parameters": parameters}
    shared |= {"http_port": None, "grpc_port": 0, "batch_size": FUSED}
    seen: dict[str, list[Any]] = {}
    with (
        ServerThread(ServeConfig(executor="batch", **shared)) as batch,
        ServerThread(ServeConfig(executor="worker", lanes=1, **shared)) as one,
        ServerThread(ServeConfig(executor="worker", **shared)) as worker,
    ):
        servers = {"batch": batch, "worker, 1 lane": one, "worker, a lane per core": worker}
        plans = {}
        for name, server in servers.items():
            target = Target("127.0.0.1", server.grpc_port, "grpc", NAME)
            plans[name] = asyncio.run(plan(target, inputs=inputs))
            check(plans[name], expected, 1e-4 if precision == "fp32" else 2e-2)
        for _ in range(rounds):
            for name, made in plans.items():
                result = measure(made, Setting(CONCURRENT, None, seconds, 0.5), processes)
                if result.failed:
                    raise HurtleError(f"{name}: {result.errors}")
                seen.setdefault(name, []).append(result)
                time.sleep(0.1)
    return {name: _median(results) for name, results in seen.items()}


def _median(results: list[Any]) -> dict[str, float]:
    return {
        "rows_per_second": statistics.median(result.rows_per_second for result in results),
        "p50_ms": statistics.median(result.latency_ms(50) for result in results),
        "p99_ms": statistics.median(result.latency_ms(99) for result in results),
    }


def _name(device: str) -> str:
    return torch.cuda.get_device_name(device) if torch.device(device).type == "cuda" else device


def report(found: dict[str, dict[str, Any]], device: str) -> str:
    """The table, and the goals beside what was measured."""
    rows = []
    for model, modes in found.items():
        for name, values in modes.items():
            ratio = modes["batch"]["rows_per_second"] / values["rows_per_second"]
            cells = [f"{values['p50_ms']:.2f}", f"{values['p99_ms']:.2f}", "" if name == "batch" else f"{ratio:.2f}"]
            rows.append([f"{model}: {name}", short(values["rows_per_second"]), *cells])
    blocks = [
        f"# DLRM on {_name(device)}, {ROWS} rows a request, {CONCURRENT} at a time, over gRPC",
        table(["model and mode", "rows/s", "p50 ms", "p99 ms", "batch is × as fast"], rows),
        f"Asked for: batch mode at least {GOAL:g}× worker mode, for a model whose cost is mostly that of calling it.",
        describe_sizes(),
    ]
    return "\n\n".join(blocks)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--sizes", nargs="+", default=list(SIZES), choices=list(SIZES))
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--processes", type=int, default=1, help="of the client")
    parser.add_argument("--quick", action="store_true", help="few short rounds; saves nothing")
    options = parser.parse_args()
    seconds, rounds = (0.5, 1) if options.quick else (options.seconds, 3)
    with tempfile.TemporaryDirectory() as folder:
        files = {size: dlrm_file(Path(folder), size) for size in options.sizes}
        precisions = ("fp32",) if options.device == "cpu" else ("fp32", "fp16")
        found = {
            f"{size}, {precision}": measured(file, options.device, precision, seconds, rounds, options.processes)
            for size, file in files.items()
            for precision in precisions
        }
    print(text := report(found, options.device))
    if not options.quick:
        save(f"serve-dlrm-{options.device.split(':')[0]}", found, text)


if __name__ == "__main__":
    main()
