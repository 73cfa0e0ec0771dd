"""`PolicyFile`: the checked contents of an exported policy, in either format.

path → bytes → onnx_file.py or pt2_file.py → card, tensors, bytes for the runtime. Runs nothing that the file holds.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hurtle.deploy.card import Card
from hurtle.deploy.onnx_file import read_onnx
from hurtle.deploy.pt2_file import read_pt2
from hurtle.errors import HurtleError, PolicyFileError

MAX_BYTES = {".onnx": 2**31 - 1, ".pt2": 1 << 29}
"""Largest file by its ending: the limit of protobuf; and 128 million weights, as an archive is unpacked in memory."""


@dataclass(frozen=True)
class PolicyFile:
    """A file that was read and checked.

    Attributes:
        path: The file.
        card: Its metadata.
        content: What a runtime loads: the bytes of an .onnx file; the members of a .pt2 file, repacked.
        tensors: The constants that the card's `mlp` lists, by name.
    """

    path: Path
    card: Card
    content: bytes
    tensors: dict[str, np.ndarray]

    @classmethod
    def of(cls, path: Path, content: bytes) -> PolicyFile:
        """Check the bytes of a file.

        Raises:
            PolicyFileError: They are not a policy file; names the path and the reason.
        """
        try:
            if path.suffix == ".onnx":
                card, tensors = read_onnx(content)
                return cls(path, card, content, tensors)
            card, packed = read_pt2(content)
            return cls(path, card, packed, {})
        except PolicyFileError as error:
            raise PolicyFileError(f"{path} is not a policy that Hurtle can load: {error}.") from None


def is_policy_file(path: Any) -> bool:
    """Whether a path has the ending of an exported policy."""
    return isinstance(path, str | Path) and Path(path).suffix in MAX_BYTES


def check_ending(path: str | Path) -> Path:
    """The path of an export, if it has the ending of one.

    Raises:
        HurtleError: It has another ending.
    """
    if Path(path).suffix not in MAX_BYTES:
        raise HurtleError(f"The file's name must end in {' or '.join(MAX_BYTES)}, got {str(path)!r}.")
    return Path(path)


def read_policy_file(path: str | Path) -> PolicyFile:
    """Read an exported policy.

    Raises:
        PolicyFileError: It is missing, damaged, too large, or not a policy file; gives the reason.
    """
    path = Path(path)
    try:
        size, limit = path.stat().st_size, MAX_BYTES[".onnx" if path.suffix == ".onnx" else ".pt2"]
        if not path.is_file() or not 0 < size <= limit:
            what = f"it has {size:,} bytes, and must have 1 to {limit:,}" if path.is_file() else "it is not a file"
            raise PolicyFileError(f"{path} is not a policy that Hurtle can load: {what}.")
        content = path.read_bytes()
    except OSError as error:
        raise PolicyFileError(f"Cannot read {path}: {error.strerror or error}.") from None
    return PolicyFile.of(path, content)
