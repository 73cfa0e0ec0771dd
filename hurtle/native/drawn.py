"""Options that are drawn anew whenever an episode begins, for curricula: their fields, the code that draws, their ranges.

range of each env, written by the host between steps → bits of the env's own stream → the State field, as an episode begins.
An env without drawn options has none of this: its generated code is as it was.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from typing import TYPE_CHECKING, Any

import numpy as np

from hurtle.errors import HurtleError, UnknownNameError, did_you_mean
from hurtle.native.dtypes import fitting
from hurtle.native.rng import OPTION_STREAM, action_bits, stream_states

if TYPE_CHECKING:
    from hurtle.native.env import Env, EnvSpec

Ranges = Mapping[str, tuple[Any, Any]]
"""The lowest and the highest value of options: of all envs, or arrays with one per env."""


def drawing(env: Env, names: Sequence[str]) -> Env:
    """A copy of an env whose options `names` are drawn anew for each episode, and reported with it like a metric.

    Raises:
        UnknownNameError: The env has no such option.
        HurtleError: The option is not a number.

    Example:
        >>> from hurtle.envs.cartpole import CartPole
        >>> drawing(CartPole(), ())
        CartPole()
    """
    made = copy(env)
    made.drawn = tuple(names)
    made.metrics = (*env.metrics, *(name for name in names if name not in env.metrics))  # type: ignore[misc]
    return made


def check_drawn(spec: EnvSpec) -> None:
    """Raise unless all drawn options of an env are options, and numbers."""
    for name in spec.env.drawn:
        if name not in spec.runtime_parameters:
            raise UnknownNameError(f"{spec.name} has no option {name!r}. {_hint(spec, name)}")
        kind = spec.fields[name]
        if kind.shape or kind.dtype.kind not in "iuf":
            raise HurtleError(f"{spec.name}: the option {name!r} is {kind}; only single numbers can be drawn.")


def _hint(spec: EnvSpec, name: str) -> str:
    known = spec.env.parameters()
    if name in known and isinstance(known[name], int | float):
        kind = "float32" if isinstance(known[name], float) else "int32"
        return (
            f"{name!r} is a parameter, a constant of the compiled code: make it an option, that is, a field of State with a "
            f"default, such as `{name}: {kind} = {known[name]}`, and read it as state.{name}."
        )
    if not spec.runtime_parameters:
        return "It has no options at all: an option is a field of State with a default, such as `size: float32 = 1.0`."
    return f"{did_you_mean(name, spec.runtime_parameters)} An option is a field of State with a default."


def drawn_layout(spec: EnvSpec) -> list[tuple]:
    """The engine's fields of a record for its drawn options."""
    if not spec.env.drawn:
        return []
    ranges = [(f"_{end}_{name}", spec.fields[name].scalar) for name in spec.env.drawn for end in ("low", "high")]
    return [("_draw_seed", np.uint64), ("_draws", np.int64), ("_ranged", np.uint8), *ranges]


def drawn_source(spec: EnvSpec) -> list[str]:
    """The lines that draw the options of `env`; before there are ranges, they keep their values. `draw` is the reference."""
    lines: list[str] = []
    for k, name in enumerate(spec.env.drawn):
        lines.append(f"    bits = action_bits(env._draw_seed, env._draws * {len(spec.env.drawn)} + {k})")
        if spec.fields[name].dtype.kind == "f":
            unit = "(f4(bits >> U64(8)) * f4(2.0**-24))"
            lines.append(f"    env.{name} = env._low_{name} + (env._high_{name} - env._low_{name}) * {unit}")
        else:
            low, high = f"i8(env._low_{name})", f"i8(env._high_{name})"
            lines.append(f"    env.{name} = {low} + i8((bits * U64({high} - {low} + 1)) >> U64(32))")
    return ["if env._ranged != 0:", *lines, "    env._draws += 1"] if lines else []


def draw(stream: int, number: int, low: Any, high: Any, is_whole: bool) -> float | int:
    """What compiled code draws from [low, high): whole numbers include `high`.

    Args:
        stream: The env's stream: `rng.stream_state(seed, OPTION_STREAM)`.
        number: Numbers drawn before.
        low: The lowest value.
        high: The highest one.
        is_whole: Whether to draw ints.

    Example:
        >>> draw(7, 0, 3, 5, is_whole=True) in (3, 4, 5), draw(7, 0, 2.0, 2.0, is_whole=False)
        (True, 2.0)
    """
    bits = action_bits(stream, number)
    if is_whole:
        return int(low) + ((bits * (int(high) - int(low) + 1)) >> 32)
    first = np.float32(low)
    return float(first + (np.float32(high) - first) * (np.float32(bits >> 8) * np.float32(2.0**-24)))


def seed_draws(spec: EnvSpec, records: np.ndarray, seeds: np.ndarray, chosen: np.ndarray) -> None:
    """Restart the streams of the chosen envs' draws; their ranges stay."""
    if spec.env.drawn:
        records["_draw_seed"][chosen] = stream_states(seeds, OPTION_STREAM)[chosen]
        records["_draws"][chosen] = 0


def write_ranges(spec: EnvSpec, records: np.ndarray, ranges: Ranges) -> None:
    """Write the ranges of all drawn options: episodes that begin from now on draw from them.

    Raises:
        HurtleError: Ranges of other options than the drawn ones.
        EnvDefinitionError: A value does not fit the option's dtype.
    """
    check_ranges(spec.name, spec.env.drawn, ranges)
    for name, ends in ranges.items():
        for end, value in zip(("low", "high"), ends, strict=True):
            records[f"_{end}_{name}"] = fitting(value, spec.fields[name].dtype, f"Option {name!r} of {spec.name}")
    records["_ranged"] = 1


def check_ranges(who: str, drawn: Sequence[str], ranges: Ranges) -> None:
    """Raise unless there is a range for each drawn option, and its low end is not above its high one."""
    if set(ranges) != set(drawn):
        raise HurtleError(
            f"{who} draws the options {list(drawn)}, and got ranges of {list(ranges)}: `drawn` of make_vec names them."
        )
    for name, (low, high) in ranges.items():
        if np.any(np.asarray(low) > np.asarray(high)):
            raise HurtleError(f"The range of option {name!r} begins above its end: {low} to {high}.")
