"""The service: descriptions, routing to versions and sequences, draining, and counts of what failed."""

import asyncio
import json
import threading
from dataclasses import replace

import numpy as np
import pytest
from serving_helpers import Answers, Gated, run

from hurtle.errors import HurtleError, ServingError
from hurtle.serving.config import ServeConfig
from hurtle.serving.messages import InferRequest, InferResponse
from hurtle.serving.service import InferenceService


def folder(tmp_path, name="m", versions=("1", "2")):
    for version in versions:
        path = tmp_path / name / version
        path.mkdir(parents=True, exist_ok=True)
        (path / "model.test").write_text("")
    return str(tmp_path)


def service_of(tmp_path, backend="Doubler", **options):
    return InferenceService(ServeConfig(models=(folder(tmp_path),), backend=f"serving_helpers:{backend}", **options))


def row(value=1.0, size=3, **fields):
    return InferRequest("m", {"x": np.full((1, size), value, np.float32)}, **fields)


def test_models_are_described_in_the_words_of_the_protocol(tmp_path):
    async def main():
        service = service_of(tmp_path, batch_size=16, batch_timeout_ms=2.5)
        assert not service.is_ready()
        await service.start()
        assert service.is_ready()
        assert service.server_metadata()["name"] == "hurtle"
        assert service.model_metadata("m", "1") == {
            "name": "m",
            "versions": ["1", "2"],
            "platform": "test_doubler",
            "inputs": [{"name": "x", "datatype": "FP32", "shape": [-1, 3]}],
            "outputs": [{"name": "y", "datatype": "FP32", "shape": [-1, 3]}],
        }
        config = service.model_config("m")
        assert (config["max_batch_size"], config["input"][0]["dims"], config["input"][0]["data_type"]) == (16, [3], "TYPE_FP32")
        assert config["dynamic_batching"] == {"max_queue_delay_microseconds": 2500}
        with pytest.raises(ServingError, match="No model 'n'") as caught:
            service.model_metadata("n")
        assert caught.value.reason == "not_found"
        json.dumps([config, await service.statistics(), await service.index()])
        await service.stop(1)
        assert not service.is_ready()

    run(main())


def test_requests_go_to_the_version_they_name(tmp_path):
    async def main():
        service, answers = service_of(tmp_path, executor="inline"), Answers()
        await service.start()
        service.infer(row(), answers.append)
        service.infer(row(version="1"), answers.append)
        service.infer(row(version="3"), answers.append)
        assert [answer.version for answer in answers[:2]] == ["2", "1"]
        assert answers[2].reason == "not_found"
        found = (await service.statistics())["model_stats"]
        assert [(entry["version"], entry["inference_count"]) for entry in found] == [("1", 1), ("2", 1)]
        one = (await service.statistics("m", "2"))["model_stats"]
        assert [entry["version"] for entry in one] == ["2"]
        assert 'hurtle_failures_total{reason="not_found"} 1' in await service.metrics()
        await service.stop(1)

    run(main())


def test_metrics_under_triton_s_names_are_an_option(tmp_path):
    async def main():
        for is_on in (False, True):
            service, answers = service_of(tmp_path, executor="inline", triton_metrics=is_on), Answers()
            await service.start()
            service.infer(row(), answers.append)
            text = await service.metrics()
            assert ('nv_inference_request_success{model="m",version="2"} 1' in text.splitlines()) is is_on
            assert 'hurtle_requests_total{model="m",version="2"} 1' in text
            stats = (await service.statistics())["model_stats"][1]["inference_stats"]
            assert "compute_input" not in stats  # the test's backend does not measure it
            await service.stop(1)

    run(main())


def test_counts_outlive_reloads_and_unloads(tmp_path):
    async def main():
        service, answers = service_of(tmp_path, executor="inline"), Answers()
        await service.start()

        async def counted():
            lines = (await service.metrics()).splitlines()
            return [int(line.split()[-1]) for line in lines if line.startswith('hurtle_requests_total{model="m",version="2"}')]

        service.infer(row(), answers.append)
        (tmp_path / "m" / "2" / "model.test").write_text("changed")
        await service.load("m", {})
        assert await counted() == [1]
        service.infer(row(), answers.append)
        found = (await service.statistics("m", "2"))["model_stats"]
        assert found[0]["inference_stats"]["success"]["count"] == 2
        await service.unload("m", {})
        assert await counted() == [2]
        assert (await service.statistics())["model_stats"] == []  # as Triton's: of what is loaded
        await service.load("m", {})
        assert await counted() == [2]
        (tmp_path / "m" / "2" / "model.test").unlink()
        await service.load("m", {})
        assert await counted() == []
        folder(tmp_path)
        await service.load("m", {})
        assert await counted() == [2]  # its files were away for a moment
        await service.stop(1)

    run(main())


def test_counts_of_versions_that_are_gone_are_kept_within_bounds(tmp_path, monkeypatch):
    async def main():
        monkeypatch.setattr("hurtle.serving.repository.KEPT_COUNTS", 3)
        service = service_of(tmp_path, executor="inline")
        await service.start()
        for version in range(3, 13):
            folder(tmp_path, versions=(str(version),))
            (tmp_path / "m" / str(version - 1) / "model.test").unlink()
            await service.load("m", {})
        assert len(service.repository.statistics()) == 2 + 3  # versions 1 and 12, and three that are gone
        await service.stop(1)

    run(main())


def test_wrong_folders_are_warned_of_once(tmp_path, caplog):
    async def main():
        (tmp_path / "flat").mkdir()
        service = service_of(tmp_path, executor="inline", watch=0.02)
        await service.start()
        said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
        assert len(said) == 1
        assert "flat: it is empty; expected flat/VERSION/model.onnx" in said[0]
        (tmp_path / "late" / "v1").mkdir(parents=True)
        end = asyncio.get_running_loop().time() + 10
        while "late: 'v1'" not in caplog.text and asyncio.get_running_loop().time() < end:
            await asyncio.sleep(0.02)
        await asyncio.sleep(0.2)  # some more looks
        assert (caplog.text.count("late: 'v1' is not a version number"), caplog.text.count("flat: it is empty")) == (1, 1)
        rows = {row["name"]: row["reason"] for row in await service.index()}
        assert "is empty" in rows["flat"]
        await service.stop(1)

    run(main())


def test_without_models_the_error_says_what_is_wrong(tmp_path):
    async def main():
        (tmp_path / "m" / "v1").mkdir(parents=True)
        with pytest.raises(HurtleError, match=r"No models in .*'v1' is not a version number; expected m/VERSION/model.onnx"):
            await InferenceService(ServeConfig(models=(str(tmp_path),))).start()

    run(main())


def test_options_of_a_model_that_is_not_served_are_refused(tmp_path, caplog):
    async def main():
        options = {"backend": "serving_helpers:Doubler", "overrides": {"mm": {"executor": "inline"}}}
        with pytest.raises(HurtleError, match=r"\[model.mm\] is for a model that is not served. Did you mean m\?"):
            await InferenceService(ServeConfig(models=(f"{folder(tmp_path)}/m",), **options)).start()
        service = InferenceService(ServeConfig(models=(str(tmp_path),), **options))  # where it may come later
        await service.start()
        assert "[model.mm] is for a model that is not served" in caplog.text
        await service.stop(1)

    run(main())


def test_a_refused_load_is_logged_once(tmp_path, caplog):
    async def main():
        service = service_of(tmp_path, "Doubler", executor="inline", parameters={"size": "3"})
        await service.start()
        service.repository._config = replace(service.config, parameters={"size": "x"})
        (tmp_path / "m" / "2" / "model.test").write_text("changed")
        with pytest.raises(ServingError, match="was refused"):
            await service.load("m", {})
        assert caplog.text.count("was refused") == 1
        (tmp_path / "m" / "2" / "model.test").write_text("changed again")
        await service.repository.refresh()
        assert caplog.text.count("was refused") == 2
        await service.stop(1)

    run(main())


def test_a_sequence_outlives_the_version_it_began_with(tmp_path):
    async def main():
        service, answers = service_of(tmp_path, "Counter", executor="inline"), Answers()
        await service.start()

        def step(x, **flags):
            service.infer(row(x, 1, parameters={"sequence_id": 7, **flags}), answers.append)
            return float(answers[-1].outputs["total"][0, 0]), answers[-1].version

        assert step(1, sequence_start=True) == (1, "2")
        old = service.repository.find("m")
        folder(tmp_path, versions=("3",))
        (tmp_path / "m" / "2" / "model.test").write_text("changed")
        await service.load("m", {})
        assert old in service.repository.retiring()
        assert step(2) == (3, "2")
        assert step(3, sequence_end=True) == (6, "2")
        assert old not in service.repository.retiring()
        assert step(1, sequence_start=True) == (1, "3")
        await service.unload("m", {})
        service.infer(row(1, 1, parameters={"sequence_id": 7}), answers.append)
        assert answers[-1].reason == "unavailable"
        await service.stop(1)

    run(main())


def test_sequence_zero_is_none(tmp_path):
    async def main():
        service, answers = service_of(tmp_path, "Counter", executor="inline"), Answers()
        await service.start()
        request = row(1, 1, parameters={"sequence_id": 0})
        request.inputs["state_in_0"] = np.full((1, 1), 5, np.float32)
        service.infer(request, answers.append)
        assert float(answers[0].outputs["state_out_0"][0, 0]) == 6  # the client carries the state
        await service.stop(1)

    run(main())


def test_a_server_that_drains_is_not_ready_and_answers_on_until_it_has_stopped(tmp_path):
    async def main():
        service, answers = service_of(tmp_path, executor="worker", lanes=1, parameters={"delay": "0.1"}), Answers()
        await service.start()
        service.infer(row(), answers.append)
        service.draining = True
        service.infer(row(), answers.append)
        assert not service.is_ready()
        assert not service.is_model_ready("m")
        assert await service.stop(5)
        assert [type(answer) for answer in answers] == [InferResponse] * 2
        service.infer(row(), answers.append)
        assert answers[2].reason == "unavailable"

    run(main())


def test_a_bad_version_beside_a_good_one_does_not_keep_a_server_from_starting(tmp_path):
    async def main():
        root = folder(tmp_path)
        (tmp_path / "m" / "2" / "model.test").unlink()
        (tmp_path / "m" / "2" / "model.onnx").write_text("not a model")
        service = InferenceService(ServeConfig(models=(root,), overrides={}, backend=None))
        (tmp_path / "m" / "1" / "model.test").rename(tmp_path / "m" / "1" / "model.affine.json")
        (tmp_path / "m" / "1" / "model.affine.json").write_text('{"scale": 1.0, "shift": 0.0, "size": 3}')
        await service.start()
        assert [(row["version"], row["state"]) for row in await service.index()] == [("1", "READY"), ("2", "UNAVAILABLE")]
        await service.stop(1)

    run(main())


def test_stopping_does_not_wait_for_ever(tmp_path):
    async def main():
        service, answers = service_of(tmp_path, executor="worker", lanes=1, parameters={"delay": "0.3"}), Answers()
        await service.start()
        service.infer(row(), answers.append)
        assert not await service.stop(0.05)

    run(main())


@pytest.mark.parametrize("unload", [False, True])
@pytest.mark.parametrize("options", [{"executor": "worker", "lanes": 1}, {"lanes": 0, "batch_size": 1}])
def test_a_call_whose_client_has_gone_does_not_keep_the_server_from_stopping(tmp_path, monkeypatch, options, unload):
    monkeypatch.setattr("hurtle.serving.service.CLOSE_SECONDS", 0.05)
    gate = threading.Event()
    gate.set()
    monkeypatch.setattr(Gated, "gate", gate)

    async def main():
        service = service_of(tmp_path, "Gated", **options)
        await service.start()
        gate.clear()
        ticket = service.infer(InferRequest("m", {"x": np.ones((2, 3), np.float32)}), lambda answer: None)
        await asyncio.sleep(0.02)
        ticket.cancel()
        if unload:
            await service.unload("m")
        assert await service.stop(0.05)  # while the call still runs

    try:
        run(main())
    finally:
        gate.set()


def test_a_client_that_has_not_gone_by_the_end_makes_it_no_clean_one(tmp_path):
    class Stays:
        aborted = False

        def drain(self):
            pass

        def abort(self):
            self.aborted = True

    async def main():
        service, client = service_of(tmp_path), Stays()
        await service.start()
        service.connections.add(client)
        assert not await service.stop(0.05)
        assert client.aborted

    run(main())
