"""GAE and V-trace down the columns of a rollout, written in LLVM's vectors: what a step hands on stays in registers.

arrays [T, N] → advantages [T, N], in the same order of operations for every column. Knows no rollout and no policy.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from functools import cache
from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from .host import WIDTH, f4
from .vector_math import exp

LANES = sorted({4 * WIDTH, WIDTH, 8, 4, 1}, reverse=True)
"""How many adjacent columns go together, as many as there are left: the sums of four vectors hide each other's latency."""

GaeArrays = namedtuple("GaeArrays", "rewards values terminated truncated final_values last_values valid out")
VtraceArrays = namedtuple(
    "VtraceArrays", "rewards values terminated truncated final_values last_values valid targets advantages"
)

_FLOATS = types.Array(types.float32, 2, "C")
_FLAGS = types.Array(types.bool_, 2, "C")
_COLUMNS = (_FLOATS, _FLOATS, _FLAGS, _FLAGS, _FLOATS, types.Array(types.float32, 1, "C"))  # rewards … last_values
_INDEX = ir.IntType(64)


# Entry points: they return whether the shapes go together, and do nothing if not --------------------------------------


@cache
def compiled_gae(masked: bool) -> Any:
    """`gae` below for exactly the dtypes and layouts that it takes (others are a TypeError); `valid` is None if not masked."""
    numbers = [types.float64] * 2
    signature = types.bool_(*_COLUMNS, *numbers, _FLAGS if masked else types.none, _FLOATS)
    return njit(signature, cache=True, nogil=True)(gae)


@cache
def compiled_vtrace(masked: bool) -> Any:
    """As `compiled_gae`, of `vtrace`."""
    numbers = [types.float64] * 4
    signature = types.bool_(_FLOATS, *_COLUMNS, *numbers, _FLAGS if masked else types.none, _FLOATS, _FLOATS)
    return njit(signature, cache=True, nogil=True)(vtrace)


def gae(rewards, values, terminated, truncated, final_values, last_values, gamma, decay, valid, out):
    """What `hurtle.native.gae` says; `decay` is gamma times lambda."""
    fit = _fit(rewards, values, terminated, truncated, final_values, last_values, valid)
    if not fit or out.shape != rewards.shape:
        return False
    arrays = GaeArrays(rewards, values, terminated, truncated, final_values, last_values, valid, out)
    _gae_columns(arrays, (f4(gamma), f4(decay)))
    return True


def vtrace(
    log_ratios, rewards, values, terminated, truncated, final_values, last_values,
    gamma, decay, rho_clip, c_clip, valid, targets, advantages,
):  # fmt: skip
    """What `hurtle.native.vtrace` says; `decay` is gamma times lambda."""
    fit, shape = _fit(rewards, values, terminated, truncated, final_values, last_values, valid), rewards.shape
    if not fit or log_ratios.shape != shape or targets.shape != shape or advantages.shape != shape:
        return False
    logs, ratios = log_ratios.reshape(-1), advantages.reshape(-1)
    for i in range(logs.size):
        ratios[i] = exp(logs[i])
    arrays = VtraceArrays(rewards, values, terminated, truncated, final_values, last_values, valid, targets, advantages)
    _vtrace_columns(arrays, (f4(gamma), f4(decay), f4(rho_clip), f4(c_clip)))
    return True


@njit
def _fit(rewards, values, terminated, truncated, final_values, last_values, valid):
    shape = rewards.shape
    if valid is not None and valid.shape != shape:
        return False
    flags_fit = terminated.shape == shape and truncated.shape == shape
    return flags_fit and values.shape == shape and final_values.shape == shape and last_values.size == shape[1]


# One step of some columns ---------------------------------------------------------------------------------------------


class _Columns:
    """Writes the code of one step of `lanes` adjacent columns into a function that is being compiled."""

    def __init__(self, builder: Any, pointers: dict[str, Any], lanes: int, at: Any):
        self.b, self.pointers, self.lanes, self.at = builder, pointers, lanes, at
        self.zero = ir.Constant(ir.VectorType(ir.FloatType(), lanes), None)
        self.valid = self.flags("valid") if "valid" in pointers else None

    def load(self, name: str) -> Any:
        return self.b.load(self._place(name), align=4)

    def flags(self, name: str) -> Any:
        found = self.b.load(self._place(name), align=1)
        return self.b.icmp_unsigned("!=", found, ir.Constant(found.type, None))

    def store(self, name: str, value: Any, if_invalid: Any) -> None:
        self.b.store(self.where_valid(value, if_invalid), self._place(name), align=4)

    def where_valid(self, value: Any, other: Any) -> Any:
        return value if self.valid is None else self.b.select(self.valid, value, other)

    def heard(self, next_value: Any, carried: Any) -> tuple[Any, Any]:
        """V of what comes after the step, and what is carried to it from there: nothing across the end of an episode."""
        terminated, truncated = self.flags("terminated"), self.flags("truncated")
        after = self.b.select(terminated, self.zero, self._unless_cut_off(truncated, next_value))
        return after, self.b.select(self.b.or_(terminated, truncated), self.zero, carried)

    def _unless_cut_off(self, truncated: Any, next_value: Any) -> Any:
        """The next value, or the final one: that is fetched only if a column truncates, which few do."""
        bits = ir.IntType(self.lanes)
        some = self.b.icmp_unsigned("!=", self.b.bitcast(truncated, bits), ir.Constant(bits, 0))
        before = self.b.block
        with self.b.if_then(some, likely=False):
            chosen, inside = self.b.select(truncated, self.load("final_values"), next_value), self.b.block
        alive = self.b.phi(next_value.type)
        alive.add_incoming(next_value, before)
        alive.add_incoming(chosen, inside)
        return alive

    def clipped(self, ratio: Any, limit: Any) -> Any:
        """The ratio, at most `limit`; NaN stays NaN, so that it is noticed."""
        return self.b.select(self.b.fcmp_ordered(">", ratio, limit), limit, ratio)

    def splat(self, scalar: Any) -> Any:
        undefined = ir.Constant(self.zero.type, ir.Undefined)
        first = self.b.insert_element(undefined, scalar, ir.Constant(ir.IntType(32), 0))
        return self.b.shuffle_vector(first, undefined, ir.Constant(ir.VectorType(ir.IntType(32), self.lanes), None))

    def _place(self, name: str) -> Any:
        first = self.b.gep(self.pointers[name], [self.at])
        return self.b.bitcast(first, ir.VectorType(first.type.pointee, self.lanes).as_pointer())


def _gae_step(c: _Columns, next_value: Any, carried: Any, gamma: Any, decay: Any) -> tuple[Any, Any]:
    """Write the advantage; returns this step's value and what it hands on to the step before it."""
    b, value = c.b, c.load("values")
    after, heard = c.heard(next_value, carried)
    delta = b.fsub(b.fadd(c.load("rewards"), b.fmul(gamma, after)), value)
    advantage = b.fadd(delta, b.fmul(decay, heard))
    c.store("out", advantage, if_invalid=c.zero)
    return value, advantage


def _vtrace_step(
    c: _Columns, next_value: Any, carried: Any, gamma: Any, decay: Any, rho_clip: Any, c_clip: Any
) -> tuple[Any, Any]:
    """As `_gae_step`; what is handed on is target - value. The ratio lies where the advantage is written."""
    b, value, reward, ratio = c.b, c.load("values"), c.load("rewards"), c.load("advantages")
    after, heard = c.heard(next_value, carried)
    rho, trace = c.clipped(ratio, rho_clip), b.fmul(decay, c.clipped(ratio, c_clip))
    delta = b.fsub(b.fadd(reward, b.fmul(gamma, after)), value)
    excess = b.fadd(b.fmul(rho, delta), b.fmul(trace, heard))
    surprise = b.fsub(b.fadd(reward, b.fmul(gamma, b.fadd(after, heard))), value)
    c.store("targets", b.fadd(value, excess), if_invalid=value)
    c.store("advantages", b.fmul(rho, surprise), if_invalid=c.zero)
    return value, excess


# All steps of all columns ---------------------------------------------------------------------------------------------


def _make_columns(step: Callable[..., tuple[Any, Any]]) -> Any:
    """The intrinsic that takes the named arrays and the float32 numbers of a step, and does all steps of all columns."""

    def columns(typing_context: Any, arrays: Any, numbers: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            kinds = dict(zip(arrays.fields, arrays.types, strict=True))
            members = zip(kinds.items(), cgutils.unpack_tuple(builder, arguments[0], len(kinds)), strict=True)
            made = {
                name: context.make_array(kind)(context, builder, value)
                for (name, kind), value in members
                if kind is not types.none
            }
            steps, num_columns = cgutils.unpack_tuple(builder, made["rewards"].shape, 2)
            scalars = cgutils.unpack_tuple(builder, arguments[1], len(numbers))
            _write_columns(builder, {name: array.data for name, array in made.items()}, steps, num_columns, step, scalars)
            return context.get_dummy_value()

        return types.void(arrays, numbers), codegen

    return intrinsic(columns)


def _write_columns(b: Any, pointers: dict[str, Any], steps: Any, columns: Any, step: Any, scalars: list[Any]) -> None:
    """For each number of lanes, from the widest on: as many blocks of columns as there are; each from its last step back."""
    zero, first = ir.Constant(_INDEX, 0), ir.Constant(_INDEX, 0)
    last_step = b.mul(b.sub(steps, ir.Constant(_INDEX, 1)), columns)
    ends = {"last_values": pointers["last_values"]}

    def block(first: Any, lanes: int) -> list[Any]:
        start = _Columns(b, ends, lanes, first)
        numbers = [start.splat(scalar) for scalar in scalars]

        def one_step(at: Any, next_value: Any, carried: Any) -> list[Any]:
            c = _Columns(b, pointers, lanes, at)
            value, handed_on = step(c, next_value, carried, *numbers)
            return [b.sub(at, columns), c.where_valid(value, next_value), c.where_valid(handed_on, carried)]

        starts = [b.add(last_step, first), start.load("last_values"), start.zero]
        _repeated(b, starts, lambda at, *_: b.icmp_signed(">=", at, zero), one_step)
        return [b.add(first, ir.Constant(_INDEX, lanes))]

    for lanes in LANES:
        last = b.sub(columns, ir.Constant(_INDEX, lanes))
        [first] = _repeated(
            b, [first], lambda first, last=last: b.icmp_signed("<=", first, last), lambda first, n=lanes: block(first, n)
        )


def _repeated(b: Any, starts: list[Any], goes_on: Callable[..., Any], body: Callable[..., list[Any]]) -> list[Any]:
    """What `starts` become by `body`, repeated while `goes_on`."""
    before = b.block
    head, inside, after = (b.append_basic_block(name) for name in ("head", "inside", "after"))
    b.branch(head)
    b.position_at_end(head)
    now = [b.phi(start.type) for start in starts]
    b.cbranch(goes_on(*now), inside, after)
    b.position_at_end(inside)
    new = body(*now)
    for phi, start, value in zip(now, starts, new, strict=True):
        phi.add_incoming(start, before)
        phi.add_incoming(value, b.block)
    b.branch(head)
    b.position_at_end(after)
    return now


_gae_columns = _make_columns(_gae_step)
_vtrace_columns = _make_columns(_vtrace_step)
