"""Read untrusted .pt2 files (torch.export): the card, and an archive that torch can load without running foreign code.

bytes → zip members → known ones only, nothing pickled, imported or evaluated, known operations only → hash → card, repacked
members. Imports no torch.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import re
import struct
import zipfile
from typing import Any

from hurtle.deploy.card import MAX_NUMBERS, Card
from hurtle.deploy.operations import is_torch_operation
from hurtle.errors import PolicyFileError

MEMBER = "hurtle.json"
"""Name of the card among the archive's extra files."""
MAX_EXPRESSION = 500
"""Most characters of a size expression or guard; real ones have a few dozen."""
_COUNTS = ("arange", "eye", "linspace", "one_hot", "repeat_interleave")
"""Operations whose single integers are sizes; lists of integers are sizes in all operations."""
_SYMBOL = r"Symbol\('[a-z]{1,3}\d+'(?:, (?:positive|nonnegative|integer)=True)*\)"
_EXPRESSION = re.compile(
    rf"(?:{_SYMBOL}|\b(?:Add|Mul|Integer|Max|Min|Mod|FloorDiv|oo|int_oo|\d{{1,18}})\b|\*(?!\*)|[-+/(), ])*"
)
"""Tensor sizes as torch writes them: sums and products of symbols and integers. No powers, which could take forever."""
_GUARD = re.compile(
    r"(?:L\['tensors'\]\[\d{1,4}\]\.size\(\)\[\d{1,2}\]|\b(?:\d{1,18}|and|or|not)\b|[=!<>]=|[<>]|\*(?!\*)|[-+/%() ])*"
)
"""Comparisons of sizes, which torch compiles as Python code."""
_TYPES = (None, "builtins.tuple", "builtins.list", "builtins.dict")
_CONTEXTS = (None, "null", "[]")
"""Contexts of containers; torch would import modules that others name."""
_SAMPLES = "data/sample_inputs/model.pt"
"""torch unpickles this member, and requires it: it must be empty."""
_MEMBERS = re.compile(
    r"data/weights/(?:weight_\d+|model_weights_config\.json)|data/constants/(?:tensor_\d+|model_constants_config\.json)|"
    rf"{re.escape(_SAMPLES)}|models/model\.json|\.data/(?:version|serialization_id)|"
    rf"extra/{re.escape(MEMBER)}|archive_format|archive_version|byteorder|version"
)
_WRONG = (
    zipfile.BadZipFile, struct.error, EOFError, RuntimeError, ValueError,
    ArithmeticError, AttributeError, LookupError, TypeError,
)  # fmt: skip
"""What `zipfile` and `json` raise (RuntimeError: encrypted, or nested too deeply), and plain Python on unexpected JSON."""


def read_pt2(content: bytes) -> tuple[Card, bytes]:
    """The card of a file, and an archive of the checked members only, so that torch sees nothing that was not checked.

    Raises:
        PolicyFileError: The file is not a policy file; gives the reason.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            entries = archive.infolist()
            if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
                raise PolicyFileError("its archive is compressed, which no export is")
            if sum(entry.file_size for entry in entries) > len(content):
                raise PolicyFileError("its archive claims to hold more than it does")
            members = members_of(archive)
        if len(members) != len(entries):
            raise PolicyFileError("its archive holds a member twice")
        if f"extra/{MEMBER}" not in members:
            raise PolicyFileError(f"its archive has no {MEMBER}: it is not an export of Hurtle's")
        card = Card.from_json(members[f"extra/{MEMBER}"].decode())
        for name, member in members.items():
            _check_member(name, member)
    except _WRONG:
        raise PolicyFileError("it is not a torch.export archive, or it is damaged or cut off") from None
    if card.sha256 != pt2_hash(members, card):
        raise PolicyFileError("it is damaged, or was changed after its export")
    return card, _packed(members)


def members_of(archive: zipfile.ZipFile) -> dict[str, bytes]:
    """The members of an archive by name, without the common folder."""
    return {entry.filename.split("/", 1)[-1]: archive.read(entry) for entry in archive.infolist()}


def _packed(members: dict[str, bytes]) -> bytes:
    """An archive of these members, as torch reads it."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        for name, member in members.items():
            archive.writestr(f"archive/{name}", member)
    return buffer.getvalue()


def pt2_hash(members: dict[str, bytes], card: Card) -> str:
    """Hash of the card and of all other members, except torch's random ids."""
    found = hashlib.sha256()
    for name in sorted(members):
        if name != f"extra/{MEMBER}" and not name.startswith(".data/"):
            found.update(name.encode() + b"\0" + hashlib.sha256(members[name]).digest())
    return card.sealed(found)


def _check_member(name: str, member: bytes) -> None:
    """Refuse a member that torch would unpickle or evaluate while it reads the archive."""
    if not _MEMBERS.fullmatch(name):
        raise PolicyFileError(f"its archive holds {name[:80]!r}, which no policy needs")
    if name == _SAMPLES and member:
        raise PolicyFileError("its archive holds example inputs, which torch would unpickle")
    if name.endswith("_config.json"):
        for tensor, payload in json.loads(member).get("config", {}).items():
            if payload.get("use_pickle") or not re.fullmatch(r"(weight|tensor)_\d+", payload["path_name"]):
                raise PolicyFileError(f"its tensor {tensor[:80]!r} is pickled")
    elif name == "models/model.json":
        model = json.loads(member)
        _check_graph(model)
        for guard in model.get("guards_code", ()):
            if len(guard) > MAX_EXPRESSION or not _GUARD.fullmatch(guard):
                raise PolicyFileError(f"its graph holds the code {guard[:80]!r}")
        for node in model["graph_module"]["graph"]["nodes"]:
            _check_sizes(node)


def _check_graph(tree: Any) -> None:
    """Refuse anything that torch would evaluate, import or call, except operations on tensors."""
    if isinstance(tree, list):
        for child in tree:
            _check_graph(child)
    elif isinstance(tree, dict):
        for key, child in tree.items():
            is_short = isinstance(child, str) and len(child) <= MAX_EXPRESSION
            if key == "expr_str" and not (is_short and _EXPRESSION.fullmatch(child)):
                raise PolicyFileError(f"its graph holds the expression {str(child)[:80]!r}")
            if key == "target" and not (isinstance(child, str) and is_torch_operation(child)):
                raise PolicyFileError(f"its graph has the operation {str(child)[:80]!r}, which no policy file may have")
            if key in ("as_operator", "as_custom_obj", "as_graph"):
                raise PolicyFileError(f"its graph holds {key} {str(child)[:80]!r}")
            if key in ("in_spec", "out_spec") and child is not None:
                _check_types(json.loads(child))
            _check_graph(child)


def _check_sizes(node: dict[str, Any]) -> None:
    """Refuse an operation that allocates more memory than any policy needs."""
    name = node["target"].split(".")[-2]
    for argument in node["inputs"]:
        kind, value = next(iter(argument["arg"].items()))
        sizes = value if kind in ("as_ints", "as_sym_ints") else []
        sizes = [value] if name in _COUNTS and kind in ("as_int", "as_sym_int", "as_float") else sizes
        numbers = [size.get("as_int", 1) if isinstance(size, dict) else size for size in sizes]
        magnitudes = (abs(float(number)) for number in numbers if number)
        if not math.prod(max(size, 1 / size) for size in magnitudes) <= MAX_NUMBERS:  # 1 / size: a small step
            raise PolicyFileError(f"its {name} has the sizes {numbers!r:.80}")


def _check_types(tree: Any) -> None:
    """Refuse containers for which torch would import a module."""
    children = tree if isinstance(tree, list) else tree.get("children_spec", ()) if isinstance(tree, dict) else ()
    if isinstance(tree, dict) and (tree.get("type") not in _TYPES or tree.get("context") not in _CONTEXTS):
        raise PolicyFileError(f"its graph takes or returns a {str(tree.get('type'))[:80]!r} {str(tree.get('context'))[:80]!r}")
    for child in children:
        _check_types(child)
