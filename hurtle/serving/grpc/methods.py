"""The table of gRPC methods by path, and the functions of the unary ones: (service, request) → response. Knows no bytes."""

from __future__ import annotations

from typing import Any

from google.protobuf.json_format import ParseDict

from hurtle.errors import ServingError
from hurtle.serving.grpc.call import Call
from hurtle.serving.grpc.calls import InferCall, StreamInferCall, UnaryCall
from hurtle.serving.grpc.codec import parameter_value
from hurtle.serving.grpc.head import Method
from hurtle.serving.grpc.health import WatchCall, health_of
from hurtle.serving.grpc.reflection import ReflectionCall
from hurtle.serving.protos import HEALTH, INFERENCE, POOL, REFLECTION, REFLECTION_ALPHA, message_class


def _response(name: str) -> Any:
    return message_class(f"inference.{name}Response")


_ServerLive, _ServerReady, _ModelReady = _response("ServerLive"), _response("ServerReady"), _response("ModelReady")
_ServerMetadata, _ModelMetadata = _response("ServerMetadata"), _response("ModelMetadata")
_ModelConfig, _ModelStatistics = _response("ModelConfig"), _response("ModelStatistics")
_Index, _Load, _Unload = _response("RepositoryIndex"), _response("RepositoryModelLoad"), _response("RepositoryModelUnload")
_Health = message_class(f"{HEALTH}CheckResponse")
_SHARED_MEMORY = ("SharedMemoryStatus", "SharedMemoryRegister", "SharedMemoryUnregister")
_UNSUPPORTED = {
    **{f"System{name}": "systemsharedmemory" for name in _SHARED_MEMORY},
    **{f"Cuda{name}": "cudasharedmemory" for name in _SHARED_MEMORY},
    "TraceSetting": "trace",
    "LogSettings": "logging",
}
"""Methods of Triton's service that are not supported, and the extensions they belong to."""


def server_live(service: Any, request: Any) -> Any:
    """Report that the process is alive."""
    return _ServerLive(live=service.is_live())


def server_ready(service: Any, request: Any) -> Any:
    """Report whether every model is loaded."""
    return _ServerReady(ready=service.is_ready())


def model_ready(service: Any, request: Any) -> Any:
    """Report whether a model can answer; an unknown one cannot, which is no error."""
    return _ModelReady(ready=service.is_model_ready(request.name, request.version))


def server_metadata(service: Any, request: Any) -> Any:
    """Report the server's name, version and extensions."""
    return _ServerMetadata(**service.server_metadata())


def model_metadata(service: Any, request: Any) -> Any:
    """Describe a model's inputs and outputs."""
    return ParseDict(service.model_metadata(request.name, request.version), _ModelMetadata(), ignore_unknown_fields=True)


def model_config(service: Any, request: Any) -> Any:
    """Describe how a model is run, as Triton's ModelConfig."""
    config = {"config": service.model_config(request.name, request.version)}
    return ParseDict(config, _ModelConfig(), ignore_unknown_fields=True)


async def model_statistics(service: Any, request: Any) -> Any:
    """Report the counts and times of one model or of all."""
    found = await service.statistics(request.name, request.version)
    return ParseDict(found, _ModelStatistics(), ignore_unknown_fields=True)


async def repository_index(service: Any, request: Any) -> Any:
    """List the models of the repository."""
    _check_repository(request)
    return _Index(models=await service.index(request.ready))


async def load_model(service: Any, request: Any) -> Any:
    """Load a model, or load it again."""
    _check_repository(request)
    await service.load(request.model_name, _parameters(request))
    return _Load()


async def unload_model(service: Any, request: Any) -> Any:
    """Unload a model."""
    _check_repository(request)
    await service.unload(request.model_name, _parameters(request))
    return _Unload()


def check_health(service: Any, request: Any) -> Any:
    """Health/Check."""
    status = health_of(service, request.service)
    if status is None:
        raise ServingError(
            "not_found",
            f"Service {request.service!r:.200} is not known: expected a model, {INFERENCE!r} or '' for the server.",
        )
    return _Health(status=status)


def _check_repository(request: Any) -> None:
    if request.repository_name:
        raise ServingError(
            "not_found", f"Repository {request.repository_name!r:.200} is not known: there is one, without name."
        )


def _parameters(request: Any) -> dict[str, Any]:
    return {name: parameter_value(name, value) for name, value in request.parameters.items()}


def _methods() -> dict[bytes, Method]:
    methods: dict[bytes, Method] = {}

    def add(service: str, name: str, call: type[Call], run: Any = None, public: bool = False) -> None:
        kind = _find_request(service, name)
        methods[f"/{service}/{name}".encode()] = Method(f"/{service}/{name}", call, kind, run, public)

    add(INFERENCE, "ServerLive", UnaryCall, server_live, public=True)
    add(INFERENCE, "ServerReady", UnaryCall, server_ready, public=True)
    add(INFERENCE, "ModelReady", UnaryCall, model_ready)
    add(INFERENCE, "ServerMetadata", UnaryCall, server_metadata)
    add(INFERENCE, "ModelMetadata", UnaryCall, model_metadata)
    add(INFERENCE, "ModelInfer", InferCall)
    add(INFERENCE, "ModelStreamInfer", StreamInferCall)
    add(INFERENCE, "ModelConfig", UnaryCall, model_config)
    add(INFERENCE, "ModelStatistics", UnaryCall, model_statistics)
    add(INFERENCE, "RepositoryIndex", UnaryCall, repository_index)
    add(INFERENCE, "RepositoryModelLoad", UnaryCall, load_model)
    add(INFERENCE, "RepositoryModelUnload", UnaryCall, unload_model)
    add(HEALTH, "Check", UnaryCall, check_health, public=True)
    add(HEALTH, "Watch", WatchCall, public=True)
    add(REFLECTION, "ServerReflectionInfo", ReflectionCall)
    add(REFLECTION_ALPHA, "ServerReflectionInfo", ReflectionCall)
    for name, extension in _UNSUPPORTED.items():
        path = f"/{INFERENCE}/{name}"
        methods[path.encode()] = Method(path, UnaryCall, None, unsupported=extension)
    return methods


def _find_request(service: str, name: str) -> Any:
    return message_class(POOL.FindServiceByName(service).FindMethodByName(name).input_type.full_name)


METHODS = _methods()
"""Every method by its path."""
