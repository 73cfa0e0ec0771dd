"""Hurtle's own exports on all backends that run them: ONNX Runtime, torch.export and compiled code agree."""

import asyncio
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from backend_helpers import (
    assert_fused_is_single,
    assert_only_fails,
    assert_phases_are_measured,
    open_backend,
    request,
    run_as_server,
    unaligned,
)

import hurtle
from hurtle.errors import HurtleError, ServingError
from hurtle.serving.config import ServeConfig
from hurtle.serving.repository import Repository

sys.path.insert(0, str(Path(__file__).parents[2] / "deploy"))
from export_helpers import hand_made

RNG = np.random.default_rng(0)


@pytest.fixture(scope="module")
def exports(tmp_path_factory):
    """A folder of exports."""
    folder = tmp_path_factory.mktemp("exports")
    plain = hand_made(folder / "plain", policy="mlp")
    box = hand_made(folder / "box", action="gaussian", policy="mlp")
    for run, name, options in (
        (plain, "plain.onnx", {"masked": True}),
        (plain, "plain.pt2", {"masked": True}),
        (box, "box.onnx", {}),
        (hand_made(folder / "lstm", recurrent="lstm"), "lstm.pt2", {}),
    ):
        hurtle.export(run, folder / name, **options)
    return folder


def observations(count, size=5):
    return RNG.standard_normal((count, size)).astype(np.float32)


@pytest.mark.parametrize("name", ["box.onnx", "plain.onnx", "plain.pt2"])
@pytest.mark.parametrize("count", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_preparing_inputs_and_extracting_outputs_are_timed(exports, name, count):
    options = {"runtime": "native"} if name.endswith(".onnx") else {}
    assert_phases_are_measured(open_backend(exports / name, **options), [request(obs=observations(count)) for _ in range(2)])


def test_all_three_choose_the_same_actions(exports):
    native = open_backend(exports / "plain.onnx", runtime="native")
    others = [open_backend(exports / "plain.onnx"), open_backend(exports / "plain.pt2")]
    assert native.metadata().platform == "hurtle_native_mlp"
    mask = np.tile([False, True, True, False], (200, 1))
    for given in (request(obs=observations(200)), request(obs=observations(200), mask=mask), request(obs=observations(1))):
        expected = native.infer(given)["action"]
        for backend in others:
            assert backend.metadata().optional == {"mask"}
            assert backend.metadata().inputs == native.metadata().inputs
            np.testing.assert_array_equal(backend.infer(given)["action"], expected)
    assert set(np.unique(native.infer(request(obs=observations(200), mask=mask))["action"])) <= {0, 1}


@pytest.mark.parametrize("name", ["plain.onnx", "box.onnx"])
def test_native_rows_fused_are_native_rows_alone(exports, name):
    backend = open_backend(exports / name, runtime="native")
    plain = open_backend(exports / name)

    def given(count):
        inputs = {spec.name: RNG.standard_normal((count, *spec.shape[1:])) for spec in backend.metadata().inputs}
        mask = inputs.pop("mask", None)
        found = {key: value.astype(np.float32) for key, value in inputs.items()}
        return found if mask is None else {**found, "mask": mask > -1}

    requests = [request(**{key.replace(".", "__"): value for key, value in given(n).items()}) for n in (1, 3, 0, 9)]
    assert_fused_is_single(backend, requests, tolerance=1e-6)
    for each in requests[:2]:
        np.testing.assert_allclose(backend.infer(each)["action"], plain.infer(each)["action"], rtol=1e-5, atol=1e-6)
    assert backend.infer(backend.warm_up_request()).keys() == {"action"}


def test_native_code_reads_messages_at_odd_addresses(exports):
    backend = open_backend(exports / "box.onnx", runtime="native")
    for rows in (1, 4):
        obs = observations(rows)
        expected = backend.infer(request(obs=obs))["action"]
        np.testing.assert_allclose(backend.infer(request(obs=unaligned(obs)))["action"], expected, rtol=1e-6, atol=1e-7)


def test_an_observation_that_is_not_a_number_fails_alone(exports):
    backend = open_backend(exports / "box.onnx", runtime="native")
    bad = np.full((1, 5), np.nan, np.float32)
    results = run_as_server(backend, [request(obs=observations(2)), request(obs=bad), request(obs=observations(1))])
    assert_only_fails(results, bad=1, words="NaN")


def test_only_plain_policies_run_natively(exports):
    with pytest.raises(HurtleError, match="only plain MLPs"):
        open_backend(exports / "lstm.pt2", backend="native_mlp")


def test_a_recurrent_export_names_its_memory_and_runs_fused(exports):
    backend = open_backend(exports / "lstm.pt2")
    assert backend.metadata().state == (("state_in_0", "state_out_0"), ("state_in_1", "state_out_1"))

    def given(rows):
        specs = backend.metadata().inputs
        return request(**{spec.name: observations(rows, spec.shape[1]) for spec in specs})

    assert_fused_is_single(backend, [given(n) for n in (1, 2, 5)], tolerance=1e-5)


@pytest.mark.parametrize("name", ["plain.pt2", "plain.onnx"])
def test_lanes_may_load_and_run_at_the_same_time(exports, name):
    obs = observations(3)
    expected = open_backend(exports / name).infer(request(obs=obs))["action"]

    def lane(_):
        backend = open_backend(exports / name)
        return [backend.infer(request(obs=obs))["action"] for _ in range(20)]

    with ThreadPoolExecutor(4) as pool:
        for found in pool.map(lane, range(4), timeout=60):
            np.testing.assert_array_equal(found, [expected] * 20)


def with_other_weights(path, removed=None):
    """The bytes of an export, one weight changed, and one entry of its metadata removed."""
    model = onnx.load(path)
    weights = next(tensor for tensor in model.graph.initializer if len(tensor.dims) == 2)
    values = onnx.numpy_helper.to_array(weights) + 1
    weights.CopyFrom(onnx.numpy_helper.from_array(values, weights.name))
    kept = [entry for entry in model.metadata_props if entry.key != removed]
    del model.metadata_props[:]
    model.metadata_props.extend(kept)
    return model.SerializeToString()


def test_an_export_that_was_changed_is_refused(exports, tmp_path):
    path = tmp_path / "changed.onnx"
    path.write_bytes(with_other_weights(exports / "plain.onnx"))
    for runtime in ("onnxruntime", "native"):
        with pytest.raises(HurtleError, match=r"changed\.onnx .*damaged, or was changed after its export"):
            open_backend(path, runtime=runtime)
    path.write_bytes(with_other_weights(exports / "plain.onnx", removed="hurtle"))
    assert "action" in open_backend(path).infer(request(obs=observations(1), mask=np.ones((1, 4), bool)))


def test_the_old_version_serves_on_where_a_changed_export_comes(exports, tmp_path):
    async def main():
        folder = tmp_path / "policy" / "1"
        folder.mkdir(parents=True)
        shutil.copy(exports / "plain.onnx", folder / "model.onnx")
        found = Repository(ServeConfig(models=(str(tmp_path),)))
        await found.load("policy")
        old = found.find("policy")
        (folder / "model.onnx").write_bytes(with_other_weights(exports / "plain.onnx"))
        with pytest.raises(ServingError, match="was changed after its export"):
            await found.load("policy")
        assert found.find("policy") is old
        found.close()

    asyncio.run(asyncio.wait_for(main(), 60))


class Net(torch.nn.Module):
    def forward(self, x, scale):
        return {"double": x * scale * 2, "total": x.sum(1)}


@pytest.fixture(scope="module")
def foreign(tmp_path_factory):
    """A .pt2 file that Hurtle did not export."""
    path = tmp_path_factory.mktemp("foreign") / "net.pt2"
    batch = torch.export.Dim("batch")
    example = (torch.ones(2, 3), torch.ones(2, 3))
    torch.export.save(torch.export.export(Net(), example, dynamic_shapes=({0: batch}, {0: batch})), path)
    return path


@pytest.mark.parametrize("trusted", ["false", "true"])
def test_a_file_that_was_cut_off_is_not_said_to_need_trust(exports, foreign, tmp_path, trusted):
    for source in (exports / "plain.pt2", foreign):
        content = source.read_bytes()
        weights = content.index(b"model.json") + 100
        flipped = content[:weights] + bytes([content[weights] ^ 8]) + content[weights + 1 :]
        for damaged in (content[: len(content) // 2], content[:-10], flipped):
            (tmp_path / "cut.pt2").write_bytes(damaged)
            with pytest.raises(HurtleError, match=r"cut\.pt2 is damaged") as caught:
                open_backend(tmp_path / "cut.pt2", trusted=trusted)
            assert "trusted" not in str(caught.value)


def test_others_programs_are_loaded_only_if_they_are_trusted(foreign):
    with pytest.raises(HurtleError, match="trusted=true"):
        open_backend(foreign)
    backend = open_backend(foreign, trusted="true")
    found = backend.metadata()
    assert [(spec.name, spec.shape) for spec in found.inputs] == [("x", (-1, 3)), ("scale", (-1, 3))]
    assert [(spec.name, spec.datatype, spec.shape) for spec in found.outputs] == [
        ("double", "FP32", (-1, 3)),
        ("total", "FP32", (-1,)),
    ]
    assert found.batched
    x = observations(4, 3)
    np.testing.assert_array_equal(backend.infer(request(x=unaligned(x), scale=x))["double"], x * x * 2)
    assert_fused_is_single(backend, [request(x=observations(n, 3), scale=observations(n, 3)) for n in (1, 2, 4)], 1e-6)


def test_sizes_that_a_program_was_not_exported_for_are_the_clients_fault(foreign):
    backend = open_backend(foreign, trusted=True)
    with pytest.raises(ServingError) as caught:
        backend.infer(request(x=observations(2, 4), scale=observations(2, 4)))
    assert caught.value.reason == "invalid_argument"


def test_a_damaged_archive_is_refused_even_if_trusted(tmp_path):
    path = tmp_path / "net.pt2"
    path.write_bytes(b"PK\x03\x04 not really")
    with pytest.raises(HurtleError, match=r"net\.pt2"):
        open_backend(path, trusted="true")
