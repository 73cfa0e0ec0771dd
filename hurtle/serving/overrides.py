"""`Overrides`: what a client may send when it loads a model: `config`, and files if the server allows them.

parameters → `Overrides` → (files → a private folder while the model is loaded). Loads nothing itself.
"""

from __future__ import annotations

import base64
import binascii
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hurtle.errors import ServingError
from hurtle.serving.config import ServeConfig
from hurtle.serving.layout import Source, source_of
from hurtle.serving.model_config import read_config
from hurtle.serving.status import invalid

MODEL_FILE = "model.onnx"
"""ONNX only: TorchScript and torch.export archives are programs, which a client must not send."""
MAX_FILES = 16
_FILE = "file:"
_PATH = re.compile(r"([0-9]{1,18})/([A-Za-z0-9_][A-Za-z0-9_.\-]{0,127})")


@dataclass(frozen=True)
class Overrides:
    """What a client sent, as plain values that can go to other processes."""

    options: dict[str, Any] = field(default_factory=dict)
    """Changed fields of `ModelOptions`."""
    has_config: bool = False
    """Whether a client sends these options now; otherwise an earlier load set them."""
    described: dict[str, Any] = field(default_factory=dict)
    """What the client says the model is, as fields of a ModelConfig."""
    version: str = ""
    """The version of the files."""
    files: dict[str, bytes] = field(default_factory=dict)
    """Files by name; if there are any, they are the whole model."""


def read_overrides(name: str, parameters: Mapping[str, Any], config: ServeConfig) -> Overrides:
    """Parse the parameters of a load.

    Raises:
        ServingError: They are wrong, or files are not allowed.
    """
    sent = {key.removeprefix(_FILE): value for key, value in parameters.items() if key.startswith(_FILE)}
    for key in parameters:
        if key != "config" and not key.startswith(_FILE):
            raise invalid(f"Loading takes the parameters config and file:VERSION/NAME, got {key!r:.80}.")
    text = parameters.get("config")
    if text is not None and not isinstance(text, str):
        raise invalid("config: expected the JSON of a ModelConfig as text, got something else.")
    if sent:
        _check_allowed(config)
        if text is None:
            raise invalid("Files need a config too, as in Triton; {} will do.")
    options, described = read_config(text, config.for_model(name)) if text is not None else ({}, {})
    if not sent:
        return Overrides(options, text is not None, described)
    version, files = _read_files(sent, config.max_message_bytes)
    return Overrides(options, True, described, version, files)


def _check_allowed(config: ServeConfig) -> None:
    if not config.allow_file_overrides:
        raise ServingError(
            "permission_denied", "This server takes no model files from clients; --allow-file-overrides enables that."
        )
    if config.processes > 1:
        raise ServingError("failed_precondition", "Files from clients need --processes 1: only one process would have them.")


def _read_files(sent: Mapping[str, Any], most: int) -> tuple[str, dict[str, bytes]]:
    if len(sent) > MAX_FILES:
        raise invalid(f"Expected at most {MAX_FILES} files, got {len(sent)}.")
    versions, files = set(), {}
    for path, value in sent.items():
        match = _PATH.fullmatch(path)
        if match is None:
            raise invalid(f"file:{path!r:.100}: expected VERSION/NAME, such as 1/{MODEL_FILE}, without other folders.")
        versions.add(match[1])
        files[match[2]] = _content(path, value)
    if len(versions) != 1:
        raise invalid(f"Expected files of one version, got {', '.join(sorted(versions))[:100]}.")
    if MODEL_FILE not in files:
        raise invalid(f"Expected a file {MODEL_FILE}, the only kind that clients may send, got {', '.join(files)[:200]}.")
    if (size := sum(map(len, files.values()))) > most:
        raise ServingError("resource_exhausted", f"Expected files of at most {most:,} bytes together, got {size:,}.")
    return versions.pop(), files


def _content(path: str, value: Any) -> bytes:
    """The bytes of a file: raw over gRPC, base64 in JSON."""
    if isinstance(value, bytes):
        return value
    try:
        return base64.b64decode(value, validate=True)
    except (TypeError, ValueError, binascii.Error):
        raise invalid(f"file:{path}: expected base64, got something else.") from None


@contextmanager
def written(overrides: Overrides) -> Iterator[dict[str, Source]]:
    """Write the client's files to a folder that only this user can read, until the model is loaded; yields sources by version.

    Raises:
        ServingError: They cannot be written.
    """
    root = None
    try:
        try:
            root = Path(tempfile.mkdtemp(prefix="hurtle-load-"))
            for name, content in overrides.files.items():
                descriptor = os.open(root / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
                with open(descriptor, "wb") as file:  # noqa: PTH123
                    file.write(content)
        except OSError as error:
            raise ServingError("resource_exhausted", f"The files cannot be kept: {error.strerror}.") from None
        yield {overrides.version: source_of(root / MODEL_FILE, [root / name for name in overrides.files])}
    finally:
        if root is not None:
            shutil.rmtree(root, ignore_errors=True)
