"""The uncompiled target: records and arrays that behave as in compiled code, and check every write.

Integers read as Python ints (64-bit in compiled code), floats as float32; a write that does not fit its dtype raises.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from hurtle.errors import EnvCodeError
from hurtle.native import rng
from hurtle.native.env import EnvSpec


class CheckedArray:
    """A NumPy array whose elements read as plain numbers and whose writes are checked against the dtype."""

    def __init__(self, array: np.ndarray, name: str = "array"):
        self.array = array
        self.name = name

    shape = property(lambda self: self.array.shape)
    size = property(lambda self: self.array.size)
    ndim = property(lambda self: self.array.ndim)

    def __len__(self) -> int:
        return len(self.array)

    def __getitem__(self, index: Any) -> Any:
        value = self.array[index]
        return CheckedArray(value, self.name) if isinstance(value, np.ndarray) else as_number(value)

    def __setitem__(self, index: Any, value: Any) -> None:
        check_fits(value, self.array.dtype, self.name)
        self.array[index] = value

    def reshape(self, shape: tuple[int, ...]) -> CheckedArray:
        """A view with other dimensions."""
        return CheckedArray(self.array.reshape(shape), self.name)

    def __repr__(self) -> str:
        return repr(self.array)


class StateView:
    """One env's record with its fields as attributes; what `state` is on the Python target."""

    def __init__(self, record: np.void):
        object.__setattr__(self, "_record", record)

    def __getattr__(self, name: str) -> Any:
        try:
            value = self._record[name]
        except (KeyError, ValueError):
            raise AttributeError(f"State has no field {name!r}") from None
        return CheckedArray(value, f"state.{name}") if isinstance(value, np.ndarray) else as_number(value)

    def __setattr__(self, name: str, value: Any) -> None:
        check_fits(value, self._record.dtype[name], f"state.{name}")
        self._record[name] = value

    def __repr__(self) -> str:
        fields = [n for n in self._record.dtype.names if not n.startswith("_")]
        return "State(" + ", ".join(f"{n}={self._record[n]!r}" for n in fields) + ")"


def as_number(value: Any) -> Any:
    """A NumPy scalar as compiled code sees it."""
    kind = value.dtype.kind
    return int(value) if kind in "iu" else bool(value) if kind == "b" else value


def check_fits(value: Any, dtype: np.dtype, name: str) -> None:
    """Raise if writing `value` into `dtype` would lose what the author meant."""
    if dtype.kind == "f" or isinstance(value, bool | np.bool_):
        return
    if not isinstance(value, int | np.integer):
        raise EnvCodeError(f"{name} holds {dtype.name}; got the float {value!r}. Use int(…) to convert it.")
    if dtype.kind in "iu":
        limits = np.iinfo(dtype)
        if not limits.min <= value <= limits.max:
            raise EnvCodeError(f"{name} holds {dtype.name}, {limits.min} to {limits.max}; got {value}.")
    elif value not in (0, 1):
        raise EnvCodeError(f"{name} holds bool; got {value}.")


def zero(array: CheckedArray) -> None:
    """Zero an array at once; element by element, that would take most of an uncompiled step."""
    array.array[...] = 0


def checked(arrays: Any) -> Any:
    """The same arrays with every read and write checked, and the records as `StateView`s."""
    views = {name: CheckedArray(array, name) for name, array in arrays._asdict().items() if name != "envs"}
    return arrays._replace(envs=[StateView(record) for record in arrays.envs], **views)


def namespace() -> dict[str, Any]:
    """The names that rewritten code and the engine core use, bound to their plain-Python references."""
    names: dict[str, Any] = {name: value for name, value in vars(rng).items() if name.startswith("rng_")}
    names.update(
        math=math,
        np=np,
        f4=np.float32,
        i8=int,
        U64=int,
        jit=lambda function: function,
        part=lambda function: function,
        entry=lambda function: function,
        unpack=lambda arrays: arrays,
        actions_at=lambda actions, n: actions,
        flags_at=lambda flags, n: flags,
        seeds_at=lambda seeds, n: seeds,
        action_bits=rng.action_bits,
    )
    return names


def guard_methods(names: dict[str, Any], spec: EnvSpec) -> None:
    """Wrap the author's methods: `observe` and `mask` get arrays of their true shapes, and the result of `step` is checked."""

    def shaped(function: Any, shape: tuple[int, ...]) -> Any:
        return lambda env, array: function(env, array.reshape(shape))

    step = names["env_step"]

    def checked_step(env: Any, *arguments: Any) -> Any:
        returned = step(env, *arguments)
        if spec.num_agents == 1:
            fits, wanted = is_outcome(returned), "two values, a number and a bool: return reward, terminated"
        else:
            fits, wanted = (
                isinstance(returned, bool | np.bool_),
                "whether the episode is over: return True or return False",
            )
        if not fits:
            code = spec.env.step.__code__  # type: ignore[attr-defined]
            raise EnvCodeError(
                f"{spec.name}.step returned {returned!r}; on every path it must return {wanted} "
                f"({code.co_filename}:{code.co_firstlineno})."
            )
        return returned

    names["env_step"] = checked_step
    names["env_observe"] = shaped(names["env_observe"], spec.obs_shape)
    if spec.has_mask:
        names["env_mask"] = shaped(names["env_mask"], spec.mask_shape)


def is_outcome(returned: Any) -> bool:
    """Whether a value is a (reward, terminated) pair, as `step` of a single agent returns."""
    if not isinstance(returned, tuple) or len(returned) != 2:
        return False
    reward, terminated = returned
    is_flag = isinstance(terminated, bool | np.bool_) or (isinstance(terminated, int) and terminated in (0, 1))
    return isinstance(reward, bool | int | float | np.number) and is_flag
