"""What env code may contain: the statements, expressions and functions that mean the same on every target.

Everything else is an error at the author's line; `rewrite.py` applies these tables.
"""

from __future__ import annotations

import ast
import builtins
import linecache
import math
from collections.abc import Callable
from typing import Any

import numpy as np

ENGINE_ARGUMENTS = {"state", "rng", "obs", "mask", "present", "reward", "terminated"}
"""Arguments that a method writes into and must not reassign: `obs = …` would have no effect outside it."""
RESERVED = {"f4", "i8", "np", "math", "U64", "_at", "_get", "_fault"}
STATEMENTS = (
    *(ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Expr, ast.Assert),
    *(ast.If, ast.While, ast.For, ast.Break, ast.Continue, ast.Return, ast.Pass),
)
EXPRESSIONS = (
    *(ast.BoolOp, ast.BinOp, ast.UnaryOp, ast.IfExp, ast.Compare, ast.Call, ast.Constant, ast.Attribute, ast.Subscript),
    *(ast.Name, ast.Tuple, ast.Slice),
)
WORDS = {
    "ListComp": "a list comprehension",
    "List": "a list",
    "Dict": "a dict",
    "JoinedStr": "an f-string",
    "Lambda": "a lambda",
    "Try": "try/except",
    "With": "a with block",
    "FunctionDef": "a function inside a method",
    "Yield": "yield",
    "GeneratorExp": "a generator expression",
    "NamedExpr": "an assignment expression",
    "Raise": "raise",
    "Starred": "a starred argument",
    "Import": "an import inside a method",
    "ImportFrom": "an import inside a method",
    "Delete": "del",
    "Match": "match",
    "Set": "a set",
    "SetComp": "a set comprehension",
    "DictComp": "a dict comprehension",
}
DEBUG_CALLS = {"print", "breakpoint"}
"""Calls that run on the Python target and are dropped from compiled code, like `assert`."""
BUILTINS = {"abs", "min", "max", "range", "len", "bool", "round"}
TO_INTEGER = {math.floor, math.ceil}
TO_BOOL = {math.isnan, math.isinf, math.isfinite}
RNG_DEFAULTS = {"uniform": (0.0, 1.0), "normal": (0.0, 1.0)}
NUMPY_TO_MATH: dict[Any, Callable] = {
    np.sin: math.sin,
    np.cos: math.cos,
    np.tan: math.tan,
    np.sqrt: math.sqrt,
    np.exp: math.exp,
    np.log: math.log,
    np.tanh: math.tanh,
    np.arctan2: math.atan2,
    np.abs: builtins.abs,
    np.minimum: builtins.min,
    np.maximum: builtins.max,
}

RNG_ALIASES = {
    **dict.fromkeys(("randint", "randrange", "random_integers"), "integers(low, high), which never gives high"),
    **dict.fromkeys(("rand", "random_sample", "sample", "ranf"), "random()"),
    **dict.fromkeys(("randn", "gauss", "normalvariate", "standard_normal"), "normal(mean, std)"),
    **dict.fromkeys(("permutation", "permuted"), "shuffle(array)"),
    "choices": "choice(array)",
}
"""The names of `Rng` for methods of Python's and NumPy's generators."""


def statements_of(function: ast.AST) -> list[ast.stmt]:
    """The statements of a function, itself first; expressions, most of a tree, hold none."""
    found: list[Any] = [function]
    for node in found:  # grows
        for field in ("body", "orelse", "finalbody", "handlers", "cases"):
            found += getattr(node, field, ())
    return [node for node in found if isinstance(node, ast.stmt)]


def known_calls() -> str:
    """Everything that env code may call."""
    from hurtle.native import dtypes
    from hurtle.native.rng import METHODS

    plain = sorted({*BUILTINS, "int", "float"})
    casts = [name for name, kind in vars(dtypes).items() if isinstance(kind, dtypes.FieldType)]
    arrays = sorted(f"np.{function.__name__}".replace("absolute", "abs") for function in (*NUMPY_TO_MATH, np.clip))
    random = sorted(f"rng.{method}" for method in METHODS)
    debugging = sorted(DEBUG_CALLS)
    listed = ", ".join(("math.*", *plain, *casts, *arrays, *random))
    return f"{listed}, your own functions, self.method(…); and, uncompiled only, {' and '.join(debugging)}"


def code_message(file: str, line: int, where: str, problem: str, fix: str) -> str:
    """A message with file, line number, the line itself, the problem, and a fix."""
    text = linecache.getline(file, line).strip()
    return f"{file}:{line}: {where} {problem}.\n    {text}\n{fix}"
