"""Rewrites one of the author's functions: walks its tree and replaces what would mean something else when compiled.

names and attributes → constants, tables, State fields; calls → functions that exist on every target; all else is an error.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import math
import types
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from hurtle.errors import EnvCodeError, did_you_mean
from hurtle.native import rng as rng_library
from hurtle.native.bounds import Site
from hurtle.native.dtypes import FieldType
from hurtle.native.language import (
    BUILTINS,
    DEBUG_CALLS,
    ENGINE_ARGUMENTS,
    EXPRESSIONS,
    NUMPY_TO_MATH,
    RESERVED,
    RNG_ALIASES,
    RNG_DEFAULTS,
    STATEMENTS,
    TO_BOOL,
    TO_INTEGER,
    WORDS,
    code_message,
    known_calls,
    statements_of,
)
from hurtle.native.rewrite_subscript import element, rewrite_subscript, signed

if TYPE_CHECKING:
    from hurtle.native.rewrite import Rewriting


class ArrayKind(NamedTuple):
    """An array that env code reads, as far as it is known at compile time."""

    dtype: np.dtype
    ndim: int
    is_part: bool = False
    """Whether it is a slice with bounds: it may be empty, so writing to it is not safe."""


Kinds = tuple[ArrayKind | None, ...]
"""A function's arguments, as far as known: a helper is rewritten for each combination of arrays it is called with."""


class FunctionRewriter(ast.NodeTransformer):
    """The walk through one function; `run` returns it rewritten.

    Args:
        program: State shared by the functions of one env: names, tables, functions still to be rewritten.
        function: The author's function.
        name: Its name in the generated code; `env_…` and `self_…` are methods.
        kinds: Its arguments, as far as known.
    """

    def __init__(self, program: Rewriting, function: Any, name: str, kinds: Kinds):
        self.program = program
        self.kinds = kinds
        self.spec = program.spec
        self.function = function
        self.name = name
        self.file = function.__code__.co_filename
        self.is_method = name.startswith(("env_", "self_"))
        self.aliases: dict[str, ArrayKind] = {}
        self.argument_shapes: dict[str, tuple[int, ...]] = {}
        self.compiled = program.target != "python"
        captured = inspect.getclosurevars(function)
        self.outside: dict[str, Any] = {**vars(builtins), **function.__globals__, **captured.nonlocals}

    def run(self) -> ast.FunctionDef:
        tree = self.parse()
        arguments = tree.args
        if arguments.vararg or arguments.kwarg or arguments.kwonlyargs or arguments.defaults:
            self.fail(tree, "has *args, keyword-only arguments or defaults", "Use plain positional arguments.")
        self.self_name = arguments.args.pop(0).arg if self.is_method else None
        for argument, kind in zip_longest(arguments.args, self.kinds[: len(arguments.args)]):
            argument.annotation = None
            if kind is not None:
                self.aliases[argument.arg] = kind
        assigned = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
        self.locals = {a.arg for a in arguments.args} | assigned
        for word in sorted(self.locals & RESERVED):
            self.fail(tree, f"uses the reserved name {word!r}", "Choose another name.")
        self.arguments = {a.arg for a in arguments.args}
        self.flat_names = {"obs", "mask"} & self.arguments
        self.state_name = "state" if "state" in self.locals else None
        if self.name in ("env_reset", "env_step", "env_observe", "env_mask", "env_present"):
            self.state_name = arguments.args[0].arg
            given = self.given_arrays([a.arg for a in arguments.args])
            self.aliases |= {name: ArrayKind(dtype, len(shape)) for name, (shape, dtype) in given.items()}
            self.argument_shapes = {name: shape for name, (shape, _) in given.items() if name not in assigned}
        if self.name == "env_step":
            self.check_returns(tree)
        body = [statement for statement in tree.body if not _is_docstring(statement)]
        tree.body = self.statements(body) or [ast.copy_location(ast.Pass(), tree)]
        tree.name, tree.decorator_list, tree.returns = self.name, [], None
        arguments.args += [ast.arg(name.id) for name in self.fault_argument()]
        return ast.fix_missing_locations(tree)

    def given_arrays(self, arguments: list[str]) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
        """Shape and dtype of the arrays that the engine passes to a method, except `obs` and `mask`."""
        spec, agents = self.spec, (self.spec.num_agents,)
        given: list[tuple[tuple[int, ...], np.dtype]] = []
        if self.name == "env_step":
            given.append(((*spec.agents_shape, *spec.action_shape), spec.action_dtype))
            if spec.num_agents > 1:
                given += [(agents, np.dtype(np.float32)), (agents, np.dtype(np.bool_))]
        if self.name == "env_present":
            given.append((agents, np.dtype(np.bool_)))
        return {name: array for name, array in zip(arguments[1:], given, strict=False) if array[0]}

    def fault_argument(self) -> list[ast.Name]:
        """The last parameter of every function on a GPU: where it reports an index out of bounds."""
        return [ast.Name("_fault", ast.Load())] if self.program.target == "cuda" else []

    def parse(self) -> ast.FunctionDef:
        """The author's function as a tree whose line numbers are those of the author's file."""
        name = self.function.__name__
        if hasattr(self.function, "__wrapped__"):
            self.fail(self.function, f"({name}) has a decorator, which would be lost", "Call the function it wraps directly.")
        try:
            source = inspect.getsource(self.function)
        except (OSError, TypeError):
            raise EnvCodeError(
                f"The source of {self.function.__qualname__} is not available; put {self.spec.name} into a file."
            ) from None
        indented = source[0].isspace()
        first = self.function.__code__.co_firstlineno
        module = ast.parse("\n" * (first - 1 - indented) + ("if True:\n" + source if indented else source))
        tree = module.body[0].body[0] if indented else module.body[0]
        if not isinstance(tree, ast.FunctionDef) or tree.name != name:
            return self.fail(
                self.function, f"({name}) is no plain function of its file", "Define it with def, at its own line."
            )
        return tree

    # Errors ----------------------------------------------------------------------------------------------------------

    def fail(self, node: Any, problem: str, fix: str) -> Any:
        line = getattr(node, "lineno", self.function.__code__.co_firstlineno)
        raise EnvCodeError(code_message(self.file, line, self.function.__qualname__, problem, fix))

    def check_returns(self, tree: ast.FunctionDef) -> None:
        several = self.spec.num_agents > 1
        wanted = "whether the episode is over: return over" if several else "two values: return reward, terminated"
        returns = [node for node in statements_of(tree) if isinstance(node, ast.Return)]
        if not returns:
            self.fail(tree, "returns nothing", f"step must return {wanted}")
        for node in returns:
            size = len(node.value.elts) if isinstance(node.value, ast.Tuple) else 0 if node.value is None else None
            literal = isinstance(node.value, ast.Constant)
            if several and size is not None:
                self.fail(node, "returns the wrong thing", f"step of an env with several agents must return {wanted}")
            if not several and (size not in (2, None) or literal):
                got = "one value" if literal else f"{size} values"
                self.fail(node, f"returns {got}", f"step must return {wanted}")

    # Statements ------------------------------------------------------------------------------------------------------

    def statements(self, body: list[ast.stmt]) -> list[ast.stmt]:
        kept = []
        for statement in body:
            new = self.visit(statement)
            if new is not None:
                kept.append(new)
        return kept

    def visit(self, node: ast.AST) -> Any:
        if isinstance(node, ast.stmt) and not isinstance(node, STATEMENTS):
            self.unsupported(node)
        if isinstance(node, ast.expr) and not isinstance(node, EXPRESSIONS):
            self.unsupported(node)
        return super().visit(node)

    def unsupported(self, node: ast.AST) -> None:
        kind = type(node).__name__
        self.fail(
            node,
            f"uses {WORDS.get(kind, kind)}, which cannot be compiled",
            "Env code is numbers, State fields, if, while, for … in range(…) and calls; scratch space is a State field.",
        )

    def visit_Assert(self, node: ast.Assert) -> ast.stmt:
        if self.compiled:
            return ast.copy_location(ast.Pass(), node)
        return ast.copy_location(ast.Assert(test=self.visit(node.test), msg=node.msg), node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.stmt:
        if node.value is None:
            return self.fail(node, "declares a variable without a value", "Assign it a value.")
        plain = ast.Assign(targets=[node.target], value=node.value)
        return self.visit(ast.copy_location(plain, node))

    def visit_Assign(self, node: ast.Assign) -> ast.stmt:
        for target in node.targets:
            both_tuples = isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple)
            pairs = zip(target.elts, node.value.elts, strict=False) if both_tuples else [(target, node.value)]  # type: ignore[attr-defined]
            for name, value in pairs:
                if isinstance(value, ast.Name) and value.id in self.flat_names:
                    self.fail(node, f"gives {value.id} another name", f"Use {value.id} itself.")
                if isinstance(name, ast.Name) and (kind := self.array_kind(value)) is not None:
                    self.aliases[name.id] = kind
        if isinstance(node.value, ast.Tuple) and all(isinstance(target, ast.Tuple) for target in node.targets):
            node.value.elts = [self.visit(value) for value in node.value.elts]  # arrays are allowed: each gets its own name
            node.targets = [self.visit(target) for target in node.targets]
            return node
        return self.generic_visit(node)  # type: ignore[return-value]

    def visit_Return(self, node: ast.Return) -> ast.stmt:
        if node.value is not None and self.array_kind(node.value) is not None:
            self.fail(node, f"returns the array {ast.unparse(node.value)}", "Return numbers; pass arrays as arguments.")
        return self.generic_visit(node)  # type: ignore[return-value]

    def visit_Tuple(self, node: ast.Tuple) -> ast.expr:
        for value in node.elts:
            if isinstance(node.ctx, ast.Load) and self.array_kind(value) is not None:
                self.fail(node, f"puts the array {ast.unparse(value)} into a tuple", "Tuples hold numbers.")
        return self.generic_visit(node)  # type: ignore[return-value]

    def visit_For(self, node: ast.For) -> ast.stmt:
        call = node.iter
        if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "range"):
            self.fail(node, "loops over something that is not range(…)", "Loop over range(n) and index.")
        if node.orelse:
            self.fail(node, "uses for … else", "Use a flag.")
        return self.generic_visit(node)  # type: ignore[return-value]

    def visit_Expr(self, node: ast.Expr) -> ast.stmt | None:
        if _is_docstring(node):
            return None
        call = node.value
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id in DEBUG_CALLS - self.locals:
            return ast.copy_location(ast.Pass(), node) if self.compiled else node
        return self.generic_visit(node)  # type: ignore[return-value]

    # Expressions -----------------------------------------------------------------------------------------------------

    def visit_Constant(self, node: ast.Constant) -> ast.expr:
        if isinstance(node.value, bool | int | float):
            return self.embed(node.value, node)
        return self.fail(node, f"uses the constant {node.value!r}", "Env code knows only numbers.")

    def visit_Name(self, node: ast.Name) -> ast.expr:
        if node.id == self.self_name:
            return self.fail(node, "passes self around", "Use self.name or self.method(…) only.")
        if isinstance(node.ctx, ast.Store) and node.id in ENGINE_ARGUMENTS & self.arguments:
            self.fail(node, f"assigns to its argument {node.id!r}", f"Write its parts: {node.id}[…] = …, or state.field = …")
        if isinstance(node.ctx, ast.Store) or node.id in self.locals:
            return node
        return self.embed(self.lookup(node), node)

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        root = node.value
        if isinstance(root, ast.Name) and root.id == self.state_name:
            return self.state_field(node)
        if isinstance(node.ctx, ast.Store):
            return self.fail(node, f"assigns to {ast.unparse(node)}", "Only State fields change; parameters are constants.")
        if isinstance(root, ast.Name) and root.id in self.flat_names and node.attr in ("shape", "size"):
            shape = self.program.flat_shapes[root.id]
            return self.embed(shape if node.attr == "shape" else int(np.prod(shape)), node)
        if self.array_kind(root) is not None or (isinstance(root, ast.Name) and root.id in self.locals):
            if node.attr in ("shape", "size", "ndim"):
                return self.generic_visit(node)  # type: ignore[return-value]
            return self.fail(
                node,
                f"reads .{node.attr} of {ast.unparse(root)!r}",
                "Only State fields (of a parameter called `state`), and .shape and elements of arrays, can be read.",
            )
        return self.embed(self.lookup(node), node)

    def visit_Subscript(self, node: ast.Subscript) -> ast.expr:
        return rewrite_subscript(self, node)

    def visit_While(self, node: ast.While) -> ast.stmt:
        """On a GPU an index out of bounds does not raise, so it must end loops: one may be waiting for the value it reads."""
        new: Any = self.generic_visit(node)
        if self.program.target == "cuda":
            fine = ast.parse("_fault[0] == 0", mode="eval").body
            new.test = ast.copy_location(ast.BoolOp(ast.And(), [new.test, fine]), node.test)
        return new

    def visit_Call(self, node: ast.Call) -> ast.expr:
        func = node.func
        if isinstance(func, ast.Attribute) and isinstance(func.value, ast.Name) and func.value.id in self.locals:
            if func.value.id == "rng":
                return self.rng_call(node, func)
            self.fail(node, f"calls .{func.attr}() of {func.value.id!r}", "Only rng has methods; use functions.")
        if isinstance(func, ast.Name) and func.id in self.locals:
            self.fail(node, f"calls the variable {func.id!r}", "Call functions and methods by their name.")
        if isinstance(func, ast.Name) and func.id == "len" and getattr(node.args[0], "id", None) in self.flat_names:
            return self.embed(self.program.flat_shapes[node.args[0].id][0], node)  # type: ignore[attr-defined]
        if isinstance(func, ast.Attribute) and self.array_kind(func.value) is not None:
            self.fail(node, f"calls {ast.unparse(func)}", "Arrays have no methods here; write a loop over their elements.")
        if any(isinstance(part, ast.Call) for part in ast.walk(func)):
            self.fail(
                node,
                "calls the result of a call",
                "super() and function factories are not available; call self.method(…).",
            )
        return self.call(self.lookup(func), node)

    def call(self, target: Any, node: ast.Call) -> ast.expr:
        if node.keywords:
            self.fail(node, "uses keyword arguments", "Pass arguments by position.")
        target = NUMPY_TO_MATH[target] if isinstance(target, np.ufunc) and target in NUMPY_TO_MATH else target
        name = getattr(target, "__name__", "")
        kinds = tuple(self.array_kind(argument) for argument in node.args)
        self.check_flat(target, node)
        arguments = [self.visit(argument) for argument in node.args]

        def direct(name: str) -> ast.Call:
            func = ast.parse(name, mode="eval").body
            for part in ast.walk(func):
                ast.copy_location(part, node)
            return ast.copy_location(ast.Call(func=func, args=arguments, keywords=[]), node)

        if target is np.clip and len(arguments) == 3:
            inner = ast.Call(func=ast.Name("max", ast.Load()), args=arguments[:2], keywords=[])
            return ast.copy_location(ast.Call(func=ast.Name("min", ast.Load()), args=[inner, arguments[2]], keywords=[]), node)
        if target in (int, math.trunc):  # not i8: np.int64 takes no bool in compiled code
            return direct("int")
        if getattr(math, name, None) is target:
            result = direct(f"math.{name}")
            if target in TO_BOOL:
                return result
            return self.cast("i8" if target in TO_INTEGER else "f4", result, node)
        if target is float:
            return direct("f4")
        if isinstance(target, FieldType):
            target = target.scalar
        if isinstance(target, type) and issubclass(target, np.number | np.bool_):
            cast = direct(f"np.{target.__name__}")  # truncates to the type; arithmetic continues in 64 bits
            return element(self, cast, np.dtype(target), node)
        if name in BUILTINS and getattr(builtins, name) is target:
            return direct(name)
        target = getattr(target, "py_func", target)
        if isinstance(target, types.MethodType) and target.__self__ is self.spec.env:
            self.check_count(target, node)
            arguments += self.fault_argument()
            return direct(self.program.request(target.__func__, f"self_{target.__name__}", kinds))
        if isinstance(target, types.FunctionType):
            if target.__module__.split(".")[0] == "numpy":
                self.fail(node, f"calls {ast.unparse(node.func)}", "Use math functions on numbers, and loops over arrays.")
            self.check_count(target, node)
            arguments += self.fault_argument()
            return direct(self.program.request(target, f"fn_{target.__name__.strip('<>')}", kinds))
        return self.fail(
            node,
            f"calls {ast.unparse(node.func)}, which cannot be compiled",
            f"Known are {known_calls()}.",
        )

    def check_flat(self, target: Any, node: ast.Call) -> None:
        """Require that helpers call `obs` and `mask` by these names, and nothing else: their shapes are known by name."""
        target = getattr(target, "py_func", target)
        if not isinstance(target, types.FunctionType | types.MethodType):
            return
        for argument, parameter in zip(node.args, inspect.signature(target).parameters, strict=False):
            given = argument.id if isinstance(argument, ast.Name) and argument.id in self.flat_names else ""
            if given != (parameter if parameter in ("obs", "mask") else ""):
                fix = f"A helper's parameter is called {given or parameter} if, and only if, it is given {given or parameter}."
                self.fail(node, f"passes {ast.unparse(argument)} as {parameter}", fix)

    def check_count(self, target: Any, node: ast.Call) -> None:
        wanted = list(inspect.signature(target).parameters)
        if len(node.args) != len(wanted):
            self.fail(node, f"gives {target.__name__} {len(node.args)} arguments", f"It takes ({', '.join(wanted)}).")

    def rng_call(self, node: ast.Call, func: ast.Attribute) -> ast.expr:
        if func.attr not in rng_library.METHODS:
            known = ", ".join(f"rng.{method}" for method in sorted(rng_library.METHODS))
            alias = RNG_ALIASES.get(func.attr)
            hint = f"Here it is rng.{alias}." if alias else did_you_mean(func.attr, rng_library.METHODS)
            self.fail(node, f"calls rng.{func.attr}", f"{hint} There are {known}.")
        if node.keywords:
            self.fail(node, "uses keyword arguments", "Pass arguments by position.")
        arguments = [self.visit(argument) for argument in node.args]
        if func.attr == "integers" and len(arguments) == 1:
            arguments.insert(0, ast.copy_location(ast.Constant(0), node))
        missing = RNG_DEFAULTS.get(func.attr, ())[len(arguments) :]
        arguments += [self.embed(default, node) for default in missing]
        wanted = len(inspect.signature(getattr(rng_library, f"rng_{func.attr}")).parameters) - 1
        if len(arguments) != wanted:
            self.fail(node, f"gives rng.{func.attr} {len(node.args)} arguments", f"It takes {wanted}.")
        if self.compiled:
            arguments = [signed(a.value) if isinstance(a, ast.Constant) and type(a.value) is int else a for a in arguments]
        if func.attr == "choice" and self.compiled:
            site = Site(self.file, node.lineno, self.function.__qualname__, ast.unparse(node.args[0]), 0)
            arguments += [signed(self.program.site(site)), *self.fault_argument()]
        name = ast.Name(f"rng_{func.attr}", ast.Load())
        call = ast.copy_location(ast.Call(func=name, args=[func.value, *arguments], keywords=[]), node)
        chosen_from = self.array_kind(node.args[0]) if func.attr == "choice" else None
        return call if chosen_from is None else element(self, call, chosen_from.dtype, node)

    def state_field(self, node: ast.Attribute) -> ast.expr:
        kind = self.spec.fields.get(node.attr)
        if kind is None:
            self.fail(node, f"uses state.{node.attr}, but State has no such field", did_you_mean(node.attr, self.spec.fields))
        assert kind is not None
        if isinstance(node.ctx, ast.Store) and kind.shape:
            self.fail(node, f"assigns to the array state.{node.attr}", "Write its elements in a loop.")
        if isinstance(node.ctx, ast.Load) and not kind.shape and kind.dtype.kind in "iu":
            return self.cast("i8", node, node)
        return node

    # Values known at compile time ------------------------------------------------------------------------------------

    def lookup(self, node: ast.expr) -> Any:
        """The value of a dotted name that is not local: a parameter, a global, an attribute of either."""
        if isinstance(node, ast.Name):
            if node.id not in self.outside:
                self.fail(node, f"uses {node.id!r}, which is not defined", did_you_mean(node.id, self.locals))
            return self.outside[node.id]
        if isinstance(node, ast.Attribute):
            if isinstance(node.value, ast.Name) and node.value.id == self.self_name:
                owner: Any = self.spec.env
            elif isinstance(node.value, ast.Name) and node.value.id in self.locals:
                return self.fail(node, f"reads .{node.attr} of {node.value.id!r}", "Only State fields can be read.")
            else:
                owner = self.lookup(node.value)
            try:
                return getattr(owner, node.attr)
            except AttributeError:
                known = [name for name in dir(owner) if not name.startswith("_")]
                self.fail(node, f"uses {ast.unparse(node)}, which does not exist", did_you_mean(node.attr, known))
        return self.fail(node, f"uses {ast.unparse(node)}", "Only names and dotted names can be called or read.")

    def embed(self, value: Any, node: ast.expr) -> ast.expr:
        """A node for a value known at compile time."""
        if isinstance(value, bool | np.bool_):
            return ast.copy_location(ast.Constant(bool(value)), node)
        if isinstance(value, int | np.integer):
            literal: ast.expr = ast.Constant(abs(int(value)))
            return ast.copy_location(ast.UnaryOp(ast.USub(), literal) if value < 0 else literal, node)
        if isinstance(value, float | np.floating):
            literal = ast.parse("math.nan", mode="eval").body if math.isnan(value) else ast.Constant(float(value))
            return self.cast("f4", literal, node)
        if isinstance(value, tuple):
            return ast.copy_location(ast.Tuple([self.embed(v, node) for v in value], ast.Load()), node)
        if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
            label = node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "array")
            return ast.copy_location(ast.Name(self.program.table(value, label), ast.Load()), node)
        return self.fail(
            node,
            f"uses {ast.unparse(node)}, a {type(value).__name__}",
            "Constants are numbers, tuples of numbers and NumPy arrays.",
        )

    def array_value(self, node: ast.expr) -> np.ndarray | None:
        """The constant array behind `self.TABLE` or a global name, or None."""
        if isinstance(node, ast.Name) and node.id not in self.locals:
            value = self.outside.get(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == self.self_name:
            value = getattr(self.spec.env, node.attr, None)
        else:
            return None
        return value if isinstance(value, np.ndarray) else None

    def array_kind(self, node: ast.expr) -> ArrayKind | None:
        """The dtype and dimensions of a State array, a local name for one, or a table; None for anything else."""
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == self.state_name:
            kind = self.spec.fields.get(node.attr)
            return ArrayKind(kind.dtype, len(kind.shape)) if kind is not None and kind.shape else None
        if isinstance(node, ast.Name) and node.id in self.aliases:
            return self.aliases[node.id]
        if isinstance(node, ast.IfExp):
            either = self.array_kind(node.body)
            if either != self.array_kind(node.orelse):
                self.fail(node, "chooses between arrays of different kinds", "Use an if statement.")
            return either
        if isinstance(node, ast.Subscript) and (whole := self.array_kind(node.value)) is not None:
            indices = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
            left = whole.ndim - sum(not isinstance(index, ast.Slice) for index in indices)
            bounded = any(isinstance(index, ast.Slice) and (index.lower or index.upper) for index in indices)
            return ArrayKind(whole.dtype, left, whole.is_part or bounded) if left > 0 else None
        array = self.array_value(node)
        return None if array is None else ArrayKind(array.dtype, array.ndim)

    def cast(self, to: str, value: Any, node: ast.AST) -> ast.Call:
        return ast.copy_location(ast.Call(func=ast.Name(to, ast.Load()), args=[value], keywords=[]), node)


def _is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
