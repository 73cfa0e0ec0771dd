"""Rewrites one subscript of an author's function: flat observations, 64-bit elements, checked indices.

`obs[y, x]` → `obs[_at(y, 10, 0) * 10 + _at(x, 10, 1)]`; `bounds.py` has `_at`. Constant indices are checked at compile time.
"""

from __future__ import annotations

import ast
import copy
from typing import TYPE_CHECKING, Any

import numpy as np

from hurtle.native.bounds import Site

if TYPE_CHECKING:
    from hurtle.native.rewrite_function import ArrayKind, FunctionRewriter


def rewrite_subscript(rewriter: FunctionRewriter, node: ast.Subscript) -> ast.expr:
    """The rewritten subscript."""
    if isinstance(node.value, ast.Name) and node.value.id in rewriter.flat_names:
        return _flat_element(rewriter, node, node.value)
    kind, shape, text = rewriter.array_kind(node.value), static_shape(rewriter, node.value), ast.unparse(node)
    indices = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
    sliced = any(isinstance(index, ast.Slice) for index in indices)
    if isinstance(node.ctx, ast.Store):
        if sliced:
            rewriter.fail(node, "assigns to a slice", "Write a loop.")
        if rewriter.array_value(node.value) is not None:
            rewriter.fail(
                node, f"writes to the table {ast.unparse(node.value)}", "Tables are constants; what changes is State."
            )
        if kind is not None and kind.is_part:
            rewriter.fail(node, f"writes to {text}, a part of another array", "Index the whole array instead.")
    value = rewriter.visit(node.value)
    new_indices: list[ast.expr] = []
    for axis, index in enumerate(indices):
        if isinstance(index, ast.Slice):
            new_indices.append(rewriter.visit(index))
            continue
        length: int | ast.expr
        if shape is not None:
            length = shape[axis] if axis < len(shape) else rewriter.fail(node, f"uses {text}", f"It has the shape {shape}.")
        elif rewriter.compiled and any(isinstance(part, ast.Call) for part in ast.walk(node.value)):
            return _get(rewriter, node, value, kind, text, indices)
        else:
            length = _length(value, axis, is_tuple=kind is None and len(indices) == 1)
        new_indices.append(_bounded(rewriter, node, text, axis, index, length))
    new = ast.Subscript(value, ast.Tuple(new_indices, ast.Load()) if len(indices) > 1 else new_indices[0], node.ctx)
    ast.copy_location(new, node)
    if isinstance(node.ctx, ast.Load) and kind is not None and kind.ndim == len(indices) and not sliced:
        return element(rewriter, new, kind.dtype, node)
    return new


def _get(
    rewriter: FunctionRewriter, node: ast.Subscript, value: ast.expr, kind: ArrayKind | None, text: str, indices: list[ast.expr]
) -> ast.expr:
    """An element of a call's result; the call must not be repeated to get its length."""
    if _constant(indices[0]) is not None and kind is None and len(indices) == 1:
        return ast.copy_location(ast.Subscript(value, rewriter.visit(indices[0]), node.ctx), node)  # of a tuple
    if isinstance(node.ctx, ast.Store) or len(indices) > 1:
        rewriter.fail(node, f"uses {text}", f"Give {ast.unparse(node.value)} a name first, and index that.")
    site = rewriter.program.site(Site(rewriter.file, node.lineno, rewriter.function.__qualname__, text, 0))
    arguments = [value, rewriter.visit(indices[0]), signed(site), *rewriter.fault_argument()]
    new = ast.copy_location(ast.Call(ast.Name("_get", ast.Load()), arguments, []), node)
    return element(rewriter, new, kind.dtype, node) if kind is not None and kind.ndim == 1 else new


def element(rewriter: FunctionRewriter, value: Any, dtype: np.dtype, node: ast.expr) -> ast.expr:
    """A read of one array element: integers are 64-bit, whatever they are stored in."""
    wide = {"i": "i8", "u": "i8", "b": "bool"}.get(dtype.kind)
    return value if wide is None else rewriter.cast(wide, value, node)


def static_shape(rewriter: FunctionRewriter, node: ast.expr) -> tuple[int, ...] | None:
    """The shape of a State array, a table, an argument of the engine or a constant tuple; None if not known at compile time."""
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == rewriter.state_name:
        field = rewriter.spec.fields.get(node.attr)
        return None if field is None or not field.shape else tuple(int(size) for size in field.shape)
    if isinstance(node, ast.Name) and node.id in rewriter.argument_shapes:
        return rewriter.argument_shapes[node.id]
    if isinstance(node, ast.Subscript) and (whole := static_shape(rewriter, node.value)) is not None:
        indices = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        if len(indices) < len(whole) and not any(isinstance(index, ast.Slice) for index in indices):
            return whole[len(indices) :]
        return None
    array = rewriter.array_value(node)
    return None if array is None else array.shape


def _flat_element(rewriter: FunctionRewriter, node: ast.Subscript, name: ast.Name) -> ast.expr:
    """`obs[i, j]` as an element of the flat array in compiled code."""
    shape, text = rewriter.program.flat_shapes[name.id], ast.unparse(node)
    indices = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
    if len(indices) != len(shape) or any(isinstance(index, ast.Slice) for index in indices):
        dims = ", ".join("ijkl"[: len(shape)])
        rewriter.fail(node, f"uses {text}", f"Index {name.id}, of shape {shape}, in full: {name.id}[{dims}].")
    bounded = [
        _bounded(rewriter, node, text, axis, index, size) for axis, (index, size) in enumerate(zip(indices, shape, strict=True))
    ]
    new: Any
    if rewriter.program.target == "python":
        new = ast.Subscript(name, ast.Tuple(bounded, ast.Load()) if len(bounded) > 1 else bounded[0], node.ctx)
    else:
        flat = bounded[0]
        for index, size in zip(bounded[1:], shape[1:], strict=True):
            flat = ast.BinOp(ast.BinOp(flat, ast.Mult(), _unsigned(size)), ast.Add(), index)
        new = ast.Subscript(name, flat, node.ctx)
    ast.copy_location(new, node)
    if isinstance(node.ctx, ast.Store):
        return new
    return element(rewriter, new, np.dtype(np.bool_) if name.id == "mask" else rewriter.spec.observation_space.dtype, node)


def _bounded(
    rewriter: FunctionRewriter, node: ast.Subscript, text: str, axis: int, index: ast.expr, length: int | ast.expr
) -> ast.expr:
    """One checked index: a constant is checked now, anything else by `_at` at run time."""
    fixed = _constant(index)
    if fixed is not None and isinstance(length, int):
        if not -length <= fixed < length:
            rewriter.fail(
                node,
                f"uses {text}",
                f"Axis {axis} of {ast.unparse(node.value)} has length {length}: the last index is {length - 1}.",
            )
        place = fixed % length
        flat = isinstance(node.value, ast.Name) and node.value.id in rewriter.flat_names
        several = isinstance(node.slice, ast.Tuple)
        return ast.copy_location(_unsigned(place) if flat and several and rewriter.compiled else ast.Constant(place), index)
    if not rewriter.compiled or (fixed is not None and rewriter.array_kind(node.value) is None):
        return rewriter.visit(index)  # plain Python checks it; so does the compiler for a constant index of a tuple
    known = length if isinstance(length, int) else None
    site = rewriter.program.site(Site(rewriter.file, node.lineno, rewriter.function.__qualname__, text, axis, known))
    size = signed(length) if isinstance(length, int) else length
    arguments = [rewriter.visit(index), size, signed(site), *rewriter.fault_argument()]
    return ast.copy_location(ast.Call(ast.Name("_at", ast.Load()), arguments, []), index)


def _length(value: ast.expr, axis: int, is_tuple: bool) -> ast.expr:
    """An expression for the length of one axis of an array, or of what may be a tuple."""
    again = copy.deepcopy(value)
    if is_tuple:
        return ast.Call(ast.Name("len", ast.Load()), [again], [])
    return ast.Subscript(ast.Attribute(again, "shape", ast.Load()), ast.Constant(axis), ast.Load())


def _constant(index: ast.expr) -> int | None:
    """The value of an index written as a literal."""
    if isinstance(index, ast.UnaryOp) and isinstance(index.op, ast.USub):
        inner = _constant(index.operand)
        return None if inner is None else -inner
    is_int = isinstance(index, ast.Constant) and type(index.value) is int
    return index.value if is_int else None  # type: ignore[attr-defined]


def signed(value: int) -> ast.expr:
    """A number whose type does not depend on its value: Numba compiles a function once more for each plain 0, 1 or 2."""
    return ast.Call(ast.Name("i8", ast.Load()), [ast.Constant(value)], [])


def _unsigned(value: int) -> ast.expr:
    return ast.Call(ast.Name("U64", ast.Load()), [ast.Constant(value)], [])
