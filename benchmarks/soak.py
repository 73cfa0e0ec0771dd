"""Mixed load for minutes, with reloads, cancels and killed clients: every request must get exactly one answer, its own.

python benchmarks/soak.py --minutes 10            # saves benchmarks/results/soak.md and .json
python benchmarks/soak.py --minutes 0.25 --dry    # saves nothing

Clients are processes (soak_client.py): single gRPC calls, streams, sequences, REST (JSON, binary, pipelined), cancelled calls,
clients that read slowly, and clients that are killed. Meanwhile versions appear, change, fail to load and vanish in the
repository, and a model is unloaded and loaded. A run fails (exit code 1) if an answer is wrong, missing or duplicated, an error
is unexplained, the server's counts differ from its clients', its memory, files or threads grow, its log has a traceback, or it
does not end by itself. A short run goes on until every kind of change has happened once, however slow the machine.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

from record import ROOT, save, table
from serve_process import ServerProcess, serving_versions
from soak_client import STEADY

CLIENTS = ("unary", "stream", "sequences", "rest", "cancel", "slow")
GROWTH_MIB = 32.0
"""MiB that the server may grow between the first quarter and the end, when all clients are gone."""
GROWTH_FILES, GROWTH_THREADS = 8, 8
START_SECONDS = 120.0
"""Seconds for all clients to get their first answers, before the clock starts; and for all changes to happen."""


class Client:
    """A client's process, and its last report."""

    def __init__(self, kind: str, server: ServerProcess, seed: int):
        self.kind, self.last = kind, {"count": {}, "asked": {}, "failures": [], "versions": []}
        script, ports = ROOT / "benchmarks" / "soak_client.py", (server.http_port, server.grpc_port)
        command = [sys.executable, str(script), kind, *map(str, (*ports, seed))]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "GRPC_VERBOSITY": "ERROR"}
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.endswith(b"\n"):
                self.last = json.loads(line)

    @property
    def has_answers(self) -> bool:
        """Whether it has reported an answer."""
        return bool(self.last["count"].get("answered"))

    def finish(self) -> dict[str, Any]:
        """Let it end; returns its counts."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            code = self._process.wait(90)
        except subprocess.TimeoutExpired:
            code = None
            self.kill()
        self._reader.join(5)
        found = self.last
        if code != 0:
            found["failures"] = [*found["failures"], f"it ended with {code}"]
        return found

    def kill(self) -> dict[str, Any]:
        """Kill it; returns its last counts."""
        self._process.kill()
        self._process.wait()
        self._reader.join(5)
        return self.last


class Reloads:
    """Changes the repository and asks for loads and unloads, in turn; counts them and their failures."""

    def __init__(self, repository: Path, port: int, rng: Random):
        self._repository, self._port, self._rng = repository, port, rng
        self.count: Counter[str] = Counter()
        self.failures: list[str] = []
        self._newest = 1
        self._turn = 0

    @property
    def has_done_all(self) -> bool:
        """Whether every kind of change has been made."""
        return self._turn >= 6

    def step(self) -> None:
        """Make the next change."""
        steps = (self.add_version, self.add_bad_version, self.unload, self.touch, self.load, self.remove_old)
        steps[self._turn % len(steps)]()
        self._turn += 1

    def add_version(self) -> None:
        """Add a version of `scale`, atomically."""
        self._newest += 1
        self._put("scale", self._newest, "2")
        self.count["versions added"] += 1

    def add_bad_version(self) -> None:
        """Add a version that cannot be loaded: the one before it must go on serving."""
        self._put("scale", self._newest + 1, "not a number")
        self.count["bad versions added"] += 1
        time.sleep(0.6)
        shutil.rmtree(self._repository / "scale" / str(self._newest + 1))

    def touch(self) -> None:
        """Replace the newest version's file."""
        file = self._repository / "scale" / str(self._newest) / "model.txt"
        other = file.with_name("new.txt")
        other.write_text("2.0")
        other.replace(file)
        self.count["versions changed"] += 1

    def remove_old(self) -> None:
        """Remove all but the two newest versions."""
        for folder in (self._repository / "scale").iterdir():
            if folder.name.isdigit() and int(folder.name) < self._newest - 1:
                shutil.rmtree(folder)
                self.count["versions removed"] += 1

    def unload(self) -> None:
        """Unload `other`."""
        self._post("/v2/repository/models/other/unload")
        self.count["unloads"] += 1

    def load(self) -> None:
        """Load `other`."""
        self._post("/v2/repository/models/other/load")
        self.count["loads"] += 1

    def _put(self, name: str, version: int, text: str) -> None:
        made = self._repository.parent / "made"
        made.mkdir()
        (made / "model.txt").write_text(text)
        made.rename(self._repository / name / str(version))

    def _post(self, path: str) -> None:
        status, body = ask(self._port, "POST", path)
        if status != 200:
            self.failures.append(f"{path}: {status} {body[:200]!r}")


def ask(port: int, method: str, path: str) -> tuple[int, bytes]:
    """Send one REST request."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        connection.request(method, path)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def start_server(folder: Path) -> ServerProcess:
    """Start a server with a model for each executor, and a repository."""
    file = folder / "model.txt"
    file.write_text("2")
    repository = folder / "repository"
    for name in ("scale", "other"):
        (repository / name / "1").mkdir(parents=True)
        (repository / name / "1" / "model.txt").write_text("2")
    backend = "conformance_models:Scale"
    slow = {"delay": "0.001"}
    overrides: dict[str, dict[str, Any]] = {
        "inline": {"backend": backend, "executor": "inline"},
        "worker": {"backend": backend, "executor": "worker", "lanes": 2, "parameters": slow},
        "batch": {"backend": backend, "executor": "batch", "lanes": 1, "batch_timeout_ms": 2.0, "parameters": slow},
        "churn": {"backend": backend, "executor": "batch", "lanes": 1, "parameters": slow, "max_queue": 4096},
        "scale": {"backend": backend},
        "other": {"backend": backend, "executor": "worker", "lanes": 1},
        "total": {"backend": "conformance_models:Total"},
    }
    models = [*(f"{name}={file}" for name in (*STEADY, "churn", "total")), str(repository)]
    return ServerProcess(folder, models, {"watch": 0.3, "max_message_mib": 4.0}, overrides)


def wait_for_answers(clients: list[Client]) -> None:
    """Wait until each has an answer: on a busy machine, starting them takes longer than a short run."""
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end and not all(client.has_answers for client in clients):
        time.sleep(0.1)


def has_seen_all(reloads: Reloads, clients: list[Client], killed: list[dict[str, Any]]) -> bool:
    """Whether every kind of change has been made, two versions have answered, and a client was killed."""
    versions = {version for client in clients for version in client.last["versions"]}
    return reloads.has_done_all and len(versions) > 1 and any(one["count"].get("answered") for one in killed)


def run(minutes: float, seed: int, folder: Path) -> dict[str, Any]:
    """Run everything; returns the results."""
    rng, seconds = Random(seed), minutes * 60
    failures: list[str] = []
    killed: list[dict[str, Any]] = []
    with start_server(folder) as server:
        reloads = Reloads(folder / "repository", server.http_port, rng)
        clients = [Client(kind, server, seed * 1000 + n) for n, kind in enumerate(CLIENTS)]
        victim = Client("victim", server, seed * 1000 + 100)
        wait_for_answers([*clients, victim])
        began = said = time.monotonic()
        end, killed_at = began + seconds, began + 1
        warm: tuple[float, int, int] | None = None
        peak: list[float] = []
        print("seconds   sent answered  kills reloads   MiB files", flush=True)
        while server.is_alive and (
            time.monotonic() < end or (time.monotonic() < began + START_SECONDS and not has_seen_all(reloads, clients, killed))
        ):
            time.sleep(0.4)
            reloads.step()
            now = time.monotonic()
            if now > killed_at and victim.has_answers:
                killed.append(victim.kill())
                victim, killed_at = Client("victim", server, seed * 1000 + 100 + len(killed)), now + rng.uniform(2.0, 5.0)
            if warm is None and now - began > seconds / 4 and reloads.has_done_all:
                warm = server.rss_mib, server.files, server.threads
            if now - said >= min(10.0, seconds / 3):
                said = now
                peak.append(round(server.rss_mib, 1))
                total = _sum(client.last for client in clients)
                line = f"{now - began:7.0f} {total['sent']:6} {total['answered']:8} {len(killed):6} {reloads.count.total():7}"
                print(f"{line} {server.rss_mib:5.0f} {server.files:5}", flush=True)
        took = time.monotonic() - began
        killed.append(victim.kill())
        found = {client.kind: client.finish() for client in clients}
        if server.is_alive:
            reloads.load()
            failures += _compare_counts(server.http_port, found)
        time.sleep(1.0)
        last = (server.rss_mib, server.files, server.threads) if server.is_alive else (0.0, 0, 0)
        alive, code = server.is_alive, server.stop()
        failures += [f"in the log: {line}" for line in server.complaints()[:5]]
        refused = server.log().count(" was refused: ")
    warm = warm or last
    if not alive:
        failures.append(f"the server died: {server.log()[-500:]}")
    elif code != 0:
        failures.append(f"the server ended with {code}")
    for name, before, after, allowed in zip(
        ("memory in MiB", "open files", "threads"), warm, last, (GROWTH_MIB, GROWTH_FILES, GROWTH_THREADS), strict=True
    ):
        if after - before > allowed:
            failures.append(f"{name} grew from {before:.0f} to {after:.0f}")
    failures += reloads.failures + [f"{kind}: {text}" for kind, one in found.items() for text in one["failures"]]
    failures += [f"a client that was killed: {text}" for one in killed for text in one["failures"]]
    for kind, one in {**found, "killed clients": {"count": _sum(killed)}}.items():
        if not one["count"].get("answered"):
            failures.append(f"{kind}: nothing was answered")
    versions = {version for one in found.values() for version in one["versions"]}
    if len(versions) < 2 or not refused:
        failures.append(f"only versions {sorted(versions)} answered, {refused} were refused")
    total = _sum(found.values())
    return {
        "seed": seed, "minutes": round(took / 60, 2), "total": dict(total),
        "by_client": {kind: one["count"] for kind, one in found.items()}, "killed": dict(_sum(killed)),
        "kills": len(killed), "versions": len(versions),
        "reloads": dict(reloads.count), "rss_mib_over_time": peak,
        "rss_mib": [round(warm[0], 1), round(last[0], 1)], "files": [warm[1], last[1]], "threads": [warm[2], last[2]],
        "failures": failures,
    }  # fmt: skip


def _sum(found: Any) -> Counter[str]:
    total: Counter[str] = Counter()
    for one in found:
        total.update(one["count"])
    return total


def _compare_counts(port: int, found: dict[str, dict[str, Any]]) -> list[str]:
    """Failures of the comparison: for models that only steady clients use, the server's counts must be theirs."""
    asked: Counter[str] = Counter()
    for one in found.values():
        asked.update(one["asked"])
    failures = []
    for model in STEADY:
        _, body = ask(port, "GET", f"/v2/models/{model}/stats")
        counted = json.loads(body)["model_stats"][0]["inference_stats"]["success"]["count"]
        if int(counted) != asked[model]:
            failures.append(f"{model}: the server counts {counted} answers, its clients {asked[model]}")
    missing = [f"{k}: {_open(one)} not answered" for k, one in found.items() if _open(one)]
    return failures + missing


def _open(one: dict[str, Any]) -> int:
    """Number of requests without any outcome."""
    ends = ("answered", "cancelled", "unavailable while unloaded", "refused as expected", "errors")
    return one["count"].get("sent", 0) - sum(one["count"].get(name, 0) for name in ends)


def report(found: dict[str, Any]) -> str:
    """The report as Markdown."""
    names = sorted({name for count in found["by_client"].values() for name in count})
    rows = [[kind, *(f"{count.get(name, 0):,}" for name in names)] for kind, count in found["by_client"].items()]
    rows.append(["together", *(f"{found['total'].get(name, 0):,}" for name in names)])
    done = ", ".join(f"{name} {count}" for name, count in found["reloads"].items())
    (rss, rss_end), (files, files_end), (threads, threads_end) = found["rss_mib"], found["files"], found["threads"]
    return "\n\n".join([
        "# Mixed load with reloads, cancels and killed clients",
        f"{found['minutes']} minutes, seed {found['seed']}. Clients killed in the middle: {found['kills']}, which had sent "
        f"{found['killed'].get('sent', 0):,} requests. Meanwhile: {done}; {found['versions']} versions of one model answered.",
        f"After a quarter of the time, under load, and at the end, without clients: memory {rss} and {rss_end} MiB, open files "
        f"{files} and {files_end}, threads {threads} and {threads_end}.",
        "Failures: " + ("; ".join(found["failures"]) or "none") + ".",
        table(["requests", *names], rows),
        f"Server: {serving_versions()}.",
    ])  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0, help="duration")
    parser.add_argument("--seed", type=int, default=0, help="seed of everything random")
    parser.add_argument("--dry", action="store_true", help="save nothing")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = run(options.minutes, options.seed, Path(folder))
    print(text := report(found))
    if not options.dry:
        save("soak", found, text)
    return 1 if found["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
