"""The lists of what an exported graph may do: real operations, and none that writes where it should not."""

import onnx
import pytest
import torch

from hurtle.deploy.operations import ATEN_OPERATIONS, ATEN_OVERLOADS, ONNX_OPERATIONS, is_onnx_operation, is_torch_operation

DANGEROUS = (
    "set_",
    "resize_",
    "as_strided",
    "from_file",
    "empty",
    "empty_like",
    "_index_put_impl_",
    "_unsafe_view",
    "save",
    "_print",
)


def overloads(name):
    packet = getattr(torch.ops.aten, name)
    return [getattr(packet, overload)._schema for overload in packet.overloads() if overload in ATEN_OVERLOADS]


def test_every_operation_exists():
    known = {schema.name for schema in onnx.defs.get_all_schemas() if not schema.domain}
    assert known >= ONNX_OPERATIONS
    assert not [name for name in ATEN_OPERATIONS if not overloads(name)]
    assert {overload for name in ATEN_OPERATIONS for overload in getattr(torch.ops.aten, name).overloads()} >= ATEN_OVERLOADS


def test_only_operations_that_say_so_write_in_place():
    writing = {name for name in ATEN_OPERATIONS if any(schema.is_mutable for schema in overloads(name))}
    assert writing == {name for name in ATEN_OPERATIONS if name.endswith("_")}


def test_what_is_written_to_is_the_first_tensor():
    for name in ATEN_OPERATIONS:
        for schema in overloads(name) if name.endswith("_") else ():
            written = [argument.name for argument in schema.arguments if argument.alias_info and argument.alias_info.is_write]
            assert written == ["self"], schema


@pytest.mark.parametrize("name", DANGEROUS)
def test_what_reaches_further_than_its_tensors_is_not_there(name):
    assert hasattr(torch.ops.aten, name)
    assert not any(is_torch_operation(f"torch.ops.aten.{name}.{overload}") for overload in ATEN_OVERLOADS)


def test_control_flow_and_strings_are_not_there():
    for schema in onnx.defs.get_all_schemas():
        kinds = {str(attribute.type).split(".")[-1] for attribute in schema.attributes.values()}
        if schema.domain or kinds & {"GRAPH", "GRAPHS"} or "String" in schema.name or "Sequence" in schema.name:
            assert not is_onnx_operation(schema.domain, schema.name)


@pytest.mark.parametrize(
    "target",
    ["torch.os.system", "torch.ops.aten.add", "torch.ops.aten.add.Tensor.__call__", "ops.aten.add.Tensor", "", "math.exp",
     "_operator.methodcaller", "torch.sym_size.__globals__", "torch.ops.prim.add.Tensor"],
)  # fmt: skip
def test_other_targets(target):
    assert not is_torch_operation(target)
    assert is_torch_operation("torch.ops.aten.add.Tensor")
    assert is_torch_operation("_operator.mul")
