"""Several processes on one port: they share the load, load and unload together, add up their counts, and are started again."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from test_server import ask, body, infer, start


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "double.test"
    path.write_text("")
    process, port, _ = start(str(path), f"other={path}", "--processes", "2", "--executor", "inline")
    yield process, port, path
    process.terminate()
    process.communicate(timeout=120)
    assert process.returncode == 0


def children(process):
    found = []
    for child in os.listdir("/proc"):  # noqa: PTH208
        try:
            stat = open(f"/proc/{child}/stat").read() if child.isdigit() else ""  # noqa: SIM115, PTH123
            line = open(f"/proc/{child}/cmdline").read() if stat else ""  # noqa: SIM115, PTH123
        except OSError:  # it has ended
            continue
        if stat and int(stat.rsplit(")", 1)[1].split()[1]) == process.pid and "resource_tracker" not in line:
            found.append(int(child))
    return found


def count(port):
    text = ask(port, path="/metrics")[1].decode()
    mine = [line for line in text.splitlines() if line.startswith('hurtle_requests_total{model="double"')]
    return int(mine[0].split()[-1])


def test_counts_are_those_of_all_processes(server):
    process, port, _ = server
    assert len(children(process)) == 2
    before = count(port)
    for _ in range(40):  # each a connection of its own, which the kernel gives to either
        assert infer(port)[0] == 200
    assert count(port) == before + 40
    found = ask(port, path="/v2/models/double/stats")[1]
    assert json.loads(found)["model_stats"][0]["inference_stats"]["success"]["count"] == before + 40
    assert b"hurtle_processes 2" in ask(port, path="/metrics")[1]


def test_unloading_and_loading_reach_all_processes(server):
    _, port, _ = server
    assert ask(port, "POST", "/v2/repository/models/double/unload", "{}")[0] == 200
    assert {infer(port)[0] for _ in range(20)} == {503}
    assert ask(port, "POST", "/v2/repository/models/double/load", "{}")[0] == 200
    assert {infer(port)[0] for _ in range(20)} == {200}
    status, found = ask(port, "POST", "/v2/repository/models/nobody/load", "{}")
    assert (status, "No model 'nobody'" in found.decode()) == (404, True)


def test_sequences_are_refused_with_the_reason(server):
    _, port, _ = server
    request = json.loads(body()) | {"parameters": {"sequence_id": 5, "sequence_start": True}}
    status, found = ask(port, "POST", "/v2/models/double/infer", json.dumps(request))
    assert status == 400
    assert "2 processes" in found.decode()


def test_a_process_that_is_started_again_knows_what_was_unloaded_and_what_configs_clients_loaded_with(server):
    process, port, _ = server

    def most():
        answers = [ask(port, path="/v2/models/double/config")[1] for _ in range(20)]
        return {json.loads(answer)["max_batch_size"] for answer in answers}

    def statuses(model):
        return {ask(port, "POST", f"/v2/models/{model}/infer", body())[0] for _ in range(20)}

    config = json.dumps({"parameters": {"config": json.dumps({"max_batch_size": 5})}})
    assert ask(port, "POST", "/v2/repository/models/double/load", config)[0] == 200
    assert ask(port, "POST", "/v2/repository/models/other/unload", "{}")[0] == 200
    assert most() == {5}
    assert statuses("other") == {503}
    kill_one(process, port)
    assert most() == {5}
    assert statuses("other") == {503}
    for name in ("double", "other"):
        assert ask(port, "POST", f"/v2/repository/models/{name}/load", "{}")[0] == 200
        assert statuses(name) == {200}
    assert most() == {64}


def test_names_that_are_none_do_not_travel(server):
    _, port, _ = server
    for _ in range(8):
        assert ask(port, "POST", f"/v2/repository/models/{'a' * 6000}/unload", "{}")[0] in (400, 404)
    assert b"hurtle_processes 2" in ask(port, path="/metrics")[1]


@pytest.mark.slow
def test_many_models_are_counted_too(tmp_path):
    for n in range(150):
        (tmp_path / f"m{n}" / "1").mkdir(parents=True)
        (tmp_path / f"m{n}" / "1" / "model.test").write_text("")
    process, port, _ = start(str(tmp_path), "--processes", "2", "--executor", "inline")
    try:
        for _ in range(5):  # each tells more than a socket between processes holds at once
            status, found = ask(port, path="/metrics")
            assert (status, found.count(b"hurtle_requests_total{")) == (200, 150)
    finally:
        process.terminate()
        process.communicate(timeout=120)
    assert process.returncode == 0


def test_a_second_server_does_not_share_the_port(server, tmp_path):
    _, port, path = server
    command = [sys.executable, "-m", "hurtle", "serve", str(path), "--processes", "2", "--http-port", str(port)]
    found = subprocess.run([*command, "--grpc-port", "None"], capture_output=True, text=True, timeout=300, check=False)
    assert (found.returncode, f"Cannot listen on 127.0.0.1:{port}" in found.stderr) == (2, True)


def test_a_process_that_dies_is_started_again_and_counts_do_not_go_down(server):
    process, port, _ = server
    for _ in range(20):
        assert infer(port)[0] == 200
    before = count(port)
    kill_one(process, port, lambda: count(port) >= before)
    assert count(port) == before  # all that was known of the dead one, and once
    for _ in range(20):
        assert infer(port)[0] == 200
    assert count(port) == before + 20
    found = json.loads(ask(port, path="/v2/models/double/stats")[1])["model_stats"][0]
    assert found["inference_stats"]["success"]["count"] == before + 20


def kill_one(process, port, holds=lambda: True):
    before = children(process)
    os.kill(before[0], signal.SIGKILL)
    end = time.monotonic() + 30
    while time.monotonic() < end:
        now = children(process)
        if len(now) == 2 and set(now) != set(before):
            try:
                assert holds()
                if b"hurtle_processes 2" in ask(port, path="/metrics")[1]:
                    break
            except OSError:
                pass
        time.sleep(0.1)
    assert b"hurtle_processes 2" in ask(port, path="/metrics")[1]
