"""Specs of inputs and outputs for models whose files lack them, from a JSON file beside the model or from parameters.

{"inputs": [{"name": "x", "datatype": "FP32", "shape": [-1, 4]}], "outputs": […], "batched": true, "optional": [], "state": []}
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hurtle.errors import HurtleError, did_you_mean
from hurtle.serving.backends.base import TensorSpec
from hurtle.serving.tensors import DTYPES

KEYS = ("inputs", "outputs", "batched", "optional", "state")
MAX_BYTES = 1 << 20


@dataclass(frozen=True)
class TensorLists:
    """The user's specs; None: not given."""

    inputs: tuple[TensorSpec, ...] | None = None
    outputs: tuple[TensorSpec, ...] | None = None
    batched: bool | None = None
    """Whether the first dimension of every tensor is the batch."""
    optional: frozenset[str] = frozenset()
    """Inputs that may be left out."""
    state: tuple[tuple[str, str], ...] = ()
    """Pairs of inputs and outputs that are a recurrent model's memory."""


def read_tensor_lists(path: Path, parameters: Mapping[str, Any]) -> TensorLists:
    """Read the user's specs of the model in `path`.

    They are in NAME.json for NAME.pt, else in model.json in the same folder. Parameters of the same names, as values or as JSON
    text, take precedence.

    Raises:
        HurtleError: Something is wrong; the message says where, what was expected and what is there.
    """
    candidates = (path.with_suffix(".json"), path.parent / "model.json")
    file = next((candidate for candidate in candidates if candidate.is_file()), None)
    written = _read(file) if file is not None else {}
    for name in KEYS:
        if name in parameters:
            written[name] = _value(name, parameters[name])
    where = str(file) if file is not None else f"The parameters of {path}"
    for name in written:
        if name not in KEYS:
            raise HurtleError(f"{where}: there is no {name!r}. {did_you_mean(name, KEYS)}")
    inputs, outputs = (_specs(where, name, written.get(name)) for name in ("inputs", "outputs"))
    batched, optional, state = (written.get(name) for name in ("batched", "optional", "state"))
    if batched not in (None, True, False):
        raise HurtleError(f"{where}: batched must be true or false, got {batched!r:.100}.")
    if not _are_texts(optional or []):
        raise HurtleError(f"{where}: optional must be a list of names, got {optional!r:.100}.")
    pairs = [tuple(pair) if _are_texts(pair) else () for pair in state] if isinstance(state, list) else [()] * bool(state)
    if any(len(pair) != 2 for pair in pairs):
        raise HurtleError(f'{where}: state must be like [["state_in_0", "state_out_0"]], got {state!r:.100}.')
    return TensorLists(inputs, outputs, batched, frozenset(optional or ()), tuple(pairs))  # type: ignore[arg-type]


def example(names: Sequence[str]) -> str:
    """An example of specs for inputs of these names."""
    return json.dumps({"inputs": [{"name": name, "datatype": "FP32", "shape": [-1, 4]} for name in names]})


def _read(file: Path) -> dict[str, Any]:
    try:
        if file.stat().st_size > MAX_BYTES:
            raise ValueError(f"it has more than {MAX_BYTES:,} bytes")
        found = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise HurtleError(f"Cannot read {file}: {error}.") from None
    if not isinstance(found, dict):
        raise HurtleError(f"{file} must be like {example(['x'])}.")
    return found


def _value(name: str, given: Any) -> Any:
    if not isinstance(given, str):
        return given
    try:
        return json.loads(given)
    except (ValueError, RecursionError) as error:
        raise HurtleError(f"The parameter {name} must be JSON, got {given!r:.100} ({error}).") from None


def _specs(where: str, name: str, written: Any) -> tuple[TensorSpec, ...] | None:
    if written is None:
        return None
    specs = [_spec(entry) for entry in written] if isinstance(written, list) else []
    found = tuple(spec for spec in specs if spec is not None)
    if not found or len(found) != len(specs):
        expected = '[{"name": "x", "datatype": "FP32", "shape": [-1, 4]}]'
        raise HurtleError(f"{where}: {name} must be like {expected} (datatypes: {', '.join(DTYPES)}), got {written!r:.200}.")
    if len({spec.name for spec in found}) != len(found):
        raise HurtleError(f"{where}: {name} must have distinct names, got {[spec.name for spec in found]}.")
    return found


def _spec(entry: Any) -> TensorSpec | None:
    if not isinstance(entry, dict) or set(entry) != {"name", "datatype", "shape"}:
        return None
    name, datatype, shape = entry["name"], entry["datatype"], entry["shape"]
    is_shape = isinstance(shape, list) and all(type(size) is int and size >= -1 for size in shape)
    if not (isinstance(name, str) and name and isinstance(datatype, str) and datatype in DTYPES and is_shape):
        return None
    return TensorSpec(name, datatype, tuple(shape))


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(part, str) for part in value)
