"""gRPC server reflection, v1 and v1alpha: tools list the services and fetch their descriptors."""

from __future__ import annotations

from typing import Any

from google.protobuf.descriptor_pb2 import FileDescriptorProto

from hurtle.errors import ServingError
from hurtle.serving.grpc.calls import MAX_UNSENT, StreamingCall, parse
from hurtle.serving.protos import POOL, SERVICES, message_class
from hurtle.serving.status import CODES


class ReflectionCall(StreamingCall):
    """ServerReflectionInfo: the services, and the files that define them."""

    def __init__(self, *args: Any):
        super().__init__(*args)
        self.limit()

    def is_full(self) -> bool:
        """Whether too many answers are unread."""
        return self.queued > MAX_UNSENT

    def on_drained(self) -> None:
        """Go on with requests: the client has read its answers."""
        self.take_messages()

    def on_only_message(self, payload: bytes) -> None:
        """Answer the only request."""
        try:
            super().on_only_message(payload)
        except ServingError as error:
            self.fail(error)

    def on_message(self, payload: bytes) -> None:
        """Answer a request."""
        request = parse(self, payload)
        kind = request.WhichOneof("message_request")
        response = self._response_class()(valid_host=request.host, original_request=request)
        try:
            if kind == "list_services":
                for name in SERVICES:
                    response.list_services_response.service.add(name=name)
            elif kind == "file_by_filename":
                self._add_files(response, POOL.FindFileByName(request.file_by_filename))
            elif kind == "file_containing_symbol":
                self._add_files(response, POOL.FindFileContainingSymbol(request.file_containing_symbol))
            elif kind == "all_extension_numbers_of_type":
                POOL.FindMessageTypeByName(request.all_extension_numbers_of_type)
                response.all_extension_numbers_response.base_type_name = request.all_extension_numbers_of_type
            else:
                raise KeyError("there are no extensions")
        except KeyError:
            response.error_response.error_code = CODES["not_found"].grpc
            response.error_response.error_message = f"Not found: {kind} {getattr(request, kind) if kind else ''!s:.200}"
        self.send(response.SerializeToString())

    def _response_class(self) -> Any:
        package = self.head.method.request.DESCRIPTOR.file.package  # type: ignore[union-attr]
        return message_class(f"{package}.ServerReflectionResponse")

    def _add_files(self, response: Any, file: Any) -> None:
        seen: set[str] = set()
        files = [file]
        while files:
            file = files.pop()
            if file.name not in seen:
                seen.add(file.name)
                copy = FileDescriptorProto()
                file.CopyToProto(copy)
                response.file_descriptor_response.file_descriptor_proto.append(copy.SerializeToString())
                files += file.dependencies
