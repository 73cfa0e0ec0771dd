"""The protobuf messages that the server speaks: Open Inference Protocol, health, reflection. No code is generated.

.proto files → descriptors.binpb (`descriptors`) → message classes, in a pool of their own, as others may register `inference`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from google.protobuf.descriptor_pb2 import FileDescriptorSet
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass

INFERENCE = "inference.GRPCInferenceService"
HEALTH = "grpc.health.v1.Health"
REFLECTION = "grpc.reflection.v1.ServerReflection"
REFLECTION_ALPHA = "grpc.reflection.v1alpha.ServerReflection"
SERVICES = (INFERENCE, HEALTH, REFLECTION, REFLECTION_ALPHA)


def _fill_pool() -> DescriptorPool:
    pool = DescriptorPool()
    for file in FileDescriptorSet.FromString((Path(__file__).parent / "descriptors.binpb").read_bytes()).file:
        pool.Add(file)
    return pool


POOL = _fill_pool()


def message_class(name: str) -> Any:
    r"""The class of a message, by its full name.

    Example:
        >>> message_class("inference.ServerLiveResponse")(live=True).SerializeToString()
        b'\x08\x01'
    """
    return GetMessageClass(POOL.FindMessageTypeByName(name))


ModelInferRequest = message_class("inference.ModelInferRequest")
ModelInferResponse = message_class("inference.ModelInferResponse")
ModelStreamInferResponse = message_class("inference.ModelStreamInferResponse")
InferParameter = message_class("inference.InferParameter")
