"""What a policy file says about itself (`Card`), and reading that from .onnx and .pt2 files that may be anything.

bytes → checks (size, format, hash, nothing pickled) → card and weights. Runs nothing of what a file holds.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import re
import zipfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium import spaces

from hurtle.emulation.actions import ActionLayout
from hurtle.emulation.layout import SpaceLayout
from hurtle.emulation.leaves import tree_leaves
from hurtle.errors import HurtleError, PolicyFileError
from hurtle.policies.spaces import layout_from_dict, space_from_dict

FORMAT = 1
KEY = "hurtle"
"""Of the metadata in an ONNX file."""
MEMBER = "hurtle.json"
"""Of the archive that a .pt2 file is."""
MAX_BYTES = 2**31 - 1
"""What a protobuf can hold; no policy comes near."""
MAX_CARD = 1 << 24
MAX_EXPRESSION = 500
"""Characters of the size of a tensor, which are otherwise a few dozen."""
MAX_NUMBERS = 1 << 24
"""In one observation or action."""
DISTRIBUTIONS = ("categorical", "multi_categorical", "gaussian", "squashed_gaussian", "beta")
_MAXIMA = ("max_length", "max_nodes", "max_edges")
SUFFIXES = (".onnx", ".pt2")


@dataclass(frozen=True)
class Port:
    """One tensor that goes in or comes out, without its first dimension, the batch."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Numbers of one row."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Card:
    """Where a policy comes from, and how to call it.

    Attributes:
        env: The id of the env it was trained on.
        env_parameters: Its parameters.
        algorithm: What trained it.
        steps: How long.
        mean_return: Of its last evaluation, if there was one.
        observation_space: Of one row, as `space_to_dict` has it; flat where the env was emulated.
        action_space: Likewise.
        structure: The env's own spaces, where it was emulated: "observation" and "action".
        distribution: "categorical", "multi_categorical", "gaussian", "squashed_gaussian" or "beta".
        deterministic: Whether "action" is the most likely one; else it is sampled.
        masked: Whether legal actions are an input.
        inputs: All of them, in order: observation, mask, state.
        outputs: All of them, in order.
        initial_state: What the inputs "state_in_…" are at the start of an episode.
        mlp: For plain MLPs: which tensors of the file are the layers.
        seed: Of the run.
        hurtle: The version that wrote it.
        commit: Of the code that trained it, where that is known.
        sha256: Of the rest of the file.
    """

    env: str
    env_parameters: dict[str, Any]
    algorithm: str
    steps: int
    mean_return: float | None
    observation_space: dict[str, Any]
    action_space: dict[str, Any]
    structure: dict[str, Any] | None
    distribution: str
    deterministic: bool
    masked: bool
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    initial_state: str = "zeros"
    mlp: dict[str, Any] | None = None
    seed: int = 0
    hurtle: str = ""
    commit: str | None = None
    sha256: str = ""
    format: int = field(default=FORMAT)

    def to_json(self) -> str:
        """One line.

        Raises:
            HurtleError: The env's parameters are nothing that JSON has.
        """
        try:
            return json.dumps(asdict(self), allow_nan=False)
        except (TypeError, ValueError) as error:
            raise HurtleError(f"env_parameters {self.env_parameters!r:.200} cannot be written to a file: {error}.") from None

    @classmethod
    def from_json(cls, text: str) -> Card:
        """Read what `to_json` wrote.

        Raises:
            PolicyFileError: It is something else.
        """
        try:
            saved = json.loads(text)
            if saved.get("format") != FORMAT:
                raise PolicyFileError(f"it has format {saved.get('format')!r}, and this version of Hurtle reads {FORMAT}")
            _check_sizes(saved)
            ports: dict[str, Any] = {name: tuple(_port(port) for port in saved.pop(name)) for name in ("inputs", "outputs")}
            card = cls(**saved, **ports)
            _check_card(card)
        except PolicyFileError:
            raise
        except Exception as error:  # Gymnasium's spaces raise many kinds
            raise PolicyFileError(f"what it says about its policy cannot be read ({type(error).__name__}: {error})") from None
        return card

    @property
    def spaces(self) -> tuple[spaces.Space, spaces.Space]:
        """The flat spaces of observations and actions."""
        return space_from_dict(self.observation_space), space_from_dict(self.action_space)

    @property
    def layouts(self) -> tuple[SpaceLayout | None, ActionLayout | None]:
        """How the env's own spaces lie in the flat ones; (None, None) where it was not emulated."""
        if self.structure is None:
            return None, None
        return layout_from_dict(self.structure["observation"]), ActionLayout(space_from_dict(self.structure["action"]))

    @property
    def states(self) -> tuple[Port, ...]:
        """The inputs that are the memory."""
        return tuple(port for port in self.inputs if port.name.startswith("state_in_"))


def _port(saved: dict[str, Any]) -> Port:
    name, dtype, shape = saved["name"], np.dtype(saved["dtype"]).name, tuple(int(n) for n in saved["shape"])
    if not isinstance(name, str) or min(shape, default=1) < 0:
        raise PolicyFileError(f"the tensor {name!r} has the shape {shape}")
    return Port(name, dtype, shape)


_TYPES: dict[str, Any] = {
    **dict.fromkeys(("env", "algorithm", "distribution", "initial_state", "hurtle", "sha256"), str),
    **dict.fromkeys(("env_parameters", "observation_space", "action_space"), dict),
    **dict.fromkeys(("steps", "seed"), int),
    **dict.fromkeys(("deterministic", "masked"), bool),
    **dict.fromkeys(("structure", "mlp"), dict | None),
    "mean_return": int | float | None,
    "commit": str | None,
}


def _check_sizes(saved: Any) -> None:
    """Refuse spaces that no memory holds, before they are made."""
    if isinstance(saved, list):
        for child in saved:
            _check_sizes(child)
    elif isinstance(saved, dict):
        for key, child in saved.items():
            sizes = child if isinstance(child, list) and key in ("shape", "n") else [child] if key in _MAXIMA else []
            sizes = [child] if saved.get("type") == "MultiBinary" and isinstance(child, int) else sizes
            numbers = [size for size in sizes if isinstance(size, int)]
            if any(number < 0 for number in numbers) or math.prod(numbers) > MAX_NUMBERS:
                raise PolicyFileError(f"it speaks of arrays of {numbers} numbers")
            _check_sizes(child)


def _check_card(card: Card) -> None:
    """Refuse a card that contradicts itself."""
    for name, kind in _TYPES.items():
        value = getattr(card, name)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise PolicyFileError(f"its {name} is {value!r:.80}")
    if card.initial_state != "zeros":
        raise PolicyFileError(f"its memory begins with {card.initial_state!r:.80}")
    names = [port.name for ports in (card.inputs, card.outputs) for port in ports]
    if len(set(names)) != len(names):
        raise PolicyFileError(f"its tensors {names} do not have names of their own")
    if card.distribution not in DISTRIBUTIONS:
        raise PolicyFileError(f"its distribution is {card.distribution!r:.80}")
    flat, _ = card.spaces
    layout, _ = card.layouts
    seen = [port for port in card.inputs if port.name == "obs" or port.name.startswith("obs.")]
    shapes = [tuple(flat.shape or ())]
    if seen and seen[0].name != "obs":
        shapes = [tuple(leaf.shape) for leaf in tree_leaves(layout.tree)] if layout is not None else []
    if not seen or [port.shape for port in seen] != shapes:
        raise PolicyFileError(f"its inputs {[port.name for port in card.inputs]} are not those of {flat}")
    after = [port for port in card.outputs if port.name.startswith("state_out_")]
    if [port.shape for port in after] != [port.shape for port in card.states]:
        raise PolicyFileError("the memory that goes in is not what comes out")
    if card.masked != any(port.name == "mask" and len(port.shape) == 1 for port in card.inputs):
        raise PolicyFileError(f"masked is {card.masked}, and its inputs say otherwise")


@dataclass(frozen=True)
class PolicyFile:
    """A file that was read and found whole.

    Attributes:
        path: Where it is.
        card: What it says about itself.
        content: What runs it: the bytes of an .onnx file; the members of a .pt2 file, packed anew.
        tensors: Its named constants, as far as the card's `mlp` names them.
    """

    path: Path
    card: Card
    content: bytes
    tensors: dict[str, np.ndarray]


def import_export_package(name: str) -> Any:
    """A package of the extra `export`.

    Raises:
        HurtleError: It is not installed.
    """
    try:
        return import_module(name)
    except ImportError as error:
        raise HurtleError(f'Exported policies need {name}: pip install "hurtle[export]" ({error}).') from None


def is_policy_file(path: Any) -> bool:
    """Whether a path has the ending of an exported policy."""
    return isinstance(path, str | Path) and Path(path).suffix in SUFFIXES


def read_policy_file(path: str | Path) -> PolicyFile:
    """Read an exported policy.

    Raises:
        PolicyFileError: It is missing, damaged, too large, or something else; says which.
    """
    path = Path(path)
    try:
        size = path.stat().st_size
        if not path.is_file() or not 0 < size <= MAX_BYTES:
            raise PolicyFileError(f"it has {size:,} bytes" if path.is_file() else "it is no file")
        content = path.read_bytes()
        read = _read_onnx if path.suffix == ".onnx" else _read_pt2
        card, tensors, content = read(content)
    except OSError as error:
        raise PolicyFileError(f"Cannot read {path}: {error.strerror or error}.") from None
    except PolicyFileError as error:
        raise PolicyFileError(f"{path} is no policy that Hurtle can load: {error}.") from None
    return PolicyFile(path, card, content, tensors)


# ONNX.


def _read_onnx(content: bytes) -> tuple[Card, dict[str, np.ndarray], bytes]:
    onnx = import_export_package("onnx")
    from google.protobuf.message import DecodeError

    model = onnx.ModelProto()
    try:
        model.ParseFromString(content)
    except (DecodeError, RuntimeError, ValueError):
        raise PolicyFileError("it is not ONNX, or it is damaged or cut off") from None
    if not model.graph.node:
        raise PolicyFileError("it is not ONNX, or it is damaged or cut off")
    written = {entry.key: entry.value for entry in model.metadata_props}
    if KEY not in written:
        raise PolicyFileError(f"its metadata has no entry {KEY!r}: it was cut off, or is not an export of Hurtle's")
    if len(written[KEY]) > MAX_CARD:
        raise PolicyFileError("what it says about its policy is too long")
    card = Card.from_json(written[KEY])
    if card.sha256 != onnx_hash(model, card):
        raise PolicyFileError("it is damaged, or was changed after its export (onnxruntime may still run it)")
    tensors = {tensor.name: tensor for tensor in model.graph.initializer}
    if any(tensor.data_location for tensor in _all_tensors(model.graph, *model.functions)):
        raise PolicyFileError("it keeps weights in other files")
    names = mlp_tensors(card.mlp)
    if not names <= tensors.keys():
        raise PolicyFileError(f"it lacks the tensors {sorted(names - tensors.keys())}")
    try:
        return card, {name: onnx.numpy_helper.to_array(tensors[name]) for name in names}, content
    except (ValueError, TypeError, KeyError) as error:
        raise PolicyFileError(f"its tensors cannot be read ({error})") from None


def _all_tensors(*graphs: Any) -> Iterator[Any]:
    """Every constant of graphs and functions, also of those inside their nodes."""
    for graph in graphs:
        yield from getattr(graph, "initializer", ())
        for sparse in getattr(graph, "sparse_initializer", ()):
            yield from (sparse.values, sparse.indices)
        for node in graph.node:
            for attribute in node.attribute:
                yield from (attribute.t, *attribute.tensors)
                for sparse in (attribute.sparse_tensor, *attribute.sparse_tensors):
                    yield from (sparse.values, sparse.indices)
                yield from _all_tensors(attribute.g, *attribute.graphs)


def onnx_hash(model: Any, card: Card) -> str:
    """Of the card, and of everything else but the metadata."""
    bare = type(model)()
    bare.CopyFrom(model)
    del bare.metadata_props[:]
    return _sealed(hashlib.sha256(bare.SerializeToString(deterministic=True)), card)


def _sealed(found: Any, card: Card) -> str:
    found.update(replace(card, sha256="").to_json().encode())
    return found.hexdigest()


def mlp_tensors(mlp: dict[str, Any] | None) -> set[str]:
    """The names of the tensors in a card's `mlp`."""
    if mlp is None:
        return set()
    try:
        names = [layer[part] for layer in mlp["layers"] for part in ("weight", "bias")] + [mlp["mean"], mlp["std"]]
        return {name for name in names if name is not None}
    except (KeyError, TypeError) as error:
        raise PolicyFileError(f"what it says about its layers cannot be read ({error})") from None


# torch.export: a zip archive. Its weights are plain bytes, but torch unpickles whatever else an archive may hold.

_SYMBOL = r"Symbol\('[a-z]{1,3}\d+'(?:, (?:positive|nonnegative|integer)=True)*\)"
_SAFE_EXPRESSION = re.compile(
    rf"(?:{_SYMBOL}|\b(?:Add|Mul|Integer|Max|Min|Mod|FloorDiv|oo|int_oo|\d{{1,18}})\b|\*(?!\*)|[-+/(), ])*"
)
"""Sizes of tensors as torch writes them: sums and products of symbols and integers. Powers could take forever."""
_SAFE_GUARD = re.compile(
    r"(?:L\['tensors'\]\[\d{1,4}\]\.size\(\)\[\d{1,2}\]|\b(?:\d{1,18}|and|or|not)\b|[=!<>]=|[<>]|\*(?!\*)|[-+/%() ])*"
)
"""What torch makes Python code of: comparisons of sizes."""
_SAFE_TARGET = re.compile(
    r"torch\.ops\.aten\.(?!from_file\b|save\b|_print\b|warn\b)\w+\.\w+|torch\.sym_\w+|"
    r"_operator\.(?:add|sub|mul|floordiv|truediv|mod|neg|eq|ne|lt|le|gt|ge|and_|or_|getitem)"
)
"""torch calls whatever is named, within the whole of torch and what that imports."""
_SAFE_TYPES = (None, "builtins.tuple", "builtins.list", "builtins.dict")
_SAFE_CONTEXTS = (None, "null", "[]")
"""Of containers; torch imports modules that others name."""
_MEMBERS = re.compile(
    r"data/weights/(?:weight_\d+|model_weights_config\.json)|data/constants/(?:tensor_\d+|model_constants_config\.json)|"
    r"data/sample_inputs/model\.pt|models/model\.json|\.data/(?:version|serialization_id)|"
    rf"extra/{re.escape(MEMBER)}|archive_format|archive_version|byteorder|version"
)


def _read_pt2(content: bytes) -> tuple[Card, dict[str, np.ndarray], bytes]:
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            if sum(entry.file_size for entry in archive.infolist()) > MAX_BYTES:
                raise PolicyFileError("it is too large when unpacked")
            if any(entry.compress_type != zipfile.ZIP_STORED for entry in archive.infolist()):
                raise PolicyFileError("its archive is compressed, which no export is")
            if archive.testzip() is not None:
                raise PolicyFileError("it is damaged")
            members = {name.split("/", 1)[-1]: name for name in archive.namelist()}
            if len(members) != len(archive.namelist()):
                raise PolicyFileError("its archive holds a member twice")
            if f"extra/{MEMBER}" not in members:
                raise PolicyFileError(f"its archive has no {MEMBER}: it is not an export of Hurtle's")
            card = Card.from_json(archive.read(members[f"extra/{MEMBER}"])[:MAX_CARD].decode())
            for short, name in members.items():
                _check_member(short, archive, name)
            if card.sha256 != pt2_hash(archive, card):
                raise PolicyFileError("it is damaged, or was changed after its export")
            return card, {}, _packed({short: archive.read(name) for short, name in members.items()})
    except PolicyFileError:
        raise
    except Exception:  # of zipfile, zlib, struct and json
        raise PolicyFileError("it is not a torch.export archive, or it is damaged or cut off") from None


def _packed(members: dict[str, bytes]) -> bytes:
    """An archive of these alone: torch must not find in the file what `zipfile` did not."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        for short, content in members.items():
            archive.writestr(f"archive/{short}", content)
    return buffer.getvalue()


def pt2_hash(archive: zipfile.ZipFile, card: Card) -> str:
    """Of the card, and of all other members but torch's random ids."""
    found = hashlib.sha256()
    for entry in sorted(archive.infolist(), key=lambda entry: entry.filename.split("/", 1)[-1]):
        short = entry.filename.split("/", 1)[-1]
        if short != f"extra/{MEMBER}" and not short.startswith(".data/"):
            found.update(short.encode() + b"\0" + hashlib.sha256(archive.read(entry)).digest())
    return _sealed(found, card)


def _check_member(short: str, archive: zipfile.ZipFile, name: str) -> None:
    """Refuse what torch would unpickle or evaluate while it reads the archive."""
    if not _MEMBERS.fullmatch(short):
        raise PolicyFileError(f"its archive holds {short!r}, which no policy needs")
    if short == "data/sample_inputs/model.pt":
        import torch

        try:
            torch.load(io.BytesIO(archive.read(name)), weights_only=True)
        except Exception:
            raise PolicyFileError("its example inputs are pickled objects, not tensors") from None
    elif short.endswith("_config.json"):
        for tensor, payload in json.loads(archive.read(name)).get("config", {}).items():
            if payload.get("use_pickle") or not re.fullmatch(r"(weight|tensor)_\d+", payload["path_name"]):
                raise PolicyFileError(f"its tensor {tensor!r} is pickled")
    elif short == "models/model.json":
        model = json.loads(archive.read(name))
        _check_graph(model)
        for guard in model.get("guards_code", ()):
            if not _SAFE_GUARD.fullmatch(guard):
                raise PolicyFileError(f"its graph holds the code {guard[:80]!r}")


def _check_graph(tree: Any) -> None:
    """Refuse what torch would evaluate, import or call, other than operations on tensors."""
    if isinstance(tree, list):
        for child in tree:
            _check_graph(child)
    elif isinstance(tree, dict):
        for key, child in tree.items():
            is_short = isinstance(child, str) and len(child) <= MAX_EXPRESSION
            if key == "expr_str" and not (is_short and _SAFE_EXPRESSION.fullmatch(child)):
                raise PolicyFileError(f"its graph holds the expression {str(child)[:80]!r}")
            if key == "target" and not (isinstance(child, str) and _SAFE_TARGET.fullmatch(child)):
                raise PolicyFileError(f"its graph calls {str(child)[:80]!r}")
            if key in ("as_operator", "as_custom_obj", "as_graph"):
                raise PolicyFileError(f"its graph holds {key} {str(child)[:80]!r}")
            if key in ("in_spec", "out_spec") and child is not None:
                _check_types(json.loads(child))
            _check_graph(child)


def _check_types(tree: Any) -> None:
    """Refuse containers that torch would import something for."""
    children = tree if isinstance(tree, list) else tree.get("children_spec", ()) if isinstance(tree, dict) else ()
    if isinstance(tree, dict) and (tree.get("type") not in _SAFE_TYPES or tree.get("context") not in _SAFE_CONTEXTS):
        raise PolicyFileError(f"its graph takes or gives a {str(tree.get('type'))[:80]!r} {str(tree.get('context'))[:80]!r}")
    for child in children:
        _check_types(child)
