"""Requests that get an error are counted exactly once, by reason, over both transports; names of clients make no labels."""

import http.client
import json
import re

import grpc
import pytest
from grpc_server import TIMEOUT

from hurtle.serving.config import ServeConfig
from hurtle.serving.protos import message_class
from hurtle.serving.server import ServerThread

TOKEN = {"authorization": "Bearer s3cret"}
INFER, STREAM = "/inference.GRPCInferenceService/ModelInfer", "/inference.GRPCInferenceService/ModelStreamInfer"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("failures")
    for name, content in (("count.test", ""), ("token", "s3cret")):
        (folder / name).write_text(content)
    config = ServeConfig(
        models=(str(folder / "count.test"),),
        http_port=0,
        grpc_port=0,
        backend="serving_helpers:Counter",
        max_sequences=1,
        max_message_mib=0.01,
        auth_token_file=str(folder / "token"),
    )
    with ServerThread(config) as found:
        yield found


def post(server, path, content, headers=None):
    connection = http.client.HTTPConnection("127.0.0.1", server.http_port, timeout=TIMEOUT)
    try:
        connection.request("POST", path, content, TOKEN if headers is None else headers)
        return connection.getresponse().status
    finally:
        connection.close()


def failures(server):
    """{(model, reason): count}."""
    text = server.call(server.server.service.metrics)
    found = {}
    for line in text.splitlines():
        if match := re.fullmatch(r'hurtle_failures_total\{(?:model="(\w*)",version="1",)?reason="(\w+)"\} (\d+)', line):
            found[match[1] or "", match[2]] = int(match[3])
        assert 'model=""' not in line
    return found


def added(server, act):
    """What an act adds to the failures."""
    before = failures(server)
    act()
    return {key: n - before.get(key, 0) for key, n in failures(server).items() if n != before.get(key, 0)}


def json_request(size=1, **parameters):
    tensor = {"name": "x", "datatype": "FP32", "shape": [1, size], "data": [1.0] * size}
    return json.dumps({"inputs": [tensor], "parameters": parameters})


def over_rest(server, model="count", version="", content=None, headers=None, **parameters):
    path = f"/v2/models/{model}{f'/versions/{version}' if version else ''}/infer"
    status = post(server, path, json_request(**parameters) if content is None else content, headers)
    assert status == 200 or 400 <= status < 500


def message(model="count", version="", **parameters):
    made = message_class("inference.ModelInferRequest")(model_name=model, model_version=version)
    made.inputs.add(name="x", datatype="FP32", shape=[1, 1]).contents.fp32_contents.append(1.0)
    for name, value in parameters.items():
        setattr(made.parameters[name], "bool_param" if isinstance(value, bool) else "int64_param", value)
    return made.SerializeToString()


def over_grpc(server, model="count", version="", content=None, headers=None, **parameters):
    metadata = list((TOKEN if headers is None else headers).items())
    with grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}") as channel:
        payload = message(model, version, **parameters) if content is None else content
        call = channel.unary_unary(INFER)
        try:
            call(payload, timeout=TIMEOUT, metadata=metadata)
        except grpc.RpcError as error:
            assert error.code() != grpc.StatusCode.DEADLINE_EXCEEDED  # noqa: PT017


def over_stream(server, model="count", version="", content=None, headers=None, **parameters):
    metadata = list((TOKEN if headers is None else headers).items())
    with grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}") as channel:
        payload = message(model, version, **parameters) if content is None else content
        try:
            list(channel.stream_stream(STREAM)(iter([payload]), timeout=TIMEOUT, metadata=metadata))
        except grpc.RpcError as error:
            assert error.code() != grpc.StatusCode.DEADLINE_EXCEEDED  # noqa: PT017


@pytest.fixture(params=[over_rest, over_grpc, over_stream], ids=["rest", "grpc", "stream"])
def send(request, server):
    return lambda **options: request.param(server, **options)


def test_what_names_no_model_is_counted_without_one(server, send):
    assert added(server, lambda: send(headers={})) == {("", "unauthenticated"): 1}
    assert added(server, lambda: send(model="nobody")) == {("", "not_found"): 1}
    assert added(server, lambda: send(version="7")) == {("", "not_found"): 1}
    assert added(server, lambda: send(content=b" " * 20_000)) == {("", "resource_exhausted"): 1}


def test_what_cannot_be_read_is_counted(server, send):
    found = added(server, lambda: send(content=b"\xff{"))
    assert [(reason, count) for (_, reason), count in found.items()] == [("invalid_argument", 1)]


def test_refused_sequences_are_counted_with_their_model(server, send):
    assert added(server, lambda: send(sequence_id=99)) == {("count", "invalid_argument"): 1}  # unknown, or forgotten
    assert added(server, lambda: send(sequence_id=1, sequence_start=True)) == {}
    assert added(server, lambda: send(sequence_id=2, sequence_start=True)) == {("count", "resource_exhausted"): 1}  # full
    assert added(server, lambda: send(sequence_id=1, sequence_end=7)) == {("count", "invalid_argument"): 1}
    assert added(server, lambda: send(sequence_id=1, sequence_end=True)) == {}


def test_what_a_model_refuses_is_counted_once(server, send):
    assert added(server, send) == {("count", "invalid_argument"): 1}  # the state is missing


def test_what_a_sequence_refuses_when_it_is_its_turn_is_counted_once(server):
    def wrong_size():
        over_rest(server, content=json_request(size=2, sequence_id=3, sequence_start=True))

    assert added(server, wrong_size) == {("count", "invalid_argument"): 1}


def test_what_is_no_inference_is_not_among_the_failures_of_a_model(server):
    asked = json.dumps({"parameters": {"force": True}})
    load = "/v2/repository/models/count/load"
    assert added(server, lambda: post(server, load, asked)) == {("", "invalid_argument"): 1}

    def load_over_grpc():
        made = message_class("inference.RepositoryModelLoadRequest")(model_name="count")
        made.parameters["force"].bool_param = True
        with grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}") as channel:
            call = channel.unary_unary("/inference.GRPCInferenceService/RepositoryModelLoad")
            with pytest.raises(grpc.RpcError):
                call(made.SerializeToString(), timeout=TIMEOUT, metadata=list(TOKEN.items()))

    assert added(server, load_over_grpc) == {("", "invalid_argument"): 1}


def test_other_paths_and_methods_are_counted(server):
    assert added(server, lambda: post(server, "/v2/nowhere", "{}")) == {("", "not_found"): 1}
    assert added(server, lambda: post(server, "/v2/models/count", "{}")) == {("", "unimplemented"): 1}

    def unknown_method():
        with grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}") as channel, pytest.raises(grpc.RpcError):
            channel.unary_unary("/inference.GRPCInferenceService/Nothing")(b"", timeout=TIMEOUT)

    assert added(server, unknown_method) == {("", "unimplemented"): 1}
    assert added(server, unknown_method) == {("", "unimplemented"): 1}  # also where the head is known already
