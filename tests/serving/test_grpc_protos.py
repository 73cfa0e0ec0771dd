import pytest
from google.protobuf import descriptor_pool
from google.protobuf.descriptor_pb2 import FileDescriptorProto

from hurtle.serving.protos import POOL, SERVICES, message_class
from hurtle.serving.protos.parse import parse_proto

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


def test_the_parser_reads_what_our_files_use():
    text = """
        syntax = "proto3"; package p; // a comment { with a brace
        enum Color { RED = 0; BLUE = 5; }
        message Outer {
          message Inner { repeated bytes parts = 2; }
          map<string, Inner> inners = 7;
          oneof choice { Color color = 1; Inner inner = 2; }
          Outer next = 3;
        }
        service S { rpc Do(stream Outer) returns (Outer.Inner); }
    """
    pool = descriptor_pool.DescriptorPool()
    pool.Add(parse_proto(text, "p.proto"))
    outer = pool.FindMessageTypeByName("p.Outer")
    assert outer.fields_by_name["inners"].message_type.GetOptions().map_entry
    assert outer.fields_by_name["color"].enum_type.values_by_name["BLUE"].number == 5
    assert [field.name for field in outer.oneofs_by_name["choice"].fields] == ["color", "inner"]
    assert outer.fields_by_name["next"].message_type is outer
    method = pool.FindServiceByName("p.S").methods[0]
    assert (method.client_streaming, method.server_streaming, method.output_type.full_name) == (True, False, "p.Outer.Inner")


def test_the_parser_says_what_it_expected():
    with pytest.raises(ValueError, match="expected '='"):
        parse_proto("message M { int32 x 1; }", "m.proto")
