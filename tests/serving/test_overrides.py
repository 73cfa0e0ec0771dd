"""Loading with a client's config and files: what it may change, what is refused, and that nothing leaves the private folder."""

import asyncio
import base64
import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
from serving_helpers import Answers, run

from hurtle.errors import ServingError
from hurtle.serving.config import ServeConfig
from hurtle.serving.messages import InferRequest, InferResponse
from hurtle.serving.service import InferenceService

sys.path.insert(0, str(Path(__file__).parent / "backends"))
import onnx_models

ROW = np.ones((1, 3), np.float32)


@pytest.fixture
def linear(tmp_path):
    """The bytes of a model: x [n, 3] → y [n, 2]."""
    return onnx_models.linear(tmp_path / "linear.onnx").read_bytes()


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    """Where temporary folders are made."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


@pytest.fixture
def zoo(tmp_path):
    for version in ("1", "2"):
        (tmp_path / "zoo" / "m" / version).mkdir(parents=True)
        (tmp_path / "zoo" / "m" / version / "model.json").write_text('{"scale": 2.0, "shift": 0.0, "size": 3}')
    return tmp_path / "zoo"


def serving(zoo, test, **options):
    """Run a test with a service that has started."""

    async def main():
        service = InferenceService(ServeConfig(models=(str(zoo),), **options))
        await service.start()
        try:
            await test(service)
        finally:
            await service.stop(5)

    run(main())


def affine(**options):
    return {"backend": "affine", **options}


async def refused(service, parameters, name="m"):
    with pytest.raises(ServingError) as caught:
        await service.load(name, parameters)
    return caught.value.reason, str(caught.value)


def test_a_config_changes_how_a_model_is_run_until_it_is_loaded_without(zoo):
    async def test(service):
        before = service.repository.find("m")
        config = {
            "name": "m",
            "backend": "hurtle",
            "max_batch_size": 8,
            "dynamic_batching": {"max_queue_delay_microseconds": 1500, "default_queue_policy": {"max_queue_size": 5}},
            "instance_group": [{"count": 2, "kind": "KIND_CPU"}],
        }
        await service.load("m", {"config": json.dumps(config)})
        model = service.repository.find("m")
        found = model.options
        assert (found.executor, found.batch_size, found.max_rows, found.batch_timeout_ms) == ("batch", 8, 8, 1.5)
        assert (found.max_queue, found.lanes, model.executor.lanes) == (5, 2, 2)
        assert service.repository.versions("m") == ["1", "2"]
        assert service.repository.find("m", "1").options == found
        assert service.model_config("m")["max_batch_size"] == 8
        await service.load("m", {"config": json.dumps(config)})
        assert service.repository.find("m") is model  # nothing has changed
        await service.repository.refresh()
        assert service.repository.find("m") is model
        (zoo / "m" / "2" / "model.json").write_text('{"scale": 3.0, "shift": 0.0, "size": 3}')
        await service.repository.refresh()  # a new file is run as the client said
        assert service.repository.find("m") is not model
        assert service.repository.find("m").options == found
        await service.load("m", {})
        assert service.repository.find("m").options == before.options

    serving(zoo, test, **affine(executor="inline"))


def test_the_config_that_the_server_gives_can_be_sent_back(zoo):
    async def test(service):
        for config in (service.model_config("m"), {}):
            await service.load("m", {"config": json.dumps(config)})
        await service.load(
            "m", {"config": '{"parameters": {"executor": {"string_value": "worker"}, "lanes": {"string_value": "1"}}}'}
        )
        assert (service.repository.find("m").options.executor, service.repository.find("m").executor.lanes) == ("worker", 1)

    serving(zoo, test, **affine())


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"max_bach_size": 3}, "max_bach_size"),
        ({"version_policy": {"latest": {"num_versions": 1}}}, "version_policy is not supported"),
        ({"sequence_batching": {}}, "sequence_batching is not supported"),
        ({"max_batch_size": -2}, "max_batch_size: expected 1 to 50"),
        ({"max_batch_size": 51}, "max_batch_size: expected 1 to 50"),  # the operator's limit
        ({"max_batch_size": "many"}, "max_batch_size"),
        ({"instance_group": [{"count": 1000}]}, "instance_group count: expected 1 to 16"),
        ({"instance_group": [{"count": 1}, {"count": 1}]}, "expected one group, got 2"),
        ({"instance_group": [{"count": 1, "kind": "KIND_GPU"}]}, "KIND_GPU"),
        ({"instance_group": [{"kind": 99}]}, "instance_group: expected kind KIND_AUTO"),
        ({"instance_group": [{"count": 1, "gpus": [0]}]}, "gpus is not supported"),
        ({"dynamic_batching": {"preserve_ordering": True}}, "preserve_ordering is not supported"),
        ({"dynamic_batching": {"default_queue_policy": {"max_queue_size": 2000}}}, "expected 1 to 1,024"),
        ({"dynamic_batching": {"max_queue_delay_microseconds": 10**12}}, "max_queue_delay_microseconds"),
        ({"parameters": {"trusted": {"string_value": "true"}}}, "'trusted'"),
        ({"parameters": {"executor": {"string_value": "fast"}}}, "No executor 'fast'"),
        ({"parameters": {"executor": {"string_value": "inline"}}, "dynamic_batching": {}}, "one value for executor"),
    ],
)
def test_what_a_config_may_not_change_is_named(zoo, config, says):
    async def test(service):
        model = service.repository.find("m")
        reason, text = await refused(service, {"config": json.dumps(config)})
        assert (reason, says in text) == ("invalid_argument", True), text
        assert service.repository.find("m") is model

    serving(zoo, test, **affine(max_rows=50))


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"name": "n"}, 'name does not match the model: expected "m", got "n"'),
        ({"backend": "my_package.my_module:Evil"}, "backend does not match the model"),
        ({"platform": "onnxruntime_onnx"}, 'expected "hurtle_affine"'),
        ({"input": [{"name": "x", "data_type": "TYPE_FP64", "dims": [3]}]}, "input does not match the model"),
        ({"max_batch_size": 0}, "max_batch_size does not match the model"),
    ],
)
def test_a_config_that_describes_another_model_is_refused_and_the_old_one_serves_on(zoo, config, says):
    async def test(service):
        model = service.repository.find("m")
        reason, text = await refused(
            service, {"config": json.dumps(config | {"dynamic_batching": {}, "instance_group": [{"count": 1}]})}
        )
        assert (reason, says in text) == ("failed_precondition", True), text
        assert service.repository.find("m") is model

    serving(zoo, test, **affine())


@pytest.mark.parametrize(
    "config", ["", "{", "[]", "1", "[" * 100_000, '{"max_batch_size": ' + "9" * 5000 + "}", " " * (1 << 21), 7, True]
)
def test_a_config_that_is_none_is_refused(zoo, config):
    async def test(service):
        reason, text = await refused(service, {"config": config})
        assert (reason, "config" in text, len(text) < 500) == ("invalid_argument", True, True)

    serving(zoo, test, **affine())


def test_other_parameters_are_refused(zoo):
    async def test(service):
        assert await refused(service, {"force": True}) == (
            "invalid_argument",
            "Loading takes the parameters config and file:VERSION/NAME, got 'force'.",
        )

    serving(zoo, test, **affine())


def infer(service, name="sent", version=""):
    answers = Answers()
    service.infer(InferRequest(name, {"x": ROW}, version), answers.append)
    return answers[0]


def test_files_are_off_unless_the_operator_allows_them(zoo, linear):
    async def test(service):
        reason, text = await refused(service, {"config": "{}", "file:1/model.onnx": linear}, "sent")
        assert (reason, "--allow-file-overrides" in text) == ("permission_denied", True)
        assert not service.has_model("sent")

    serving(zoo, test, **affine())


ALLOWED = {"allow_file_overrides": True, "executor": "inline"}


@pytest.fixture
def onnx_zoo(tmp_path, linear):
    for version in ("3", "4"):
        (tmp_path / "onnx" / "m" / version).mkdir(parents=True)
        (tmp_path / "onnx" / "m" / version / "model.onnx").write_bytes(linear)
    return tmp_path / "onnx"


@pytest.mark.parametrize("encode", [bytes, lambda content: base64.b64encode(content).decode()], ids=["grpc", "rest"])
def test_a_model_can_be_loaded_from_a_client_s_file_which_is_then_gone(onnx_zoo, linear, temporary, encode):
    async def test(service):
        sent = {"config": '{"backend": "onnxruntime"}', "file:7/model.onnx": encode(linear)}
        for name in ("sent", "m"):
            await service.load(name, sent)
            assert list(temporary.iterdir()) == []
            answer = infer(service, name)
            assert isinstance(answer, InferResponse)
            assert (answer.version, answer.outputs["y"].tolist()) == ("7", [[6.0, 9.0]])
            assert service.repository.versions(name) == ["7"]  # it stands for what lies in the folder
            await service.repository.refresh()
            assert service.repository.versions(name) == ["7"]
        (onnx_zoo / "m" / "4" / "model.onnx").write_bytes(b"damaged")
        assert (await refused(service, {}))[0] == "failed_precondition"
        assert "7" in service.repository.versions("m")
        (onnx_zoo / "m" / "4" / "model.onnx").write_bytes(linear)
        await service.load("m", {})
        assert service.repository.versions("m") == ["3", "4"]
        await service.unload("sent")
        assert not service.has_model("sent")
        assert (await refused(service, {}, "sent"))[0] == "not_found"

    serving(onnx_zoo, test, **ALLOWED)


@pytest.mark.parametrize(
    "path",
    ["../model.onnx", "1/../../model.onnx", "/etc/model.onnx", "1//model.onnx", "1/a/model.onnx", "model.onnx", "", "1/",
     "x/model.onnx", "1/.model.onnx", "1/model.onnx\0", "1\\model.onnx", "1/" + "m" * 300, "1/mödel.onnx", "1/model.onnx\n"],
)  # fmt: skip
def test_paths_that_lead_elsewhere_are_refused_and_nothing_is_written(onnx_zoo, linear, temporary, path):
    async def test(service):
        reason, text = await refused(service, {"config": "{}", "file:1/model.onnx": linear, f"file:{path}": b"x"})
        assert (reason, "expected VERSION/NAME" in text) == ("invalid_argument", True)
        assert list(temporary.iterdir()) == []
        assert not list(temporary.parent.glob("model.onnx"))
        assert service.repository.versions("m") == ["3", "4"]

    serving(onnx_zoo, test, **ALLOWED)


@pytest.mark.parametrize(
    ("files", "reason", "says"),
    [
        ({"1/model.onnx": b"no model"}, "failed_precondition", "not ONNX"),
        ({"1/model.onnx": b""}, "failed_precondition", "not ONNX"),
        ({"1/model.pt": b"x"}, "invalid_argument", "Expected a file model.onnx"),
        ({"1/model.pt2": b"x"}, "invalid_argument", "Expected a file model.onnx"),
        ({"1/model.onnx": "no base64!"}, "invalid_argument", "expected base64"),
        ({"1/model.onnx": 5}, "invalid_argument", "expected base64"),
        ({"1/model.onnx": b"x", "2/model.onnx": b"x"}, "invalid_argument", "files of one version"),
        ({"1/model.onnx": b"x", **{f"1/f{n}": b"" for n in range(16)}}, "invalid_argument", "at most 16 files"),
        ({"1/model.onnx": b"x", "1/weights": bytes(1 << 20)}, "resource_exhausted", "1,048,576 bytes together"),
    ],
)
def test_files_that_are_no_model_are_refused_and_leave_nothing_behind(onnx_zoo, temporary, files, reason, says):
    async def test(service):
        for name in ("new", "m"):
            found = await refused(
                service, {"config": "{}", **{f"file:{path}": content for path, content in files.items()}}, name
            )
            assert (found[0], says in found[1]) == (reason, True), found
        assert list(temporary.iterdir()) == []
        assert not service.has_model("new")
        assert infer(service, "m").version == "4"
        assert [row["reason"] for row in service.repository.index()] == ["", ""]

    serving(onnx_zoo, test, max_message_mib=1.0, **ALLOWED)


def test_files_come_with_a_config(onnx_zoo, linear):
    async def test(service):
        assert "need a config" in (await refused(service, {"file:1/model.onnx": linear}))[1]

    serving(onnx_zoo, test, **ALLOWED)


def test_a_client_s_file_takes_no_weights_from_elsewhere(onnx_zoo, tmp_path, temporary):
    path = onnx_models.external(tmp_path / "model.onnx", "../secret")

    async def test(service):
        reason, text = await refused(service, {"config": "{}", "file:1/model.onnx": path.read_bytes()})
        assert (reason, "outside its own folder" in text) == ("failed_precondition", True)

    serving(onnx_zoo, test, **ALLOWED)


def test_a_backend_of_the_operator_s_own_gets_no_files_from_clients(zoo, linear):
    async def test(service):
        reason, text = await refused(service, {"config": "{}", "file:1/model.onnx": linear})
        assert (reason, "'affine', which takes no files" in text) == ("failed_precondition", True)

    serving(zoo, test, **affine(**ALLOWED))


def test_clients_cannot_bring_any_number_of_models(onnx_zoo, linear):
    async def test(service):
        sent = {"config": "{}", "file:1/model.onnx": linear}
        for n in range(16):
            await service.load(f"sent{n}", sent)
        assert (await refused(service, sent, "one_more"))[0] == "resource_exhausted"
        await service.load("sent3", sent)
        await service.unload("sent3")
        await service.load("one_more", sent)

    serving(onnx_zoo, test, **ALLOWED)


def test_an_instance_group_without_a_count_is_one_lane(zoo):
    async def test(service):
        await service.load("m", {"config": '{"instance_group": [{"kind": "KIND_CPU"}], "dynamic_batching": {}}'})
        assert service.repository.find("m").options.lanes == 1

    serving(zoo, test, **affine())


def test_a_config_that_describes_another_model_is_refused_though_it_changes_no_option(zoo):
    async def test(service):
        models = service.repository.models()
        reason, text = await refused(service, {"config": '{"platform": "onnxruntime_onnx"}'})
        assert (reason, "platform does not match the model" in text) == ("failed_precondition", True), text
        assert service.repository.models() == models
        assert [row["reason"] for row in service.repository.index()] == ["", ""]

    serving(zoo, test, **affine())


def test_a_config_is_taken_for_all_versions_or_for_none(zoo):
    (zoo / "m" / "2" / "model.json").write_text('{"scale": 2.0, "shift": 0.0, "size": 4}')

    async def test(service):
        models = service.repository.models()
        config = {"input": service.model_config("m", "1")["input"], "max_batch_size": 8}
        reason, text = await refused(service, {"config": json.dumps(config)})
        assert reason == "failed_precondition"
        assert "could not be loaded with this config; nothing was changed. version 2: The config's input" in text
        assert "files" not in text
        assert service.repository.models() == models
        assert [row["reason"] for row in service.repository.index()] == ["", ""]
        await service.unload("m")
        assert (await refused(service, {"config": json.dumps(config)}))[0] == "failed_precondition"
        assert service.repository.models() == []
        assert {row["state"] for row in service.repository.index()} == {"UNAVAILABLE"}
        await service.repository.refresh()
        assert service.repository.models() == []  # it is unloaded as before
        await service.load("m")
        assert len(service.repository.models()) == 2

    serving(zoo, test, **affine())


def test_files_that_cannot_be_kept_leave_the_model_as_it_was(onnx_zoo, linear, temporary, monkeypatch):
    async def test(service):
        sent = {"config": "{}", "file:1/model.onnx": linear}
        monkeypatch.setattr(tempfile, "tempdir", str(temporary / "missing"))
        for name in ("m", "new"):
            reason, text = await refused(service, sent, name)
            assert (reason, "cannot be kept" in text) == ("resource_exhausted", True)
        assert not service.has_model("new")
        assert not service.repository._entries["m"].is_sent  # it is watched as before

    serving(onnx_zoo, test, **ALLOWED)


def test_a_load_that_fails_in_any_way_leaves_the_model_as_it_was(onnx_zoo, linear, monkeypatch):
    def broken(overrides):
        raise KeyError("a fault of ours")

    monkeypatch.setattr("hurtle.serving.repository.written", broken)

    async def test(service):
        for name in ("m", "new"):
            with pytest.raises(KeyError):
                await service.load(name, {"config": "{}", "file:1/model.onnx": linear})
        assert not service.has_model("new")
        assert not service.repository._entries["m"].is_sent

    serving(onnx_zoo, test, **ALLOWED)


def test_two_clients_may_unload_a_sent_model_at_once(onnx_zoo, linear):
    async def test(service):
        await service.load("sent", {"config": "{}", "file:1/model.onnx": linear})
        async with service.repository._entries["sent"].lock:
            unloads = [asyncio.create_task(service.unload("sent")) for _ in range(2)]
            for _ in range(20):  # turns of the event loop, until both wait for the lock
                await asyncio.sleep(0)
        found = await asyncio.gather(*unloads, return_exceptions=True)
        assert found[0] is None
        assert (type(found[1]), found[1].reason) == (ServingError, "unavailable")
        assert not service.has_model("sent")

    serving(onnx_zoo, test, **ALLOWED)


def test_errors_do_not_name_the_private_folder(onnx_zoo, temporary):
    async def test(service):
        _, text = await refused(service, {"config": "{}", "file:1/model.onnx": b"no model"})
        assert "model.onnx" in text
        assert str(temporary) not in text

    serving(onnx_zoo, test, **ALLOWED)
