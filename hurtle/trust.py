"""Who may run code: a checkpoint, an export or a TOML file may name some, but only the user allows it to run.

what a file names → which of it is code → trust=True, or this user's signature, or else `TrustError`. Resolves no name and
imports nothing. Names in the user's own call or command line never come here.

A run is signed when it is written: an HMAC over the names of its code, the files behind them and the env's parameters, with a
key that only this user can read. The contents of those files are not signed, so that you can edit your policy and resume.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import importlib.util
import json
import os
import re
import secrets
import site
import stat
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hurtle.errors import TrustError
from hurtle.references import absolute_reference, is_reference

SIGNATURE = "signature"
"""The setting that holds it, in checkpoints and in config.toml."""
_PARAMETERS = "env_parameters"
_UNSAFE = "unsafe"
_KEY_BYTES = 32
_OF_THIS_PROCESS = secrets.token_bytes(_KEY_BYTES)  # where no key can be kept: what this process wrote is still the user's own
_INSTEAD = {"env": "env=MyEnv", "policy": "policy=MyPolicy", _PARAMETERS: "env_parameters={…}", _UNSAFE: "unsafe=False"}


def check_code(source: Any, words: Mapping[str, Any], trusted: bool, signature: Any = None) -> None:
    """Refuse code that a file names, unless the user trusts it.

    Args:
        source: The file.
        words: The settings of the file that are about to be used: `env`, `policy`, `env_parameters` and `unsafe` are looked at.
        trusted: The user said so, or `is_signed`.
        signature: The one that the file has, if any, for the message.

    Raises:
        TrustError: Names the file, the code, and how to allow it.
    """
    named = {} if trusted else _code_in(words)
    if not named:
        return
    if named.keys() & _IS_FREE.keys():
        does = "names code that is in no installed package"
    elif named.keys() == {_UNSAFE} or (_PARAMETERS in named and named[_PARAMETERS].get(_UNSAFE, False) is not False):
        does = "switches off the bounds checks of native envs"
    else:
        does = "names a file or module for its env"
    listed = ", ".join(f"{word} = {value!r:.200}" for word, value in named.items())
    instead = ", ".join(_INSTEAD[word] for word in named)
    _, problem = _key()
    has = "this file has none" if signature is None else "this file is signed, but not with your present key, or was changed"
    raise TrustError(
        f"{source} {does}: {listed}. Nothing was run, since a file can come from anybody. In Python, pass your own instead "
        f"({instead}); or, if you trust whoever made the file, say trust=True, on the command line --trust. Runs that you "
        f"train on this machine carry your signature and need neither; {has}{f' ({problem})' if problem else ''}."
    )


def signed(words: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a run with this user's signature among them, if there is any code for it to vouch for."""
    if not _code_in(words):
        return dict(words)
    key, _ = _key(create=True)
    return {**words, SIGNATURE: _sign(words, key)}


def is_signed(words: Mapping[str, Any], signature: Any) -> bool:
    """Whether this user signed these settings, and their names still mean the same files."""
    if not isinstance(signature, str):
        return False
    key, _ = _key()
    return hmac.compare_digest(signature.encode(), _sign(words, key).encode())


def _code_in(words: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the settings that can make code run that no installed package offers, or native code without its checks."""
    named = {word: words[word] for word, is_free in _IS_FREE.items() if word in words and not is_free(str(words[word]))}
    parameters = words.get(_PARAMETERS, {})
    if not _is_plain(list(parameters.values())) or parameters.get(_UNSAFE, False) is not False:  # native envs take it, too
        named[_PARAMETERS] = parameters
    if words.get(_UNSAFE):
        named[_UNSAFE] = words[_UNSAFE]
    return named


def _is_free_env(name: str) -> bool:
    """Whether resolving a name imports nothing but installed packages: names of Hurtle and Gymnasium, "minigrid:MiniGrid-…-v0".

    The standard library is not among them, since some of its modules act when they are imported, and neither are modules inside
    packages, since one can be a script.
    """
    if ":" not in name:
        return True
    found = _ID_OF_PACKAGE.fullmatch(name)
    place = _place_of(found["package"]) if found and not is_reference(name) and ".py" not in found["id"] else None
    return place is not None and any(place.is_relative_to(folder) for folder in _site_folders())


def _is_free_policy(name: str) -> bool:
    """Whether a name can only be that of a network of Hurtle's: one word. Building the policy refuses words that are none."""
    return name.isidentifier()


_IS_FREE = {"env": _is_free_env, "policy": _is_free_policy}
_ID_OF_PACKAGE = re.compile(r"(?P<package>[A-Za-z_]\w*):(?P<id>[\w./-]+-v\d+)", re.ASCII)


def _is_plain(value: Any) -> bool:
    """Whether a parameter is a number or a word such as "8x8": other text may be a path or a name that the env resolves."""
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float) or (isinstance(value, str) and not set(value) & set("./\\:"))


def _place_of(package: str) -> Path | None:
    """The file that importing a top-level package would run; does not import it."""
    try:
        found = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return None
    return Path(found.origin).resolve() if found is not None and found.has_location and found.origin else None


def _site_folders() -> list[Path]:
    return [Path(folder).resolve() for folder in (*site.getsitepackages(), site.getusersitepackages())]


def _sign(words: Mapping[str, Any], key: bytes) -> str:
    meant = [_meaning(str(words.get(word, ""))) for word in _IS_FREE]
    unchecked = [_UNSAFE] if words.get(_UNSAFE) else []
    text = json.dumps(["hurtle run", meant, words.get(_PARAMETERS, {}), *unchecked], sort_keys=True, default=repr)
    return hmac.new(key, text.encode(), hashlib.sha256).hexdigest()


def _meaning(name: str) -> str:
    """A name with the file that it means here: "helper.py:P" in another folder, or behind a link, is something else."""
    if is_reference(name):
        return absolute_reference(name)
    package, colon, _ = name.partition(":")
    return f"{name} of {_place_of(package)}" if colon and package.isidentifier() else name


# The key.


def key_file() -> Path:
    """The file of the key: in $HURTLE_DATA_DIR, else in the user's data folder.

    Raises:
        RuntimeError: The user has no home.
    """
    chosen = os.environ.get("HURTLE_DATA_DIR")
    data = Path(chosen) if chosen else Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share") / "hurtle"
    return data / "signing-key"


def _key(create: bool = False) -> tuple[bytes, str]:
    """The key, and why it is only that of this process, if it is."""
    try:
        file = key_file()
        if create and not file.exists():
            _create(file)
        return _read(file), ""
    except FileNotFoundError:
        return _OF_THIS_PROCESS, ""
    except (OSError, RuntimeError) as error:
        return _OF_THIS_PROCESS, f"your key cannot be used: {error}"


def _read(file: Path) -> bytes:
    with file.open("rb") as opened:
        status = os.fstat(opened.fileno())
        if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
            raise PermissionError(f"{file} must be yours, and readable by nobody else (chmod 600)")
        key = opened.read()
    if len(key) != _KEY_BYTES:
        raise OSError(f"{file} is damaged; remove it, and a new one is made")
    return key


def _create(file: Path) -> None:
    """Write a new key, whole or not at all; of two processes that do, the first one wins."""
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor, part = tempfile.mkstemp(dir=file.parent)  # only the user can read it
    try:
        with os.fdopen(descriptor, "wb") as opened:
            opened.write(secrets.token_bytes(_KEY_BYTES))
            opened.flush()
            os.fsync(opened.fileno())
        with contextlib.suppress(FileExistsError):
            os.link(part, file)
    finally:
        Path(part).unlink()
