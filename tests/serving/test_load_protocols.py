"""The load generator's clients and questions against our server, and its gRPC client against grpcio's."""

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import grpc
import numpy as np
import pytest
from serving_helpers import run

from hurtle.cli.bench_serve import bench_serve
from hurtle.errors import HurtleError
from hurtle.serving.config import ServeConfig
from hurtle.serving.load.generator import Generator, Setting
from hurtle.serving.load.probe import Plan, ask, plan
from hurtle.serving.load.processes import measure
from hurtle.serving.load.request import Target, grpc_message, http_request, make_inputs, parse_address, read_inputs
from hurtle.serving.protos import ModelInferRequest, ModelInferResponse
from hurtle.serving.server import ServerThread

SIZE = 3
QUICK = Setting(connections=3, seconds=0.3, warm_up=0.05)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    file = tmp_path_factory.mktemp("models") / "affine.json"
    file.write_text(json.dumps({"scale": 2.0, "shift": 1.0, "size": SIZE}))
    with ServerThread(ServeConfig(models=(str(file),), http_port=0, grpc_port=0)) as found:
        yield found


@pytest.fixture(scope="module")
def grpcio():
    """Answers with as many bytes as came; refuses the model "full"; keeps the requests' sizes, by model."""
    sizes = {}

    def infer(data, context):
        request = ModelInferRequest.FromString(data)
        sizes.setdefault(request.model_name, set()).add(len(data))
        if request.model_name == "full":
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "100 % full: später")
        return ModelInferResponse(model_name=request.model_name, raw_output_contents=[bytes(len(data))]).SerializeToString()

    handlers = {"ModelInfer": grpc.unary_unary_rpc_method_handler(infer)}
    with ThreadPoolExecutor(4) as pool:
        found = grpc.server(pool, options=[("grpc.max_receive_message_length", -1)])
        found.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("inference.GRPCInferenceService", handlers)])
        port = found.add_insecure_port("127.0.0.1:0")
        found.start()
        yield port, sizes
        found.stop(0).wait(5)


def target(server, protocol, model="affine", **fields) -> Target:
    return Target("127.0.0.1", server.http_port if protocol == "http" else server.grpc_port, protocol, model, **fields)


def succeeded(server) -> int:
    stats = server.call(server.server.service.statistics)["model_stats"]
    return stats[0]["inference_stats"]["success"]["count"]


async def generated(made: Plan, setting=QUICK):
    generator = Generator(made.target.host, made.target.port, made.make(), setting, made.rows)
    await generator.connect()
    return await generator.run()


@pytest.mark.parametrize(("protocol", "encoding"), [("http", "binary"), ("http", "json"), ("grpc", "binary")])
def test_the_server_counts_the_same_requests(server, protocol, encoding):
    made = run(plan(target(server, protocol, model=""), rows=5, encoding=encoding))
    assert (made.target.model, made.rows) == ("affine", 5)
    before = succeeded(server)
    found = run(generated(made, Setting(connections=3, seconds=0.3, warm_up=0)))
    answered = succeeded(server) - before
    assert found.errors == {}
    assert found.answers <= answered <= found.answers + 3
    assert found.answers > 20
    assert found.rows_per_second == pytest.approx(found.requests_per_second * 5)


def test_an_open_loop_over_grpc_sends_what_is_due(server, monkeypatch):
    made = run(plan(target(server, "grpc")))
    for patience in (0.2, 60.0):  # a busy machine takes longer
        monkeypatch.setattr("hurtle.serving.load.generator.PATIENCE", patience)
        found = run(generated(made, Setting(connections=8, rate=300, seconds=0.5, warm_up=0.1)))
        if found.failed == 0:
            break
    assert found.failed == 0
    assert 90 < len(found.latencies) < 220  # however late their answers
    assert found.answers < 220


@pytest.mark.parametrize("rows", [1, 40_000])
def test_answers_are_those_of_the_request(server, rows):
    x = np.arange(rows * SIZE, dtype=np.float32).reshape(rows, SIZE)
    made = run(plan(target(server, "grpc"), inputs={"x": x}))
    answer = ModelInferResponse.FromString(run(ask(made)))
    assert np.array_equal(np.frombuffer(answer.raw_output_contents[0], np.float32).reshape(x.shape), 2 * x + 1)


@pytest.mark.parametrize("size", [10, 20_000, 1_000_000])
def test_grpcio_takes_the_calls_of_any_size(grpcio, size):
    port, sizes = grpcio
    model = f"of {size}"
    message = grpc_message(Target("", 0, "grpc", model), {"x": np.zeros(size, np.uint8)})
    made = Plan(Target("127.0.0.1", port, "grpc", model), message, 1)
    for seconds in (0.3, 30.0):  # a busy machine takes longer
        found = run(generated(made, replace(QUICK, seconds=seconds)))
        assert found.errors == {}
        if found.answers >= 3:
            break
    assert found.answers >= 3
    assert sizes[model] == {len(message)}
    assert len(ModelInferResponse.FromString(run(ask(made))).raw_output_contents[0]) == len(message)


def test_grpcio_s_refusals_are_errors_in_its_words(grpcio):
    made = Plan(Target("127.0.0.1", grpcio[0], "grpc", "full"), grpc_message(Target("", 0, "grpc", "full"), {}), 1)
    found = run(generated(made))
    assert list(found.errors) == ["grpc-status 8 100 % full: später"]
    assert found.answers == 0
    unknown = Plan(made.target, b"", 1, "/inference.GRPCInferenceService/Other")
    with pytest.raises(HurtleError, match="grpc-status 12"):
        run(ask(unknown))


def test_errors_of_ours_are_errors(server):
    for protocol, code in (("http", "400"), ("grpc", "grpc-status 3")):
        with pytest.raises(HurtleError, match=rf"{code} .*'y'"):
            run(plan(target(server, protocol), inputs={"y": np.zeros((1, SIZE), np.float32)}))


def test_questions_that_go_wrong_say_why(server):
    for protocol in ("http", "grpc"):
        with pytest.raises(HurtleError, match=r"no model 'affin'\. Did you mean affine"):
            run(plan(target(server, protocol, "affin")))
    with pytest.raises(HurtleError, match=r"Nothing listens at 127\.0\.0\.1:1\."):
        run(plan(Target("127.0.0.1", 1)))
    with pytest.raises(HurtleError, match="HTTP/1, the port of REST"):
        run(plan(Target("127.0.0.1", server.http_port, "grpc", "affine")))
    with pytest.raises(HurtleError, match=r"gRPC, which is HTTP/2"):
        run(plan(Target("127.0.0.1", server.grpc_port, "http", "affine")))
    with pytest.raises(HurtleError, match="rows must be at least 1"):
        run(plan(target(server, "http"), rows=0))


def test_a_token_is_sent(tmp_path):
    (tmp_path / "affine.json").write_text(json.dumps({"scale": 2.0, "shift": 1.0, "size": SIZE}))
    (tmp_path / "token").write_text("secret")
    config = ServeConfig(
        models=(str(tmp_path / "affine.json"),), http_port=0, grpc_port=0, auth_token_file=str(tmp_path / "token")
    )
    with ServerThread(config) as server:
        for protocol in ("http", "grpc"):
            assert run(plan(target(server, protocol, "", token="secret"))).target.model == "affine"
            with pytest.raises(HurtleError, match="token"):
                run(plan(target(server, protocol, "", token="wrong")))


def test_several_processes_share_a_setting(server):
    made = run(plan(target(server, "grpc")))
    looks = []
    found = measure(made, Setting(connections=3, seconds=0.4, warm_up=0.1), 2, looks.append)
    assert found.failed == 0
    assert found.answers == len(found.latencies) > 20
    assert found.setting.connections == 3
    assert looks


def test_ctrl_c_gives_what_is_known(server):
    made = run(plan(target(server, "http")))

    def look(elapsed):
        if elapsed > 0.5:
            raise KeyboardInterrupt

    found = measure(made, Setting(connections=2, seconds=60, warm_up=0), 1, look)
    assert found.stopped
    assert found.answers > 20
    assert 0.3 < found.seconds < 60


def test_a_worker_that_cannot_connect_says_so():
    made = Plan(Target("127.0.0.1", 1, "http", "m"), b"", 1)
    with pytest.raises(HurtleError, match=r"127\.0\.0\.1:1: 2 connections could not be opened"):
        measure(made, Setting(connections=2, seconds=1))


def test_the_command_prints_a_table_and_writes_files(server, tmp_path, capsys):
    out, picture = tmp_path / "out.json", tmp_path / "curve.png"
    bench_serve(
        address=f"127.0.0.1:{server.http_port}",
        connections=(1, 2),
        seconds=0.2,
        warm_up=0.0,
        json_file=str(out),
        plot=str(picture),
    )
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("affine at 127.0.0.1:")
    assert [line.split()[0] for line in lines[1:4]] == ["connections", "1", "2"]
    found = json.loads(out.read_text())
    assert (found["model"], found["rows"], [point["connections"] for point in found["results"]]) == ("affine", 1, [1, 2])
    assert all(point["requests"] > 5 and not point["errors"] for point in found["results"])
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_command_refuses_before_it_measures(server, tmp_path):
    here = f"127.0.0.1:{server.http_port}"
    for wrong, text in (
        ({"address": "nowhere"}, "expected HOST:PORT"),
        ({"address": here, "plot": "curve.txt"}, r"\.png"),
        ({"address": here, "processes": 0}, "processes"),
        ({"address": here, "connections": (0,)}, "connections"),
        ({"address": here, "input_file": str(tmp_path / "none.json")}, "Cannot read"),
    ):
        with pytest.raises(HurtleError, match=text):
            bench_serve(**wrong)


def test_inputs_fit_what_a_model_takes():
    kinds = ("FP32", "FP16", "BF16", "INT64", "UINT8", "BOOL", "BYTES")
    inputs = make_inputs([{"name": kind, "datatype": kind, "shape": [-1, 2, -1]} for kind in kinds], rows=4)
    assert all(array.shape == (4, 2, 1) for array in inputs.values())
    assert not np.array_equal(inputs["FP32"][0], inputs["FP32"][1])
    assert not inputs["INT64"].any()
    assert b"Inference-Header-Content-Length" in http_request(Target("h", 1, "http", "a/b"), inputs)
    assert b"POST /v2/models/a%2Fb/infer" in http_request(Target("h", 1, "http", "a/b"), inputs)
    with pytest.raises(HurtleError, match=r"'x' has the fixed shape \[2, 3\]: --rows 4"):
        make_inputs([{"name": "x", "datatype": "FP32", "shape": [2, 3]}], rows=4)
    with pytest.raises(HurtleError, match="--input"):
        make_inputs([])


def test_inputs_come_from_a_file(tmp_path):
    file = tmp_path / "request.json"
    file.write_text('{"inputs": [{"name": "x", "datatype": "INT32", "shape": [2], "data": [1, 2]}]}')
    assert {name: array.tolist() for name, array in read_inputs(file).items()} == {"x": [1, 2]}
    for text in ("{", "[]", '{"inputs": []}', '{"inputs": [{"name": "x"}]}', '{"inputs": [1]}'):
        file.write_text(text)
        with pytest.raises(HurtleError, match=r"request\.json"):
            read_inputs(file)
    file.write_text('{"inputs": [{"name": "x", "datatype": "INT32", "shape": [2], "data": [1.5, 2]}]}')
    with pytest.raises(HurtleError, match=r"'x'.*INT32"):
        read_inputs(file)


@pytest.mark.parametrize("text", ["", "host", "host:", ":80", "host:0", "host:99999", "host:eighty"])
def test_addresses_that_are_none_are_refused(text):
    with pytest.raises(HurtleError, match="HOST:PORT"):
        parse_address(text)


def test_a_timeout_of_a_silent_server_is_told(monkeypatch):
    monkeypatch.setattr("hurtle.serving.load.probe.ANSWER_TIMEOUT", 0.1)

    async def main():
        silent = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
        async with silent:
            with pytest.raises(HurtleError, match="no answer within"):
                await ask(
                    Plan(Target("127.0.0.1", silent.sockets[0].getsockname()[1], "http", "m"), b"GET / HTTP/1.1\r\n\r\n", 1)
                )

    run(main())


def test_a_server_that_speaks_before_it_is_asked_and_goes_is_told():
    """Nothing is sent to a connection that is gone, and what the server said is not lost."""

    async def main():
        def hang_up(reader, writer):
            writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            writer.close()

        rude = await asyncio.start_server(hang_up, "127.0.0.1", 0)
        async with rude:
            target = Target("127.0.0.1", rude.sockets[0].getsockname()[1], "grpc", "m")
            with pytest.raises(HurtleError, match=r"HTTP/1, the port of REST|closed without an answer"):
                await ask(Plan(target, b"", 1))
            generator = Generator("127.0.0.1", target.port, Plan(target, b"", 1).make(), Setting(seconds=0.3, warm_up=0))
            await generator.connect()
            await asyncio.sleep(0.1)
            return await generator.run()

    found = run(main())
    assert found.answers == 0
    assert not found.stopped
