"""Inference servers on the same ONNX MLP: `hurtle serve`, grpcio, mlserver and mosec, over gRPC and HTTP, in turns.

python benchmarks/serve.py                      # saves benchmarks/results/serve.md and .json
python benchmarks/serve.py --quick --seconds 1  # smoke run: one round, fewer settings, saves nothing
python benchmarks/serve.py --transport          # our HTTP/2 against grpcio's servers alone; saves serve-transport

Each server gets one core and the client another, so two free cores are needed, and taskset, wrk and h2load (nghttp2).
`--transport` uses Hurtle's own load generator if h2load is missing. mlserver and mosec are installed into build/serve-peers on
first use. The MLP has 4 inputs, 64×64 tanh, 2 outputs, and ONNX Runtime runs it on one thread everywhere. All servers stay up,
and are stopped (SIGSTOP) while another is measured. Before each run one answer is compared with ONNX Runtime's; after it, every
answer must have been right (see serve_drivers.py).

What is sent: over gRPC the same bytes (raw contents) to all; "JSON" is the Open Inference Protocol's JSON, the same bytes to
both servers; "binary" is the protocol's binary REST format; mosec has no tensor protocol and gets what is fastest for it, bare
float32 values. Hurtle's modes: inline, worker (one thread), batch (the default). "grpc.aio" and "grpcio, 8 threads" are
Hurtle's codec, batch executor and backend behind the grpcio library's two servers.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper
from record import save, short, table
from serve_dlrm import CONCURRENT, FUSED, NAME, describe_sizes, dlrm_file, dlrm_inputs, dlrm_scores
from serve_dlrm import OUTPUT as DLRM_OUTPUT
from serve_dlrm import ROWS as DLRM_ROWS
from serve_drivers import Case, Format, HeldUpError, Measured, drive
from serve_servers import MOSEC_BATCH, Running, peer_versions, start_grpcio, start_hurtle, start_mlserver, start_mosec

CONNECTIONS = (1, 16, 64)
ROWS = (1, 64)
MODES = ("inline", "worker", "batch")
BATCH_ROWS = MOSEC_BATCH * max(ROWS)
"""The most rows that our batch mode fuses: as many as mosec's batches of the larger requests have."""
DLRM_SIZES = ("tiny", "small", "medium")
OURS, MLSERVER, MOSEC, BATCHED = "hurtle batch", "mlserver", "mosec", "mosec, batched"
GRPCIO = {"grpc.aio": "aio", "grpcio, 8 threads": "sync"}
"""Hurtle's serving core behind grpcio's servers; our own HTTP/2 must be at least `TRANSPORT_GOAL` times as fast."""
TRANSPORT_GOAL = 2.0

Found = dict[str, dict[str, Any]]
"""System and format → setting → its figures."""
Key = tuple[str, Format]


def write_mlp(path: Path, sizes: tuple[int, ...] = (4, 64, 64, 2)) -> None:
    """An MLP with tanh between its layers; any number of rows."""
    rng = np.random.default_rng(0)
    nodes, weights, last = [], [], "obs"
    for n, (takes, gives) in enumerate(pairwise(sizes)):
        weight = rng.standard_normal((takes, gives)) / takes**0.5
        weights.append(numpy_helper.from_array(weight.astype(np.float32), f"weight_{n}"))
        weights.append(numpy_helper.from_array(rng.standard_normal(gives).astype(np.float32) * np.float32(0.1), f"bias_{n}"))
        is_last = n == len(sizes) - 2
        linear = "logits" if is_last else f"linear_{n}"
        nodes.append(helper.make_node("Gemm", [last, f"weight_{n}", f"bias_{n}"], [linear]))
        if not is_last:
            last = f"hidden_{n}"
            nodes.append(helper.make_node("Tanh", [linear], [last]))
    obs = helper.make_tensor_value_info("obs", TensorProto.FLOAT, ["batch", sizes[0]])
    logits = helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", sizes[-1]])
    graph = helper.make_graph(nodes, "mlp", [obs], [logits], weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    onnx.checker.check_model(model)
    onnx.save(model, path)


@contextlib.contextmanager
def servers(model: Path, core: int, folder: Path, only_transport: bool) -> Iterator[dict[str, Running]]:
    """Every server, started and paused one after the other."""
    running: dict[str, Running] = {}
    with contextlib.ExitStack() as stack:

        def add(server: Running) -> None:
            running[server.name] = server
            stack.callback(server.stop)
            format_: Format = "HTTP bytes" if server.name.startswith("mosec") else "HTTP JSON"
            case = case_of(server, "gRPC" if server.name in GRPCIO else format_, model, 1)
            server.wait_until(case.check)
            server.pause()

        for mode in MODES:
            flags = ("--batch-size", str(BATCH_ROWS)) if mode == "batch" else ()
            add(start_hurtle(f"hurtle {mode}", model, mode, core, folder, *flags))
        for name, kind in GRPCIO.items():
            add(start_grpcio(name, kind, model, core, folder, "--batch-size", str(BATCH_ROWS)))
        if not only_transport:
            add(start_mlserver(model, core, folder))
            add(start_mosec(model, 1, core, folder))
            add(start_mosec(model, MOSEC_BATCH, core, folder))
        yield running


def case_of(server: Running, format_: Format, model: Path, rows: int) -> Case:
    """The same observations for every server, and ONNX Runtime's answer."""
    obs = np.random.default_rng(rows).uniform(-1, 1, (rows, 4)).astype(np.float32)
    session = onnxruntime.InferenceSession(str(model), providers=["CPUExecutionProvider"])
    return Case(server, format_, model.stem, {"obs": obs}, "logits", session.run(None, {"obs": obs})[0])


def systems(only_transport: bool) -> list[Key]:
    """Everything that is measured, each server beside its peers."""
    found: list[Key] = [(name, "gRPC") for name in GRPCIO]
    if only_transport:
        return [*((f"hurtle {mode}", "gRPC") for mode in MODES), *found]  # type: ignore[list-item]
    for format_ in ("gRPC", "HTTP JSON"):
        names = [f"hurtle {mode}" for mode in MODES] if format_ == "gRPC" else [OURS]
        found += [(name, format_) for name in (*names, MLSERVER)]  # type: ignore[misc]
    found += [(f"hurtle {mode}", "HTTP binary") for mode in MODES]
    return [*found, (MOSEC, "HTTP bytes"), (BATCHED, "HTTP bytes")]


def measure_mlp(options: argparse.Namespace, cores: tuple[int, int], folder: Path) -> Found:
    """Measure in rounds, in which the servers take turns."""
    keys = systems(options.transport)
    model = folder / "mlp.onnx"
    write_mlp(model)
    connections = CONNECTIONS[:2] if options.quick else CONNECTIONS
    seen: dict[Key, dict[str, list[Measured]]] = {key: {} for key in keys}
    with servers(model, cores[0], folder, options.transport) as running:
        cases = {(key, rows): case_of(running[key[0]], key[1], model, rows) for key in keys for rows in ROWS}
        for number in range(options.rounds):
            for rows in ROWS:
                for count in connections:
                    for key in keys if number % 2 == 0 else reversed(keys):
                        measured = turn(cases[key, rows], count, options.seconds, cores[1], folder)
                        seen[key].setdefault(setting(rows, count), []).append(measured)
                        say(number, key, setting(rows, count), measured)
    return {name_of(key): {at: median(results) for at, results in points.items()} for key, points in seen.items()}


def measure_dlrm(options: argparse.Namespace, cores: tuple[int, int], folder: Path) -> Found:
    """Batch mode beside worker mode, with requests of a hundred rows."""
    inputs = dlrm_inputs()
    seen: dict[str, list[Measured]] = {}
    with contextlib.ExitStack() as stack:
        cases = {}
        for size in DLRM_SIZES:
            model = dlrm_file(folder, size)
            expected = dlrm_scores(model, inputs)
            for mode in ("worker", "batch"):
                flags = ["--backend", "dlrm", *(("--batch-size", str(FUSED)) if mode == "batch" else ())]
                server = start_hurtle(f"hurtle dlrm {size} {mode}", model, mode, cores[0], folder, *flags)
                stack.callback(server.stop)
                cases[f"DLRM {size} {mode}"] = case = Case(server, "gRPC", NAME, inputs, DLRM_OUTPUT, expected)
                server.wait_until(case.check)
                server.pause()
        for number in range(options.rounds):
            for name, case in cases.items():
                measured = turn(case, CONCURRENT, options.seconds, cores[1], folder)
                seen.setdefault(name, []).append(measured)
                say(number, (name, "gRPC"), setting(DLRM_ROWS, CONCURRENT), measured)
    return {name: {setting(DLRM_ROWS, CONCURRENT): median(results)} for name, results in seen.items()}


def turn(case: Case, connections: int, seconds: int, core: int, folder: Path) -> Measured:
    """Measure one server."""
    case.server.resume()
    try:
        for _ in range(5):
            wake(case)
            try:
                return drive(case, connections, seconds, core, folder)
            except HeldUpError as error:
                print(f"again: the machine stood still ({error})", flush=True)
        raise HeldUpError("five times in a row")
    finally:
        case.server.pause()


def wake(case: Case) -> None:
    """Let a server recover from its pause, which mosec may take for a timeout."""
    right = 0
    for _ in range(20):
        try:
            case.check()
            right += 1
        except (AssertionError, OSError, grpc.RpcError):
            right = 0
            time.sleep(0.2)
        if right == 5:
            return
    case.check()


def setting(rows: int, connections: int) -> str:
    """The name of a setting in the results."""
    return f"{rows} row{'s' * (rows > 1)}, {connections} connection{'s' * (connections > 1)}"


def name_of(key: Key) -> str:
    """The name of a server and format in the results."""
    return f"{key[0]}, {key[1]}"


def say(number: int, key: Key, at: str, measured: Measured) -> None:
    """Print a measurement."""
    rate = f"{measured.requests_per_second:,.0f} requests/s"
    print(f"round {number + 1}  {at:<24} {name_of(key):<28} {rate:>18}  p50 {measured.p50_ms:.3f} ms", flush=True)


def median(results: list[Measured]) -> dict[str, Any]:
    """The medians of the rounds."""
    middle = {
        name: statistics.median(getattr(result, name) for result in results)
        for name in ("requests_per_second", "p50_ms", "p99_ms")
    }
    return {**middle, "rounds": [asdict(result) for result in results]}


# The report.


def report(mlp: Found, dlrm: Found, versions: dict[str, str]) -> str:
    """The tables, and the goals beside what was measured."""
    blocks = ["# Inference servers: the same ONNX MLP, one core for the server and one for the client"]
    for at in next(iter(mlp.values())):
        rows = int(at.split()[0])
        lines = []
        for name, points in mlp.items():
            point = points[at]
            rate = point["requests_per_second"]
            lines.append([name, short(rate), short(rate * rows), f"{point['p50_ms']:.3f}", f"{point['p99_ms']:.3f}"])
        blocks += [f"## {at}", table(["server", "requests/s", "rows/s", "p50 ms", "p99 ms"], lines)]
    for at in next(iter(dlrm.values()), {}):
        lines = []
        for name, points in dlrm.items():
            rate = points[at]["requests_per_second"]
            lines.append([name, short(rate), short(rate * DLRM_ROWS), *(f"{points[at][p]:.2f}" for p in ("p50_ms", "p99_ms"))])
        blocks += [f"## DLRM, {at}, gRPC", table(["mode", "requests/s", "rows/s", "p50 ms", "p99 ms"], lines)]
    grpc_client = "h2load" if shutil.which("h2load") else "Hurtle's own load generator"
    blocks += ["## Goals", table(["what", "goal", "measured", ""], goals(mlp, dlrm))]
    blocks.append(
        f"Medians of the rounds, in which the servers took turns. gRPC: the same raw tensors to all, {grpc_client}. JSON: "
        "the same Open Inference Protocol JSON to both, wrk. Binary: the protocol's binary REST tensors; mosec takes and "
        f"returns bare float32 values. Hurtle's batch mode fuses up to {BATCH_ROWS:,} rows, mosec's up to {MOSEC_BATCH} "
        "requests within 1 ms. "
        "mlserver: parallel_workers 0, no metrics. grpc.aio and grpcio: Hurtle's codec, batch executor and backend behind the "
        "grpcio library's servers."
    )
    if dlrm:
        blocks.append(describe_sizes())
    blocks.append(", ".join(f"{name} {version}" for name, version in versions.items()) + ".")
    return "\n\n".join(blocks)


def goals(mlp: Found, dlrm: Found) -> list[list[str]]:
    """The goals, and what was measured."""

    def rate(server: str, format_: Format, rows: int, connections: int) -> float:
        point = mlp.get(name_of((server, format_)), {}).get(setting(rows, connections))
        return float("nan") if point is None else float(point["requests_per_second"])

    lines = []

    def at_least(what: str, least: float, found: float) -> None:
        if found == found:
            lines.append([what, f"≥ {least:g}×", f"{found:.2f}×", "yes" if found >= least else "NO"])

    for rows in ROWS:
        size = f"{rows} row{'s' * (rows > 1)}"
        for name in GRPCIO:
            for count in CONNECTIONS:
                ratio = rate(OURS, "gRPC", rows, count) / rate(name, "gRPC", rows, count)
                at_least(f"batch against {name}, gRPC, {setting(rows, count)}", TRANSPORT_GOAL, ratio)
        ratio = rate(OURS, "gRPC", rows, 16) / rate(MLSERVER, "gRPC", rows, 16)
        at_least(f"batch against mlserver, gRPC, {size}, 16 connections", 2.5, ratio)
        ratio = rate(OURS, "HTTP JSON", rows, 16) / rate(MLSERVER, "HTTP JSON", rows, 16)
        at_least(f"batch against mlserver, JSON, {size}, 16 connections", 4.0, ratio)
        for count in CONNECTIONS:
            ratio = rate(OURS, "HTTP binary", rows, count) / rate(MOSEC, "HTTP bytes", rows, count)
            at_least(f"batch against mosec, HTTP, {setting(rows, count)}", 1.0, ratio)
        for count, least in ((64, 0.5), (1, 5.0)):
            ratio = rate(OURS, "HTTP binary", rows, count) / rate(BATCHED, "HTTP bytes", rows, count)
            at_least(f"batch against mosec, batched, HTTP, {setting(rows, count)}", least, ratio)
    for size in DLRM_SIZES if dlrm else ():
        (batch,), (worker,) = (dlrm[f"DLRM {size} {mode}"].values() for mode in ("batch", "worker"))
        ratio = batch["requests_per_second"] / worker["requests_per_second"]
        at_least(f"DLRM {size}, batch against worker, {CONCURRENT} connections", 2.0, ratio)
    for format_ in ("gRPC", "HTTP binary") if dlrm else ():
        inline, ours = (mlp[f"hurtle {mode}, {format_}"][setting(1, 1)]["p50_ms"] for mode in ("inline", "batch"))
        added = ours / inline - 1
        lines.append(
            [
                f"p50 of batch over inline, {format_}, {setting(1, 1)}",
                "≤ +10 %",
                f"{added:+.1%}",
                "yes" if added <= 0.1 else "NO",
            ]
        )
    return lines


def versions(only_transport: bool) -> dict[str, str]:
    """The versions of what was measured and of what measured it."""
    import importlib.metadata

    ours = {
        name: importlib.metadata.version(name)
        for name in ("onnxruntime", "uvloop", "httptools", "protobuf", "orjson", "grpcio")
    }
    tools = {}
    for tool, flag in (("wrk", "-v"), ("h2load", "--version")):
        if shutil.which(tool) is None:
            continue
        done = subprocess.run([tool, flag], capture_output=True, text=True, check=False)
        tools[tool] = (done.stdout + done.stderr).splitlines()[0].split()[1].removeprefix("nghttp2/")
    peers = {
        name: version
        for peer in (() if only_transport else ("mlserver", "mosec"))
        for name, version in peer_versions(peer).items()
    }
    named = {f"{name} (the peers')" if name in ours else name: version for name, version in peers.items() if name != "numpy"}
    return {**ours, **named, **tools}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=int, default=2, help="seconds of each measurement")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--transport", action="store_true", help="only our HTTP/2 against grpcio's servers")
    parser.add_argument("--quick", action="store_true", help="one round, fewer settings; saves nothing")
    options = parser.parse_args()
    if options.quick:
        options.rounds = 1
    missing = [
        tool for tool in (("taskset",) if options.transport else ("wrk", "h2load", "taskset")) if shutil.which(tool) is None
    ]
    cores = sorted(os.sched_getaffinity(0))
    if missing or len(cores) < 2:
        raise SystemExit(f"This needs {', '.join(missing)}." if missing else "This needs two cores.")
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(1))  # so that the servers are stopped
    if (load := os.getloadavg()[0]) > 0.5:
        print(f"Something else runs on this machine (load average {load:.1f}): the figures will mean little.", flush=True)
    began = time.monotonic()
    found_versions = versions(options.transport)
    with tempfile.TemporaryDirectory() as folder:
        mlp = measure_mlp(options, (cores[0], cores[1]), Path(folder))
        dlrm = {} if options.transport else measure_dlrm(options, (cores[0], cores[1]), Path(folder))
    print(text := report(mlp, dlrm, found_versions))
    print(f"\n{time.monotonic() - began:.0f} s")
    if not options.quick:
        save(
            "serve-transport" if options.transport else "serve",
            {"mlp": mlp, "dlrm": dlrm, "versions_of_servers": found_versions},
            text,
        )


if __name__ == "__main__":
    main()
