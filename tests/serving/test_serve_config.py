"""The server's options: from flags, the environment and a TOML file, in this order; mistakes are named."""

import pytest

from hurtle.cli.serve import _announce, parse, run_serve
from hurtle.errors import HurtleError, TrustError
from hurtle.serving.config import ServeConfig, defaults_from, describe

TOML = """\
models = ["a.onnx", "zoo"]
executor = "worker"
lanes = 3
batch_timeout_ms = 2
grpc_port = false
parameters = {device = "cpu", threads = 1}

"""
OWN = """\
models = ["a.onnx"]
model = {a = {executor = "batch", batch_size = 8, parameters = {threads = 2}}}
"""


def write(tmp_path, text):
    path = tmp_path / "serve.toml"
    path.write_text(text)
    return path


def test_flags_beat_the_environment_which_beats_the_file(tmp_path):
    environment = {"HURTLE_SERVE_LANES": "5", "HURTLE_SERVE_MAX_QUEUE": "7", "OTHER": "x"}
    found = parse(["--max-queue", "9", "--host", "0.0.0.0"], defaults_from(write(tmp_path, TOML), environment))
    assert found.models == ("a.onnx", "zoo")
    assert (found.executor, found.lanes, found.max_queue, found.host) == ("worker", 5, 9, "0.0.0.0")
    assert (found.batch_timeout_ms, found.grpc_port, found.http_port) == (2.0, None, 8000)
    assert found.parameters == {"device": "cpu", "threads": "1"}


def test_help_reads_well(capsys):
    with pytest.raises(SystemExit):
        parse(["--help"], ServeConfig())
    said = capsys.readouterr().out
    assert "{None}" not in said
    for option in ("--lanes INT", "--http-port INT|None", "--tls-cert FILE", "--config FILE", "--otlp-endpoint URL"):
        assert option in said
    assert parse(["--grpc-port", "None", "--lanes", "2"], ServeConfig()) == ServeConfig(grpc_port=None, lanes=2)


def test_one_model_may_have_options_of_its_own(tmp_path):
    config = parse(["a.onnx", "b.onnx", "--lanes", "2", "--parameters", "device=cuda"], defaults_from(write(tmp_path, OWN), {}))
    a, b = config.for_model("a"), config.for_model("b")
    assert (a.executor, a.batch_size, a.lanes) == ("batch", 8, 2)
    assert a.parameters == {"device": "cuda", "threads": "2"}
    assert (b.batch_size, b.parameters) == (64, {"device": "cuda"})


def test_variables_of_every_kind(tmp_path):
    found = defaults_from(
        None,
        {
            "HURTLE_SERVE_MODELS": "a.onnx:b.onnx",
            "HURTLE_SERVE_PARAMETERS": "device=cuda,threads=2",
            "HURTLE_SERVE_GRPC_PORT": "off",
            "HURTLE_SERVE_WATCH": "0.5",
            "HURTLE_SERVE_EXECUTOR": "inline",
            "HURTLE_SERVE_TRITON_METRICS": "true",
        },
    )
    assert found.triton_metrics is True
    assert defaults_from(None, {"HURTLE_SERVE_TRITON_METRICS": "0"}).triton_metrics is False
    assert found.models == ("a.onnx", "b.onnx")
    assert found.parameters == {"device": "cuda", "threads": "2"}
    assert (found.grpc_port, found.watch, found.executor) == (None, 0.5, "inline")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("lane = 3", "serve.toml has no option 'lane'. Did you mean lanes"),
        ("lanes = 'three'", "lanes must be .*got 'three'"),
        ("executor = 'wrker'", "No executor 'wrker'. Did you mean worker"),
        ("executor = 3", "executor must be"),
        ("lanes = true", "lanes must be .*got True"),
        ("model = {a = {lane = 3}}", r"\[model.a\] has no option 'lane'"),
        ("model = {a = {batch_size = 0}}", "batch_size must be at least 1, got 0"),
        ("models = [3]", "models must be"),
        ("models = {a = 3}", "models must be"),
        ("model = 3", r"as a table, \[model.NAME\]"),
        ("model = {a = 3}", r"as a table"),
        ("a = ", "Cannot read"),
        ("http_port = 70000", "http_port must be 0 to 65535, got 70000"),
        ("tls_cert = 'a.pem'", "both --tls-cert and --tls-key"),
        ("watch = -1", "watch must be at least 0, got -1"),
        ("drain = nan", "drain must be at least 0, got nan"),
        ("max_buffered_mib = 127", "max_buffered_mib must be at least twice max_message_mib, 128.0"),
        ("max_buffered_mib = inf", "max_buffered_mib must be at least"),
        ("max_connections = 0", "max_connections must be at least 1, got 0"),
        ("access_log_files = 0", "access_log_files must be at least 1, got 0"),
        ("access_log_mib = 0", "access_log_mib must be more than 0"),
        ("max_sequence_mib = inf", "max_sequence_mib must be more than 0 and less than"),
        ("max_message_mib = 0", "max_message_mib must be more than 0"),
        ("executor = 'inline'\nlanes = 2", "no lanes, got lanes=2"),
        ("http_port = false\ngrpc_port = false", "Both ports are off"),
    ],
)
def test_mistakes_in_a_file_are_named(tmp_path, text, said):
    with pytest.raises(HurtleError, match=said):
        defaults_from(write(tmp_path, text), {})


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("backend = 'helper.py:Mean'", "backend = 'helper.py:Mean'"),
        ("model = {a = {backend = 'os:system'}}", r"\[model.a\] backend = 'os:system'"),
        ("load_library = ['evil.so']", r"load_library = \['evil.so'\]"),
        ("parameters = {backend = 'helper.py:Mean'}", "parameters.backend"),
        ("model = {a = {parameters = {trusted = true}}}", r"\[model.a\] parameters.trusted"),
    ],
)
def test_a_file_names_code_only_with_the_users_word(tmp_path, text, named):
    file = write(tmp_path, text)
    with pytest.raises(TrustError, match=rf"serve.toml names code: {named}.*--trust \(HURTLE_SERVE_TRUST=1\)"):
        defaults_from(file, {})
    assert defaults_from(file, {}, trust=True) == defaults_from(file, {"HURTLE_SERVE_TRUST": "1"})


def test_trust_is_for_the_command_line(tmp_path):
    with pytest.raises(HurtleError, match="has no option 'trust'"):
        defaults_from(write(tmp_path, "trust = true"), {})
    with pytest.raises(TrustError):
        run_serve(["--config", str(write(tmp_path, "backend = 'helper.py:Mean'"))])
    with pytest.raises(HurtleError, match="Which models"):
        run_serve(["--config", str(write(tmp_path, "backend = 'helper.py:Mean'")), "--trust"])
    assert parse(["--backend", "helper.py:Mean"], ServeConfig()).backend == "helper.py:Mean"


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("HURTLE_SERVE_LANES", "many", "HURTLE_SERVE_LANES must be a number, got 'many'"),
        ("HURTLE_SERVE_LANE", "1", "HURTLE_SERVE_LANE has no option 'lane'"),
        ("HURTLE_SERVE_TRITON_METRICS", "maybe", "HURTLE_SERVE_TRITON_METRICS must be true or false, got 'maybe'"),
        ("HURTLE_SERVE_PARAMETERS", "cuda", "Expected NAME=VALUE, got 'cuda'"),
    ],
)
def test_mistakes_in_variables_are_named(name, text, said):
    with pytest.raises(HurtleError, match=said):
        defaults_from(None, {name: text})


def test_a_token_comes_from_a_file(tmp_path):
    path = tmp_path / "token"
    path.write_text("secret\n")
    assert ServeConfig(auth_token_file=str(path)).auth_token == "secret"
    path.write_text(" \n")
    with pytest.raises(HurtleError, match="holds no token"):
        _ = ServeConfig(auth_token_file=str(path)).auth_token
    with pytest.raises(HurtleError, match="Cannot read the token"):
        _ = ServeConfig(auth_token_file=str(tmp_path / "none")).auth_token


def test_what_was_changed_is_said():
    assert describe(ServeConfig()) == "default options"
    said = describe(ServeConfig(lanes=2, overrides={"a": {"batch_size": 8}}))
    assert said == "lanes=2, a: batch_size=8"


def test_trust_is_read_as_other_truths_are(tmp_path):
    file = tmp_path / "serve.toml"
    file.write_text('backend = "my.module:Class"')
    assert defaults_from(file, {"HURTLE_SERVE_TRUST": "On"}).backend == "my.module:Class"
    with pytest.raises(TrustError):
        defaults_from(file, {"HURTLE_SERVE_TRUST": "off"})
    with pytest.raises(HurtleError, match="HURTLE_SERVE_TRUST must be true or false, got 'maybe'"):
        defaults_from(file, {"HURTLE_SERVE_TRUST": "maybe"})
    assert defaults_from(file, {"HURTLE_SERVE_TRUST": "yes"}).backend == "my.module:Class"


def test_ipv6_addresses_are_announced_in_brackets(capsys):
    _announce(ServeConfig(host="::1"), 8000, 8001)
    said = capsys.readouterr().err
    assert "http://[::1]:8000/" in said
    assert "gRPC                    [::1]:8001" in said
