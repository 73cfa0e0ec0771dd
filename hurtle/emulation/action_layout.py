"""`ActionLayout`: a structured action space as one Discrete, MultiDiscrete or Box.

flat action → decode → structured action, and back. Knows nothing of envs or parallelism.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from operator import index
from typing import Any

import numpy as np
from gymnasium import spaces

from hurtle.emulation.fixed import FIXED, bounds, check_bounds
from hurtle.emulation.leaves import Tree, check_tree, key_source, kind_of, space_tree, tree_items, tree_leaves
from hurtle.errors import EmulationError

DISCRETE = (spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)


class ActionLayout:
    """Maps the entries of a flat action to the leaves of a structured one.

    Discrete leaves become one Discrete (a single choice) or one MultiDiscrete, counted from 0; Box leaves become one Box.
    A single Box stays as it is.

    Args:
        space: A tree of Discrete, MultiDiscrete and MultiBinary, or a tree of Box.
        name: The first part of every path.

    Raises:
        EmulationError: The space has other leaves, or mixes discrete and continuous ones; the message names them.

    Example:
        >>> layout = ActionLayout(spaces.Dict(jump=spaces.Discrete(2), move=spaces.Discrete(3, start=-1)))
        >>> layout.flat_space
        MultiDiscrete([2 3])
        >>> layout.decode([1, 0])
        {'jump': np.int64(1), 'move': np.int64(-1)}
    """

    flat_space: spaces.Discrete | spaces.MultiDiscrete | spaces.Box
    decode: Callable[[Any], Any]
    """One flat action → a structured action that shares no memory with it. A flat action whose shape is not that of
    `flat_space` raises an EmulationError; bounds are not checked."""

    def __init__(self, space: spaces.Space, name: str = "action"):
        self.space = space
        self.name = name
        self._parts: Tree = space_tree(space, name, _Part)
        parts: list[_Part] = tree_leaves(self._parts)
        _refuse(name, parts)
        self.flat_space = _flat_space(space, parts)
        start = 0
        for part in parts:
            start = part.place(start, self.flat_space)
        self.decode = self._make_decode()

    def encode(self, action: Any) -> np.ndarray | np.int64:
        """The flat action that `decode` turns into `action`.

        Raises:
            EmulationError: The action does not belong to the space; the message names the leaf.
        """
        check_tree(self._parts, action, self.name)
        flat = np.concatenate([part.encode(value) for part, value in tree_items(self._parts, action)])
        return flat[0] if isinstance(self.flat_space, spaces.Discrete) else flat.reshape(self.flat_space.shape)

    def _make_decode(self) -> Callable[[Any], Any]:
        """Generate straight-line code for this space, such as `return {"jump": flat[0], "move": flat[1] - 1}`."""
        scope: dict[str, Any] = {
            "keys": [],
            "np": np,
            "dtype": self.flat_space.dtype,
            "index": index,
            "refuse": self._refuse_flat,
        }
        source = "def decode(flat):\n"
        if isinstance(self.flat_space, spaces.Discrete):
            source += "    try: flat = index(flat)\n"
            source += "    except TypeError: refuse(flat)\n"
        else:
            source += "    flat = np.asarray(flat, dtype)\n"
            source += f"    if flat.shape != {self.flat_space.shape}: refuse(flat)\n"
        source += f"    return {_decode_source(self._parts, scope)}\n"
        exec(compile(source, f"<decoder of {self.name}>", "exec"), scope)
        return scope["decode"]

    def _refuse_flat(self, flat: Any) -> None:
        if isinstance(self.flat_space, spaces.Discrete):
            raise EmulationError(f"{self.name}: expected a flat action (one integer), got {kind_of(flat)}.") from None
        raise EmulationError(f"{self.name}: expected a flat action of shape {self.flat_space.shape}, got {flat.shape}.")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ActionLayout) and (self.space, self.name) == (other.space, other.name)

    def __hash__(self) -> int:
        return hash((self.name, self.flat_space.shape))

    def __repr__(self) -> str:
        return f"ActionLayout({self.space}, {self.name!r}: {self.flat_space})"

    def __getstate__(self) -> dict[str, Any]:
        return {"space": self.space, "name": self.name}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]


class _Part:
    """One leaf of the action space: entries [start, stop) of the flat action."""

    def __init__(self, space: spaces.Space, path: str):
        self.space, self.path = space, path
        self.is_discrete = isinstance(space, DISCRETE)
        self.is_choice = isinstance(space, spaces.Discrete)
        if isinstance(space, FIXED):
            self.low, self.high = bounds(space)

    def place(self, start: int, flat_space: spaces.Space) -> int:
        """Take the entries from `start` on; returns the start of the next leaf."""
        assert flat_space.dtype is not None
        stop = start + self.low.size
        self._flat_dtype: np.dtype = flat_space.dtype
        self._is_all = flat_space.shape == self.low.shape  # the only leaf, with the same shape
        self._entries = "flat" if self._is_all else f"flat[{start}]" if self.is_choice else f"flat[{start}:{stop}]"
        return stop

    def source(self, name: str, scope: dict[str, Any]) -> str:
        """Code that takes this leaf's value from `flat`; the objects it needs go into `scope`, prefixed with `name`."""
        source, dtype = self._entries, self.low.dtype
        scope[f"{name}_type"] = dtype.type
        has_start = self.is_discrete and bool(self.low.any())
        if self.is_choice:
            source += f" + {int(self.low)}" if has_start else ""
            return f"{name}_type({source})" if self._is_all or dtype != self._flat_dtype else source
        must_clip = not self.is_discrete and dtype.kind != "f" and dtype != self._flat_dtype
        if has_start:
            scope[f"{name}_start"] = self.low.ravel().astype(np.int64)
            source = f"({source} + {name}_start)"
        elif must_clip:
            scope[f"{name}_low"], scope[f"{name}_high"] = _range_in(self._flat_dtype, self.low.ravel(), self.high.ravel())
            source = f"np.rint({source})" if self._flat_dtype.kind == "f" else source
            source = f"np.clip({source}, {name}_low, {name}_high)"
        if dtype != self._flat_dtype:
            source += f".astype({name}_type)"
        elif not has_start and not must_clip:
            source += ".copy()"  # an env may keep its action, and `flat` may be overwritten
        return source if self._is_all or self.low.ndim == 1 else f"{source}.reshape({self.low.shape})"

    def encode(self, value: Any) -> np.ndarray:
        """This leaf's entries of the flat action."""
        value = np.asarray(value).ravel()
        return value.astype(np.int64) - self.low.ravel() if self.is_discrete else value.astype(self._flat_dtype)

    def check(self, value: Any, path: str) -> None:
        """Raise an EmulationError whose message begins with `path` unless `value` belongs to the space."""
        check_bounds(value, path, self.low, self.high, self.is_choice)


def _decode_source(tree: Tree, scope: dict[str, Any]) -> str:
    """The structured action as one expression."""
    if isinstance(tree, dict):
        items = [f"{key_source(key, scope['keys'])}: {_decode_source(child, scope)}" for key, child in tree.items()]
        return f"{{{', '.join(items)}}}"
    if isinstance(tree, tuple):
        return f"({', '.join(_decode_source(child, scope) for child in tree)},)"
    return tree.source(f"leaf_{len(scope)}", scope)


def _refuse(name: str, parts: list[_Part]) -> None:
    """Raise an EmulationError that names the leaves which cannot be part of a flat action, if there are any."""
    advice = (
        f"Switch off action emulation with hurtle.emulate(env, actions=False), use hurtle.make_vec without emulation "
        f"(it takes structured {name}s), or restrict the env to one kind with a wrapper."
    )
    others = [part for part in parts if not isinstance(part.space, FIXED)]
    if others:
        raise EmulationError(
            f"{_listed(others)}: cannot be part of a flat action, unlike Discrete, MultiDiscrete, MultiBinary and Box. {advice}"
        )
    discrete = [part for part in parts if part.is_discrete]
    continuous = [part for part in parts if not part.is_discrete]
    if discrete and continuous:
        raise EmulationError(
            f"{name}: mixes discrete leaves ({_listed(discrete)}) with continuous ones ({_listed(continuous)}); "
            f"a flat action has one kind. {advice}"
        )


def _flat_space(space: spaces.Space, parts: list[_Part]) -> spaces.Discrete | spaces.MultiDiscrete | spaces.Box:
    if isinstance(space, spaces.Box):
        return deepcopy(space)
    if not parts[0].is_discrete:
        dtype = np.result_type(*[part.low.dtype for part in parts])
        low, high = (np.concatenate([getattr(part, name).ravel() for part in parts]) for name in ("low", "high"))
        return spaces.Box(low.astype(dtype), high.astype(dtype), low.shape, dtype.type)
    counts = [part.high.ravel().astype(np.int64) - part.low.ravel().astype(np.int64) + 1 for part in parts]
    if len(parts) == 1 and parts[0].is_choice:
        return spaces.Discrete(int(counts[0][0]))
    return spaces.MultiDiscrete(np.concatenate(counts))


def _range_in(dtype: np.dtype, low: np.ndarray, high: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Integer bounds in the flat dtype, rounded inwards: 2**63 - 1 as a float would be 2**63."""
    flat_low, flat_high = low.astype(dtype), high.astype(dtype)
    if dtype.kind == "f":
        below = flat_low.astype(object) < low.astype(object)
        above = flat_high.astype(object) > high.astype(object)
        flat_low = np.where(below, np.nextafter(flat_low, dtype.type(np.inf)), flat_low)
        flat_high = np.where(above, np.nextafter(flat_high, dtype.type(-np.inf)), flat_high)
    return flat_low, flat_high


def _listed(parts: list[_Part]) -> str:
    return ", ".join(f"{part.path}: {part.space}" for part in parts)
