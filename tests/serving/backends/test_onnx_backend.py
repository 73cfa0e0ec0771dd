"""The ONNX backend: any .onnx file, what it says of itself, single and fused calls, and files that are refused."""

import ml_dtypes
import numpy as np
import onnx
import onnx_models
import pytest
from backend_helpers import (
    assert_fused_is_single,
    assert_only_fails,
    assert_phases_are_measured,
    open_backend,
    request,
    run_as_server,
    unaligned,
)
from onnx import TensorProto, helper

from hurtle.errors import DeviceError, HurtleError, ServingError, UnknownNameError
from hurtle.serving.backends import external_data
from hurtle.serving.backends.base import TensorSpec
from hurtle.serving.backends.external_data import external_files
from hurtle.serving.tensors import DTYPES

RNG = np.random.default_rng(0)


def rows(count, size=3):
    return RNG.standard_normal((count, size)).astype(np.float32)


def test_metadata_is_that_of_the_file(tmp_path):
    backend = open_backend(onnx_models.linear(tmp_path / "m.onnx"))
    found = backend.metadata()
    assert found.inputs == (TensorSpec("x", "FP32", (-1, 3)),)
    assert found.outputs == (TensorSpec("y", "FP32", (-1, 2)),)
    assert found.batched
    assert found.platform == "onnxruntime_onnx"
    assert backend.infer(backend.warm_up_request())["y"].shape == (1, 2)


@pytest.mark.parametrize(
    ("first", "last", "batched"),
    [("n", "n", True), (None, None, True), ("unk__1", "unk__2", True), ("n", "m", False), (4, 4, False), ("n", 4, False)],
)
def test_a_model_is_batched_if_all_tensors_begin_with_the_same_open_size(tmp_path, first, last, batched):
    assert open_backend(onnx_models.linear(tmp_path / "m.onnx", first, last)).metadata().batched is batched


def test_the_user_knows_better_whether_rows_are_a_batch(tmp_path):
    path = onnx_models.linear(tmp_path / "m.onnx", "n", "m")
    assert open_backend(path, batched="true").metadata().batched
    assert not open_backend(onnx_models.linear(tmp_path / "m.onnx"), batched="false").metadata().batched
    with pytest.raises(HurtleError, match="first dimension is fixed"):
        open_backend(onnx_models.linear(tmp_path / "m.onnx", 4, 4), batched="true")


def test_outputs_are_those_of_the_arithmetic_also_from_a_message_at_an_odd_address(tmp_path):
    backend = open_backend(onnx_models.linear(tmp_path / "m.onnx"))
    x = rows(5)
    expected = x @ np.arange(6, dtype=np.float32).reshape(3, 2)
    for given in (x, unaligned(x), np.asfortranarray(x)):
        np.testing.assert_allclose(backend.infer(request(x=given))["y"], expected, rtol=1e-6, atol=1e-6)


def test_preparing_inputs_and_extracting_outputs_are_timed(tmp_path):
    backend = open_backend(onnx_models.linear(tmp_path / "m.onnx"))
    assert_phases_are_measured(backend, [request(x=rows(n)) for n in (3, 2)])


def test_fused_calls_give_what_single_calls_give(tmp_path):
    backend = open_backend(onnx_models.linear(tmp_path / "m.onnx"))
    assert_fused_is_single(backend, [request(x=rows(n)) for n in (1, 4, 0, 1, 7)], tolerance=1e-6)


def test_requests_of_other_sizes_are_fused_in_groups(tmp_path):
    tensors = [onnx_models.value(name, TensorProto.FLOAT, ["n", "m"]) for name in ("x", "y")]
    path = onnx_models.write(tmp_path / "m.onnx", [helper.make_node("Neg", ["x"], ["y"])], tensors[:1], tensors[1:])
    assert_fused_is_single(open_backend(path), [request(x=rows(n, size)) for n, size in ((1, 2), (2, 3), (3, 2), (1, 5))])


def test_a_bad_request_in_a_batch_fails_alone_and_blames_its_input(tmp_path):
    nodes = [helper.make_node("Gather", ["table", "x"], ["y"])]
    tensors = [onnx_models.value("x", TensorProto.INT64, ["n"]), onnx_models.value("y", TensorProto.FLOAT, ["n"])]
    path = onnx_models.write(tmp_path / "m.onnx", nodes, tensors[:1], tensors[1:], [onnx_models.weights("table", [5, 6, 7])])
    results = run_as_server(open_backend(path), [request(x=np.array(ids)) for ids in ([0, 2], [3], [1])])
    assert_only_fails(results, bad=1, words="ONNX Runtime refuses the inputs")
    np.testing.assert_array_equal(results[2]["y"], [6])


def test_a_model_whose_rows_are_no_batch_after_all_is_run_one_by_one(tmp_path):
    tensors = [onnx_models.value("x", TensorProto.FLOAT, ["n"]), onnx_models.value("y", TensorProto.FLOAT, ["n"])]
    nodes = [helper.make_node("Concat", ["x", "x"], ["y"], axis=0)]
    path = onnx_models.write(tmp_path / "m.onnx", nodes, tensors[:1], tensors[1:])
    found = run_as_server(open_backend(path), [request(x=np.float32([n, n + 1])) for n in range(2)])
    np.testing.assert_array_equal(found[1]["y"], [1, 2, 1, 2])


@pytest.mark.parametrize("datatype", list(DTYPES))
def test_every_datatype_comes_back_as_it_went(tmp_path, datatype):
    kinds = {"FP16": "FLOAT16", "BF16": "BFLOAT16", "FP32": "FLOAT", "FP64": "DOUBLE", "BYTES": "STRING"}
    backend = open_backend(onnx_models.identity(tmp_path / "m.onnx", getattr(TensorProto, kinds.get(datatype, datatype))))
    assert backend.metadata().inputs[0].datatype == datatype
    x = np.array(["å".encode(), b""], object) if datatype == "BYTES" else np.array([1, 0], DTYPES[datatype])
    found = backend.infer(request(x=x))["y"]
    assert found.dtype == x.dtype
    assert found.tolist() == x.tolist()
    assert [each["y"].tolist() for each in backend.infer_batch([request(x=x), request(x=x[:1])])] == [
        x.tolist(),
        x[:1].tolist(),
    ]
    assert backend.infer(backend.warm_up_request())["y"].shape == (1,)


def test_text_that_is_not_utf8_is_refused(tmp_path):
    backend = open_backend(onnx_models.identity(tmp_path / "m.onnx", TensorProto.STRING))
    with pytest.raises(ServingError, match="'x': expected UTF-8") as caught:
        backend.infer(request(x=np.array([b"\xff"], object)))
    assert caught.value.reason == "invalid_argument"


def test_empty_bfloat16_tensors_are_tensors(tmp_path):
    backend = open_backend(onnx_models.identity(tmp_path / "m.onnx", TensorProto.BFLOAT16))
    assert backend.infer(request(x=np.empty(0, ml_dtypes.bfloat16)))["y"].shape == (0,)


def test_memory_is_paired_and_masks_of_our_own_exports_may_be_left_out(tmp_path, monkeypatch):
    monkeypatch.setattr("hurtle.serving.backends.onnx.read_sealed", lambda content: None)  # which this one is not
    backend = open_backend(onnx_models.recurrent(tmp_path / "m.onnx", {"hurtle": "{}"}))
    assert backend.metadata().state == (("state_in_0", "state_out_0"),)
    assert backend.metadata().optional == {"mask"}
    x, state = rows(2, 2), rows(2, 2)
    whole = request(x=x, state_in_0=state, mask=np.zeros((2, 2), bool))
    short = request(x=x, state_in_0=state)
    np.testing.assert_array_equal(backend.infer(short)["total"], x + state)
    found = backend.infer_batch([whole, short])
    np.testing.assert_array_equal(found[0]["state_out_0"], x)
    np.testing.assert_array_equal(found[1]["state_out_0"], x + state)
    assert open_backend(onnx_models.recurrent(tmp_path / "other.onnx")).metadata().optional == frozenset()


def test_inputs_with_a_default_are_the_clients_only_if_the_user_says_so(tmp_path):
    path = onnx_models.with_default(tmp_path / "m.onnx")
    assert [spec.name for spec in open_backend(path).metadata().inputs] == ["x"]
    backend = open_backend(path, optional="scale")
    assert backend.metadata().optional == {"scale"}
    assert not backend.metadata().batched
    x = rows(2, 2)
    np.testing.assert_array_equal(backend.infer(request(x=x))["y"], x * 2)
    np.testing.assert_array_equal(backend.infer(request(x=x, scale=np.float32([3])))["y"], x * 3)
    with pytest.raises(HurtleError, match="no default for an input 'scales'"):
        open_backend(path, optional="scales")


@pytest.mark.parametrize("location", ["../w.bin", "/etc/hostname", "link.bin", "a\0b"])
def test_weights_in_files_outside_of_the_models_folder_are_refused(tmp_path, location):
    folder = tmp_path / "model"
    folder.mkdir()
    for place in (tmp_path / "w.bin", folder / "w.bin"):
        place.write_bytes(np.arange(6, dtype=np.float32).tobytes())
    (folder / "link.bin").symlink_to(tmp_path / "w.bin")
    with pytest.raises(HurtleError, match="outside its own folder"):
        open_backend(onnx_models.external(folder / "m.onnx", location))
    backend = open_backend(onnx_models.external(folder / "m.onnx", "w.bin"))
    np.testing.assert_array_equal(backend.infer(request(x=np.eye(3, dtype=np.float32)[:1]))["y"], [[0, 1]])


def test_files_that_would_take_long_to_read_are_refused(tmp_path, monkeypatch):
    path = tmp_path / "m.onnx"
    path.write_bytes(bytes(10_000_000))
    with pytest.raises(HurtleError, match=r"is not ONNX.*a field without a number"):
        open_backend(path)
    monkeypatch.setattr(external_data, "MAX_FIELDS", 1000)
    onnx_models.linear(path)
    open_backend(path)
    path.write_bytes(b"\x08\x01" * 1001)
    with pytest.raises(HurtleError, match="more than 1,000 fields"):
        open_backend(path)


def test_external_files_are_found_wherever_a_model_can_name_them(tmp_path):
    model = onnx.load(onnx_models.external(tmp_path / "m.onnx", "top"), load_external_data=False)
    inner = helper.make_graph([], "inner", [], [], [onnx_models.weights("v", [1.0])])
    entry = inner.initializer[0].external_data.add()
    entry.key, entry.value = "location", "inside"
    node = helper.make_node("If", ["c"], ["z"], then_branch=inner)
    node.attribute.append(helper.make_attribute("value", model.graph.initializer[0]))
    function = helper.make_function("d", "F", [], [], [node], [helper.make_opsetid("", 17)])
    found = external_files(onnx.ModelProto(graph=model.graph, functions=[function]).SerializeToString())
    assert sorted(found) == ["inside", "top", "top"]


@pytest.mark.parametrize("content", [b"", b"\xff" * 40, b"\x3a\x05abc", b"no onnx", bytes(100)])
def test_files_that_are_not_onnx_are_refused_by_name(tmp_path, content):
    path = tmp_path / "m.onnx"
    path.write_bytes(content)
    with pytest.raises(HurtleError, match=r"m\.onnx"):
        open_backend(path)
    with pytest.raises(HurtleError, match=r"gone\.onnx"):
        open_backend(tmp_path / "gone.onnx")


def test_types_that_the_protocol_lacks_are_refused(tmp_path):
    path = onnx_models.identity(tmp_path / "m.onnx", TensorProto.COMPLEX64)
    with pytest.raises(HurtleError, match=r"m\.onnx"):
        open_backend(path)


def test_parameters_are_checked(tmp_path):
    path = onnx_models.linear(tmp_path / "m.onnx")
    assert open_backend(path, threads="2").infer(request(x=rows(1)))["y"].shape == (1, 2)
    with pytest.raises(UnknownNameError, match="Did you mean threads"):
        open_backend(path, thread="2")
    with pytest.raises(HurtleError, match="threads of the backend onnx must be a whole number"):
        open_backend(path, threads="many")
    with pytest.raises(HurtleError, match="device of the backend onnx must be cpu, cuda"):
        open_backend(path, device="gpu")
    with pytest.raises(DeviceError):
        open_backend(path, device="cuda:99")
