"""REST paths in front of a fake service and of the real one; mutated requests."""

import http.client
import json
import os
import random
import resource

import numpy as np
import pytest
from rest_server import METADATA, FakeService, HttpServer, infer_binary, infer_json, read_answer, request

from hurtle.serving.config import ServeConfig
from hurtle.serving.server import ServerThread

INFER = "/v2/models/echo/infer"
FUZZED = int(os.environ.get("HURTLE_FUZZ_REQUESTS", "1500"))


@pytest.fixture(scope="module")
def server():
    found = HttpServer(FakeService())
    yield found
    found.close()


@pytest.fixture(scope="module")
def guarded():
    found = HttpServer(FakeService(token="open sesame"))
    yield found
    found.close()


def ask(server, method, path, body=b"", **headers):
    """Status and JSON."""
    (answer,) = server.ask(request(method, path, body, **headers))
    return answer[0], json.loads(answer[2])


@pytest.mark.parametrize(
    ("path", "found"),
    [
        ("/v2", {"name": "hurtle", "version": "0", "extensions": ["binary_tensor_data"]}),
        ("/v2/", {"name": "hurtle", "version": "0", "extensions": ["binary_tensor_data"]}),
        ("http://any.host:80/v2/health/live", {"live": True}),
        ("/v2/health/live?a=b", {"live": True}),
        ("/v2/health/ready", {"ready": True}),
        ("/v2/models/echo", METADATA),
        ("/v2/models/%65cho", METADATA),
        ("/v2/models/echo/versions/1", METADATA),
        ("/v2/models/echo/ready", {"name": "echo", "ready": True}),
        ("/v2/models/echo/versions/1/ready", {"name": "echo", "ready": True}),
        ("/v2/models/echo/config", {"name": "echo", "max_batch_size": 8, "version asked": ""}),
        ("/v2/models/echo/versions/4/config", {"name": "echo", "max_batch_size": 8, "version asked": "4"}),
        ("/v2/models/stats", {"model_stats": [{"name": "echo", "version": "1"}]}),
        ("/v2/models/echo/stats", {"model_stats": [{"name": "echo", "version": "1"}]}),
        ("/v2/models/echo/versions/2/stats", {"model_stats": [{"name": "echo", "version": "2"}]}),
    ],
)
def test_paths_to_read(server, path, found):
    assert ask(server, "GET", path) == (200, found)


def test_paths_about_the_repository(server):
    server.service.calls.clear()
    assert ask(server, "POST", "/v2/repository/index") == (
        200,
        [{"name": "echo", "version": "1", "state": "READY", "reason": ""}],
    )
    assert ask(server, "POST", "/v2/repository/index", b'{"ready": true}')[0] == 200
    assert ask(server, "POST", "/v2/repository/models/echo/load", b'{"parameters": {"config": "{}"}}') == (200, {})
    assert ask(server, "POST", "/v2/repository/models/echo/unload", b'{"parameters": {"unload_dependents": false}}') == (
        200,
        {},
    )
    assert ask(server, "POST", "/v2/repository/models/other/load", b"{}") == (404, {"error": "No model 'other'."})
    assert server.service.calls == [
        ("index", False),
        ("index", True),
        ("load", "echo", {"config": "{}"}),
        ("unload", "echo", {"unload_dependents": False}),
        ("load", "other", {}),
    ]
    for path, body in (
        ("index", b'{"ready": 1}'),
        ("index", b"[]"),
        ("models/echo/load", b"{"),
        ("models/echo/load", b'{"parameters": []}'),
    ):
        assert ask(server, "POST", f"/v2/repository/{path}", body)[0] == 400


@pytest.mark.parametrize(
    ("method", "path", "status", "says"),
    [
        ("GET", "/v3", 404, "No such path: '/v3'"),
        ("GET", "/v2/models", 404, "No such path"),
        ("GET", "/v2/models/", 404, "No such path"),
        ("GET", "/v2/models//ready", 404, "No such path"),
        ("GET", "/v2/models/echo/nothing", 404, "No such path"),
        ("GET", "/v2/models/other", 404, "No model 'other'."),
        ("GET", "/v2/models/gr%C3%BC%C3%9Fe", 404, "No model 'grüße'."),
        ("GET", "/v2/models/a%2Fb", 404, "no slash"),
        ("GET", "/v2/models/..%2F..%2Fetc", 404, "no slash"),
        ("POST", "/v2/repository/models/..%2Fsecret/load", 404, "no slash"),
        ("GET", "/v2/models/a%00b", 404, "no slash and no NUL"),
        ("GET", "/v2/models/a%FFb", 400, "UTF-8"),
        ("GET", "/v2/models/%3Cscript%3E", 404, "No model '<script>'."),
        ("GET", "*", 404, "No such path"),
        ("GET", "/v2/systemsharedmemory/status", 501, "does not support system shared memory"),
        ("GET", INFER, 405, "expected POST, got GET"),
        ("PUT", "/v2", 405, "expected GET, HEAD, got PUT"),
        ("OPTIONS", INFER, 405, "expected POST"),
        ("POST", "/v2/models/other/infer", 400, "not JSON"),
    ],
)
def test_paths_and_methods_that_are_not_there(server, method, path, status, says):
    (answer,) = server.ask(request(method, path))
    assert answer[0] == status
    assert says in json.loads(answer[2])["error"]
    assert ("allow" in answer[1]) == (status == 405)


def test_errors_of_models_have_their_codes(server):
    assert ask(server, "POST", "/v2/models/other/infer", infer_json()) == (404, {"error": "No model 'other'."})
    assert ask(server, "POST", "/v2/models/broken/infer", infer_json()) == (500, {"error": "Model 'broken' failed."})
    for length in ("-1", "1e3", "", "99999999999999999999", "٣"):
        status, found = ask(server, "POST", INFER, infer_json(), Inference_Header_Content_Length=length)
        assert (status, "Inference-Header-Content-Length" in found["error"]) == (400, True)


def test_a_model_that_is_not_known_is_not_ready_as_triton_says_it(server):
    refusal = {"name": "other", "ready": False, "error": "Model 'other' version '2' is not ready."}
    assert ask(server, "GET", "/v2/models/other/versions/2/ready") == (400, refusal)


def test_a_server_that_is_not_ready_says_503(server):
    server.service.ready = False
    try:
        assert ask(server, "GET", "/v2/health/ready") == (503, {"ready": False})
        refusal = {"name": "echo", "ready": False, "error": "Model 'echo' is not ready."}
        assert ask(server, "GET", "/v2/models/echo/ready") == (503, refusal)
        assert ask(server, "GET", "/v2/health/live") == (200, {"live": True})
    finally:
        server.service.ready = True


def test_metrics_are_prometheus_text(server):
    (answer,) = server.ask(request("GET", "/metrics"))
    assert answer[1]["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert answer[2].startswith(b"# TYPE hurtle_requests_total counter\n")


def test_the_version_in_the_path_reaches_the_model(server):
    body, length = infer_binary(id="9")
    (answer,) = server.ask(request("POST", "/v2/models/echo/versions/3/infer", body, Inference_Header_Content_Length=length))
    head = json.loads(answer[2][: int(answer[1]["inference-header-content-length"])])
    assert (head["model_name"], head["model_version"], head["id"]) == ("echo", "3", "9")


def test_the_callers_trace_reaches_the_model(server):
    trace = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    server.ask(request("POST", INFER, infer_json(), traceparent=trace))
    assert server.service.last.trace_parent == trace


def test_large_json_requests_are_served_too(server):
    x = np.random.default_rng(0).random((20_000, 2)).astype(np.float32)
    status, found = ask(server, "POST", INFER, infer_json(x))
    assert status == 200
    assert np.array_equal(np.array(found["outputs"][0]["data"], np.float32), x.ravel())
    status, found = ask(server, "POST", INFER, infer_json(x)[:-1])
    assert (status, "not JSON" in found["error"]) == (400, True)


def test_only_health_and_the_empty_page_need_no_token(guarded):
    for path in ("/v2/health/live", "/v2/health/ready", "/", "/favicon.ico"):
        assert guarded.ask(request("GET", path))[0][0] == 200
    paths = ["/v2", "/metrics", "/v2/models/stats", "/v2/models/echo", "/v2/models/echo/ready", "/v2/models/echo/config"]
    asked = [("GET", path) for path in paths] + [
        ("POST", path) for path in (INFER, "/v2/repository/index", "/v2/repository/models/echo/load")
    ]
    guarded.service.last, guarded.service.calls = None, []
    for method, path in asked:
        body = infer_json() if path == INFER else b""
        for headers in ({}, {"Authorization": "Bearer guess"}):
            (answer,) = guarded.ask(request(method, path, body, **headers))
            assert (answer[0], answer[1]["www-authenticate"]) == (401, "Bearer")
            assert json.loads(answer[2]) == {"error": "This server wants a token."}
    assert (guarded.service.last, guarded.service.calls) == (None, [])
    for method, path in asked:
        body = infer_json() if path == INFER else b""
        assert guarded.ask(request(method, path, body, Authorization="Bearer open sesame"))[0][0] == 200


def test_a_body_without_a_token_is_not_kept_and_the_connection_goes_on(guarded):
    with guarded.connect() as client, client.makefile("rb") as stream:
        client.sendall(request("POST", INFER, bytes(900_000), close=False))
        assert read_answer(stream)[0] == 401
        client.sendall(request("POST", INFER, infer_json(), close=False, Authorization="Bearer open sesame"))
        assert read_answer(stream)[0] == 200


def test_pages_of_other_sites_cannot_change_anything(server):
    server.service.calls.clear()
    for site, status in (("cross-site", 403), ("same-site", 403), ("same-origin", 200), ("none", 200)):
        (answer,) = server.ask(request("POST", "/v2/repository/models/echo/unload", Sec_Fetch_Site=site))
        assert answer[0] == status
    assert len(server.service.calls) == 2


def test_mutated_requests_get_a_clean_status_or_none_and_the_server_lives_on(server):
    """HURTLE_FUZZ_REQUESTS says how many."""
    rng = random.Random(8)
    body, length = infer_binary()
    text = infer_json(id="i", outputs=[{"name": "x", "parameters": {"binary_data": False}}], parameters={"a": 1})
    packed = b"\x1f\x8b" + rng.randbytes(40)
    valid = [
        request("POST", INFER, body, False, Inference_Header_Content_Length=length),
        request("POST", INFER, text, False),
        request("POST", INFER, packed, False, Content_Encoding="gzip"),
        request("POST", "/v2/repository/index", b'{"ready": false}', False),
        POST_CHUNKED + b"%x\r\n%b\r\n0\r\n\r\n" % (len(text), text),
        request("GET", "/v2/models/echo/versions/1/config", b"", False),
    ]
    resource_before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    statuses: dict[int, int] = {}
    for _ in range(FUZZED):
        data = mutated(rng, rng.choice(valid), resize=rng.random() < 0.7)
        with server.connect() as client, client.makefile("rb") as stream:
            client.sendall(data + b"\r\n\r\n")
            client.shutdown(1)
            while status := read_status(stream):
                statuses[status] = statuses.get(status, 0) + 1
    assert set(statuses) <= {100, 200, 400, 404, 405, 413, 414, 415, 417, 431, 501}, statuses
    assert statuses[200] > FUZZED // 100
    assert statuses[400] > FUZZED // 10
    assert server.ask(request("POST", INFER, infer_json()))[0][0] == 200
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - resource_before < 200 << 10  # KiB


POST_CHUNKED = f"POST {INFER} HTTP/1.1\r\nHost: t\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
PIECES = [
    b"\0", b"\r\n", b"\r\n\r\n", b"\xff\xfe", b'"', b"{", b"[", b"]", b"-1", b"9" * 30, b"1e999", b"null", b"[[[[", b'{"a":{}}',
    b"%00", b"%2e%2e%2f", b"Content-Length: 3\r\n", b"Transfer-Encoding: chunked\r\n", b"Expect: 100-continue\r\n",
    b"4294967296", b"BYTES", b"BF16", b'"shape":[-1]', b'"shape":[9223372036854775807,2]',
    b'"parameters":{"binary_data_size":1e9}', b"\xf0\x9f\xa6\x80",
]  # fmt: skip


def mutated(rng, data, resize):
    """A request with some bytes changed, cut out, doubled or put in; mostly with a Content-Length that is right again."""
    head, _, body = data.partition(b"\r\n\r\n")
    parts = [bytearray(head), bytearray(body)]
    for _ in range(rng.randint(1, 4)):
        part = parts[rng.random() < 0.7 and len(body) > 0]
        if not part:
            continue
        at = rng.randrange(len(part))
        kind = rng.randrange(5)
        if kind == 0:
            part[at] = rng.randrange(256)
        elif kind == 1:
            del part[at : at + rng.randint(1, 20)]
        elif kind == 2:
            part[at:at] = rng.choice(PIECES)
        elif kind == 3:
            part[at:at] = part[at : at + rng.randint(1, 40)]
        else:
            del part[at:]
    if resize:
        lines = bytes(parts[0]).split(b"\r\n")
        lines = [b"Content-Length: %d" % len(parts[1]) if line.startswith(b"Content-Length") else line for line in lines]
        parts[0] = bytearray(b"\r\n".join(lines))
    return bytes(parts[0]) + b"\r\n\r\n" + bytes(parts[1])


def read_status(stream):
    try:
        return read_answer(stream)[0]
    except ConnectionResetError:
        return 0


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    for name, version, scale in (("affine", "1", 2.0), ("affine", "2", 3.0), ("other-1.0", "1", 1.0)):
        (folder / name / version).mkdir(parents=True)
        (folder / name / version / "model.json").write_text(json.dumps({"scale": scale, "shift": 1.0, "size": 2}))
    config = ServeConfig(models=(str(folder),), http_port=0, grpc_port=None, backend="affine", drain=5.0)
    with ServerThread(config) as found:
        yield found


def ask_real(real, method, path, body=None, headers=None):
    client = http.client.HTTPConnection("127.0.0.1", real.http_port, timeout=60)
    try:
        client.request(method, path, body, headers or {})
        answer = client.getresponse()
        return answer.status, answer.headers, answer.read()
    finally:
        client.close()


def test_the_real_service_is_served(real):
    assert ask_real(real, "GET", "/v2/health/ready")[0] == 200
    status, _, body = ask_real(real, "POST", "/v2/models/affine/infer", infer_json([[1, 2], [3, 4]], id="a"))
    found = json.loads(body)
    assert (status, found["id"], found["model_version"]) == (200, "a", "2")
    assert found["outputs"] == [{"name": "y", "datatype": "FP32", "shape": [2, 2], "data": [4.0, 7.0, 10.0, 13.0]}]
    status, _, body = ask_real(real, "POST", "/v2/models/affine/versions/1/infer", infer_json([[1, 2]]))
    assert json.loads(body)["outputs"][0]["data"] == [3.0, 5.0]
    binary, length = infer_binary([[1, 2]])
    status, headers, body = ask_real(
        real, "POST", "/v2/models/affine/infer", binary, {"Inference-Header-Content-Length": str(length)}
    )
    assert np.frombuffer(body[int(headers["Inference-Header-Content-Length"]) :], "<f4").tolist() == [4.0, 7.0]
    assert json.loads(ask_real(real, "GET", "/v2/models/%6Fther-1.0")[2])["inputs"] == [
        {"name": "x", "datatype": "FP32", "shape": [-1, 2]}
    ]
    index = json.loads(ask_real(real, "POST", "/v2/repository/index")[2])
    assert {(entry["name"], entry["version"], entry["state"]) for entry in index} >= {("affine", "2", "READY")}
    stats = json.loads(ask_real(real, "GET", "/v2/models/affine/stats")[2])["model_stats"]
    assert sum(entry["inference_stats"]["success"]["count"] for entry in stats) >= 3
    assert b'hurtle_requests_total{model="affine",version="2"}' in ask_real(real, "GET", "/metrics")[2]
    assert ask_real(real, "GET", "/v2/models/affine/config")[0] == 200


def test_the_real_service_refuses_over_rest_with_the_right_codes(real):
    def refused(path, body=None, method="POST"):
        status, _, answer = ask_real(real, method, path, body)
        return status, json.loads(answer)["error"]

    assert refused("/v2/models/none/infer", infer_json())[0] == 404
    assert refused("/v2/models/affine/versions/9/infer", infer_json())[0] == 404
    status, message = refused("/v2/models/affine/infer", infer_json([[1, 2, 3]]))
    assert (status, "'x'" in message, "3" in message) == (400, True, True)
    wrong = json.dumps({"inputs": [{"name": "z", "datatype": "FP32", "shape": [1, 2], "data": [1, 2]}]})
    status, message = refused("/v2/models/affine/infer", wrong)
    assert (status, "'z'" in message) == (400, True)
    assert refused("/v2/models/affine/infer", infer_json(outputs=[{"name": "q"}]))[0] == 400
    assert refused("/v2/repository/models/none/load")[0] in (400, 404)
    assert refused("/v2/repository/models/../load")[0] in (400, 404)


def test_the_real_service_unloads_and_loads_over_rest(real):
    assert ask_real(real, "POST", "/v2/repository/models/other-1.0/unload")[0] == 200
    assert ask_real(real, "GET", "/v2/models/%6Fther-1.0/ready")[0] != 200
    assert ask_real(real, "POST", "/v2/repository/models/other-1.0/load", "{}")[0] == 200
    assert ask_real(real, "GET", "/v2/models/%6Fther-1.0/ready")[0] == 200
