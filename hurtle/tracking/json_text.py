"""Metrics and results as standard JSON: NaN and infinities, which JSON lacks, become null."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np


def to_json(values: Mapping[str, Any], indent: int | None = None) -> str:
    r"""One line of JSON, or several with `indent`, ending with a newline; arrays become lists, other objects strings.

    Example:
        >>> to_json({"steps": 128, "return": float("nan")})
        '{"steps": 128, "return": null}\n'
    """
    try:
        return json.dumps(values, indent=indent, ensure_ascii=False, allow_nan=False) + "\n"  # nearly all lines of a run
    except (TypeError, ValueError):
        return json.dumps(_plain(values), indent=indent, ensure_ascii=False) + "\n"


def _plain(value: Any) -> Any:
    if type(value) is float:
        return value if math.isfinite(value) else None
    if isinstance(value, (np.generic, np.ndarray)):
        return _plain(value.tolist())
    if isinstance(value, float):
        return _plain(float(value))
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value if value is None or isinstance(value, (bool, int, str)) else str(value)
