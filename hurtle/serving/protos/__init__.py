"""The protobuf messages that the server speaks: Open Inference Protocol, health, reflection; made from the .proto files here.

They live in a pool of their own, so that nothing clashes with another package of the process that registers `inference`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass

from hurtle.serving.protos.parse import parse_proto

INFERENCE = "inference.GRPCInferenceService"
HEALTH = "grpc.health.v1.Health"
REFLECTION = "grpc.reflection.v1.ServerReflection"
REFLECTION_ALPHA = "grpc.reflection.v1alpha.ServerReflection"
SERVICES = (INFERENCE, HEALTH, REFLECTION, REFLECTION_ALPHA)


def _fill_pool() -> DescriptorPool:
    pool, folder = DescriptorPool(), Path(__file__).parent
    texts = {path.stem: path.read_text(encoding="utf-8") for path in folder.glob("*.proto")}
    pool.Add(parse_proto(texts["model_config"], "model_config.proto"))
    pool.Add(parse_proto(texts["inference"], "inference.proto"))
    pool.Add(parse_proto(texts["health"], "grpc/health/v1/health.proto"))
    reflection = texts["reflection"]
    pool.Add(parse_proto(reflection, "grpc/reflection/v1/reflection.proto"))
    alpha = reflection.replace("package grpc.reflection.v1;", "package grpc.reflection.v1alpha;")
    pool.Add(parse_proto(alpha, "grpc/reflection/v1alpha/reflection.proto"))
    return pool


POOL = _fill_pool()


def message_class(name: str) -> Any:
    r"""The class of a message by its full name.

    Example:
        >>> message_class("inference.ServerLiveResponse")(live=True).SerializeToString()
        b'\x08\x01'
    """
    return GetMessageClass(POOL.FindMessageTypeByName(name))


ModelInferRequest = message_class("inference.ModelInferRequest")
ModelInferResponse = message_class("inference.ModelInferResponse")
ModelStreamInferResponse = message_class("inference.ModelStreamInferResponse")
InferParameter = message_class("inference.InferParameter")
