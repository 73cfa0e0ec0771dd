"""Triton's ModelConfig: `config_of` describes how a model runs; `read_config` reads a client's changes when it loads one.

Model → config; JSON text → `ModelOptions` fields, and a description that the model must match. Loads nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from google.protobuf.json_format import MessageToDict, ParseDict, ParseError

from hurtle.errors import HurtleError, did_you_mean
from hurtle.serving.config import ModelOptions
from hurtle.serving.protos import message_class
from hurtle.serving.status import invalid

if TYPE_CHECKING:
    from hurtle.serving.model import Model

MAX_TEXT = 1 << 20
MAX_LANES = 16
"""Copies of a model that a client may ask for."""
MAX_ROWS = 1 << 16
MAX_DELAY_US = 10_000_000
_ModelConfig = message_class("inference.ModelConfig")
_CPU_KINDS = ("KIND_AUTO", "KIND_CPU", "KIND_MODEL")
_DESCRIBING = ("name", "platform", "backend", "input", "output")
"""Fields that describe a model: they cannot be changed, and must match the model."""


def config_of(model: Model) -> dict[str, Any]:
    """How a model runs, as Triton's ModelConfig."""
    options, metadata = model.options, model.metadata

    def tensors(specs: Any) -> list[dict[str, Any]]:
        skip = 1 if metadata.batched else 0
        kinds = {"BYTES": "TYPE_STRING"}
        return [
            {"name": spec.name, "data_type": kinds.get(spec.datatype, f"TYPE_{spec.datatype}"), "dims": list(spec.shape[skip:])}
            for spec in specs
        ]

    found: dict[str, Any] = {
        "name": model.name,
        "platform": metadata.platform,
        "backend": metadata.platform.split("_")[0],
        "max_batch_size": (options.max_rows or options.batch_size) if metadata.batched else 0,
        "input": tensors(metadata.inputs),
        "output": tensors(metadata.outputs),
        "parameters": {
            "executor": {"string_value": options.executor},
            "lanes": {"string_value": str(model.executor.lanes)},
        },
    }
    if options.executor == "batch":
        found["dynamic_batching"] = {"max_queue_delay_microseconds": int(options.batch_timeout_ms * 1000)}
    return found


def read_config(text: str, base: ModelOptions) -> tuple[dict[str, Any], dict[str, Any]]:
    """The options that a client's config changes, and its description of the model (for `check_described`).

    Args:
        text: JSON of a ModelConfig.
        base: The operator's options; their limits hold for clients too.

    Raises:
        ServingError: It is no ModelConfig, or has unsupported fields or values, which the message names.
    """
    given = _parse(text)
    try:
        message = ParseDict(given, _ModelConfig())
    except (ParseError, RecursionError) as error:
        raise invalid(f"config: {str(error).splitlines()[0]:.300}") from None
    readers: dict[str, Callable[[Any], dict[str, Any]]] = {
        "dynamic_batching": lambda batching: _read_batching(batching, base),
        "instance_group": _read_instances,
        "parameters": _read_parameters,
    }
    _check_fields("config", message, (*_DESCRIBING, "max_batch_size", *readers))
    options: dict[str, Any] = {}
    most = base.max_rows or MAX_ROWS
    if message.max_batch_size:
        rows = _within("max_batch_size", message.max_batch_size, 1, most)
        options |= {"batch_size": rows, "max_rows": rows}
    for name, read in readers.items():
        if any(field.name == name for field, _ in message.ListFields()):
            for option, value in read(getattr(message, name)).items():
                if options.setdefault(option, value) != value:
                    raise invalid(f"config: expected one value for {option}, got {options[option]} and {value}.")
    described = MessageToDict(message, preserving_proto_field_name=True)
    described = {name: value for name, value in described.items() if name in _DESCRIBING}
    if not message.max_batch_size and {"max_batch_size", "maxBatchSize"} & given.keys():
        described["max_batch_size"] = 0  # the client says that the model takes no batches
    return options, described


def check_described(described: dict[str, Any], model: Model) -> None:
    """Refuse a model that does not match a client's description.

    Raises:
        HurtleError: They differ; the message says where.
    """
    wanted, found = ParseDict(described, _ModelConfig()), ParseDict(config_of(model), _ModelConfig())
    for name in described:
        if getattr(wanted, name) != getattr(found, name):
            actual = json.dumps(MessageToDict(found, preserving_proto_field_name=True).get(name))
            given = json.dumps(described[name])
            raise HurtleError(f"The config's {name} does not match the model: expected {actual:.300}, got {given:.300}.")


def _parse(text: str) -> dict[str, Any]:
    if len(text) > MAX_TEXT:
        raise invalid(f"config: expected at most {MAX_TEXT:,} characters, got {len(text):,}.")
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise invalid(f"config: expected the JSON of a ModelConfig: {error!s:.200}.") from None
    if not isinstance(found, dict):
        raise invalid('config: expected a JSON object such as {"max_batch_size": 8}, got something else.')
    return found


def _check_fields(where: str, message: Any, known: Iterable[str]) -> None:
    for field, _ in message.ListFields():
        if field.name not in known:
            raise invalid(f"{where}: {field.name} is not supported when a model is loaded. {did_you_mean(field.name, known)}")


def _within(name: str, value: int, least: int, most: int) -> int:
    if not least <= value <= most:
        raise invalid(f"config: {name}: expected {least} to {most:,}, got {value:,}.")
    return value


def _read_batching(batching: Any, base: ModelOptions) -> dict[str, Any]:
    where = "config: dynamic_batching"
    _check_fields(where, batching, ("max_queue_delay_microseconds", "default_queue_policy"))
    _check_fields(f"{where}.default_queue_policy", batching.default_queue_policy, ("max_queue_size",))
    delay = _within("max_queue_delay_microseconds", batching.max_queue_delay_microseconds, 0, MAX_DELAY_US)
    found: dict[str, Any] = {"executor": "batch", "batch_timeout_ms": delay / 1000}
    if batching.default_queue_policy.max_queue_size:
        found["max_queue"] = _within("max_queue_size", batching.default_queue_policy.max_queue_size, 1, base.max_queue)
    return found


def _read_instances(groups: Any) -> dict[str, Any]:
    if len(groups) != 1:
        raise invalid(f"config: instance_group: expected one group, got {len(groups)}.")
    _check_fields("config: instance_group", groups[0], ("name", "count", "kind"))
    kinds = type(groups[0]).Kind
    kind = kinds.Name(groups[0].kind) if groups[0].kind in kinds.values() else str(groups[0].kind)
    if kind not in _CPU_KINDS:
        raise invalid(
            f"config: instance_group: expected kind {', '.join(_CPU_KINDS)}, got {kind}; the server's options set devices."
        )
    return {"lanes": _within("instance_group count", groups[0].count or 1, 1, MAX_LANES)}  # 1 by default, as in Triton


def _read_parameters(parameters: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, parameter in parameters.items():
        text = parameter.string_value
        if name == "executor":
            found[name] = text
        elif name == "lanes" and text.isascii() and text.isdigit() and len(text) < 9:
            found[name] = _within("lanes", int(text), 0, MAX_LANES)
        else:
            raise invalid(
                f"config: parameters: expected executor, or lanes as a whole number, got {name!r:.80} = {text!r:.80}."
            )
    return found
