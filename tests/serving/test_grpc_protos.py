import re

import pytest
from google.protobuf import descriptor_pool
from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet

from hurtle.serving.protos import POOL, SERVICES, descriptors, message_class

NUMBERS = {  # as Triton's own descriptors have them
    "ModelInferRequest": "model_name 1 model_version 2 id 3 parameters 4 inputs 5 outputs 6 raw_input_contents 7",
    "ModelInferRequest.InferInputTensor": "name 1 datatype 2 shape 3 parameters 4 contents 5",
    "ModelInferRequest.InferRequestedOutputTensor": "name 1 parameters 2",
    "ModelInferResponse": "model_name 1 model_version 2 id 3 parameters 4 outputs 5 raw_output_contents 6",
    "ModelStreamInferResponse": "error_message 1 infer_response 2",
    "InferParameter": "bool_param 1 int64_param 2 string_param 3 double_param 4 uint64_param 5",
    "ModelRepositoryParameter": "bool_param 1 int64_param 2 string_param 3 bytes_param 4",
    "InferTensorContents": "bool_contents 1 int_contents 2 int64_contents 3 uint_contents 4 uint64_contents 5 fp32_contents 6 "
    "fp64_contents 7 bytes_contents 8",
    "ModelConfig": "name 1 platform 2 version_policy 3 max_batch_size 4 input 5 output 6 instance_group 7 "
    "default_model_filename 8 cc_model_filenames 9 metric_tags 10 dynamic_batching 11 sequence_batching 13 parameters 14 "
    "backend 17 model_transaction_policy 19 runtime 25",
    "ModelStatistics": "name 1 version 2 last_inference 3 inference_count 4 execution_count 5 inference_stats 6 batch_stats 7 "
    "memory_usage 8 response_stats 9",
}


@pytest.mark.parametrize("name", NUMBERS)
def test_fields_have_the_protocol_s_numbers(name):
    fields = POOL.FindMessageTypeByName(f"inference.{name}").fields
    assert " ".join(f"{field.name} {field.number}" for field in fields) == NUMBERS[name]


def test_every_service_has_its_methods():
    names = {name: [method.name for method in POOL.FindServiceByName(name).methods] for name in SERVICES}
    assert len(names["inference.GRPCInferenceService"]) == 12
    assert names["grpc.health.v1.Health"] == ["Check", "Watch"]
    assert names["grpc.reflection.v1alpha.ServerReflection"] == ["ServerReflectionInfo"]
    stream = POOL.FindMethodByName("inference.GRPCInferenceService.ModelStreamInfer")
    assert stream.client_streaming
    assert stream.server_streaming


def test_another_package_may_register_the_same_names():
    with pytest.raises(KeyError):
        descriptor_pool.Default().FindMessageTypeByName("inference.ModelInferRequest")
    other = descriptor_pool.DescriptorPool()
    other.Add(FileDescriptorProto(name="inference.proto", package="inference"))
    assert message_class("inference.ModelInferRequest").DESCRIPTOR.file.pool is POOL


def test_the_committed_descriptors_are_those_of_the_proto_files():
    pytest.importorskip("grpc_tools")
    committed = (descriptors.FOLDER / "descriptors.binpb").read_bytes()
    assert FileDescriptorSet.FromString(descriptors.compile_protos()) == FileDescriptorSet.FromString(committed)


@pytest.mark.parametrize(("name", "source"), descriptors.FILES.items())
def test_the_committed_descriptors_have_every_field_of_the_proto_files(name, source):
    """Also without protoc: every name and number of the text is in the descriptors, and nothing else is."""
    text = re.sub(r"//.*", "", (descriptors.FOLDER / source).read_text())
    file = FileDescriptorProto()
    POOL.FindFileByName(name).CopyToProto(file)
    found = [f"{field.name} = {field.number}" for message in messages(file.message_type) for field in message.field]
    enums = [*file.enum_type, *(enum for message in messages(file.message_type) for enum in message.enum_type)]
    found += [f"{value.name} = {value.number}" for enum in enums for value in enum.value]
    assert sorted(found) == sorted(re.findall(r"\w+ = \d+", text))
    assert sorted(m.name for m in messages(file.message_type)) == sorted(re.findall(r"message (\w+)", text))
    assert [method.name for service in file.service for method in service.method] == re.findall(r"rpc (\w+)", text)


def messages(found):
    """With those nested in them; protoc makes a message of each map's entries, which has no text."""
    for message in found:
        if not message.options.map_entry:
            yield message
            yield from messages(message.nested_type)
