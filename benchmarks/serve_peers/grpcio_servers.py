"""Hurtle's serving core behind the servers of the grpcio library, instead of our own HTTP/2: `grpc.aio`, or a pool of threads.

python benchmarks/serve_peers/grpcio_servers.py aio mlp.onnx --port 8001 --batch-size 2048
python benchmarks/serve_peers/grpcio_servers.py sync mlp.onnx --port 8001 --batch-size 2048

Codec, `InferenceService`, executor and backend are those of `hurtle serve`; only the transport differs. `sync` hands each call
from its thread to the event loop of the service, which is not thread-safe, and waits for the answer.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import grpc

from hurtle.errors import ServingError
from hurtle.serving.config import ServeConfig
from hurtle.serving.event_loop import new_event_loop
from hurtle.serving.grpc.codec import decode_request, encode_response
from hurtle.serving.load.request import GRPC_INFER
from hurtle.serving.messages import InferResponse
from hurtle.serving.service import InferenceService
from hurtle.serving.status import CODES

THREADS = 8
STATUS = {code.value[0]: code for code in grpc.StatusCode}
SERVICE, METHOD = GRPC_INFER.strip("/").split("/")


def infer(service: InferenceService, payload: bytes, done: Callable[[bytes | ServingError], None]) -> None:
    """Answer a ModelInfer message, on the service's event loop."""

    def reply(answer: InferResponse | ServingError) -> None:
        done(encode_response(answer) if isinstance(answer, InferResponse) else answer)

    try:
        service.infer(decode_request(payload), reply)
    except ServingError as error:
        done(error)


async def start_aio(service: InferenceService, address: str) -> Any:
    """`grpc.aio`: calls are coroutines on the service's event loop."""

    async def model_infer(payload: bytes, context: Any) -> bytes:
        found: asyncio.Future[bytes | ServingError] = asyncio.get_running_loop().create_future()
        infer(service, payload, lambda answer: found.done() or found.set_result(answer))
        answer = found.result() if found.done() else await found
        if isinstance(answer, ServingError):
            await context.abort(STATUS[CODES[answer.reason].grpc], str(answer))
        return answer  # type: ignore[return-value]

    server = grpc.aio.server()
    server.add_generic_rpc_handlers((handler(model_infer),))
    server.add_insecure_port(address)
    await server.start()
    return server


async def start_sync(service: InferenceService, address: str) -> Any:
    """`grpc.server`: each call occupies one of a pool's threads."""
    loop = asyncio.get_running_loop()

    def model_infer(payload: bytes, context: Any) -> bytes:
        found: Future[bytes | ServingError] = Future()
        loop.call_soon_threadsafe(infer, service, payload, found.set_result)
        answer = found.result()
        if isinstance(answer, ServingError):
            context.abort(STATUS[CODES[answer.reason].grpc], str(answer))
        return answer  # type: ignore[return-value]

    server = grpc.server(ThreadPoolExecutor(THREADS))
    server.add_generic_rpc_handlers((handler(model_infer),))
    server.add_insecure_port(address)
    server.start()
    return server


def handler(model_infer: Any) -> grpc.GenericRpcHandler:
    """Without serializers: bytes in, bytes out, as in our own server."""
    return grpc.method_handlers_generic_handler(SERVICE, {METHOD: grpc.unary_unary_rpc_method_handler(model_infer)})


async def serve(options: argparse.Namespace) -> None:
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    config = ServeConfig(models=(options.model,), executor=options.executor, batch_size=options.batch_size)
    service = InferenceService(config)
    await service.start()
    start = start_aio if options.kind == "aio" else start_sync
    server = await start(service, f"127.0.0.1:{options.port}")
    await stop.wait()
    stopping = server.stop(1.0)
    if options.kind == "aio":
        await stopping
    await service.stop(1.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=["aio", "sync"])
    parser.add_argument("model")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--executor", default="batch")
    parser.add_argument("--batch-size", type=int, default=64)
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(serve(parser.parse_args()))


if __name__ == "__main__":
    main()
