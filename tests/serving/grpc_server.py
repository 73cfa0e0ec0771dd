"""A gRPC server on a thread over a service that is a fake: it tests the transport alone."""

import asyncio
import threading
from contextlib import contextmanager
from types import SimpleNamespace

import grpc
import numpy as np
import uvloop

from hurtle.errors import ServingError
from hurtle.serving.grpc.connection import GrpcConnection
from hurtle.serving.memory import Memory
from hurtle.serving.messages import InferResponse
from hurtle.serving.notices import Notices
from hurtle.serving.protos import POOL, message_class

TIMEOUT = 60


class Ticket:
    def __init__(self, service, timer):
        self.service, self.timer = service, timer

    def cancel(self):
        self.timer.cancel()
        self.service.cancelled += 1


class FakeService:
    """Models: `echo` gives each input back as `<name>_out`; `slow` does so after the parameter `seconds`; `big` gives `bytes`
    zeros; `broken` raises what a service never should."""

    def __init__(self, max_message_bytes=1 << 26, token=None, max_buffered_bytes=1 << 30):
        self.config = SimpleNamespace(max_message_bytes=max_message_bytes, auth_token=token)
        self.memory = Memory(max(max_buffered_bytes, 4 * max_message_bytes))
        self.notices = Notices()
        self.connections, self.access_log, self.draining = set(), None, False
        self.ready, self.token, self.unloaded = True, token, set()
        self.cancelled = self.asked = self.running = self.most_running = 0
        self.requests, self.loads = [], []

    def count_failure(self, reason, model="", version=""):
        self.failures = [*getattr(self, "failures", []), reason]

    def infer(self, request, reply):
        self.asked += 1
        self.requests = [*self.requests[-3:], request]
        if request.model == "slow":
            self.running += 1
            self.most_running = max(self.most_running, self.running)
            seconds = request.parameters.get("seconds", 0.05)
            return Ticket(self, asyncio.get_running_loop().call_later(seconds, self._later, request, reply))
        if request.model == "echo":
            reply(self._echo(request))
        elif request.model == "big":
            size = min(request.parameters["bytes"], 1 << 25)
            reply(InferResponse("big", "1", request.id, {"y": np.zeros(size, np.uint8)}))
        elif request.model == "broken":
            raise RuntimeError("secret")
        elif request.model == "odd":
            reply(InferResponse("odd", "1", request.id, {"y": np.zeros(2, np.complex64)}))
        else:
            reply(ServingError("not_found", f"Model {request.model!r} is not known – ünknown, 100%\n."))
        return None

    def _later(self, request, reply):
        self.running -= 1
        reply(self._echo(request))

    def _echo(self, request):
        outputs = {f"{name}_out": array for name, array in request.inputs.items()}
        return InferResponse(request.model, "1", request.id, outputs, dict(request.parameters))

    def authorize(self, header):
        if self.token is None or header == b"Bearer " + self.token.encode():
            return None
        return ServingError("unauthenticated", "no token")

    def is_live(self):
        return True

    def is_ready(self):
        return self.ready and not self.draining

    def is_model_ready(self, name, version=""):
        return self.is_ready() and self.has_model(name) and name not in self.unloaded

    def has_model(self, name):
        return name in ("echo", "slow")

    def server_metadata(self):
        return {"name": "fake", "version": "1", "extensions": ["a", "b"]}

    def model_metadata(self, name, version=""):
        if not self.has_model(name):
            raise ServingError("not_found", f"Model {name!r} is not known.")
        tensor = {"name": "x", "datatype": "FP32", "shape": [-1, 4]}
        return {"name": name, "versions": ["1"], "platform": "fake", "inputs": [tensor], "outputs": [tensor]}

    def model_config(self, name, version=""):
        if name == "broken":
            raise RuntimeError("secret")
        tensor = {"name": "x", "data_type": "TYPE_FP32", "dims": [4]}
        return {
            "name": name,
            "platform": "fake",
            "max_batch_size": 8,
            "input": [tensor],
            "dynamic_batching": {"max_queue_delay_microseconds": 5},
        }

    async def statistics(self, name="", version=""):
        counts = {"success": {"count": 3, "ns": 17}}
        return {"model_stats": [{"name": "echo", "version": "1", "inference_count": 3, "inference_stats": counts}]}

    async def index(self, ready=False):
        return [{"name": "echo", "version": "1", "state": "READY", "reason": ""}]

    async def load(self, name, parameters):
        if name == "slow":
            try:
                await asyncio.sleep(TIMEOUT)
            except asyncio.CancelledError:
                self.cancelled += 1
                raise
        self.loads.append((name, parameters))

    async def unload(self, name, parameters):
        raise ServingError("failed_precondition", f"Model {name!r} stays.")


class GrpcServer:
    """Runs on a thread; `call` runs a function on its loop."""

    def __init__(self, service, make_loop=uvloop.new_event_loop, **options):
        self.service, self.loop = service, make_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        start = self.loop.create_server(lambda: GrpcConnection(service), "127.0.0.1", 0, **options)
        self.server = asyncio.run_coroutine_threadsafe(start, self.loop).result(TIMEOUT)
        self.port = self.server.sockets[0].getsockname()[1]

    def call(self, function, *arguments):
        async def run():
            return function(*arguments)

        return asyncio.run_coroutine_threadsafe(run(), self.loop).result(TIMEOUT)

    def close(self):
        async def stop():
            self.server.close()
            for connection in list(self.service.connections):
                connection.abort()
            await asyncio.sleep(0)

        asyncio.run_coroutine_threadsafe(stop(), self.loop).result(TIMEOUT)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(TIMEOUT)
        self.loop.close()


@contextmanager
def serving(service=None, **options):
    server = GrpcServer(service or FakeService(), **options)
    try:
        yield server
    finally:
        server.close()


OPTIONS = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1), ("grpc.use_local_subchannel_pool", 1)]


@contextmanager
def client(server, **options):
    with grpc.insecure_channel(f"127.0.0.1:{server.port}", options=OPTIONS, **options) as channel:
        yield Client(channel)


class Client:
    """`client.ModelInfer(message)` and so on for every method of every service."""

    def __init__(self, channel):
        self.channel = channel

    def method(self, service, name):
        method = POOL.FindServiceByName(service).FindMethodByName(name)
        kind = "".join("stream" if streaming else "unary" for streaming in (method.client_streaming, method.server_streaming))
        kind = {"unaryunary": "unary_unary", "unarystream": "unary_stream", "streamstream": "stream_stream"}[kind]
        return getattr(self.channel, kind)(
            f"/{service}/{name}",
            request_serializer=message_class(method.input_type.full_name).SerializeToString,
            response_deserializer=message_class(method.output_type.full_name).FromString,
        )

    def __getattr__(self, name):
        return self.method("inference.GRPCInferenceService", name)

    def ask(self, method, /, **fields):
        """A unary method by name, with a timeout."""
        return getattr(self, method)(message_class(f"inference.{method}Request")(**fields), timeout=TIMEOUT)


def infer_request(model="echo", array=None, name="x", datatype=None, request_id="", **parameters):
    from hurtle.serving.grpc.codec import set_parameter
    from hurtle.serving.protos import ModelInferRequest
    from hurtle.serving.tensors import datatype_of, to_raw

    array = np.arange(4, dtype=np.float32) if array is None else array
    message = ModelInferRequest(model_name=model, id=request_id)
    message.inputs.add(name=name, datatype=datatype or datatype_of(array.dtype), shape=array.shape)
    message.raw_input_contents.append(to_raw(array))
    for key, value in parameters.items():
        set_parameter(message.parameters[key], value)
    return message
