"""Decides whether code named by a checkpoint, an export or a TOML file may run: only if the user allows it.

settings of a file → those that name code → trust=True, or this user's signature, or else `TrustError`. Resolves no names and
imports nothing. Names in the user's own call or command line are not checked.

A run is signed when it is written: an HMAC over the names of its code, the files they refer to and the env's parameters, with a
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
"""The setting that holds the signature, in checkpoints and in config.toml."""
_PARAMETERS = "env_parameters"
_UNSAFE = "unsafe"
_KEY_BYTES = 32
_OF_THIS_PROCESS = secrets.token_bytes(_KEY_BYTES)  # if no key can be stored, files of this process are still trusted
_INSTEAD = {
    "env": "env=MyEnv",
    "policy": "policy=MyPolicy",
    "algorithm": "algorithm=MyAlgorithm",
    _PARAMETERS: "env_parameters={…}",
    _UNSAFE: "unsafe=False",
}


def check_code(source: Any, settings: Mapping[str, Any], trusted: bool, signature: Any = None) -> None:
    """Refuse code that a file names, unless the user trusts it.

    Args:
        source: The file.
        settings: The settings of the file that will be used; `env`, `policy`, `algorithm`, `env_parameters` and `unsafe` are
            checked.
        trusted: Whether the user trusts the file, or `is_signed`.
        signature: The file's signature, if any, for the message.

    Raises:
        TrustError: The code is not trusted; the message names the file, the code, and how to allow it.
    """
    named = {} if trusted else _code_in(settings)
    if not named:
        return
    if named.keys() & _IS_FREE.keys():
        does = "names code outside the installed packages"
    elif named.keys() == {_UNSAFE} or (_PARAMETERS in named and named[_PARAMETERS].get(_UNSAFE, False) is not False):
        does = "switches off the bounds checks of native envs"
    else:
        does = "names a file or module for its env"
    listed = ", ".join(f"{name} = {value!r:.200}" for name, value in named.items())
    instead = ", ".join(_INSTEAD[name] for name in named)
    _, problem = _key()
    has = "this file has none" if signature is None else "this file is signed, but not with your current key, or was changed"
    raise TrustError(
        f"{source} {does}: {listed}. Nothing was run, since a file can come from anybody. In Python, pass your own instead "
        f"({instead}); or, if you trust the author of the file, pass trust=True, on the command line --trust. Runs that you "
        f"train on this machine carry your signature and need neither; {has}{f' ({problem})' if problem else ''}."
    )


def signed(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a run, with this user's signature added if they name code."""
    if not _code_in(settings):
        return dict(settings)
    key, _ = _key(create=True)
    return {**settings, SIGNATURE: _sign(settings, key)}


def is_signed(settings: Mapping[str, Any], signature: Any) -> bool:
    """Whether this user signed these settings and their names still refer to the same files."""
    if not isinstance(signature, str):
        return False
    key, _ = _key()
    return hmac.compare_digest(signature.encode(), _sign(settings, key).encode())


def _code_in(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that can run code from outside the installed packages, or native code without bounds checks."""
    named = {
        name: settings[name] for name, is_free in _IS_FREE.items() if name in settings and not is_free(str(settings[name]))
    }
    parameters = settings.get(_PARAMETERS, {})
    if not _is_plain(list(parameters.values())) or parameters.get(_UNSAFE, False) is not False:  # a native env takes it too
        named[_PARAMETERS] = parameters
    if settings.get(_UNSAFE):
        named[_UNSAFE] = settings[_UNSAFE]
    return named


def _is_free_env(name: str) -> bool:
    """Whether resolving a name imports only installed packages: names of Hurtle and Gymnasium, "minigrid:MiniGrid-…-v0".

    The standard library does not count, since importing some of its modules has side effects, nor do modules inside packages,
    which can be scripts.
    """
    if ":" not in name:
        return True
    found = _ID_OF_PACKAGE.fullmatch(name)
    place = _place_of(found["package"]) if found and not is_reference(name) and ".py" not in found["id"] else None
    return place is not None and any(place.is_relative_to(folder) for folder in _site_folders())


def _is_free_policy(name: str) -> bool:
    """Whether a name can only be one of Hurtle's networks: a single identifier. Building the policy refuses unknown ones."""
    return name.isidentifier()


_IS_FREE = {"env": _is_free_env, "policy": _is_free_policy, "algorithm": _is_free_policy}
_ID_OF_PACKAGE = re.compile(r"(?P<package>[A-Za-z_]\w*):(?P<id>[\w./-]+-v\d+)", re.ASCII)


def _is_plain(value: Any) -> bool:
    """Whether a parameter is a number or a string such as "8x8"; others may be paths or names that the env resolves."""
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


def _sign(settings: Mapping[str, Any], key: bytes) -> str:
    meant = [_meaning(str(settings.get(name, ""))) for name in ("env", "policy")]
    if "algorithm" in _code_in(settings):
        meant.append(_meaning(str(settings["algorithm"])))
    unchecked = [_UNSAFE] if settings.get(_UNSAFE) else []
    text = json.dumps(["hurtle run", meant, settings.get(_PARAMETERS, {}), *unchecked], sort_keys=True, default=repr)
    return hmac.new(key, text.encode(), hashlib.sha256).hexdigest()


def _meaning(name: str) -> str:
    """A name with the file that it refers to: "helper.py:P" in another folder, or behind a link, is different code."""
    if is_reference(name):
        return absolute_reference(name)
    package, colon, _ = name.partition(":")
    return f"{name} of {_place_of(package)}" if colon and package.isidentifier() else name


# The key.


def key_file() -> Path:
    """The file of the key: in $HURTLE_DATA_DIR, else in the user's data folder.

    Raises:
        RuntimeError: The user has no home folder.
    """
    chosen = os.environ.get("HURTLE_DATA_DIR")
    data = Path(chosen) if chosen else Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share") / "hurtle"
    return data / "signing-key"


def _key(create: bool = False) -> tuple[bytes, str]:
    """The key; and, if only this process's own key can be used, the reason."""
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
            raise PermissionError(f"{file} must belong to you and be readable by nobody else (chmod 600)")
        key = opened.read()
    if len(key) != _KEY_BYTES:
        raise OSError(f"{file} is damaged; remove it to get a new one")
    return key


def _create(file: Path) -> None:
    """Write a new key atomically; if two processes do so, the first one wins."""
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
