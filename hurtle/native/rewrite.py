"""Turns the author's methods into functions that mean the same on every target.

method source → ast → `self.gravity` becomes a constant, `0.5` becomes `f4(0.5)`, `rng.random()` becomes `rng_random(rng)`,
reads of integer fields become 64-bit. Code that cannot be compiled is an error at the author's line.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from hurtle.native.bounds import Site
from hurtle.native.env import EnvSpec
from hurtle.native.rewrite_function import FunctionRewriter, Kinds

METHODS = ("reset", "step", "observe", "mask", "present")


@dataclass(frozen=True)
class Rewritten:
    """The functions of one env, ready to be written to a module or compiled in place."""

    functions: list[tuple[ast.FunctionDef, str]]
    """Each function with the author's file; line numbers are the author's."""
    tables: dict[str, np.ndarray]
    """Constant arrays by the names that the functions use."""
    sites: list[Site]
    """The checked indices, in the order of their numbers in compiled code."""
    writes_whole_obs: bool
    """Whether `observe` always sets every element, so that the observation need not be zeroed first."""


def rewrite(spec: EnvSpec, target: str) -> Rewritten:
    """Rewrite the author's methods and everything they call.

    Args:
        spec: The checked env.
        target: "cpu", "cuda", or "python", the uncompiled one, where `assert` stays and `obs` and `mask` keep their
            dimensions. In compiled code they are flat: `obs[y, x]` becomes `obs[y * width + x]`.

    Raises:
        EnvCodeError: Something cannot be compiled; names file, line and what to write instead.
    """
    program = Rewriting(spec, target)
    for name in METHODS:
        if (function := spec.method(name)) is not None:
            program.request(function, f"env_{name}")
    functions = []
    while program.waiting:
        function, name, kinds = program.waiting.pop(0)
        functions.append((FunctionRewriter(program, function, name, kinds).run(), function.__code__.co_filename))
    observe = next(function for function, _ in functions if function.name == "env_observe")
    return Rewritten(functions, program.tables, list(program.sites), _writes_all(observe, spec.obs_size))


class Rewriting:
    """State shared by the functions of one env: names in use, tables, functions still to be rewritten."""

    def __init__(self, spec: EnvSpec, target: str):
        self.spec = spec
        self.target = target
        self.sites: dict[Site, int] = {}
        self.flat_shapes = {"obs": spec.obs_shape, "mask": spec.mask_shape}
        self.names: dict[tuple[Callable, Kinds], str] = {}
        self.waiting: list[tuple[Any, str, Kinds]] = []
        self.tables: dict[str, np.ndarray] = {}
        self.table_names: dict[tuple, str] = {}

    def request(self, function: Callable, name: str, kinds: Kinds = ()) -> str:
        """The name of a function rewritten for arguments of these kinds."""
        key = (function, kinds)
        if key not in self.names:
            taken = set(self.names.values())
            unique, n = name, 2
            while unique in taken:
                unique, n = f"{name}_{n}", n + 1
            self.names[key] = unique
            self.waiting.append((function, unique, kinds))
        return self.names[key]

    def site(self, site: Site) -> int:
        """Register a checked index; returns its number."""
        return self.sites.setdefault(site, len(self.sites))

    def table(self, array: np.ndarray, name: str) -> str:
        """The name of a constant array in the generated code; equal arrays share one."""
        kept = np.ascontiguousarray(array.astype(np.float32) if array.dtype == np.float64 else array)
        key = (kept.dtype.str, kept.shape, kept.tobytes())
        if key not in self.table_names:
            self.table_names[key] = f"TABLE{len(self.tables)}_{name}"
            self.tables[self.table_names[key]] = kept
        return self.table_names[key]


def _writes_all(function: ast.FunctionDef, size: int) -> bool:
    """Whether a function assigns every element of flat `obs` on every path, and reads none."""
    obs = function.args.args[1].arg
    parts = [node for node in ast.walk(function) if isinstance(node, ast.Subscript) and getattr(node.value, "id", "") == obs]
    if any(isinstance(node.ctx, ast.Load) for node in parts):
        return False
    written = set()
    for statement in function.body:
        if isinstance(statement, ast.Assign):
            targets = [target for target in parts if target in statement.targets]
            written |= {target.slice.value for target in targets if isinstance(target.slice, ast.Constant)}
        elif isinstance(statement, ast.AugAssign) and statement.target not in parts:
            continue
        elif not isinstance(statement, ast.Pass):
            return False
    return written == set(range(size))
