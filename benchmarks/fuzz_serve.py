"""Malformed requests against a live server, over gRPC and REST: it must answer each cleanly, not grow, and keep serving.

python benchmarks/fuzz_serve.py --count 100000             # saves benchmarks/results/fuzz-serve.md and .json
python benchmarks/fuzz_serve.py --count 3000 --dry         # saves nothing
python benchmarks/fuzz_serve.py --seed 1 --only 4711       # one case again, printed

Case n of a seed is always the same. A run fails (exit code 1) if a request gets no answer or no status, an answer is a 500 or
violates the protocol, a good request in between gets a wrong answer, the server's memory or open files grow after the warm-up,
its log has a traceback, or it does not end by itself.
"""

from __future__ import annotations

import argparse
import json
import struct
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

from fuzz_clients import GrpcClient, RestClient, Unclean
from fuzz_grpc import GrpcCase, call_headers, encode, make_grpc_case, message
from fuzz_rest import RestCase, make_rest_case
from record import save, table
from serve_process import ServerProcess, serving_versions

EVERY = 250
"""Cases between two good requests."""
GROWTH_MIB = 16.0
"""MiB that the server may grow after the warm-up, the first fifth."""
GROWTH_FILES = 4
MAX_FAILURES = 10
MODELS = {"good": "Scale", "other": "Scale", "text": "Identity", "pair": "SumDifference", "total": "Total"}


def make_case(seed: int, n: int) -> RestCase | GrpcCase:
    """Make case n."""
    rng = Random(f"{seed}:{n}")
    return make_rest_case(rng) if n % 2 else make_grpc_case(rng)


def start_server(folder: Path) -> ServerProcess:
    """Start a server with a model of each kind."""
    file = folder / "model.txt"
    file.write_text("2")
    overrides: dict[str, dict[str, Any]] = {name: {"backend": f"conformance_models:{kind}"} for name, kind in MODELS.items()}
    overrides["text"]["parameters"] = {"datatype": "BYTES"}
    options = {"max_message_mib": 1.0, "max_sequences": 64, "sequence_idle": 5.0}
    return ServerProcess(folder, [f"{name}={file}" for name in MODELS], options, overrides)


def check_health(rest: RestClient, grpc: GrpcClient, n: int) -> None:
    """Check that good requests get the right answers over both transports."""
    values = [float(n % 1000), 0.5, -1.0]
    tensor = {"name": "x", "datatype": "FP32", "shape": [1, 3], "data": values}
    body = json.dumps({"id": str(n), "inputs": [tensor]}).encode()
    head = b"POST /v2/models/good/infer HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body)
    status, _, answer = rest.request(head + body)
    found = json.loads(answer) if status == 200 else {}
    if found.get("id") != str(n) or found["outputs"][0]["data"] != [2 * value for value in values]:
        raise Unclean(f"a good REST request was answered with {status} {answer[:200]!r}")
    raw = struct.pack("<3f", *values)
    request = [(1, "good"), (3, str(n)), (5, [(1, "x"), (2, "FP32"), (3, 1), (3, 3)]), (7, raw)]
    outcome, answer = grpc.call(call_headers(), message(encode(request)))  # type: ignore[arg-type]
    expected = struct.pack("<3f", *(2 * value for value in values))
    if outcome != "grpc 0" or expected not in answer or str(n).encode() not in answer:
        raise Unclean(f"a good gRPC request was answered with {outcome}, {answer[:200]!r}")


def run(count: int, seed: int, folder: Path) -> dict[str, Any]:
    """Run all cases; returns the results."""
    outcomes: Counter[str] = Counter()
    kinds: Counter[str] = Counter()
    failures: list[str] = []
    sizes: list[float] = []
    began = time.monotonic()
    with start_server(folder) as server:
        rest, grpc = RestClient(server.http_port), GrpcClient(server.grpc_port)
        good_rest, good_grpc = RestClient(server.http_port), GrpcClient(server.grpc_port)
        check_health(good_rest, good_grpc, 0)
        warm_rss, warm_files = server.rss_mib, server.files
        for n in range(count):
            case = make_case(seed, n)
            try:
                outcomes[(rest if isinstance(case, RestCase) else grpc).run(case)] += 1  # type: ignore[arg-type]
                if n % EVERY == EVERY - 1 or n == count - 1:
                    check_health(good_rest, good_grpc, n)
            except (Unclean, OSError) as error:
                outcomes["unclean"] += 1
                failures.append(f"case {n} ({case.kind}): {error}")
            kinds[f"{'REST' if isinstance(case, RestCase) else 'gRPC'} {case.kind}"] += 1
            if n == count // 5:
                warm_rss, warm_files = settled(server, rest, grpc)
            if n % max(count // 50, 1) == 0:
                sizes.append(round(server.rss_mib, 1))
            if not server.is_alive:
                failures.append(f"case {n}: the server died: {server.log()[-500:]}")
            if len(failures) >= MAX_FAILURES or not server.is_alive:
                break
        seconds = time.monotonic() - began
        last_rss, last_files = settled(server, rest, grpc) if server.is_alive else (0.0, 0)
        for one in (rest, grpc, good_rest, good_grpc):
            one.close()
        code = server.stop()
        failures += [f"in the log: {line}" for line in server.complaints()[:5]]
    if code != 0:
        failures.append(f"the server ended with {code}")
    if last_rss - warm_rss > GROWTH_MIB:
        failures.append(f"memory grew from {warm_rss:.1f} to {last_rss:.1f} MiB")
    if last_files - warm_files > GROWTH_FILES:
        failures.append(f"open files grew from {warm_files} to {last_files}")
    return {
        "seed": seed, "count": kinds.total(), "seconds": round(seconds, 1), "per_second": round(kinds.total() / seconds),
        "rss_mib_after_warm_up": round(warm_rss, 1), "rss_mib_at_the_end": round(last_rss, 1), "rss_mib_over_time": sizes,
        "files_after_warm_up": warm_files, "files_at_the_end": last_files,
        "outcomes": dict(outcomes.most_common()), "kinds": dict(sorted(kinds.items())), "failures": failures,
    }  # fmt: skip


def settled(server: ServerProcess, *clients: RestClient | GrpcClient) -> tuple[float, int]:
    """Memory and open files once the connections of the cases are gone."""
    for client in clients:
        client.close()
    time.sleep(0.3)
    return server.rss_mib, server.files


def report(found: dict[str, Any]) -> str:
    """The report as Markdown."""
    rows = [[name, f"{count:,}"] for name, count in found["outcomes"].items()]
    kinds = [[name, f"{count:,}"] for name, count in found["kinds"].items()]
    failures = found["failures"] or ["none"]
    return "\n\n".join([
        "# Malformed requests against the server",
        f"{found['count']:,} requests, seed {found['seed']}, {found['per_second']:,} a second, over gRPC and REST; a good "
        f"request over each after every {EVERY}.",
        f"Memory of the server: {found['rss_mib_after_warm_up']} MiB after a fifth of them, "
        f"{found['rss_mib_at_the_end']} MiB at "
        f"the end (allowed: {GROWTH_MIB:g} MiB more). Open files: {found['files_after_warm_up']} and "
        f"{found['files_at_the_end']}.",
        "Failures: " + "; ".join(failures) + ".",
        table(["kind", "requests"], kinds),
        table(["outcome", "requests"], rows),
        f"Server: {serving_versions()}.",
    ])  # fmt: skip


def show(seed: int, n: int, folder: Path) -> int:
    """Run one case and print it."""
    case = make_case(seed, n)
    print(case)
    with start_server(folder) as server:
        client: Any = RestClient(server.http_port) if isinstance(case, RestCase) else GrpcClient(server.grpc_port)
        try:
            print(client.run(case))
        except Unclean as error:
            print(f"unclean: {error}")
        client.close()
        server.stop()
        print(server.log())
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=100_000, help="how many")
    parser.add_argument("--seed", type=int, default=0, help="which ones")
    parser.add_argument("--only", type=int, help="this one, printed")
    parser.add_argument("--dry", action="store_true", help="save nothing")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if options.only is not None:
            return show(options.seed, options.only, Path(folder))
        found = run(options.count, options.seed, Path(folder))
    print(text := report(found))
    if not options.dry:
        save("fuzz-serve", found, text)
    return 1 if found["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
