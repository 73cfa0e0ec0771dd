"""`Env`, the class that authors derive from, and `EnvSpec`, its checked definition.

class + constructor parameters → checked spec (spaces, record layout, methods) → build.py. Compiles nothing itself.
"""

from __future__ import annotations

import ast
import difflib
import inspect
import operator
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
from gymnasium import spaces

from hurtle.errors import EnvDefinitionError, UnknownNameError, did_you_mean
from hurtle.native.drawn import check_drawn, drawn_layout
from hurtle.native.dtypes import FieldType, fitting

TAKEN = (
    *("seed", "num_envs", "num_workers", "device", "backend", "autoreset_mode", "copy"),
    *("debug", "render_mode", "api", "unsafe"),
)
OBS_DTYPES = ("float32", "uint8", "int8", "int16", "int32")


class Env:
    """A native environment: plain-Python methods over a `State` record that run uncompiled, on CPU threads and on the GPU.

    Derive from it, give it `observation_space`, `action_space`, a `State` and the methods `reset`, `step` and `observe`;
    docs/write-an-env.md shows how. Annotated class attributes are parameters: `CartPole(gravity=1.6)`.
    """

    observation_space: Any
    action_space: Any
    max_steps: Any = None
    num_agents: Any = 1
    metrics: ClassVar[tuple[str, ...]] = ()
    unsafe: Any = False
    """Compile without bounds checks: an index out of bounds then corrupts memory."""
    drawn: Any = ()
    """Options that are drawn anew for each episode, see drawn.py."""

    def __init__(self, *, unsafe: bool | None = None, **parameters: Any):
        if unsafe is not None:
            self.unsafe = _convert(f"{type(self).__name__}.unsafe", unsafe, False)
        known = self.parameters()
        for name, value in parameters.items():
            if name not in known:
                raise UnknownNameError(
                    f"{type(self).__name__} has no parameter {name!r}. {did_you_mean(name, known)} "
                    "A parameter is an annotated class attribute with a default."
                )
            setattr(self, name, _convert(f"{type(self).__name__}.{name}", value, known[name]))

    @classmethod
    def parameters(cls) -> dict[str, Any]:
        """The parameters and their defaults, in the order of definition."""
        found = {} if isinstance(cls.max_steps, property) else {"max_steps": cls.max_steps}
        for base in reversed(cls.__mro__):
            if base in (object, Env):
                continue
            for name, annotation in inspect.get_annotations(base).items():
                if "ClassVar" in str(annotation) or isinstance(getattr(cls, name, None), property):
                    continue
                if not isinstance(getattr(cls, name, None), bool | int | float) or name in TAKEN:
                    raise EnvDefinitionError(
                        f"{cls.__name__}.{name} is annotated, which makes it a parameter: give it an int, a float or a bool "
                        f"as default, and none of the names {', '.join(TAKEN)}, which `make` and `make_vec` take themselves."
                    )
                found[name] = getattr(cls, name)
        return found

    def changed_parameters(self) -> dict[str, Any]:
        """The parameters whose values are not their defaults."""
        return {name: getattr(self, name) for name, default in self.parameters().items() if getattr(self, name) != default}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self.changed_parameters().items())})"


def _convert(name: str, value: Any, default: Any) -> Any:
    """A parameter's value in the type of its default; `max_steps` may also be None."""
    kind = bool if isinstance(default, bool) else float if isinstance(default, float) else int
    if value is None and name.endswith(".max_steps"):
        return None
    try:
        fits = isinstance(value, bool | np.bool_) if kind is bool else not isinstance(value, bool) and kind(value) == value
    except (TypeError, ValueError, OverflowError):
        fits = False
    if not fits:
        raise EnvDefinitionError(f"{name} takes {'an' if kind is int else 'a'} {kind.__name__}, got {value!r}.")
    return kind(value)


@dataclass(frozen=True)
class EnvSpec:
    """A checked env definition: everything the code generator and the batches need to know."""

    env: Env
    observation_space: spaces.Box
    action_space: spaces.Space
    num_agents: int
    max_steps: int
    fields: dict[str, FieldType]
    runtime_parameters: dict[str, Any]
    """Defaults of the State fields that have one: kept across resets, set by `reset(options=…)`."""

    @classmethod
    def of(cls, env: Env | type[Env]) -> EnvSpec:
        """Check an env class or instance and describe it.

        Raises:
            EnvDefinitionError: The class is incomplete or contradicts itself; the message says what to write.
        """
        if isinstance(env, type):
            if not issubclass(env, Env):
                raise EnvDefinitionError(f"{env.__name__} is not a native env: derive it from hurtle.native.Env.")
            env = env()
        if not isinstance(env, Env):
            raise EnvDefinitionError(f"Expected a native env, a class derived from hurtle.native.Env, got {env!r}.")
        name = type(env).__name__
        num_agents, max_steps = env.num_agents, env.max_steps
        if not isinstance(num_agents, int) or num_agents < 1:
            raise EnvDefinitionError(f"{name}.num_agents must be an int of at least 1, got {num_agents!r}.")
        if max_steps is not None and (not isinstance(max_steps, int) or max_steps < 1):
            raise EnvDefinitionError(f"{name}.max_steps must be None or an int of at least 1, got {max_steps!r}.")
        fields, runtime_parameters = _state_fields(env)
        spec = cls(
            env,
            _observation_space(env),
            _action_space(env),
            num_agents,
            max_steps or 0,
            fields,
            runtime_parameters,
        )
        check_drawn(spec)
        spec._check_methods()
        return spec

    @property
    def name(self) -> str:
        """The name of the author's class."""
        return type(self.env).__name__

    @property
    def description(self) -> str:
        """The first line of the class docstring."""
        return (inspect.getdoc(type(self.env)) or "").split("\n")[0]

    def method(self, name: str) -> Callable | None:
        """The author's function of that name, unbound, or None."""
        return getattr(type(self.env), name, None)

    @property
    def has_mask(self) -> bool:
        """Whether the env has an action mask."""
        return self.method("mask") is not None

    @property
    def has_present(self) -> bool:
        """Whether agents come and go."""
        return self.method("present") is not None

    @property
    def mask_size(self) -> int:
        """Entries of one agent's action mask."""
        space = self.action_space
        return int(space.n if isinstance(space, spaces.Discrete) else space.nvec.sum())  # type: ignore[attr-defined]

    @property
    def action_shape(self) -> tuple[int, ...]:
        """Shape of one agent's action."""
        return tuple(self.action_space.shape or ())

    @property
    def action_dtype(self) -> np.dtype:
        """The dtype in which actions reach `step`: int64, or float32 for a Box."""
        return np.dtype(np.float32 if isinstance(self.action_space, spaces.Box) else np.int64)

    @property
    def agents_shape(self) -> tuple[int, ...]:
        """() for one agent, (num_agents,) for several: the axis that multi-agent arrays have after num_envs."""
        return (self.num_agents,) if self.num_agents > 1 else ()

    @property
    def obs_shape(self) -> tuple[int, ...]:
        """Shape of one env's observation, all agents together."""
        return (*self.agents_shape, *self.observation_space.shape)

    @property
    def obs_size(self) -> int:
        """Elements of one env's observation, all agents together."""
        return int(np.prod(self.obs_shape))

    @property
    def mask_shape(self) -> tuple[int, ...]:
        """Shape of one env's action mask, all agents together; (1,) without one."""
        return (*self.agents_shape, self.mask_size) if self.has_mask else (1,)

    @cached_property
    def record(self) -> np.dtype:
        """One env in memory: the engine's fields, whose names begin with an underscore, then the author's State."""
        agents = (self.num_agents,)
        layout: list[tuple] = [("_rng", np.uint64), ("_steps", np.int32), ("_return", np.float32, agents)]
        if self.num_agents > 1:
            layout.append(("_start", np.int32, agents))  # the step at which the agent's episode began
        if self.has_present:
            layout.append(("_present", np.uint8, agents))
        layout += drawn_layout(self)
        for name, kind in self.fields.items():
            stored = np.uint8 if kind.scalar is np.bool_ and kind.shape else kind.scalar  # Numba's records hold no bool arrays
            layout.append((name, stored, kind.shape))
        return np.dtype(layout, align=True)

    def _check_methods(self) -> None:
        several = self.num_agents > 1
        expected = {
            "reset": ("state", "rng"),
            "step": ("state", "action", "reward", "terminated", "rng") if several else ("state", "action", "rng"),
            "observe": ("state", "obs"),
            "mask": ("state", "mask"),
            "present": ("state", "present"),
            "render": ("state",),
        }
        for name, arguments in expected.items():
            function = self.method(name)
            wanted = f"def {name}(self, {', '.join(arguments)})"
            if function is None:
                if name in ("reset", "step", "observe"):
                    near = difflib.get_close_matches(name, vars(type(self.env)), n=1, cutoff=0.7)
                    hint = f" ({self.name} has {near[0]!r}: is that it?)" if near else ""
                    raise EnvDefinitionError(f"{self.name} has no method {name!r}{hint}. Write: {wanted}")
                continue
            got = list(inspect.signature(function).parameters)[1:]
            if len(got) != len(arguments):
                agents = f" (num_agents = {self.num_agents})" if name == "step" else ""
                raise EnvDefinitionError(
                    f"{self.name}.{name} takes ({', '.join(got)}); expected {wanted}{agents}. {_where(function)}"
                )
            for word in {"rng", "obs", "mask"} & (set(arguments) - set(got)):
                raise EnvDefinitionError(f"{self.name}.{name} must call its argument `{word}`: {wanted}. {_where(function)}")
        if self.has_present and not several:
            raise EnvDefinitionError(f"{self.name}.present is for envs with several agents; num_agents is 1.")
        if self.has_mask and isinstance(self.action_space, spaces.Box):
            raise EnvDefinitionError(
                f"{self.name}.mask needs a Discrete or MultiDiscrete action space, got {self.action_space}."
            )
        if isinstance(self.env.metrics, str):
            raise EnvDefinitionError(f"{self.name}.metrics must be a tuple of names: metrics = ({self.env.metrics!r},)")
        for metric in self.env.metrics:
            if metric in ("r", "l", "t"):
                raise EnvDefinitionError(
                    f"{self.name}.metrics names {metric!r}, a name of the episode's statistics; rename the field."
                )
            if metric not in self.fields or self.fields[metric].shape:
                raise EnvDefinitionError(
                    f"{self.name}.metrics names {metric!r}, which is not a scalar field of State. "
                    f"{did_you_mean(metric, self.fields)}"
                )


def _where(function: Callable) -> str:
    code = function.__code__
    return f"({code.co_filename}:{code.co_firstlineno})"


def _observation_space(env: Env) -> spaces.Box:
    name, space = type(env).__name__, getattr(env, "observation_space", None)
    if space is None:
        raise EnvDefinitionError(f"{name} has no observation_space. Write: observation_space = Box(-inf, inf, (4,))")
    if not isinstance(space, spaces.Box):
        raise EnvDefinitionError(f"{name}.observation_space must be a Box, got {space}.")
    if space.dtype is None or space.dtype.name not in OBS_DTYPES:
        raise EnvDefinitionError(f"{name}.observation_space has dtype {space.dtype}; supported: {', '.join(OBS_DTYPES)}.")
    if not space.shape:
        raise EnvDefinitionError(f"{name}.observation_space has no dimension; write Box(low, high, (1,)).")
    return space


def _action_space(env: Env) -> spaces.Space:
    name, space = type(env).__name__, getattr(env, "action_space", None)
    if space is None:
        raise EnvDefinitionError(f"{name} has no action_space. Write: action_space = Discrete(2)")
    if isinstance(space, spaces.Discrete):
        return space
    if isinstance(space, spaces.MultiDiscrete) and space.nvec.ndim == 1:
        return space
    if isinstance(space, spaces.Box) and space.shape and space.dtype == np.float32:
        return space
    raise EnvDefinitionError(
        f"{name}.action_space must be Discrete, MultiDiscrete (one-dimensional) or a float32 Box with a shape, got {space}."
    )


def _state_fields(env: Env) -> tuple[dict[str, FieldType], dict[str, Any]]:
    """The fields of State with their dimensions resolved, and the defaults of those that have one."""
    name, state = type(env).__name__, getattr(env, "State", None)
    if not isinstance(state, type):
        raise EnvDefinitionError(f"{name} has no State. Write: class State: with a line `x: float32` for each field.")
    fields: dict[str, FieldType] = {}
    defaults: dict[str, Any] = {}
    for base in reversed(state.__mro__):
        if base is object:
            continue
        for field, kind in inspect.get_annotations(base, eval_str=True).items():
            if not isinstance(kind, FieldType):
                raise EnvDefinitionError(
                    f"{name}.State.{field} is annotated with {kind!r}; use a type of hurtle.native: "
                    "bool_, int8, int16, int32, int64, uint8, uint16, uint32, float32, or an array such as uint8[10, 10]."
                )
            if field.startswith("_"):
                raise EnvDefinitionError(f"{name}.State.{field}: names with a leading underscore belong to the engine.")
            fields[field] = FieldType(kind.scalar, tuple(_dimension(env, field, d) for d in kind.shape))
            if hasattr(state, field):
                defaults[field] = _default(f"{name}.State.{field}", getattr(state, field), fields[field])
    return fields, defaults


def _default(where: str, value: Any, kind: FieldType) -> np.ndarray:
    """The default of a field: one number, or one for each element."""
    try:
        given = fitting(value, kind.dtype, where)
        np.broadcast_to(given, kind.shape)  # type: ignore[arg-type]
    except ValueError:  # wrong shape, or ragged
        takes = f"takes one number, or an array of shape {kind.shape}" if kind.shape else "is one number"
        fix = "" if kind.shape else f" For an array, write its shape: {kind}[{np.size(value)}]."
        raise EnvDefinitionError(f"{where}: {kind} {takes}, got the default {value!r}.{fix}") from None
    return given


def _dimension(env: Env, field: str, dimension: int | str) -> int:
    where = f"{type(env).__name__}.State.{field}"
    size = _computed(env, where, dimension) if isinstance(dimension, str) else dimension
    if not isinstance(size, int | np.integer) or size < 1:
        raise EnvDefinitionError(f"{where}: dimension {dimension!r} must be an int of at least 1, got {size!r}.")
    return int(size)


_OPERATORS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
}


def _computed(env: Env, where: str, text: str) -> Any:
    """The value of a dimension such as "size" or "2 * size + 1", whose names are attributes of the env."""

    def value(node: ast.expr) -> Any:
        if isinstance(node, ast.Constant) and type(node.value) is int:
            return node.value
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
            return _OPERATORS[type(node.op)](value(node.left), value(node.right))
        if not isinstance(node, ast.Name):
            raise SyntaxError
        if (found := getattr(env, node.id, None)) is None:
            raise EnvDefinitionError(
                f"{where}: {node.id!r} is not an attribute of the env. {did_you_mean(node.id, env.parameters())}"
            )
        return found

    try:
        return value(ast.parse(text, mode="eval").body)
    except EnvDefinitionError:
        raise
    except (SyntaxError, TypeError, ZeroDivisionError):
        raise EnvDefinitionError(
            f"{where}: the dimension {text!r} may contain names of attributes, ints, +, -, * and //. "
            "For anything else, compute it in a property of the env and name that."
        ) from None
