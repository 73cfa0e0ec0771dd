"""Writes settings as TOML text that `tomllib` reads back unchanged: a flat dict, and tables, those inside tables in one line.

dict → text. Knows nothing of what the settings mean.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from hurtle.errors import HurtleError


def to_toml(values: Mapping[str, Any]) -> str:
    """TOML text of `values`: strings, bools, ints, floats, lists of them, and dicts of these as tables.

    TOML has no null: None is omitted. Tuples are read back as lists.

    Example:
        >>> print(to_toml({"env": "cartpole", "hidden_sizes": (64, 64), "env_parameters": {"gravity": 1.6}}), end="")
        env = "cartpole"
        hidden_sizes = [64, 64]
        <BLANKLINE>
        [env_parameters]
        gravity = 1.6
    """
    tables = {key: value for key, value in values.items() if isinstance(value, Mapping)}
    text = _lines({key: value for key, value in values.items() if key not in tables}, "")
    for name, table in tables.items():
        text += f"{chr(10) if text else ''}[{_key(name)}]\n{_lines(table, f'{name}.')}"
    return text


def _lines(values: Mapping[str, Any], prefix: str) -> str:
    return "".join(f"{_key(key)} = {_value(value, prefix + key)}\n" for key, value in values.items() if value is not None)


def _key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else _string(key, key)


def _value(value: Any, where: str) -> str:
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return _string(value, where)
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_value(item, where) for item in value)}]"
    if isinstance(value, Mapping):
        return f"{{ {', '.join(f'{_key(key)} = {_value(item, where)}' for key, item in value.items())} }}"
    raise HurtleError(
        f"The setting {where} cannot be written as TOML: expected a string, bool, int, float or a list of them, "
        f"got {type(value).__name__} ({value!r})."
    )


def _string(text: str, where: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise HurtleError(f"The setting {where} cannot be written as TOML: {text!r} is not valid Unicode.") from error
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")  # JSON's escapes are valid TOML, except for DEL
