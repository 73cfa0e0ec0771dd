"""The gRPC transport as grpcio's own client sees it, over a fake service."""

import asyncio
import ssl
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import grpc
import numpy as np
import pytest
import uvloop
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from grpc_server import TIMEOUT, Client, FakeService, client, infer_request, serving

from hurtle.serving.grpc.connection import GrpcConnection
from hurtle.serving.protos import HEALTH, INFERENCE, REFLECTION, REFLECTION_ALPHA, message_class

SHARED_MEMORY = ("SharedMemoryStatus", "SharedMemoryRegister", "SharedMemoryUnregister")


@pytest.fixture(scope="module")
def server():
    with serving() as server:
        yield server


@pytest.fixture
def calls(server):
    with client(server) as found:
        yield found


def fails(run):
    with pytest.raises(grpc.RpcError) as raised:
        run()
    return raised.value.code(), raised.value.details()


def wait_until(condition):
    end = time.monotonic() + TIMEOUT
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_the_simple_methods_answer(calls):
    assert calls.ask("ServerLive").live
    assert calls.ask("ServerReady").ready
    assert calls.ask("ModelReady", name="echo").ready
    assert list(calls.ask("ServerMetadata").extensions) == ["a", "b"]
    assert list(calls.ask("ModelMetadata", name="echo").inputs[0].shape) == [-1, 4]
    config = calls.ask("ModelConfig", name="echo").config
    assert (config.max_batch_size, config.input[0].data_type, list(config.input[0].dims)) == (8, 11, [4])
    assert config.dynamic_batching.max_queue_delay_microseconds == 5
    assert calls.ask("ModelStatistics").model_stats[0].inference_stats.success.ns == 17
    assert calls.ask("RepositoryIndex").models[0].state == "READY"


def test_infer_gives_the_model_s_answer_under_the_request_s_id(calls):
    response = calls.ModelInfer(infer_request(request_id="7", n=3), timeout=TIMEOUT)
    assert (response.model_name, response.model_version, response.id) == ("echo", "1", "7")
    assert np.frombuffer(response.raw_output_contents[0], np.float32).tolist() == [0, 1, 2, 3]
    assert response.parameters["n"].int64_param == 3


def test_errors_have_the_right_code_and_their_text_survives(calls):
    code, text = fails(lambda: calls.ModelInfer(infer_request("nobody"), timeout=TIMEOUT))
    assert code is grpc.StatusCode.NOT_FOUND
    assert text == "Model 'nobody' is not known – ünknown, 100%\n."
    assert fails(lambda: calls.ask("ModelMetadata", name="x"))[0] is grpc.StatusCode.NOT_FOUND
    assert fails(lambda: calls.ask("RepositoryModelUnload", model_name="x"))[0] is grpc.StatusCode.FAILED_PRECONDITION
    assert fails(lambda: calls.ask("RepositoryIndex", repository_name="x"))[0] is grpc.StatusCode.NOT_FOUND
    code, text = fails(lambda: calls.ModelInfer(infer_request(datatype="FP31"), timeout=TIMEOUT))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert "'x'" in text


def test_an_error_that_should_not_be_is_internal_and_tells_no_secrets(calls):
    code, text = fails(lambda: calls.ask("ModelConfig", name="broken"))
    assert code is grpc.StatusCode.INTERNAL
    assert "secret" not in text
    code, text = fails(lambda: calls.ModelInfer(infer_request("broken"), timeout=TIMEOUT))
    assert code is grpc.StatusCode.INTERNAL
    assert "secret" not in text
    (answer,) = stream(calls, [infer_request("broken")])
    assert "RuntimeError" in answer.error_message
    assert calls.ask("ServerLive").live


def test_an_output_that_the_protocol_cannot_hold_is_an_error(calls):
    assert "complex64" in fails(lambda: calls.ModelInfer(infer_request("odd"), timeout=TIMEOUT))[1]


def test_an_unknown_method_is_unimplemented(calls):
    for path in ("/inference.GRPCInferenceService/Nothing", "/x", "/inference.GRPCInferenceService/TraceSetting"):
        run = calls.channel.unary_unary(path)
        assert fails(lambda run=run: run(b"", timeout=TIMEOUT))[0] is grpc.StatusCode.UNIMPLEMENTED
        assert fails(lambda run=run: run(bytes(200_000), timeout=TIMEOUT))[0] is grpc.StatusCode.UNIMPLEMENTED


def test_a_message_that_is_none_is_refused(calls):
    run = calls.channel.unary_unary("/inference.GRPCInferenceService/ModelReady")
    assert fails(lambda: run(b"\xff\xff", timeout=TIMEOUT))[0] is grpc.StatusCode.INVALID_ARGUMENT


def test_a_unary_method_takes_exactly_one_message(calls):
    run = calls.channel.stream_unary("/inference.GRPCInferenceService/ServerLive")
    assert fails(lambda: run(iter([]), timeout=TIMEOUT))[0] is grpc.StatusCode.UNIMPLEMENTED
    assert fails(lambda: run(iter([b"", b""]), timeout=TIMEOUT))[0] is grpc.StatusCode.UNIMPLEMENTED
    assert run(iter([b""]), timeout=TIMEOUT) == b"\x08\x01"


def test_many_calls_at_a_time_each_get_their_own_answer(server, calls):
    infer = calls.ModelInfer
    waiting = [
        infer.future(infer_request("slow", np.full(8, n, np.int32), request_id=str(n), seconds=0.3), timeout=TIMEOUT)
        for n in range(200)
    ]
    for n, future in enumerate(waiting):
        response = future.result()
        assert response.id == str(n)
        assert np.frombuffer(response.raw_output_contents[0], np.int32).tolist() == [n] * 8
    assert server.service.most_running >= 100


def test_large_messages_go_both_ways(calls):
    array = np.random.default_rng(0).integers(0, 256, 20 << 20, dtype=np.uint8)
    response = calls.ModelInfer(infer_request(array=array), timeout=TIMEOUT)
    assert response.raw_output_contents[0] == array.tobytes()


def test_large_messages_at_a_time_share_the_connection(calls):
    arrays = [np.full(5 << 20, n, np.uint8) for n in range(8)]
    waiting = [calls.ModelInfer.future(infer_request(array=array), timeout=TIMEOUT) for array in arrays]
    small = calls.ModelInfer(infer_request(), timeout=TIMEOUT)
    assert len(small.raw_output_contents) == 1
    for array, future in zip(arrays, waiting, strict=True):
        assert future.result().raw_output_contents[0] == array.tobytes()


def test_asyncio_s_own_loop_serves_too():
    with serving(make_loop=asyncio.new_event_loop) as server, client(server) as calls:
        array = np.arange(3 << 20, dtype=np.uint8)
        assert calls.ModelInfer(infer_request(array=array), timeout=TIMEOUT).raw_output_contents[0] == array.tobytes()


def test_a_message_over_the_limit_is_refused_and_the_connection_goes_on():
    with serving(FakeService(max_message_bytes=100_000)) as server, client(server) as calls:
        for size in (100_001, 10_000_000):
            code, text = fails(
                lambda size=size: calls.ModelInfer(infer_request(array=np.zeros(size, np.uint8)), timeout=TIMEOUT)
            )
            assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert "100,000" in text
        assert calls.ask("ServerLive").live
        assert len(server.service.connections) == 1


@pytest.mark.parametrize("compression", [grpc.Compression.Gzip, grpc.Compression.Deflate])
def test_compressed_requests_are_understood(server, compression):
    with client(server, compression=compression) as calls:
        array = np.zeros(3_000_000, np.uint8)
        for sent in (array, array[:10]):
            response = calls.ModelInfer(infer_request(array=sent), timeout=TIMEOUT)
            assert response.raw_output_contents[0] == sent.tobytes()


def test_a_compressed_bomb_is_refused():
    with serving(FakeService(max_message_bytes=100_000)) as server, client(server, compression=grpc.Compression.Gzip) as calls:
        message = infer_request(array=np.zeros(50_000_000, np.uint8))
        assert fails(lambda: calls.ModelInfer(message, timeout=TIMEOUT))[0] is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_cancelling_reaches_the_service(server, calls):
    before = server.service.cancelled
    future = calls.ModelInfer.future(infer_request("slow", seconds=5.0))
    wait_until(lambda: server.service.running)
    future.cancel()
    wait_until(lambda: server.service.cancelled == before + 1)
    server.service.running = 0


def test_cancelling_ends_a_coroutine(server, calls):
    before = server.service.cancelled
    future = calls.RepositoryModelLoad.future(message_class("inference.RepositoryModelLoadRequest")(model_name="slow"))
    time.sleep(0.1)
    future.cancel()
    wait_until(lambda: server.service.cancelled == before + 1)


def test_a_lost_connection_cancels_what_runs(server):
    before = server.service.cancelled
    with client(server) as calls:
        waiting = [calls.ModelInfer.future(infer_request("slow", seconds=5.0)) for _ in range(5)]
        wait_until(lambda: server.service.running >= 5)
        assert not waiting[0].done()
    wait_until(lambda: server.service.cancelled == before + 5)
    server.service.running = 0


def test_a_deadline_reaches_the_request_and_ends_coroutines(server, calls):
    begun = time.monotonic()
    calls.ModelInfer(infer_request(), timeout=5)
    assert begun + 4.9 < server.service.requests[-1].deadline < time.monotonic() + 5.1  # the client rounds what it sends
    calls.ModelInfer(infer_request())
    assert server.service.requests[-1].deadline is None
    load = calls.RepositoryModelLoad
    request = message_class("inference.RepositoryModelLoadRequest")(model_name="slow")
    assert fails(lambda: load(request, timeout=0.2))[0] is grpc.StatusCode.DEADLINE_EXCEEDED


def test_parameters_of_loading_arrive(server, calls):
    request = message_class("inference.RepositoryModelLoadRequest")(model_name="m")
    request.parameters["config"].string_param = "{}"
    request.parameters["file:1/model"].bytes_param = b"\0"
    calls.RepositoryModelLoad(request, timeout=TIMEOUT)
    assert server.service.loads[-1] == ("m", {"config": "{}", "file:1/model": b"\0"})


def test_a_token_is_asked_for_except_by_health_checks():
    with serving(FakeService(token="t")) as server, client(server) as calls:
        for metadata in (None, [("authorization", "Bearer x")]):
            code, _ = fails(lambda metadata=metadata: calls.ModelInfer(infer_request(), metadata=metadata, timeout=TIMEOUT))
            assert code is grpc.StatusCode.UNAUTHENTICATED
        assert calls.ModelInfer(infer_request(), metadata=[("authorization", "Bearer t")], timeout=TIMEOUT).model_name == "echo"
        assert fails(lambda: calls.ask("ModelReady", name="echo"))[0] is grpc.StatusCode.UNAUTHENTICATED
        assert calls.ask("ServerLive").live
        assert check(calls) == 1


def test_metadata_over_the_limit_is_refused_and_the_connection_goes_on(calls):
    # grpcio would not send what we say we do not take, so this is just below that and above what a call may have.
    metadata = [(f"name-{n}", "v" * 100) for n in range(118)]
    code, _ = fails(lambda: calls.ModelInfer(infer_request(), metadata=metadata, timeout=TIMEOUT))
    assert code in (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE)
    assert calls.ask("ServerLive").live


def stream(calls, requests, **options):
    return calls.ModelStreamInfer(iter(requests), timeout=TIMEOUT, **options)


def test_a_stream_is_answered_in_the_order_of_its_requests_and_errors_do_not_end_it(calls):
    requests = [
        infer_request("slow", request_id="a", seconds=0.2),
        infer_request("nobody", request_id="b"),
        infer_request("slow", request_id="c", seconds=0.01),
        infer_request("echo", request_id="d", datatype="FP31"),
        infer_request("echo", request_id="e"),
    ]
    answers = list(stream(calls, requests))
    assert [answer.infer_response.id for answer in answers] == ["a", "b", "c", "", "e"]
    assert [bool(answer.error_message) for answer in answers] == [False, True, False, True, False]
    assert "nobody" in answers[1].error_message
    assert len(answers[4].infer_response.raw_output_contents) == 1
    assert answers[4].infer_response.parameters["triton_final_response"].bool_param


def test_a_stream_of_many_requests_is_answered(calls):
    requests = [infer_request(array=np.full(1000, n, np.int32), request_id=str(n)) for n in range(2000)]
    answers = [answer.infer_response for answer in stream(calls, requests)]
    assert [int(np.frombuffer(answer.raw_output_contents[0], np.int32)[5]) for answer in answers] == list(range(2000))


def test_a_stream_runs_no_more_requests_at_a_time_than_it_may(server, calls):
    server.service.running = server.service.most_running = 0
    requests = [infer_request("slow", request_id=str(n), seconds=0.02) for n in range(300)]
    answers = [answer.infer_response.id for answer in stream(calls, requests)]
    assert answers == [str(n) for n in range(300)]
    assert 32 <= server.service.most_running <= 64


def test_a_stream_takes_large_requests(calls):
    requests = [infer_request(array=np.full(3 << 20, n, np.uint8)) for n in range(4)]
    for n, answer in enumerate(stream(calls, requests)):
        assert answer.infer_response.raw_output_contents[0] == bytes([n]) * (3 << 20)


def test_a_stream_is_a_conversation(calls):
    gate, asked = threading.Semaphore(1), []

    def requests():
        for n in range(5):
            assert gate.acquire(timeout=TIMEOUT)
            asked.append(n)
            yield infer_request(request_id=str(n))

    for answer in stream(calls, requests()):
        assert answer.infer_response.id == str(asked[-1])
        gate.release()
    assert asked == [0, 1, 2, 3, 4]


def test_a_stream_ends_at_its_deadline_and_cancels_what_runs(server, calls):
    before = server.service.cancelled
    running = calls.ModelStreamInfer(iter([infer_request("slow", seconds=9.0)]), timeout=0.3)
    assert fails(lambda: next(running))[0] is grpc.StatusCode.DEADLINE_EXCEEDED
    wait_until(lambda: server.service.cancelled == before + 1)


def check(calls, service=""):
    request = message_class("grpc.health.v1.HealthCheckRequest")(service=service)
    return calls.method(HEALTH, "Check")(request, timeout=TIMEOUT).status


def test_health_follows_the_service(server, calls):
    assert check(calls) == check(calls, INFERENCE) == 1
    server.service.ready = False
    assert check(calls) == check(calls, INFERENCE) == 2
    server.service.ready = True
    assert fails(lambda: check(calls, "nobody"))[0] is grpc.StatusCode.NOT_FOUND


def test_health_knows_each_model_by_its_name(server, calls):
    request = message_class("grpc.health.v1.HealthCheckRequest")(service="echo")
    watching = calls.method(HEALTH, "Watch")(request, timeout=TIMEOUT)
    assert check(calls, "echo") == next(watching).status == 1
    server.service.unloaded.add("echo")
    assert check(calls, "echo") == next(watching).status == 2
    assert check(calls, "slow") == check(calls) == 1
    server.service.unloaded.clear()
    assert check(calls, "echo") == next(watching).status == 1
    watching.cancel()


def test_an_unknown_model_is_not_ready_which_is_no_error(calls):
    assert not calls.ask("ModelReady", name="nobody").ready


@pytest.mark.parametrize(
    ("method", "says"),
    [
        *((f"System{name}", "system shared memory") for name in SHARED_MEMORY),
        *((f"Cuda{name}", "CUDA shared memory") for name in SHARED_MEMORY),
        ("TraceSetting", "trace settings"),
        ("LogSettings", "log settings"),
    ],
)
def test_extensions_of_triton_that_are_not_there_are_named(calls, method, says):
    code, details = fails(lambda: calls.channel.unary_unary(f"/{INFERENCE}/{method}")(b"", timeout=TIMEOUT))
    assert code is grpc.StatusCode.UNIMPLEMENTED
    assert f"does not support {says}" in details


def test_watching_health_tells_changes(server, calls):
    request = message_class("grpc.health.v1.HealthCheckRequest")
    watch = calls.method(HEALTH, "Watch")
    running = watch(request(), timeout=TIMEOUT)
    assert next(running).status == 1
    server.service.ready = False
    assert next(running).status == 2
    server.service.ready = True
    assert next(running).status == 1
    running.cancel()
    assert next(watch(request(service="nobody"), timeout=TIMEOUT)).status == 3


@pytest.mark.parametrize("service", [REFLECTION, REFLECTION_ALPHA])
def test_reflection_tells_the_services_and_their_files(calls, service):
    request = message_class(f"{service.rpartition('.')[0]}.ServerReflectionRequest")
    questions = [
        request(list_services=""),
        request(file_containing_symbol="inference.GRPCInferenceService"),
        request(file_by_filename="grpc/health/v1/health.proto"),
        request(file_containing_symbol="no.Such"),
    ]
    answers = list(calls.method(service, "ServerReflectionInfo")(iter(questions), timeout=TIMEOUT))
    names = {found.name for found in answers[0].list_services_response.service}
    assert names == {INFERENCE, HEALTH, REFLECTION, REFLECTION_ALPHA}
    files = [FileDescriptorProto.FromString(file) for file in answers[1].file_descriptor_response.file_descriptor_proto]
    assert [file.name for file in files] == ["inference.proto", "model_config.proto"]
    assert "ModelInfer" in {method.name for method in files[0].service[0].method}
    assert len(answers[2].file_descriptor_response.file_descriptor_proto) == 1
    assert answers[3].error_response.error_code == 5


def test_draining_finishes_what_runs_and_then_closes():
    with serving() as server, client(server) as calls:
        future = calls.ModelInfer.future(infer_request("slow", seconds=0.4, request_id="last"), timeout=TIMEOUT)
        talking = stream(calls, [infer_request("slow", seconds=0.3, request_id="s")])
        watching = calls.method(HEALTH, "Watch")(message_class("grpc.health.v1.HealthCheckRequest")(), timeout=TIMEOUT)
        assert next(watching).status == 1
        wait_until(lambda: server.service.running == 2)
        server.call(lambda: [connection.drain() for connection in list(server.service.connections)])
        assert future.result().id == "last"
        assert next(talking).infer_response.id == "s"
        assert next(watching).status == 2
        wait_until(lambda: not server.service.connections)


def test_draining_an_idle_connection_closes_it_when_the_client_has_answered_ping(monkeypatch):
    monkeypatch.setattr(GrpcConnection, "grace", 3600.0)
    with serving() as server, client(server) as calls:
        assert calls.ask("ServerLive").live
        server.call(lambda: [connection.drain() for connection in list(server.service.connections)])
        wait_until(lambda: not server.service.connections)


def test_clients_on_many_threads_and_connections_are_served(server):
    def work(n):
        with client(server) as calls:
            for k in range(20):
                response = calls.ModelInfer(infer_request(array=np.full(3, n * 100 + k), request_id=f"{n}"), timeout=TIMEOUT)
                assert np.frombuffer(response.raw_output_contents[0], np.int64).tolist() == [n * 100 + k] * 3

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    wait_until(lambda: not server.service.connections)


def test_calls_are_logged():
    class Log(list):
        def write(self, **values):
            self.append(values)

    with serving() as server, client(server) as calls:
        server.service.access_log = log = Log()
        calls.ModelInfer(infer_request(request_id="7"), timeout=TIMEOUT)
        fails(lambda: calls.ModelInfer(infer_request("nobody"), timeout=TIMEOUT))
        assert [(line["model"], line["status"], line["id"]) for line in log] == [("echo", 0, "7"), ("nobody", 5, "")]
        assert log[0]["transport"] == "grpc"
        assert log[0]["method"].endswith("/ModelInfer")
        assert log[0]["peer"].startswith("127.0.0.1:")
        assert 0 < log[0]["duration_ms"] < 1000
        assert min(log[0]["request_bytes"], log[0]["response_bytes"]) > 20


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tls")
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=localhost"
    names = ["-keyout", str(folder / "key.pem"), "-out", str(folder / "cert.pem"), "-addext", "subjectAltName=DNS:localhost"]
    try:
        subprocess.run([*command.split(), *names], check=True, capture_output=True, timeout=TIMEOUT)
    except FileNotFoundError:
        pytest.skip("needs openssl")
    return folder


def test_it_speaks_tls(certificate):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate / "cert.pem", certificate / "key.pem")
    context.set_alpn_protocols(["h2"])
    trusted = grpc.ssl_channel_credentials((certificate / "cert.pem").read_bytes())
    options, array = [("grpc.max_receive_message_length", -1)], np.arange(5 << 20, dtype=np.uint8)
    with (
        serving(make_loop=uvloop.new_event_loop, ssl=context) as server,
        grpc.secure_channel(f"localhost:{server.port}", trusted, options) as channel,
    ):
        response = Client(channel).ModelInfer(infer_request(array=array), timeout=TIMEOUT)
        assert response.raw_output_contents[0] == array.tobytes()
