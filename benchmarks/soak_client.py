"""One client of the soak run: sends requests of one kind until standard input is closed, and checks every answer.

python benchmarks/soak_client.py KIND HTTP_PORT GRPC_PORT SEED    # prints its counts as JSON each second, and at the end

An answer must have the request's id and the right value; each request must have exactly one.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from random import Random
from typing import Any

import grpc
import numpy as np
from fuzz_grpc import SERVICE, Fields, encode

from hurtle.serving.protos import ModelInferResponse, ModelStreamInferResponse

STEADY = ("inline", "worker", "batch")
"""Models that only steady clients use, so that the server's counts must equal theirs."""
SHARED = ("scale", "churn")
ALL = (*STEADY, "scale", "other")
SECONDS = 30.0
"""Seconds that an answer may take."""
MAX_FAILURES = 20


class Soaker:
    """Counts, random numbers and connections of a client."""

    def __init__(self, http_port: int, grpc_port: int, seed: int):
        self.http_port, self.seed = http_port, seed
        self.target = f"127.0.0.1:{grpc_port}"
        self.rng, self.numbers = Random(seed), np.random.default_rng(seed)
        self.count: Counter[str] = Counter()
        self.asked: Counter[str] = Counter()
        """Successful answers by model."""
        self.versions: set[str] = set()
        """Versions of the model `scale` that answered."""
        self.failures: list[str] = []
        self.is_over = False
        self._id = 0

    def next_id(self) -> str:
        """A request id that no other client uses."""
        self._id += 1
        return f"{self.seed}-{self._id}"

    def input(self, rows: int, columns: int = 4) -> np.ndarray:
        """Random quarters, which float32 adds exactly."""
        return (self.numbers.integers(-4000, 4000, (rows, columns)) / 4).astype(np.float32)

    def fail(self, text: str) -> None:
        """Record a failure."""
        self.count["wrong"] += 1
        if len(self.failures) < MAX_FAILURES:
            self.failures.append(text)

    def check(self, model: str, identity: str, x: np.ndarray, answer: tuple[str, str, str, np.ndarray]) -> None:
        """Check that an answer (id, model, version, y) belongs to its request."""
        found_id, found_model, version, y = answer
        own = int(version) / 8 if model in ("scale", "other") else 0.0  # a version in a folder adds its number
        if (found_id, found_model) != (identity, model):
            self.fail(f"asked {model} {identity}, answered {found_model} {found_id}")
        elif y.shape != x.shape or not np.array_equal(y, 2 * x + np.float32(own)):
            self.fail(f"{model} {identity}: version {version} gave a wrong value")
        self.count["answered"] += 1
        self.asked[model] += 1
        if model == "scale":
            self.versions.add(version)

    def summary(self) -> str:
        """The counts as JSON."""
        found = {"count": self.count, "asked": self.asked, "failures": self.failures, "versions": sorted(self.versions)}
        return json.dumps(found)


def request_bytes(model: str, identity: str, x: np.ndarray, *more: tuple[int, Any]) -> bytes:
    """Encode a ModelInferRequest."""
    tensor: Fields = [(1, "x"), (2, "FP32"), *((3, size) for size in x.shape)]
    return encode([(1, model), (3, identity), (5, tensor), (7, x.tobytes()), *more])


def read_response(found: Any) -> tuple[str, str, str, np.ndarray]:
    """(id, model, version, y) of a ModelInferResponse."""
    y = np.frombuffer(found.raw_output_contents[0], np.float32).reshape(found.outputs[0].shape)
    return found.id, found.model_name, found.model_version, y


async def unary(s: Soaker, models: tuple[str, ...] = ALL, tasks: int = 6, cancels: bool = False) -> None:
    """ModelInfer, several at a time; with `cancels` some are cancelled while they run."""
    async with grpc.aio.insecure_channel(s.target) as channel:
        infer = channel.unary_unary(SERVICE + "ModelInfer")

        async def ask() -> None:
            while not s.is_over:
                model, identity, x = s.rng.choice(models), s.next_id(), s.input(s.rng.choice((1, 1, 1, 3, 40)))
                s.count["sent"] += 1
                call = infer(request_bytes(model, identity, x), timeout=SECONDS)
                if cancels and s.rng.random() < 0.5:
                    asyncio.get_running_loop().call_later(s.rng.random() * 0.004, call.cancel)
                try:
                    answer = ModelInferResponse.FromString(await call)
                except asyncio.CancelledError:
                    if not cancels:
                        raise
                    s.count["cancelled"] += 1
                except grpc.aio.AioRpcError as error:
                    is_unloaded = error.code() == grpc.StatusCode.UNAVAILABLE and "not ready" in (error.details() or "")
                    if model == "other" and is_unloaded:
                        s.count["unavailable while unloaded"] += 1
                    else:
                        s.count["errors"] += 1
                        s.fail(f"{model} {identity}: {error.code().name} {error.details()}")
                else:
                    s.check(model, identity, x, read_response(answer))

        await asyncio.gather(*(ask() for _ in range(tasks)))


async def stream(s: Soaker, models: tuple[str, ...] = (*STEADY, "scale"), delay: float = 0.0) -> None:
    """ModelStreamInfer: many in flight, answered in order; one in fifty is bad. `delay`: read slowly."""
    async with grpc.aio.insecure_channel(s.target) as channel:
        while not s.is_over:
            waiting: deque[tuple[str, str, np.ndarray | None]] = deque()
            call = channel.stream_stream(SERVICE + "ModelStreamInfer")(timeout=4 * SECONDS)

            async def write(call: Any = call, waiting: Any = waiting) -> None:
                for _ in range(400):
                    if s.is_over:
                        break
                    while len(waiting) > 100:
                        await asyncio.sleep(0.002)
                    model, identity, x = s.rng.choice(models), s.next_id(), s.input(s.rng.choice((1, 3, 400 if delay else 40)))
                    is_bad = s.rng.random() < 0.02
                    waiting.append((model, identity, None if is_bad else x))
                    s.count["sent"] += 1
                    await call.write(request_bytes("nobody" if is_bad else model, identity, x))
                await call.done_writing()

            writer = asyncio.create_task(write())
            try:
                async for data in call:
                    if delay and s.rng.random() < 0.1:
                        await asyncio.sleep(delay)
                    found = ModelStreamInferResponse.FromString(data)
                    model, identity, x = waiting.popleft()
                    if x is None:
                        s.count["refused as expected"] += 1
                        if not found.error_message or found.infer_response.id != identity:
                            s.fail(f"stream {identity}: expected an error, got {found.infer_response.id}")
                    elif found.error_message:
                        s.count["errors"] += 1
                        s.fail(f"stream {model} {identity}: {found.error_message}")
                    else:
                        s.check(model, identity, x, read_response(found.infer_response))
                await writer
            except (grpc.aio.AioRpcError, IndexError) as error:
                s.fail(f"stream: {error!r:.300}")
                writer.cancel()
                continue
            if waiting:
                s.fail(f"stream: {len(waiting)} requests were not answered, first {waiting[0][1]}")


async def sequences(s: Soaker) -> None:
    """Sums kept by the server, with single calls: many sequences at a time, each step checked."""
    async with grpc.aio.insecure_channel(s.target) as channel:
        infer = channel.unary_unary(SERVICE + "ModelInfer")

        async def run(number: int) -> None:
            while not s.is_over:
                key, total, steps = f"{s.seed}/{number}/{s.next_id()}", np.zeros((2, 1), np.float32), s.rng.randrange(1, 30)
                for step in range(steps):
                    x, identity = abs(s.input(2, 1)), s.next_id()
                    values = {"id": (3, key), "start": (1, int(step == 0)), "end": (1, int(step == steps - 1))}
                    parameters = [(4, [(1, f"sequence_{name}"), (2, [value])]) for name, value in values.items()]
                    s.count["sent"] += 1
                    try:
                        data = await infer(request_bytes("total", identity, x, *parameters), timeout=SECONDS)
                    except grpc.aio.AioRpcError as error:
                        s.count["errors"] += 1
                        s.fail(f"sequence {key} step {step}: {error.code().name} {error.details()}")
                        break
                    total += x
                    found_id, _, _, y = read_response(ModelInferResponse.FromString(data))
                    s.count["answered"] += 1
                    if found_id != identity or not np.array_equal(y, total):
                        s.fail(f"sequence {key} step {step}: expected {total.tolist()}, got {y.tolist()} for {found_id}")

        await asyncio.gather(*(run(n) for n in range(8)))


async def read_answer(reader: asyncio.StreamReader) -> tuple[int, bytes, int | None]:
    """(status, body, length of its JSON if binary tensors follow)."""
    head = (await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), SECONDS)).lower()
    sizes = dict(line.split(b": ", 1) for line in head.split(b"\r\n")[1:] if b": " in line)
    body = await asyncio.wait_for(reader.readexactly(int(sizes[b"content-length"])), SECONDS)
    length = sizes.get(b"inference-header-content-length")
    return int(head.split()[1]), body, None if length is None else int(length)


def rest_request(model: str, identity: str, x: np.ndarray, binary: bool) -> bytes:
    """A complete HTTP request."""
    tensor: dict[str, Any] = {"name": "x", "datatype": "FP32", "shape": x.shape}
    request: dict[str, Any] = {"id": identity, "inputs": [tensor]}
    raw = x.tobytes() if binary else b""
    if binary:
        tensor["parameters"] = {"binary_data_size": len(raw)}
        request["parameters"] = {"binary_data_output": True}
    else:
        tensor["data"] = x.ravel().tolist()
    text = json.dumps(request).encode()
    extra = b"Inference-Header-Content-Length: %d\r\n" % len(text) if binary else b""
    size = len(text) + len(raw)
    head = b"POST /v2/models/%b/infer HTTP/1.1\r\nHost: x\r\n%bContent-Length: %d\r\n\r\n" % (model.encode(), extra, size)
    return head + text + raw


async def rest(s: Soaker, models: tuple[str, ...] = ALL, connections: int = 4, most: int = 5, delay: float = 0.0) -> None:
    """Infer over HTTP, JSON and binary, up to `most` pipelined; `delay`: answers are read late and slowly."""

    async def ask() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", s.http_port, limit=2**16)
        while not s.is_over:
            batch = []
            for _ in range(s.rng.choice((1, 1, most))):
                rows = s.rng.choice((1, 3, 2000 if delay else 40))
                batch.append((s.rng.choice(models), s.next_id(), s.input(rows), s.rng.random() < 0.5))
            s.count["sent"] += len(batch)
            writer.write(b"".join(rest_request(*one) for one in batch))
            draining = asyncio.ensure_future(writer.drain())
            await asyncio.sleep(delay)
            for model, identity, x, binary in batch:
                if delay:
                    await asyncio.sleep(delay / 20)
                status, body, length = await read_answer(reader)
                found = json.loads(body[:length])
                if status == 503 and model == "other" and "not ready" in found["error"]:
                    s.count["unavailable while unloaded"] += 1
                elif status != 200:
                    s.count["errors"] += 1
                    s.fail(f"REST {model} {identity}: {status} {body[:200]!r}")
                else:
                    output = found["outputs"][0]
                    y = np.frombuffer(body[length:], np.float32) if binary else np.array(output["data"], np.float32)
                    said = found["id"], found["model_name"], found["model_version"]
                    s.check(model, identity, x, (*said, y.reshape(output["shape"])))
            await draining
        writer.close()

    await asyncio.gather(*(ask() for _ in range(connections)))


async def victim(s: Soaker) -> None:
    """Everything at once, until it is killed."""
    await asyncio.gather(unary(s, SHARED, 16), stream(s, SHARED), rest(s, SHARED, 4, 20), stuck(s))


async def stuck(s: Soaker) -> None:
    """Starts requests and never completes them."""
    connections = []
    for _ in range(5):
        _, writer = await asyncio.open_connection("127.0.0.1", s.http_port)
        writer.write(rest_request("churn", "never", s.input(1), False)[:-5])
        connections.append(writer)
    while not s.is_over:
        await asyncio.sleep(0.1)


async def slow(s: Soaker) -> None:
    """Sends requests at once and reads the answers slowly."""
    await asyncio.gather(rest(s, SHARED, 2, 60, 0.4), stream(s, SHARED, 0.05))


KINDS: dict[str, Callable[[Soaker], Awaitable[None]]] = {
    "unary": unary, "stream": stream, "sequences": sequences, "rest": rest, "slow": slow, "victim": victim,
    "cancel": lambda s: unary(s, SHARED, 8, cancels=True),
}  # fmt: skip


async def main(kind: str, http_port: int, grpc_port: int, seed: int) -> None:
    s = Soaker(http_port, grpc_port, seed)

    def stop() -> None:
        s.is_over = True
        asyncio.get_running_loop().remove_reader(sys.stdin)

    asyncio.get_running_loop().add_reader(sys.stdin, stop)
    work = asyncio.ensure_future(KINDS[kind](s))
    said = time.monotonic()
    while not work.done():
        await asyncio.wait([work], timeout=0.1)
        if time.monotonic() - said > 1:
            said = time.monotonic()
            print(s.summary(), flush=True)
    if work.exception() is not None:
        s.fail(f"the client failed: {work.exception()!r:.300}")
    print(s.summary(), flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], *map(int, sys.argv[2:5])))
