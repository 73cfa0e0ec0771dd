"""REST bodies ⇄ requests and responses."""

import json
import time

import ml_dtypes
import numpy as np
import pytest

from hurtle.errors import ServingError
from hurtle.serving.messages import InferResponse
from hurtle.serving.rest.codec import _descriptions, decode, encode
from hurtle.serving.tensors import DTYPES, to_raw

VALUES = {
    "BOOL": [True, False, True],
    "UINT8": [0, 1, 255],
    "UINT16": [0, 1, 65535],
    "UINT32": [0, 1, 2**32 - 1],
    "UINT64": [0, 1, 2**64 - 1],
    "INT8": [-128, 0, 127],
    "INT16": [-(2**15), 0, 2**15 - 1],
    "INT32": [-(2**31), 0, 2**31 - 1],
    "INT64": [-(2**63), 0, 2**63 - 1],
    "FP16": [0.5, -2.0, 65504.0],
    "BF16": [0.5, -2.0, 256.0],
    "FP32": [0.5, -2, 3.4028235e38],
    "FP64": [0.1, -2, 1.7e308],
    "BYTES": ["", "a", "Grüße"],
}


def array_of(datatype):
    if datatype == "BYTES":
        return np.array([text.encode() for text in VALUES["BYTES"]] + [None], object)[:3]
    return np.array(VALUES[datatype], DTYPES[datatype])


def tensor(datatype="FP32", shape=(1, 2), name="x", **more):
    return {"name": name, "datatype": datatype, "shape": list(shape), **more}


def body(*inputs, **more):
    return json.dumps({"inputs": inputs, **more}).encode()


def refusal(text, length=None, reason="invalid_argument"):
    with pytest.raises(ServingError) as caught:
        decode(text, length, "m")
    assert caught.value.reason == reason
    return str(caught.value)


@pytest.mark.parametrize("datatype", DTYPES)
def test_every_datatype_comes_in_as_binary_data_and_goes_out_so(datatype):
    array = array_of(datatype)
    raw = to_raw(array)
    head = body(tensor(datatype, (3,), parameters={"binary_data_size": len(raw)}))
    request, _ = decode(head + raw, len(head), "m", "2")
    assert request.inputs["x"].dtype == DTYPES[datatype]
    assert request.inputs["x"].tolist() == array.tolist()
    parts, length = encode(InferResponse("m", "2", "", request.inputs), True)
    answer = json.loads(parts[0])
    assert length == len(parts[0])
    assert answer["outputs"] == [tensor(datatype, (3,), parameters={"binary_data_size": len(raw)})]
    assert parts[1] == raw


@pytest.mark.parametrize("datatype", [name for name in DTYPES if name not in ("FP16", "BF16")])
def test_every_datatype_that_json_can_say_comes_in_and_goes_out_as_json(datatype):
    request, wanted = decode(body(tensor(datatype, (3, 1), data=VALUES[datatype])), None, "m")
    assert request.inputs["x"].dtype == DTYPES[datatype]
    assert request.inputs["x"].shape == (3, 1)
    assert request.inputs["x"].ravel().tolist() == array_of(datatype).tolist()
    parts, length = encode(InferResponse("m", "1", "", request.inputs), wanted)
    assert length is None
    (output,) = json.loads(parts[0])["outputs"]
    assert output == tensor(datatype, (3, 1), data=VALUES[datatype])


def test_half_precision_goes_out_as_json_numbers_but_does_not_come_in_so():
    for datatype, dtype in (("FP16", np.float16), ("BF16", ml_dtypes.bfloat16)):
        parts, _ = encode(InferResponse("m", "1", "", {"y": np.array([0.5, -2], dtype)}), False)
        assert json.loads(parts[0])["outputs"] == [tensor(datatype, (2,), "y", data=[0.5, -2.0])]
        message = refusal(body(tensor(datatype, (1,), data=[1.0])))
        assert "'x'" in message
        assert "binary data only" in message


def test_nested_and_flat_data_are_the_same():
    for data in ([1, 2, 3, 4, 5, 6], [[1, 2, 3], [4, 5, 6]], [[[1], [2], [3]], [[4], [5], [6]]]):
        for datatype in ("FP32", "INT32", "UINT8"):
            request, _ = decode(body(tensor(datatype, (2, 3), data=data)), None, "m")
            assert request.inputs["x"].tolist() == [[1, 2, 3], [4, 5, 6]]


def test_binary_and_json_tensors_mix_in_any_order():
    head = body(
        tensor("INT8", (3,), "a", parameters={"binary_data_size": 3}),
        tensor("FP32", (1,), "b", data=[2.5]),
        tensor("FP64", (1,), "c", parameters={"binary_data_size": 8}),
        outputs=[{"name": "c", "parameters": {"binary_data": True}}, {"name": "a"}],
    )
    request, wanted = decode(head + bytes([1, 2, 255]) + np.array([7.5]).tobytes(), len(head), "m")
    assert {name: array.tolist() for name, array in request.inputs.items()} == {"a": [1, 2, -1], "b": [2.5], "c": [7.5]}
    assert list(request.inputs) == ["a", "b", "c"]
    assert request.inputs["c"].flags.aligned
    assert request.outputs == ("c", "a")
    parts, length = encode(InferResponse("m", "1", "", {"c": request.inputs["c"], "a": request.inputs["a"]}), wanted)
    c, a = json.loads(parts[0])["outputs"]
    assert (c["parameters"], "data" in c, a["data"]) == ({"binary_data_size": 8}, False, [1, 2, -1])
    assert parts[1:] == [np.array([7.5]).tobytes()]
    assert length == len(parts[0])


def test_large_tensors_share_the_memory_of_the_body_only_where_they_lie_aligned_in_it():
    x = np.arange(5000, dtype="<f4")
    for spaces in range(4):
        head = body(tensor("FP32", (5000,), parameters={"binary_data_size": x.nbytes})) + b" " * spaces
        data = head + x.tobytes()
        request, _ = decode(data, len(head), "m")
        assert request.inputs["x"].flags.aligned
        assert np.array_equal(request.inputs["x"], x)
        assert np.shares_memory(request.inputs["x"], np.frombuffer(data, np.uint8)) == (len(head) % 4 == 0)


def test_all_outputs_go_out_as_binary_data_when_the_request_says_so():
    request, wanted = decode(body(tensor(data=[1, 2]), parameters={"binary_data_output": True, "priority": 3}), None, "m")
    assert wanted is True
    assert request.parameters == {"priority": 3}
    _, wanted = decode(
        body(
            tensor(data=[1, 2]),
            parameters={"binary_data_output": True},
            outputs=[{"name": "a"}, {"name": "b", "parameters": {"binary_data": False}}],
        ),
        None,
        "m",
    )
    assert wanted == {"a": True, "b": False}


def test_id_parameters_and_timeout_are_read():
    before = time.monotonic()
    request, _ = decode(
        body(tensor(data=[1, 2]), id="ä", parameters={"timeout": 2_000_000, "sequence_id": 4, "sequence_start": True}),
        None,
        "m",
        "3",
    )
    assert (request.model, request.version, request.id) == ("m", "3", "ä")
    assert request.parameters == {"timeout": 2_000_000, "sequence_id": 4, "sequence_start": True}
    assert before + 2 <= request.deadline <= time.monotonic() + 2
    assert decode(body(tensor(data=[1, 2]), parameters={"timeout": 0}), None, "m")[0].deadline is None
    parts, _ = encode(InferResponse("m", "3", "ä", {}, {"sequence_id": 4}), False)
    assert json.loads(parts[0]) == {
        "model_name": "m",
        "model_version": "3",
        "id": "ä",
        "outputs": [],
        "parameters": {"sequence_id": 4},
    }


def test_a_head_that_comes_again_gives_a_new_request_with_its_own_values_and_parameters():
    head = body(tensor("FP32", (2,), parameters={"binary_data_size": 8}), parameters={"k": 1, "timeout": 10})
    first, _ = decode(head + np.array([1, 2], "<f4").tobytes(), len(head), "m")
    first.parameters["k"] = 99
    first_deadline = first.deadline
    time.sleep(0.002)
    second, _ = decode(head + np.array([3, 4], "<f4").tobytes(), len(head), "other")
    assert (first.inputs["x"].tolist(), second.inputs["x"].tolist()) == ([1, 2], [3, 4])
    assert (second.model, second.parameters["k"]) == ("other", 1)
    assert second.deadline > first_deadline
    assert refusal(head + b"1234", len(head)) == "Binary data: the inputs' binary_data_size add up to 8 bytes, 4 came."


def test_the_heads_that_are_kept_are_few():
    for n in range(1000):
        head = body(tensor("INT8", (1,), parameters={"binary_data_size": 1}), id=str(n))
        decode(head + b"\1", len(head), "m")
    assert len(_descriptions) <= 256


def test_nan_and_infinity_go_out_as_null():
    parts, _ = encode(InferResponse("m", "1", "", {"y": np.array([np.nan, np.inf, -np.inf, 1], np.float32)}), False)
    assert json.loads(parts[0])["outputs"][0]["data"] == [None, None, None, 1.0]


def test_outputs_of_unusual_layout_go_out_right():
    wide = np.arange(12, dtype=">f4").reshape(3, 4)
    for array in (wide, wide.T, wide[:, ::2], wide[::-1], np.float64(3.5).reshape(()), np.zeros((0, 4), np.int8)):
        parts, _ = encode(InferResponse("m", "1", "", {"y": array}), False)
        (output,) = json.loads(parts[0])["outputs"]
        assert np.array_equal(np.array(output["data"]).reshape(output["shape"]), array)
        parts, _ = encode(InferResponse("m", "1", "", {"y": array}), True)
        assert parts[1] == array.astype(array.dtype.newbyteorder("<")).tobytes()


def test_bytes_that_are_not_utf8_go_out_as_binary_data_only():
    response = InferResponse("m", "1", "", {"y": np.array([b"\xff"], object)})
    with pytest.raises(ServingError, match="not UTF-8"):
        encode(response, False)
    assert encode(response, True)[0][1] == b"\x01\0\0\0\xff"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (b"", ["not JSON"]),
        (b"[1]", ["expected a JSON object", "a list"]),
        (b"[" * 100_000, ["not JSON"]),
        (b'{"inputs": [' + b'{"a":' * 100_000, ["not JSON"]),
        (b'{"inputs": 3}', ["'inputs'", "expected a list", "a number"]),
        (b'{"inputs": [3]}', ["Input 0", "expected a JSON object"]),
        (b'{"id": 3}', ["'id'", "expected text"]),
        (body({"datatype": "FP32", "shape": [1], "data": [1]}), ["Input 0", "'name'", "nothing"]),
        (body(tensor("FP31", data=[1, 2])), ["'x'", "FP31", "FP32"]),
        (body({"name": "x", "datatype": ["FP32"], "shape": [1], "data": [1]}), ["'x'", "datatype", "a list"]),
        (body({"name": "x", "datatype": "FP32", "data": [1]}), ["'x'", "'shape'", "None"]),
        (body(tensor(shape=(1.5,), data=[1])), ["'x'", "'shape'", "1.5"]),
        (body(tensor(shape=(True,), data=[1])), ["'x'", "'shape'", "True"]),
        (body(tensor(shape=(-1,), data=[1])), ["'x'", "≥ 0", "-1"]),
        (body(tensor(shape=(2**62, 2**62), data=[1])), ["'x'", "≥ 0"]),
        (body(tensor(shape=(1,) * 40, data=[1])), ["'x'", "32", "40"]),
        (body(tensor(shape=(2,), data=[1])), ["'x'", "takes 2 values", "got 1"]),
        (body(tensor(shape=(2,), data=[[1], [2, 3]])), ["'x'", "ragged"]),
        (body(tensor(shape=(2, 1), data=[[1], 2])), ["'x'", "mixes"]),
        (body(tensor(shape=(2,), data=[1, "2"])), ["'x'", "expected FP32", "str '2'"]),
        (body(tensor(shape=(2,), data=[1, None])), ["'x'", "expected FP32", "NoneType"]),
        (body(tensor(shape=(1,), data=[True])), ["'x'", "expected FP32", "bool True"]),
        (body(tensor(shape=(1,), data=[1e39])), ["'x'", "out of the range of FP32"]),
        (body(tensor("INT8", (1,), data=[128])), ["'x'", "out of the range of INT8"]),
        (body(tensor("INT32", (1,), data=[1.5])), ["'x'", "expected INT32", "float 1.5"]),
        (body(tensor("UINT64", (1,), data=[-1])), ["'x'", "out of the range of UINT64"]),
        (body(tensor("BOOL", (1,), data=[1])), ["'x'", "expected BOOL", "int 1"]),
        (body(tensor("BYTES", (1,), data=[1])), ["'x'", "expected BYTES", "int 1"]),
        (body(tensor(data={"a": 1})), ["'x'", "expected a list", "dict"]),
        (body(tensor()), ["'x'", "'data'", "neither"]),
        (body(tensor(data=[1, 2], parameters={"binary_data_size": 8})), ["'x'", "both"]),
        (body(tensor(parameters={"binary_data_size": 7})), ["'x'", "FP32 of shape [1, 2] takes 8 bytes", "got 7"]),
        (body(tensor(parameters={"binary_data_size": -8})), ["'x'", "binary_data_size", "-8"]),
        (body(tensor(parameters={"binary_data_size": "8"})), ["'x'", "binary_data_size", "'8'"]),
        (body(tensor(parameters={"binary_data_size": True})), ["'x'", "binary_data_size", "True"]),
        (body(tensor(parameters={"binary_data_size": 8})), ["Binary data", "8 bytes", "0 came"]),
        (body(tensor(data=[1, 2]), tensor(data=[1, 2])), ["'x'", "twice"]),
        (body(tensor(data=[1, 2]), outputs=[{"name": "y"}, {"name": "y"}]), ["'y'", "twice"]),
        (body(tensor(data=[1, 2]), outputs=[{"name": "y", "parameters": {"binary_data": 1}}]), ["'y'", "binary_data"]),
        (body(tensor(data=[1, 2]), parameters={"a": {"b": 1}}), ["parameter 'a'", "an object"]),
        (body(tensor(data=[1, 2]), parameters=[]), ["'parameters'", "a list"]),
        (body(tensor(data=[1, 2]), parameters={"timeout": -1}), ["timeout", "-1"]),
        (body(tensor(data=[1, 2]), parameters={"timeout": "1"}), ["timeout", "'1'"]),
        (body(tensor(data=[1, 2]), parameters={"binary_data_output": "yes"}), ["binary_data_output"]),
        (body(*[{}] * 2000), ["'inputs'", "1,024", "2,000"]),
        (body(tensor(data=[1, 2], name="n" * 5000)), ["Input 0", "'name'"]),
    ],
)
def test_a_wrong_body_is_refused_in_words_that_say_what_is_wrong(text, says):
    message = refusal(text)
    for part in says:
        assert part in message
    assert len(message) < 500


def test_what_triton_has_and_we_have_not_is_refused_as_such():
    region = body(tensor(data=[1, 2], parameters={"shared_memory_region": "r"}))
    assert "'x': the parameter 'shared_memory_region' is not supported" in refusal(region, reason="unimplemented")
    classes = body(tensor(data=[1, 2]), outputs=[{"name": "y", "parameters": {"classification": 3}}])
    assert "'y': the parameter 'classification' is not supported" in refusal(classes, reason="unimplemented")


def test_wrong_lengths_of_the_json_are_refused():
    head = body(tensor(parameters={"binary_data_size": 8}))
    assert "expected at most" in refusal(head, len(head) + 1)
    assert "is 0" in refusal(head, 0)
    assert "not JSON" in refusal(head + bytes(8), len(head) - 1)
    assert "not JSON" in refusal(head + bytes(8), len(head) + 1)
    assert "9 came" in refusal(head + bytes(9), len(head))


def test_wrong_lengths_in_binary_bytes_are_refused():
    def message(shape, raw):
        head = body(tensor("BYTES", shape, parameters={"binary_data_size": len(raw)}))
        return refusal(head + raw, len(head))

    assert "element 0 claims 4,294,967,295 bytes" in message((1,), b"\xff\xff\xff\xff")
    assert "ends after 5" in message((1,), b"\x01\0\0\0ab")
    assert "takes 8 bytes or more" in message((2,), b"\0\0\0\0")


def test_json_that_would_take_long_to_read_is_refused_before_it_is_read(monkeypatch):
    many = b'{"inputs": [{"name": "x", "datatype": "FP32", "shape": [1], "data": [%b0]}]}'
    with monkeypatch.context() as patched:
        patched.setattr("orjson.loads", None)  # it must not get that far
        assert "1,000,000 lists and objects" in refusal(many % (b"[]," * 5_000_000))
        assert "1,000,000 lists and objects" in refusal(many % (b"{}," * 5_000_000))
        assert "4,000,000 values" in refusal(many % (b"0," * 5_000_000))
    assert "takes 1 values, got 10,001 or more" in refusal(many % (b"0," * 10_000))
