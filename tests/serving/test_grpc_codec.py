import ml_dtypes
import numpy as np
import pytest
from grpc_server import infer_request

from hurtle.errors import ServingError
from hurtle.serving.grpc import codec
from hurtle.serving.grpc.codec import decode_request, encode_response, varint
from hurtle.serving.messages import InferResponse
from hurtle.serving.protos import ModelInferRequest, ModelInferResponse
from hurtle.serving.tensors import DTYPES, from_raw

RANDOM = np.random.default_rng(3)
TYPED = {
    "BOOL": ("bool_contents", [True, False, True]),
    "UINT8": ("uint_contents", [0, 255, 7]),
    "UINT16": ("uint_contents", [0, 65535, 7]),
    "UINT32": ("uint_contents", [0, 2**32 - 1, 7]),
    "UINT64": ("uint64_contents", [0, 2**64 - 1, 7]),
    "INT8": ("int_contents", [-128, 127, 7]),
    "INT16": ("int_contents", [-(2**15), 2**15 - 1, 7]),
    "INT32": ("int_contents", [-(2**31), 2**31 - 1, 7]),
    "INT64": ("int64_contents", [-(2**63), 2**63 - 1, 7]),
    "FP32": ("fp32_contents", [1.5, -np.inf, 7.0]),
    "FP64": ("fp64_contents", [1.1, np.nan, 7.0]),
    "BYTES": ("bytes_contents", [b"", b"\0\xff", b"text"]),
}


def sample(datatype, shape):
    if datatype == "BYTES":
        array = np.empty(int(np.prod(shape)), object)
        array[:] = [bytes([n % 256]) * (n % 5) for n in range(array.size)]
        return array.reshape(shape)
    if datatype == "BOOL":
        return RANDOM.integers(0, 2, shape).astype(bool)
    return RANDOM.integers(0, 100, shape).astype(DTYPES[datatype])


def typed(datatype, values, field=None, shape=None):
    message = ModelInferRequest(model_name="m")
    tensor = message.inputs.add(name="x", datatype=datatype, shape=[len(values)] if shape is None else shape)
    getattr(tensor.contents, field or TYPED[datatype][0]).extend(values)
    return message


def error_of(message):
    payload = message if isinstance(message, bytes) else message.SerializeToString()
    with pytest.raises(ServingError) as raised:
        decode_request(payload)
    return raised.value.reason, str(raised.value)


@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3), (40, 50), (2, 0, 3)])
@pytest.mark.parametrize("datatype", DTYPES)
def test_every_datatype_goes_in_and_out_as_raw_bytes(datatype, shape):
    array = sample(datatype, shape)
    request = decode_request(infer_request(array=array, datatype=datatype).SerializeToString())
    assert request.inputs["x"].dtype == DTYPES[datatype]
    np.testing.assert_array_equal(request.inputs["x"], array)
    response = ModelInferResponse.FromString(encode_response(InferResponse("m", "1", "", {"y": request.inputs["x"]})))
    tensor = response.outputs[0]
    assert (tensor.name, tensor.datatype, tuple(tensor.shape)) == ("y", datatype, shape)
    np.testing.assert_array_equal(from_raw("y", datatype, shape, response.raw_output_contents[0]), array)


@pytest.mark.parametrize("datatype", TYPED)
def test_every_datatype_but_the_half_floats_goes_in_as_typed_contents(datatype):
    array = decode_request(typed(datatype, TYPED[datatype][1]).SerializeToString()).inputs["x"]
    assert array.dtype == DTYPES[datatype]
    np.testing.assert_array_equal(array, np.array(TYPED[datatype][1], array.dtype))


def test_everything_else_of_a_request_arrives():
    message = infer_request("m", request_id="ü7", flag=True, count=-3, huge=2**63 + 1, rate=0.5, text="é")
    message.model_version = "2"
    message.outputs.add(name="b")
    message.outputs.add(name="a")
    request = decode_request(message.SerializeToString())
    assert (request.model, request.version, request.id, request.outputs) == ("m", "2", "ü7", ("b", "a"))
    assert request.parameters == {"flag": True, "count": -3, "huge": 2**63 + 1, "rate": 0.5, "text": "é"}
    assert request.parameters["flag"] is True


def test_everything_else_of_a_response_arrives():
    outputs = {"a": np.arange(6.0).reshape(2, 3).T, "b": np.zeros((0, 2), np.int8), "c": np.ones(300, ">i4")}
    response = InferResponse("m", "3", "ü7", outputs, {"done": True, "n": 4})
    for _ in range(2):  # the second time from the cache
        message = ModelInferResponse.FromString(encode_response(response))
        assert (message.model_name, message.model_version, message.id) == ("m", "3", "ü7")
        assert [tuple(tensor.shape) for tensor in message.outputs] == [(3, 2), (0, 2), (300,)]
        np.testing.assert_array_equal(np.frombuffer(message.raw_output_contents[0]).reshape(3, 2), outputs["a"])
        assert np.frombuffer(message.raw_output_contents[2], "<i4").sum() == 300
        assert message.parameters["done"].bool_param is True
        assert message.parameters["n"].int64_param == 4


def test_outputs_that_share_a_shape_but_not_a_name_or_type_are_not_confused():
    for name, dtype in (("a", "f4"), ("b", "f4"), ("a", "i4"), ("a", ml_dtypes.bfloat16), ("a", "f2")):
        message = ModelInferResponse.FromString(encode_response(InferResponse("m", "1", "", {name: np.zeros(2, dtype)})))
        wanted = {"f4": "FP32", "i4": "INT32", "f2": "FP16"}.get(dtype, "BF16")
        assert (message.outputs[0].name, message.outputs[0].datatype) == (name, wanted)


def test_raw_and_typed_contents_exclude_each_other():
    message = typed("FP32", [1.0])
    message.raw_input_contents.append(b"\0\0\0\0")
    reason, text = error_of(message)
    assert reason == "invalid_argument"
    assert "'x'" in text
    assert "both" in text


def test_the_number_of_raw_contents_must_be_that_of_the_inputs():
    message = infer_request()
    message.raw_input_contents.append(b"")
    assert "for 1 inputs, got 2" in error_of(message)[1]


@pytest.mark.parametrize("datatype", ["FP16", "BF16"])
def test_half_floats_must_be_raw(datatype):
    message = typed(datatype, [1.0], "fp32_contents")
    assert "raw_input_contents" in error_of(message)[1]


def test_typed_contents_must_be_in_the_field_of_their_datatype():
    assert "expected INT32 data in int_contents, got fp32_contents" in error_of(typed("INT32", [1.0], "fp32_contents"))[1]
    message = typed("INT32", [1])
    message.inputs[0].contents.fp64_contents.append(1)
    assert "int_contents, fp64_contents" in error_of(message)[1]


def test_typed_contents_must_be_as_many_as_the_shape_says():
    assert "shape [2, 2] takes 4 values, got 3" in error_of(typed("INT64", [1, 2, 3], shape=[2, 2]))[1]
    assert "takes 1 values, got 0" in error_of(typed("FP32", [], shape=[1]))[1]


@pytest.mark.parametrize(
    ("datatype", "value"), [("INT8", 128), ("INT8", -129), ("UINT8", 256), ("INT16", 2**15), ("UINT16", 65536)]
)
def test_typed_contents_must_be_in_the_range_of_their_datatype(datatype, value):
    reason, text = error_of(typed(datatype, [1, value]))
    assert reason == "invalid_argument"
    assert f"got {value}" in text


@pytest.mark.parametrize("shape", [[-1], [2**62, 2**62], [-(2**63)], [1] * 40, [2**40 + 1]])
@pytest.mark.parametrize("raw", [True, False])
def test_absurd_shapes_are_refused(shape, raw):
    message = ModelInferRequest(model_name="m")
    message.inputs.add(name="x", datatype="FP32", shape=shape)
    if raw:
        message.raw_input_contents.append(b"\0" * 4)
    assert error_of(message)[0] == "invalid_argument"


def test_raw_bytes_must_be_as_many_as_the_shape_says():
    message = infer_request()
    message.raw_input_contents[0] = b"\0" * 15
    assert "takes 16 bytes, got 15" in error_of(message)[1]


def test_unknown_datatypes_and_double_names_are_refused():
    assert "FP31" in error_of(infer_request(datatype="FP31"))[1]
    message = infer_request()
    message.inputs.append(message.inputs[0])
    message.raw_input_contents.append(message.raw_input_contents[0])
    assert "different names" in error_of(message)[1]


def test_shared_memory_and_classification_are_not_ignored():
    for kind in ("shared_memory_region", "classification"):
        message = infer_request()
        message.inputs[0].parameters[kind].string_param = "r"
        assert error_of(message)[0] == "unimplemented"
        message = infer_request()
        message.outputs.add(name="y").parameters[kind].int64_param = 3
        reason, text = error_of(message)
        assert reason == "unimplemented"
        assert "'y'" in text


def test_a_parameter_without_a_value_is_refused():
    message = infer_request()
    message.parameters["empty"].SetInParent()
    assert "'empty'" in error_of(message)[1]


def test_what_is_no_protobuf_is_refused():
    assert error_of(b"\xff" * 20)[0] == "invalid_argument"
    assert error_of(b"\x0a\x02\xff\xfe")[0] == "invalid_argument"  # a model's name that is not UTF-8


def test_a_large_message_of_tiny_tensors_is_refused_before_it_is_parsed():
    nested = b"".join(b"\x22\x05\x0a\x03%03d" % (n % 1000) for n in range(30_000))
    for tag in (0x2A, 0x32):
        inside = bytes([tag]) + varint(len(nested)) + nested
        for payload in (bytes([tag, 0]) * 1_000_000, inside):
            reason, text = error_of(payload)
            assert reason == "invalid_argument"
            assert "at most 20,000" in text
    shape = b"\x1a" + varint(100_000) + b"\1" * 100_000
    assert "at most 20,000" in error_of(b"\x2a" + varint(len(shape)) + shape)[1]


def test_a_large_message_of_few_tensors_is_not():
    array = np.zeros(100_000, np.uint8)
    np.testing.assert_array_equal(decode_request(infer_request(array=array).SerializeToString()).inputs["x"], array)


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.uint8, np.bool_, np.int64])
def test_data_of_large_requests_is_taken_where_it_lies_and_aligned(monkeypatch, dtype):
    monkeypatch.setattr(codec, "_LARGE", 0)
    rng = np.random.default_rng(3)
    for padding in range(9):  # the data begins at any address
        array = rng.integers(0, 2, (3, 50)).astype(dtype)
        payload = infer_request(array=array, request_id="x" * padding).SerializeToString()
        found = codec.parse_request(payload)[0].inputs["x"]
        assert found.flags.aligned
        assert found.dtype == array.dtype
        np.testing.assert_array_equal(found, array)


def test_large_requests_mean_what_protobuf_says_whatever_is_damaged(monkeypatch):
    message = infer_request(array=np.arange(6, dtype=np.float32), request_id="abc", priority=3)
    message.inputs.add(name="text", datatype="BYTES", shape=[2])
    message.raw_input_contents.append(b"\1\0\0\0a\0\0\0\0")
    message.outputs.add(name="y")
    whole = message.SerializeToString()
    rng = np.random.default_rng(4)
    payloads = [whole, whole + b"\x3a\x00", whole + b"\x3a", whole + b"\x3a" + b"\xff" * 11, whole + b"\xba\x00\x01a", b""]
    payloads += [whole[:n] for n in range(len(whole))]
    for _ in range(3000):
        damaged = bytearray(whole)
        for at in rng.integers(0, len(whole), rng.integers(1, 4)):
            damaged[at] = rng.integers(0, 256)
        payloads.append(bytes(damaged))

    def meaning(payload, large):
        monkeypatch.setattr(codec, "_LARGE", large)
        try:
            request, datatypes = codec.parse_request(payload)
        except ServingError as error:
            return str(error)
        arrays = {name: (array.dtype, array.shape, array.tolist()) for name, array in request.inputs.items()}
        return repr((request.model, request.version, request.id, request.outputs, request.parameters, arrays, datatypes))

    assert not meaning(whole, 0).startswith("The request")
    for payload in payloads:
        assert meaning(payload, 0) == meaning(payload, 1 << 30), payload
