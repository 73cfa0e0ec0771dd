"""`measure`: measures one setting in separate processes, so that progress bars and the like do not disturb the timing.

Parent → job, a line of JSON → worker connects: "ready" → "go" → … → a line of JSON and the latencies as bytes → `Result`.
`python -m hurtle.serving.load.processes` is a worker. "stop", or the parent's death, ends it early.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import selectors
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, replace
from typing import IO, Any

import numpy as np

from hurtle.errors import HurtleError
from hurtle.serving.event_loop import new_event_loop
from hurtle.serving.load.generator import CONNECT_TIMEOUT, PATIENCE, Generator, Result, Setting, merged
from hurtle.serving.load.probe import Plan

LOOK_EVERY = 0.1
GRACE = 10.0
"""Seconds of delay after which a worker is given up."""


def measure(plan: Plan, setting: Setting, processes: int = 1, look: Callable[[float], None] = lambda elapsed: None) -> Result:
    """Measure a setting; Ctrl-C ends it early, which the result notes.

    Args:
        plan: The request, and where to send it.
        setting: Connections and rate of all processes together.
        processes: Number of client processes.
        look: Called periodically with the seconds since the start.

    Raises:
        HurtleError: A worker could not connect, or died.
    """
    shares = split(setting, processes)
    workers: list[subprocess.Popen[bytes]] = []
    try:
        for n, share in enumerate(shares):
            workers.append(_start())
            job = {"plan": plan.as_json(), "setting": asdict(share), "seed": n}
            _send(workers[-1], json.dumps(job))
        for worker in workers:
            _expect_ready(worker)
        for worker in workers:
            _send(worker, "go")
        try:
            _wait(workers, setting, look)
        except KeyboardInterrupt:
            for worker in workers:
                _send(worker, "stop")
        return merged([_read_result(worker, share) for worker, share in zip(workers, shares, strict=True)], setting)
    finally:
        for worker in workers:
            worker.kill()
            worker.communicate()


def split(setting: Setting, processes: int) -> list[Setting]:
    """Spread a setting's connections and rate over processes; each has at least one connection.

    Example:
        >>> [share.connections for share in split(Setting(connections=5), 2)]
        [3, 2]
    """
    if processes < 1:
        raise HurtleError(f"processes must be at least 1, got {processes}.")
    count = min(processes, setting.connections)
    shares = [setting.connections // count + (n < setting.connections % count) for n in range(count)]
    rates = [None if setting.rate is None else setting.rate * share / setting.connections for share in shares]
    return [replace(setting, connections=share, rate=rate) for share, rate in zip(shares, rates, strict=True)]


def _start() -> subprocess.Popen[bytes]:
    # In its own session: Ctrl-C reaches only the parent, which then asks for the results so far.
    command = [sys.executable, "-m", "hurtle.serving.load.processes"]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)


def _send(worker: subprocess.Popen[bytes], line: str) -> None:
    assert worker.stdin is not None
    with suppress(BrokenPipeError):  # reading its output reports the death
        worker.stdin.write(line.encode() + b"\n")
        worker.stdin.flush()


def _read_line(worker: subprocess.Popen[bytes]) -> dict[str, Any]:
    assert worker.stdout is not None
    line = worker.stdout.readline()
    if not line:
        raise HurtleError(f"A process of the load generator died (exit code {worker.wait()}).")
    found: dict[str, Any] = json.loads(line)
    if "error" in found:
        raise HurtleError(found["error"])
    return found


def _expect_ready(worker: subprocess.Popen[bytes]) -> None:
    assert _read_line(worker) == {"ready": True}


def _wait(workers: list[subprocess.Popen[bytes]], setting: Setting, look: Callable[[float], None]) -> None:
    """Wait for output of the workers."""
    began = time.monotonic()
    patience = setting.warm_up + setting.seconds + PATIENCE + GRACE
    with selectors.DefaultSelector() as selector:
        for worker in workers:
            assert worker.stdout is not None
            selector.register(worker.stdout, selectors.EVENT_READ)
        while selector.get_map():
            elapsed = time.monotonic() - began
            if elapsed > patience:
                raise HurtleError(f"A process of the load generator did not finish within {patience:g} s.")
            for key, _ in selector.select(LOOK_EVERY):
                selector.unregister(key.fileobj)
            look(elapsed)


def _read_result(worker: subprocess.Popen[bytes], setting: Setting) -> Result:
    found = _read_line(worker)
    assert worker.stdout is not None
    count = found.pop("latencies")
    data = worker.stdout.read(count * 8)
    if len(data) != count * 8:
        raise HurtleError("A process of the load generator died while it reported.")
    return Result(setting=setting, latencies=np.frombuffer(data), **found)


# The worker's side.


def _say(found: dict[str, Any], out: IO[bytes], data: bytes = b"") -> None:
    out.write(json.dumps(found).encode() + b"\n" + data)
    out.flush()


async def _work(job: dict[str, Any], out: IO[bytes]) -> None:
    plan, setting = Plan.from_json(job["plan"]), Setting(**job["setting"])
    target = plan.target
    generator = Generator(target.host, target.port, plan.make(), setting, plan.rows, job["seed"])
    try:
        await generator.connect()
    except OSError as error:
        reason = f"not within {CONNECT_TIMEOUT:g} s" if isinstance(error, TimeoutError) else error.strerror or str(error)
        _say({"error": f"{target.address}: {setting.connections} connections could not be opened: {reason}."}, out)
        return
    go = asyncio.Event()
    asyncio.get_running_loop().add_reader(0, _listen, go, generator)
    _say({"ready": True}, out)
    await go.wait()
    gc.disable()  # few cycles arise here, and a pause would look like the server's
    result = await generator.run()
    about = {name: getattr(result, name) for name in ("rows", "seconds", "answers", "errors", "unanswered", "stopped")}
    _say({**about, "latencies": len(result.latencies)}, out, result.latencies.tobytes())


def _listen(go: asyncio.Event, generator: Generator) -> None:
    told = os.read(0, 4096)
    if b"stop" in told or not told:
        generator.stop()
    if not told:
        asyncio.get_running_loop().remove_reader(0)
    go.set()


def main() -> None:
    """Run a worker; its job comes on standard input."""
    line = b""
    while not line.endswith(b"\n"):  # unbuffered, as a buffer could swallow what `_listen` waits for
        if not (part := os.read(0, 1 << 16)):
            return
        line += part
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(_work(json.loads(line), sys.stdout.buffer))


if __name__ == "__main__":
    main()
