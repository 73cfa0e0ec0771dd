"""Checkpoints: a state dict in one file, written atomically, verified when read, and free of code.

state → temporary file → fsync → rename; file → digest checked → plain values. Knows nothing of what the state means.

A checkpoint is an ordinary `torch.save` zip whose comment is the SHA-256 of the rest. NumPy arrays, which torch refuses to load
safely, are stored as bytes with their dtype.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch

from hurtle.errors import CheckpointError, HurtleError
from hurtle.tracking.whole_files import replacing

FORMAT = 1
"""The version of the state dict's layout; files of other versions are rejected."""

_DIGEST = 64  # characters of a SHA-256
_NAME = re.compile(r"step-(\d+)\.pt")
_ARRAY = "__numpy_dtype__"  # the key that marks a dict as an array


def save_checkpoint(path: str | Path, state: Mapping[str, Any]) -> None:
    """Write `state` to `path` atomically: the file is complete and on disk, or, on any failure, unchanged.

    Args:
        path: The file; its folder must exist.
        state: Nested dicts, lists and tuples of tensors, NumPy arrays, numbers, strings, bytes and None. `format` is added.

    Raises:
        CheckpointError: The disk is full, the folder is not writable …, or the state contains other objects.
    """
    path = Path(path)
    plain = _to_plain({"format": FORMAT, **state}, "")
    try:
        with replacing(path) as file:
            _write(file, plain)
            file.flush()
            os.fsync(file.fileno())
        sync(path.parent)
    except OSError as error:
        raise CheckpointError(
            f"The checkpoint {path} could not be written: {error.strerror or error}. "
            "Earlier checkpoints are intact; free some space, or keep fewer with keep_checkpoints=1."
        ) from error


def load_checkpoint(path: str | Path) -> dict[str, Any]:
    """Read and verify a checkpoint; tensors are returned on the CPU, NumPy arrays as such. Runs no code from the file.

    Raises:
        CheckpointError: The file is missing, damaged, not a Hurtle checkpoint or of another version. The message suggests
            the newest older checkpoint in the folder that is intact.
    """
    path = Path(path)
    if not path.is_file():
        raise CheckpointError(f"There is no checkpoint file {path}.{_offer(path)}")
    if not is_whole(path):
        raise CheckpointError(
            f"{path} ({path.stat().st_size:,} bytes) is damaged or not a Hurtle checkpoint: its checksum does not match."
            f"{_offer(path)}"
        )
    try:
        state = _from_plain(torch.load(path, map_location="cpu", weights_only=True))
    except Exception as error:  # the checksum is right, but loading the contents would run code
        raise CheckpointError(
            f"{path} contains objects other than tensors and plain values, and Hurtle runs no code from checkpoints: {error}"
            f"{_offer(path)}"
        ) from error
    found = state.get("format") if isinstance(state, dict) else None
    if found != FORMAT:
        raise CheckpointError(
            f"{path} has checkpoint format {found!r}; this version of Hurtle reads format {FORMAT}. "
            f"Use the version of Hurtle that wrote it (about.json in the run folder names it).{_offer(path)}"
        )
    return state


def to_bytes(state: Mapping[str, Any]) -> bytes:
    """A state as `save_checkpoint` takes it, for another process."""
    with io.BytesIO() as file:
        torch.save(_to_plain(state, ""), file)
        return file.getvalue()


def from_bytes(content: bytes) -> dict[str, Any]:
    """The state that `to_bytes` packed; runs no code from it."""
    return _from_plain(torch.load(io.BytesIO(content), map_location="cpu", weights_only=True))


def is_whole(path: str | Path) -> bool:
    """Whether the file is an intact checkpoint: its checksum matches."""
    try:
        with Path(path).open("rb") as file:
            size = file.seek(0, os.SEEK_END) - _DIGEST
            return size > 0 and _digest(file, size) == file.read()
    except OSError:  # unreadable, or just removed by the run that wrote it
        return False


class Checkpoints:
    """The checkpoints of one run: the newest `keep` of `step-000000102400.pt` …, and `best.pt`.

    Args:
        folder: Their folder; created if missing.
        keep: Number of checkpoints to keep.
    """

    def __init__(self, folder: str | Path, keep: int = 3):
        if keep < 1:
            raise HurtleError(f"keep must be at least 1, so that there is a checkpoint to resume from; got {keep}.")
        self.folder, self.keep = Path(folder), keep

    def save(self, step: int, state: Mapping[str, Any], best: bool = False) -> Path:
        """Write the state after `step` steps; returns the file.

        Args:
            step: Steps so far. Removes checkpoints of later steps, left over if the run was resumed from an earlier one.
            state: As for `save_checkpoint`.
            best: Write `best.pt` instead, which is not removed later.
        """
        path = self.folder / ("best.pt" if best else f"step-{step:012}.pt")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CheckpointError(f"The checkpoint folder {self.folder} could not be created: {error.strerror}.") from error
        save_checkpoint(path, state)
        if not best:
            self._remove_superseded(step)
        return path

    def all(self) -> list[Path]:
        """The checkpoints by step, oldest first, without `best.pt`."""
        return _by_step(self.folder)

    def latest(self) -> Path | None:
        """The newest intact checkpoint, or None; reports damaged ones on standard error."""
        for path in reversed(self.all()):
            if is_whole(path):
                return path
            print(f"hurtle: {path} is damaged; looking for an older one.", file=sys.stderr)
        return None

    def _remove_superseded(self, step: int) -> None:
        until_now = [path for path in self.all() if _step(path) <= step]
        abandoned = [path for path in self.all() if _step(path) > step]
        interrupted = self.folder.glob(".*.pt.tmp")  # left by processes killed while writing
        for path in (*until_now[: -self.keep], *abandoned, *interrupted):
            with contextlib.suppress(OSError):  # a leftover file must not end a run
                path.unlink()


class _Sink:
    """The file that torch writes to; keeps the first error instead of raising it inside torch's C++ code."""

    def __init__(self, file: BinaryIO):
        self._file = file
        self.error: OSError | None = None

    def write(self, data: bytes) -> int:
        if self.error is None:
            try:
                self._file.write(data)
            except OSError as error:
                self.error = error
        return len(data)

    def flush(self) -> None:
        """Do nothing: torch calls this, but the file is synced at the end."""


def _write(file: BinaryIO, plain: Any) -> None:
    sink: Any = _Sink(file)
    torch.save(plain, sink)
    if sink.error is not None:
        raise sink.error
    file.seek(-2, os.SEEK_END)  # a zip ends with the length of its comment, two bytes, and the comment
    file.write(_DIGEST.to_bytes(2, "little"))
    file.write(_digest(file, file.tell()))


def _digest(file: BinaryIO, size: int) -> bytes:
    """The SHA-256 of the first `size` bytes, in hexadecimal; leaves the file's position after them."""
    digest = hashlib.sha256()
    file.seek(0)
    while size > 0 and (piece := file.read(min(size, 1 << 20))):
        size -= len(piece)
        digest.update(piece)
    return digest.hexdigest().encode()


def sync(path: Path) -> None:
    """Flush a file, or the entries of a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _to_plain(value: Any, where: str) -> Any:
    """Convert `value` to types that torch loads with weights_only=True."""
    if isinstance(value, torch.Tensor):  # torch would save all of the memory that a view is a part of
        value = value.detach()
        return value.clone() if value.untyped_storage().nbytes() > value.nbytes else value
    if value is None or isinstance(value, (str, bytes)) or type(value) in (bool, int, float):
        return value
    if isinstance(value, np.generic) and value.dtype.kind in "biuf":
        return value.item()
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        data = torch.from_numpy(np.frombuffer(bytearray(value.tobytes()), np.uint8)) if value.nbytes else torch.empty(0)
        return {_ARRAY: np.lib.format.dtype_to_descr(value.dtype), "shape": value.shape, "data": data}
    if isinstance(value, Mapping):
        return {key: _to_plain(item, f"{where}.{key}" if where else str(key)) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_to_plain(item, f"{where}[{index}]") for index, item in enumerate(value))
    raise CheckpointError(
        f"{where} is a {type(value).__module__}.{type(value).__qualname__}; checkpoints contain only tensors, NumPy arrays, "
        "numbers, strings, bytes, None, and dicts, lists and tuples of them. Save what is needed to rebuild the object."
    )


def _from_plain(value: Any) -> Any:
    if isinstance(value, dict) and _ARRAY in value:
        dtype = np.lib.format.descr_to_dtype(value[_ARRAY])
        return np.frombuffer(bytearray(value["data"].numpy().tobytes()), dtype).reshape(value["shape"])
    if isinstance(value, dict):
        return {key: _from_plain(item) for key, item in value.items()}
    return type(value)(_from_plain(item) for item in value) if type(value) in (list, tuple) else value


def _step(path: Path) -> int:
    found = _NAME.fullmatch(path.name)
    return int(found[1]) if found else -1


def _by_step(folder: Path) -> list[Path]:
    return sorted((path for path in folder.glob("step-*.pt") if _step(path) >= 0), key=_step)


def _offer(path: Path) -> str:
    """A sentence that names the newest intact checkpoint older than `path`."""
    step = _step(path)
    older = [other for other in _by_step(path.parent) if step < 0 or _step(other) < step]
    good = next((other for other in reversed(older) if is_whole(other)), None)
    if good is None:
        return " There is no older one beside it."
    return f"\nAn older one is intact: {good}\nResume from it: hurtle train --resume {good}"
