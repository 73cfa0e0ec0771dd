"""A whole server: TLS and client certificates, tokens, drain, signals, and what it says when it cannot start."""

import http.client
import json
import os
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from hurtle.cli import main
from hurtle.errors import HurtleError
from hurtle.serving import access_log
from hurtle.serving.config import ServeConfig
from hurtle.serving.server import ServerThread

CERTIFICATES = Path(__file__).parent / "certificates"
TLS = {"tls_cert": str(CERTIFICATES / "server.pem"), "tls_key": str(CERTIFICATES / "server.key")}
BACKEND = "serving_helpers:Doubler"


@pytest.fixture
def model(tmp_path):
    path = tmp_path / "double.test"
    path.write_text("")
    return str(path)


def config(model, **options):
    return ServeConfig(models=(model,), **{"http_port": 0, "grpc_port": 0, "backend": BACKEND, "drain": 5.0, **options})


def body(value=1.0):
    return json.dumps({"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 3], "data": [value] * 3}]})


def ask(port, method="GET", path="/v2", content=None, headers=None, context=None, host="127.0.0.1"):
    if context is None:
        connection = http.client.HTTPConnection(host, port, timeout=60)
    else:
        connection = http.client.HTTPSConnection(host, port, timeout=60, context=context)
    try:
        connection.request(method, path, content, headers or {})
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def infer(port, value=1.0, **options):
    status, content = ask(port, "POST", "/v2/models/double/infer", body(value), **options)
    return status, json.loads(content)


def client_context(certificate=None):
    context = ssl.create_default_context(cafile=str(CERTIFICATES / "ca.pem"))
    if certificate:
        context.load_cert_chain(CERTIFICATES / f"{certificate}.pem", CERTIFICATES / f"{certificate}.key")
    return context


def test_both_transports_answer(model):
    import grpc

    with ServerThread(config(model)) as server:
        status, found = infer(server.http_port, 3.0)
        assert (status, found["outputs"][0]["data"]) == (200, [6.0] * 3)
        with grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}") as channel:
            live = channel.unary_unary("/inference.GRPCInferenceService/ServerLive")(b"", timeout=60)
            assert live == b"\x08\x01"


def test_tls_is_spoken_on_both_ports(model):
    import grpc

    with ServerThread(config(model, **TLS)) as server:
        assert infer(server.http_port, context=client_context(), host="localhost")[0] == 200
        credentials = grpc.ssl_channel_credentials((CERTIFICATES / "ca.pem").read_bytes())
        with grpc.secure_channel(f"localhost:{server.grpc_port}", credentials) as channel:
            assert channel.unary_unary("/inference.GRPCInferenceService/ServerLive")(b"", timeout=60) == b"\x08\x01"
        with pytest.raises((ConnectionError, http.client.BadStatusLine)):
            ask(server.http_port)


def test_with_mtls_only_clients_with_a_certificate_come_in(model):
    import grpc

    with ServerThread(config(model, **TLS, tls_client_ca=str(CERTIFICATES / "ca.pem"))) as server:
        assert infer(server.http_port, context=client_context("client"), host="localhost")[0] == 200
        for stranger in (None, "stranger"):
            with pytest.raises((ssl.SSLError, ConnectionError, http.client.BadStatusLine)):
                infer(server.http_port, context=client_context(stranger), host="localhost")
        read = {name: (CERTIFICATES / name).read_bytes() for name in ("ca.pem", "client.key", "client.pem")}
        with grpc.secure_channel(
            f"localhost:{server.grpc_port}",
            grpc.ssl_channel_credentials(read["ca.pem"], read["client.key"], read["client.pem"]),
        ) as channel:
            assert channel.unary_unary("/inference.GRPCInferenceService/ServerLive")(b"", timeout=60) == b"\x08\x01"
        with grpc.secure_channel(f"localhost:{server.grpc_port}", grpc.ssl_channel_credentials(read["ca.pem"])) as channel:
            with pytest.raises(grpc.RpcError) as caught:
                channel.unary_unary("/inference.GRPCInferenceService/ServerLive")(b"", timeout=60)
            assert caught.value.code() == grpc.StatusCode.UNAVAILABLE


def test_a_token_is_needed_for_everything_but_health(model, tmp_path):
    import grpc

    token = tmp_path / "token"
    token.write_text("s3cret\n")
    with ServerThread(config(model, auth_token_file=str(token))) as server:
        good = {"authorization": "Bearer s3cret"}
        assert infer(server.http_port, headers=good)[0] == 200
        assert ask(server.http_port, path="/v2/health/ready")[0] == 200
        for headers in ({}, {"authorization": "Bearer s3cre"}, {"authorization": "s3cret"}, {"authorization": "Basic s3cret"}):
            status, found = infer(server.http_port, headers=headers)
            assert (status, "Bearer" in found["error"]) == (401, True)
        for path in ("/metrics", "/v2/models/double", "/v2", "/v2/models/stats"):
            assert ask(server.http_port, path=path)[0] == 401
            assert ask(server.http_port, path=path, headers=good)[0] == 200
        with grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}") as channel:
            metadata = channel.unary_unary("/inference.GRPCInferenceService/ServerMetadata")
            assert b"hurtle" in metadata(b"", timeout=60, metadata=[("authorization", "Bearer s3cret")])
            with pytest.raises(grpc.RpcError) as caught:
                metadata(b"", timeout=60)
            assert caught.value.code() == grpc.StatusCode.UNAUTHENTICATED
            assert channel.unary_unary("/grpc.health.v1.Health/Check")(b"", timeout=60) == b"\x08\x01"


def test_stopping_finishes_what_runs_and_lets_nobody_in(model):
    answers = []
    with ServerThread(config(model, parameters={"delay": "0.4"}, executor="worker", lanes=1)) as server:
        kept = http.client.HTTPConnection("127.0.0.1", server.http_port, timeout=60)
        kept.request("GET", "/v2/health/ready")
        assert kept.getresponse().read() is not None
        thread = threading.Thread(target=lambda: answers.append(infer(server.http_port, 4.0)))
        thread.start()
        time.sleep(0.15)
        port = server.http_port
    thread.join()
    assert answers[0][0] == 200
    assert answers[0][1]["outputs"][0]["data"] == [8.0] * 3
    with pytest.raises(OSError, match="refused"):
        ask(port)
    kept.close()


def test_requests_that_cannot_be_read_are_counted(model):
    with ServerThread(config(model)) as server:
        assert ask(server.http_port, "POST", "/v2/models/double/infer", "{")[0] == 400
        assert ask(server.http_port, "POST", "/v2/models/nobody/infer", "{")[0] == 400
        text = ask(server.http_port, path="/metrics")[1].decode()
        assert 'hurtle_failures_total{model="double",version="1",reason="invalid_argument"} 1' in text
        assert 'hurtle_failures_total{reason="invalid_argument"} 1' in text


def test_stopping_does_not_wait_for_clients_that_only_keep_a_connection(model):
    import grpc

    with ServerThread(config(model, **TLS, drain=60.0)) as server:
        kept = http.client.HTTPSConnection("localhost", server.http_port, timeout=60, context=client_context())
        kept.request("GET", "/v2/health/ready")
        kept.getresponse().read()
        credentials = grpc.ssl_channel_credentials((CERTIFICATES / "ca.pem").read_bytes())
        channel = grpc.secure_channel(f"localhost:{server.grpc_port}", credentials)
        channel.unary_unary("/inference.GRPCInferenceService/ServerLive")(b"", timeout=60)
    assert server.clean  # long before the limit
    kept.close()
    channel.close()


def test_requests_that_were_sent_together_are_all_answered_while_it_stops(model):
    with ServerThread(config(model, parameters={"delay": "0.2"}, executor="worker", lanes=1)) as server:
        content = body(4.0).encode()
        head = b"POST /v2/models/double/infer HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(content)
        client = socket.create_connection(("127.0.0.1", server.http_port), timeout=60)
        client.sendall((head + content) * 4)
        time.sleep(0.1)
    received = b""
    while data := client.recv(1 << 16):
        received += data
    client.close()
    assert received.count(b"HTTP/1.1 200") == 4
    assert received.count(b"Connection: close") == 1


def test_a_port_that_is_taken_is_an_error_that_says_so(model):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(
            HurtleError, match=f"Cannot listen on 127.0.0.1:{port}: Address already in use. Is another server running"
        ):
            ServerThread(config(model, http_port=port)).__enter__()


def test_a_host_that_is_not_ours_is_an_error_that_says_so(model, monkeypatch):
    def unknown(*args, **options):
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    with pytest.raises(HurtleError, match=r"'192.0.2.1' is not an address of this machine") as caught:
        ServerThread(config(model, host="192.0.2.1")).__enter__()
    assert "another server" not in str(caught.value)
    with pytest.raises(HurtleError, match="no host name"):
        ServerThread(config(model, host="a..b")).__enter__()
    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(HurtleError, match=r"the host 'nowhere.invalid' cannot be found \(Name or service") as caught:
        ServerThread(config(model, host="nowhere.invalid")).__enter__()
    assert "another server" not in str(caught.value)


def test_bad_certificates_and_bad_models_are_errors_before_anybody_comes_in(model, tmp_path):
    with pytest.raises(HurtleError, match="certificates cannot be used"):
        ServerThread(config(model, tls_cert=model, tls_key=model)).__enter__()
    with pytest.raises(HurtleError, match="was refused"):
        ServerThread(config(model, parameters={"size": "x"})).__enter__()
    (tmp_path / "empty").mkdir()
    with pytest.raises(HurtleError, match="No models in"):
        ServerThread(config(str(tmp_path / "empty"))).__enter__()


def test_requests_are_written_to_the_access_log(model, tmp_path):
    import grpc

    from hurtle.serving.protos import ModelInferRequest

    path, grpc_path = tmp_path / "access.jsonl", "/inference.GRPCInferenceService/ModelInfer"
    with ServerThread(config(model, access_log=str(path))) as server:
        infer(server.http_port)
        ask(server.http_port, "POST", "/v2/models/nobody/versions/7/infer?a=b", body())
        ask(server.http_port, "GET", "/v2/models/double/versions/1/ready")
        ask(server.http_port, "GET", "/no%20where")
        asked = ModelInferRequest(model_name="double", model_version="1").SerializeToString()
        with grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}") as channel, pytest.raises(grpc.RpcError):
            channel.unary_unary(grpc_path)(asked, timeout=60)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(line["transport"], line["status"]) for line in lines] == [
        *(("http", status) for status in (200, 404, 200, 404)),
        ("grpc", 3),
    ]
    assert [(line["path"], line["model"], line.get("version")) for line in lines] == [
        ("/v2/models/double/infer", "double", None),
        ("/v2/models/nobody/versions/7/infer", "nobody", "7"),
        ("/v2/models/double/versions/1/ready", "double", "1"),
        ("/no%20where", "", None),
        (grpc_path, "double", "1"),
    ]
    assert lines[0]["method"] == "POST /v2/models/infer"
    assert lines[0]["duration_ms"] >= 0


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_costs_lines_of_the_log_and_no_answers(model, monkeypatch):
    monkeypatch.setattr(access_log, "BUFFER", 1024)
    with ServerThread(config(model, access_log="/dev/full")) as server:
        for n in range(20):  # more than its buffer holds
            assert infer(server.http_port, float(n))[0] == 200


def start(*arguments, **environment):
    root = Path(__file__).parents[2]
    process = subprocess.Popen(
        [sys.executable, "-m", "hurtle", "serve", *arguments, "--http-port", "0", "--grpc-port", "0", "--backend", BACKEND],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": f"{root}:{root / 'tests/serving'}", **environment},
    )
    said = []
    for line in process.stderr:
        said.append(line)
        if line.startswith("ready"):
            break
    assert said, "it ended at once"
    text = "".join(said)
    assert said[-1].startswith("ready"), text
    return process, int(text.split("http://127.0.0.1:")[1].split("/")[0]), text


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_cleanly(model, number):
    process, port, said = start(model, "--executor", "inline")
    try:
        assert "double version 1 is ready: test_doubler, inline on the event loop" in said
        assert "executor=inline" in said
        assert infer(port)[0] == 200
        process.send_signal(number)
        _, rest = process.communicate(timeout=60)
        assert process.returncode == 0
        assert "stopped" in rest
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("processes", [pytest.param("1", marks=pytest.mark.slow), "2"])
def test_a_model_that_cannot_be_loaded_is_said_once(tmp_path, processes):
    (tmp_path / "bad.onnx").write_text("no model")
    command = [sys.executable, "-m", "hurtle", "serve", "bad.onnx", "--processes", processes]
    ports = ["--http-port", "0", "--grpc-port", "None"]
    found = subprocess.run([*command, *ports], capture_output=True, text=True, timeout=60, cwd=tmp_path, check=False)
    assert found.returncode == 2
    lines = found.stderr.splitlines()
    assert len(lines) == 2
    assert lines[0].startswith("hurtle ")
    assert lines[1].startswith("hurtle: error: Model 'bad': version 1 was refused: ")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["none.onnx"], "none.onnx does not exist"),
        ([], "Which models"),
        (["x", "--config", "none.toml"], "Cannot read none.toml"),
    ],
)
def test_bad_arguments_end_with_one_line(tmp_path, monkeypatch, capsys, arguments, said):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("logging.basicConfig", lambda **options: None)
    assert main(["serve", *arguments]) == 2
    assert said in capsys.readouterr().err
