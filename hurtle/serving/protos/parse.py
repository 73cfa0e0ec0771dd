"""Reads the .proto files beside it into descriptors, so that nothing is generated and no compiler is needed.

Understands what these files use: messages, enums, maps, oneofs, services. Not for .proto files in general.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    ServiceDescriptorProto,
)

_TOKEN = re.compile(r'"[^"]*"|[\w.]+|[{}()<>,;=]')
_SCALARS = {
    name: getattr(FieldDescriptorProto, f"TYPE_{name.upper()}")
    for name in ("bool", "int32", "int64", "uint32", "uint64", "float", "double", "string", "bytes")
}


def parse_proto(text: str, name: str) -> FileDescriptorProto:
    """The descriptor of a .proto file's text, under the given file name.

    Example:
        >>> parse_proto('package p; message M { int64 size = 3; }', "m.proto").message_type[0].field[0].number
        3
    """
    tokens = iter(_TOKEN.findall(re.sub(r"//.*", "", text)))
    file = FileDescriptorProto(name=name, syntax="proto3")
    for word in tokens:
        if word == "package":
            file.package = next(tokens)
        elif word == "import":
            file.dependency.append(next(tokens).strip('"'))
        elif word == "message":
            _read_message(file.message_type.add(), tokens)
        elif word == "enum":
            _read_enum(file.enum_type.add(), tokens)
        elif word == "service":
            _read_service(file.service.add(), tokens)
    _name_types_in_full(file)
    return file


def _read_message(message: DescriptorProto, tokens: Iterator[str]) -> None:
    message.name = next(tokens)
    _expect("{", tokens)
    oneof = None
    for word in tokens:
        if word == "}" and oneof is None:
            return
        if word == "}":
            oneof = None
        elif word == "message":
            _read_message(message.nested_type.add(), tokens)
        elif word == "enum":
            _read_enum(message.enum_type.add(), tokens)
        elif word == "oneof":
            oneof = len(message.oneof_decl)
            message.oneof_decl.add(name=next(tokens))
            _expect("{", tokens)
        else:
            _read_field(message, word, oneof, tokens)


def _read_field(message: DescriptorProto, word: str, oneof: int | None, tokens: Iterator[str]) -> None:
    field = message.field.add(label=FieldDescriptorProto.LABEL_OPTIONAL)
    if word in ("map", "repeated"):
        field.label = FieldDescriptorProto.LABEL_REPEATED
    kinds = []
    if word == "map":
        _expect("<", tokens)
        kinds.append(next(tokens))
        _expect(",", tokens)
        kinds.append(next(tokens))
        _expect(">", tokens)
    elif word == "repeated":
        word = next(tokens)
    field.name = next(tokens)
    _expect("=", tokens)
    field.number = int(next(tokens))
    _expect(";", tokens)
    if oneof is not None:
        field.oneof_index = oneof
    if not kinds:
        _set_type(field, word)
        return
    entry = message.nested_type.add(name="".join(part.capitalize() for part in field.name.split("_")) + "Entry")
    entry.options.map_entry = True
    for number, kind in enumerate(kinds, 1):
        part = entry.field.add(name=("key", "value")[number - 1], number=number, label=FieldDescriptorProto.LABEL_OPTIONAL)
        _set_type(part, kind)
    _set_type(field, entry.name)


def _set_type(field: FieldDescriptorProto, kind: str) -> None:
    if kind in _SCALARS:
        field.type = _SCALARS[kind]
    else:
        field.type_name = kind


def _read_enum(enum: EnumDescriptorProto, tokens: Iterator[str]) -> None:
    enum.name = next(tokens)
    _expect("{", tokens)
    for word in tokens:
        if word == "}":
            return
        _expect("=", tokens)
        enum.value.add(name=word, number=int(next(tokens)))
        _expect(";", tokens)


def _read_service(service: ServiceDescriptorProto, tokens: Iterator[str]) -> None:
    service.name = next(tokens)
    _expect("{", tokens)
    while next(tokens) == "rpc":
        method = service.method.add(name=next(tokens))
        method.input_type, method.client_streaming = _read_argument(tokens)
        _expect("returns", tokens)
        method.output_type, method.server_streaming = _read_argument(tokens)
        _expect(";", tokens)


def _read_argument(tokens: Iterator[str]) -> tuple[str, bool]:
    _expect("(", tokens)
    kind = next(tokens)
    streaming = kind == "stream"
    if streaming:
        kind = next(tokens)
    _expect(")", tokens)
    return kind, streaming


def _expect(wanted: str, tokens: Iterator[str]) -> None:
    got = next(tokens)
    if got != wanted:
        raise ValueError(f"expected {wanted!r}, got {got!r}")


def _name_types_in_full(file: FileDescriptorProto) -> None:
    """Give every type its full name, as descriptors want it; a name is looked for in the message, then further out.

    What is not in this file is of the same package in an imported one.
    """
    kinds: dict[str, FieldDescriptorProto.Type.ValueType] = {}

    def collect(scope: str, messages, enums) -> None:  # type: ignore[no-untyped-def]
        for enum in enums:
            kinds[f"{scope}.{enum.name}"] = FieldDescriptorProto.TYPE_ENUM
        for message in messages:
            kinds[f"{scope}.{message.name}"] = FieldDescriptorProto.TYPE_MESSAGE
            collect(f"{scope}.{message.name}", message.nested_type, message.enum_type)

    def resolve(scope: str, message: DescriptorProto) -> None:
        scope = f"{scope}.{message.name}"
        for field in message.field:
            if field.type_name:
                field.type_name = full_name(scope, field.type_name)
                field.type = kinds.get(field.type_name, FieldDescriptorProto.TYPE_MESSAGE)
        for nested in message.nested_type:
            resolve(scope, nested)

    def full_name(scope: str, name: str) -> str:
        while scope and f"{scope}.{name}" not in kinds:
            scope = scope.rpartition(".")[0]
        return f"{scope}.{name}" if scope else f"{package}.{name}"

    package = f".{file.package}"
    collect(package, file.message_type, file.enum_type)
    for message in file.message_type:
        resolve(package, message)
    for service in file.service:
        for method in service.method:
            method.input_type = full_name(package, method.input_type)
            method.output_type = full_name(package, method.output_type)
