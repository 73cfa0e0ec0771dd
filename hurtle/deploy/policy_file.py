"""`PolicyFile`: an exported policy that was read and found whole, whatever its format.

path → bytes → onnx_file.py or pt2_file.py → card, tensors, what a runtime gets. Runs nothing of what a file holds.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hurtle.deploy.card import Card
from hurtle.deploy.onnx_file import read_onnx
from hurtle.deploy.pt2_file import read_pt2
from hurtle.errors import PolicyFileError

MAX_BYTES = {".onnx": 2**31 - 1, ".pt2": 1 << 29}
"""By the ending: what a protobuf can hold; and 128 million weights, as an archive is taken apart in memory."""


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

    @classmethod
    def of(cls, path: Path, content: bytes) -> PolicyFile:
        """What the bytes of a file hold.

        Raises:
            PolicyFileError: It is something else; names the path and says what.
        """
        try:
            if path.suffix == ".onnx":
                card, tensors = read_onnx(content)
                return cls(path, card, content, tensors)
            card, packed = read_pt2(content)
            return cls(path, card, packed, {})
        except PolicyFileError as error:
            raise PolicyFileError(f"{path} is no policy that Hurtle can load: {error}.") from None


def is_policy_file(path: Any) -> bool:
    """Whether a path has the ending of an exported policy."""
    return isinstance(path, str | Path) and Path(path).suffix in MAX_BYTES


def read_policy_file(path: str | Path) -> PolicyFile:
    """Read an exported policy.

    Raises:
        PolicyFileError: It is missing, damaged, too large, or something else; says which.
    """
    path = Path(path)
    try:
        size, limit = path.stat().st_size, MAX_BYTES[".onnx" if path.suffix == ".onnx" else ".pt2"]
        if not path.is_file() or not 0 < size <= limit:
            what = f"it has {size:,} bytes, of at most {limit:,}" if path.is_file() else "it is no file"
            raise PolicyFileError(f"{path} is no policy that Hurtle can load: {what}.")
        content = path.read_bytes()
    except OSError as error:
        raise PolicyFileError(f"Cannot read {path}: {error.strerror or error}.") from None
    return PolicyFile.of(path, content)
