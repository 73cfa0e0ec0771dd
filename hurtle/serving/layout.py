"""The layout of model folders, name/version/model.*: finds the versions of a model, and explains what is wrong with a folder.

folder → versions, each with a `Source`. Loads nothing, and does not know what is loaded.
"""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from hurtle.serving.backends.registry import can_serve

NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,127}")
_VERSION = re.compile(r"[0-9]{1,18}")
Fingerprint = tuple[tuple[str, int, int], ...]


@dataclass(frozen=True)
class Source:
    """The files of one version of a model."""

    path: Path
    """The file for the backend."""
    fingerprint: Fingerprint
    """Changes when one of the version's files changes."""
    refusal: str = ""
    """The reason not to load the file, or an empty string."""


def source_of(path: Path, files: list[Path]) -> Source:
    """The source of a model's file and the files that belong to it."""
    found = []
    for file in files:
        with suppress(FileNotFoundError):  # removed since the folder was read
            stat = file.stat()
            found.append((file.name, stat.st_mtime_ns, stat.st_size))
    return Source(path, tuple(found))


def children_of(folder: Path) -> list[Path]:
    """The sorted contents of a folder; empty if the folder does not exist."""
    try:
        return sorted(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []


def is_model_folder(path: Path) -> bool:
    """Whether a folder holds versions of one model."""
    return any(child.is_dir() and _VERSION.fullmatch(child.name) for child in path.iterdir())


def versions_in(folder: Path, root: Path) -> dict[str, Source]:
    """The versions in a model's folder. Links to folders outside the root are ignored, links to such files are refused."""
    found = {}
    for child in children_of(folder) if folder.resolve().is_relative_to(root) else ():
        if not (_VERSION.fullmatch(child.name) and child.is_dir() and child.resolve().is_relative_to(root)):
            continue
        files = children_of(child)
        models = [path for path in files if path.name.startswith("model.")]
        known = [path for path in models if can_serve(path)]
        best = known or [path for path in models if path.suffix != ".json"] or models
        if best and (source := source_of(best[0], [path for path in files if path.is_file()])).fingerprint:
            if not best[0].resolve().is_relative_to(root):
                source = replace(source, refusal=f"{best[0]} is a link that leads out of the repository")
            found[child.name] = source
    return dict(sorted(found.items(), key=lambda item: int(item[0])))


def model_folders(root: Path) -> list[Path]:
    """The folders of a repository that should each hold a model; hidden ones are ignored."""
    return [child for child in children_of(root) if child.is_dir() and not child.name.startswith(".")]


def problem_of_root(root: Path) -> str:
    """The problem of a repository's own files, or an empty string."""
    loose = [child.name for child in children_of(root) if child.is_file() and can_serve(child)]
    return f"{root}: {_listed(loose)} in no model's folder; expected NAME/VERSION/model.onnx." if loose else ""


def problem_of(folder: Path, root: Path) -> str:
    """The problem of a model's folder and what was expected, or an empty string."""
    try:
        wrong = _wrong(folder, root)
    except OSError as error:
        wrong = f"it cannot be read ({error.strerror})"
    return f"{folder}: {wrong}; expected {folder.name}/VERSION/model.onnx, where VERSION is a number." if wrong else ""


def _wrong(folder: Path, root: Path) -> str:
    if not NAME.fullmatch(folder.name):
        return "this cannot be a model's name (letters, digits, _ . - only)"
    if not folder.resolve().is_relative_to(root):
        return "it is a link that leads out of the repository"
    found, children = versions_in(folder, root), children_of(folder)
    wrong = [_wrong_version(child, root, bool(found)) for child in children if child.is_dir() and child.name not in found]
    loose = [child.name for child in children if child.is_file() and can_serve(child)]
    if loose:
        wrong.append(f"{_listed(loose)} in no version's folder")
    if not found and not any(wrong):
        wrong.append("it has no versions" if children else "it is empty")
    return ", ".join(filter(None, wrong))


def _wrong_version(child: Path, root: Path, has_others: bool) -> str:
    """The problem of a folder that is no version but may be meant as one, or an empty string."""
    if not child.resolve().is_relative_to(root):
        return f"{child.name} is a link that leads out of the repository"
    names = [path.name for path in children_of(child)]
    if _VERSION.fullmatch(child.name):
        return f"{child.name} has no file model.*, but {_listed(names)}" if names else f"{child.name} is empty"
    is_meant = not has_others or any(name.startswith("model.") for name in names)
    return f"{child.name!r} is not a version number" if is_meant and not child.name.startswith(".") else ""


def _listed(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
