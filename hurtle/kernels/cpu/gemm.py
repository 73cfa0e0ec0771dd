"""Matrix products at the speed of the host's vector unit: register tiles of LLVM vectors, beside a NumPy reference.

C = finish(start + A · B), a tile of rows × vectors at a time, B in panels of adjacent columns. Knows nothing of networks.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from .host import CHECKED, WIDTH, allocating, joined

# Measured with benchmarks/gemm.py: enough independent sums to hide the latency of a multiply-add, few enough to stay in
# registers together with a row of B (32 registers with AVX-512 and NEON, 16 with AVX2).
ROWS = 8 if WIDTH == 16 else 4
VECTORS = 4 if WIDTH == 4 else 2
UNROLLED = 4 if WIDTH == 4 else 2
PANEL = VECTORS * WIDTH
"""Columns of a wide panel; a matrix of at most `WIDTH` columns has narrow ones."""

FEW = max(1, WIDTH // 4)
"""Up to this many columns of the result, sums along vectors are faster than panels, which would be mostly padding."""

NONE, TANH, RELU = 0, 1, 2
"""Activations."""

i64 = ir.IntType(64)

_LIMIT = 7.90531110763549805
_TANH_TOP = (1.0, 1.340216100e-1, 3.520756727e-3, 2.102733560e-5, 1.394553628e-8)
_TANH_BOTTOM = (1.0, 4.673548340e-1, 2.597254514e-2, 3.326951409e-4, 8.015776984e-7)


def panel_width(columns: int) -> int:
    """The width of the panels of a matrix with this many columns."""
    return WIDTH if columns <= WIDTH else PANEL


def padded(columns: int) -> int:
    """The number of columns rounded up to full panels."""
    width = panel_width(columns)
    return -(-columns // width) * width


def panels_of(matrix: np.ndarray) -> np.ndarray:
    """A matrix [rows, columns] as flat panels: each has `panel_width` adjacent columns of all rows, zero-padded."""
    rows, columns = matrix.shape
    whole = np.zeros((rows, padded(columns)), np.float32)
    whole[:, :columns] = matrix
    return whole.reshape(rows, -1, panel_width(columns)).transpose(1, 0, 2).ravel()


def product_reference(start: Any, a: np.ndarray, b: np.ndarray, finish: str, h: Any = None) -> np.ndarray:
    """The reference for the products below, in float64: `start + a @ b`, then "none", "tanh", "relu" or the slope at `h`."""
    total = np.asarray(start, np.float64) + np.asarray(a, np.float64) @ np.asarray(b, np.float64)
    if finish == "tanh":
        return np.tanh(total)
    if finish == "relu":
        return np.where(total < 0, 0.0, total)
    if finish == "tanh_slope":
        return total * (1.0 - np.asarray(h, np.float64) ** 2)
    return np.where(h <= 0, 0.0, total) if finish == "relu_slope" else total


class Tile:
    """Emits the code of one tile into the function being compiled."""

    def __init__(self, builder: Any, vectors: int):
        self.b, self.vectors = builder, vectors
        self.vector = ir.VectorType(ir.FloatType(), WIDTH)

    def at(self, pointer: Any, *offsets: Any) -> Any:
        """The pointer plus offsets in elements, which are ints or LLVM values."""
        for offset in offsets:
            pointer = self.b.gep(pointer, [ir.Constant(ir.IntType(64), offset) if isinstance(offset, int) else offset])
        return pointer

    def load(self, pointer: Any) -> Any:
        """Load a vector."""
        return self.b.load(self.b.bitcast(pointer, self.vector.as_pointer()), align=4)

    def store(self, value: Any, pointer: Any) -> None:
        """Store a vector."""
        self.b.store(value, self.b.bitcast(pointer, self.vector.as_pointer()), align=4)

    def constant(self, number: float) -> Any:
        """A constant in every lane."""
        return ir.Constant(self.vector, [float(np.float32(number))] * WIDTH)

    def splat(self, scalar: Any) -> Any:
        """A scalar in every lane."""
        undefined = ir.Constant(self.vector, ir.Undefined)
        first = self.b.insert_element(undefined, scalar, ir.Constant(ir.IntType(32), 0))
        return self.b.shuffle_vector(first, undefined, ir.Constant(ir.VectorType(ir.IntType(32), WIDTH), [0] * WIDTH))

    def call(self, name: str, *arguments: Any) -> Any:
        """Call one of LLVM's vector intrinsics."""
        kind = ir.FunctionType(self.vector, [argument.type for argument in arguments])
        return self.b.call(cgutils.get_or_insert_function(self.b.module, kind, name), arguments)

    def fma(self, x: Any, y: Any, z: Any) -> Any:
        """The sum x · y + z, rounded once."""
        return self.call(f"llvm.fma.v{WIDTH}f32", x, y, z)

    def total(self, start: Any, vector: Any) -> Any:
        """`start` plus the sum of the lanes, which are added in pairs."""
        kind = ir.FunctionType(ir.FloatType(), [ir.FloatType(), self.vector])
        add = cgutils.get_or_insert_function(self.b.module, kind, f"llvm.vector.reduce.fadd.v{WIDTH}f32")
        return self.b.call(add, [start, vector], fastmath=("reassoc",))

    def polynomial(self, x: Any, coefficients: tuple[float, ...]) -> Any:
        """A polynomial by Horner's rule, lowest coefficient first."""
        value = self.constant(coefficients[-1])
        for coefficient in reversed(coefficients[:-1]):
            value = self.fma(value, x, self.constant(coefficient))
        return value

    def divide(self, x: Any, y: Any) -> Any:
        """The quotient; with AVX-512, an estimate of 1 / y and one Newton step, which is three times as fast."""
        if WIDTH != 16:
            return self.b.fdiv(x, y)
        mask = ir.Constant(ir.IntType(16), 0xFFFF)
        estimate = self.call("llvm.x86.avx512.rcp14.ps.512", y, self.constant(0.0), mask)
        missing = self.fma(self.b.fneg(y), estimate, self.constant(1.0))
        return self.b.fmul(x, self.fma(estimate, missing, estimate))

    def tanh(self, x: Any) -> Any:
        """A rational function, accurate to 3e-7; NaN stays NaN, since comparisons with it are false."""
        low, high = self.constant(-_LIMIT), self.constant(_LIMIT)
        x = self.b.select(self.b.fcmp_ordered("<", x, low), low, x)
        x = self.b.select(self.b.fcmp_ordered(">", x, high), high, x)
        square = self.b.fmul(x, x)
        top = self.b.fmul(x, self.polynomial(square, _TANH_TOP))
        return self.divide(top, self.polynomial(square, _TANH_BOTTOM))

    def finished(self, value: Any, finish: str, h: Any) -> Any:
        """Finish a sum: apply the activation, or multiply by its slope at h."""
        zero = self.constant(0.0)
        if finish == "tanh":
            return self.tanh(value)
        if finish == "relu":
            return self.b.select(self.b.fcmp_ordered("<", value, zero), zero, value)
        if finish == "tanh_slope":
            return self.b.fmul(value, self.fma(self.b.fneg(h), h, self.constant(1.0)))
        if finish == "relu_slope":
            return self.b.select(self.b.fcmp_ordered("<=", h, zero), zero, value)
        return value

    def sums(self, starts: list[Any], depth: Any, step: Any) -> list[Any]:
        """`starts` after `step(k, sums)` for k = 0 … depth - 1, `UNROLLED` at a time."""
        unrolled = self.b.and_(depth, ir.Constant(ir.IntType(64), -UNROLLED))
        zero = ir.Constant(ir.IntType(64), 0)
        return self._loop(unrolled, depth, 1, self._loop(zero, unrolled, UNROLLED, starts, step), step)

    def _loop(self, first: Any, last: Any, stride: int, starts: list[Any], step: Any) -> list[Any]:
        b, before = self.b, self.b.block
        head, body, after = (b.append_basic_block(name) for name in ("head", "body", "after"))
        b.branch(head)
        b.position_at_end(head)
        k, sums = b.phi(ir.IntType(64)), [b.phi(self.vector) for _ in starts]
        k.add_incoming(first, before)
        b.cbranch(b.icmp_signed("<", k, last), body, after)
        b.position_at_end(body)
        new = step(k, stride, sums)
        k.add_incoming(b.add(k, ir.Constant(ir.IntType(64), stride)), b.block)
        for phi, start, value in zip(sums, starts, new, strict=True):
            phi.add_incoming(start, before)
            phi.add_incoming(value, b.block)
        b.branch(head)
        b.position_at_end(after)
        return sums


def _make_tile(rows: int, vectors: int, start: str, finish: str, transposed: bool) -> Any:
    """The intrinsic for one tile of C: `rows` rows of `vectors` vectors.

    Row r of A begins at a + r * a_stride; if transposed, column r of the stored matrix is read from a + r.
    `x` is the row of biases (start="bias") or the activations whose slope is taken (finish="…_slope").
    """

    @intrinsic
    def tile(typing_context: Any, c: Any, c_at: Any, c_stride: Any, a: Any, a_at: Any, a_stride: Any, b: Any, b_at: Any,
             b_stride: Any, depth: Any, x: Any, x_at: Any, x_stride: Any) -> Any:  # fmt: skip
        i8 = types.int64

        def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            made = Tile(builder, vectors)

            def pointer(n: int) -> Any:
                array = context.make_array(signature.args[n])(context, builder, arguments[n])
                return made.at(array.data, arguments[n + 1])

            c_first, a_first, b_first, x_first = pointer(0), pointer(3), pointer(6), pointer(10)
            c_step, a_step, b_step, length, x_step = (arguments[n] for n in (2, 5, 8, 9, 12))

            def stepped(first: Any, step: Any, r: int) -> Any:
                return made.at(first, builder.mul(step, ir.Constant(ir.IntType(64), r)))

            c_rows = [stepped(c_first, c_step, r) for r in range(rows)]
            a_rows = [] if transposed else [stepped(a_first, a_step, r) for r in range(rows)]
            lanes = [v * WIDTH for v in range(vectors)]
            if start == "bias":
                starts = [made.load(made.at(x_first, lane)) for lane in lanes] * rows
            elif start == "add":
                starts = [made.load(made.at(row, lane)) for row in c_rows for lane in lanes]
            else:
                starts = [made.constant(0.0)] * (rows * vectors)

            def scalars(k: Any, count: int) -> list[list[Any]]:
                """A's elements for `count` steps starting at k, [step][row]."""
                if transposed:
                    steps = [builder.add(k, ir.Constant(k.type, u)) for u in range(count)]
                    firsts = [made.at(a_first, builder.mul(step, a_step)) for step in steps]
                    return [[builder.load(made.at(first, r)) for r in range(rows)] for first in firsts]
                if WIDTH != 4 or count == 1:
                    return [[builder.load(made.at(row, k, u)) for row in a_rows] for u in range(count)]
                quads = [made.load(made.at(row, k)) for row in a_rows]  # NEON multiplies by one lane of a vector for free
                index = [ir.Constant(ir.IntType(32), u) for u in range(count)]
                return [[builder.extract_element(quad, index[u]) for quad in quads] for u in range(count)]

            def step(k: Any, count: int, sums: list[Any]) -> list[Any]:
                sums, elements = list(sums), scalars(k, count)
                for u in range(count):
                    row = made.at(b_first, builder.mul(builder.add(k, ir.Constant(k.type, u)), b_step))
                    columns = [made.load(made.at(row, lane)) for lane in lanes]
                    for r in range(rows):
                        element = made.splat(elements[u][r])
                        for v, column in enumerate(columns):
                            sums[r * vectors + v] = made.fma(element, column, sums[r * vectors + v])
                return sums

            sums = made.sums(starts, length, step)
            for r in range(rows):
                for v, lane in enumerate(lanes):
                    h = made.load(made.at(stepped(x_first, x_step, r), lane)) if finish.endswith("slope") else None
                    made.store(made.finished(sums[r * vectors + v], finish, h), made.at(c_rows[r], lane))
            return context.get_dummy_value()

        return types.void(c, i8, i8, a, i8, i8, b, i8, i8, i8, x, i8, i8), codegen

    return tile


@allocating
def _check(name, array, first, rows, stride, columns):
    if first < 0 or (rows > 0 and first + (rows - 1) * stride + columns > array.shape[0]):
        raise IndexError("a matrix product would go out of bounds of its " + name)


def _make_band(rows: int, vectors: int, start: str, finish: str, transposed: bool) -> Any:
    """A compiled function for one panel, `rows` rows at a time, from row `r` on; returns the first row not done."""
    tile = _make_tile(rows, vectors, start, finish, transposed)

    @joined
    def band(c, c_at, a, b, b_at, x, x_at, r, count, depth):
        c_array, _, c_stride, _ = c
        a_array, a_first, a_stride = a
        b_array, _, b_stride, _ = b
        x_array, _, x_stride = x
        down = 1 if transposed else a_stride
        while r + rows <= count:
            tile(
                c_array, c_at + r * c_stride, c_stride, a_array, a_first + r * down, a_stride, b_array, b_at, b_stride, depth,
                x_array, x_at + r * x_stride, x_stride,
            )  # fmt: skip
            r += rows
        return r

    return band


def _make_product(start: str, finish: str, transposed: bool = False) -> Any:
    """A compiled function for C = finish(start + A · B) of any number of rows and panels.

    Matrices are tuples: c and b = (flat array, offset, row stride, stride of panels of `width` columns),
    a = (array, offset, row stride), x = (array, offset, row stride): biases, or the activations whose slope is taken.
    """
    wide, wide_rest = (_make_band(n, VECTORS, start, finish, transposed) for n in (ROWS, 1))
    wide_half = _make_band(ROWS // 2, VECTORS, start, finish, transposed) if transposed else None  # inputs may be very few
    narrow, narrow_rest = (_make_band(n, 1, start, finish, transposed) for n in (ROWS, 1))
    uses_x = start == "bias" or finish.endswith("slope")

    @joined
    def product(c, a, b, x, rows, depth, panels, width):
        if CHECKED:
            _check("result", c[0], c[1] + (panels - 1) * c[3], rows, c[2], width)
            _check("left factor", a[0], a[1], depth if transposed else rows, a[2], rows if transposed else depth)
            _check("right factor", b[0], b[1] + (panels - 1) * b[3], depth, b[2], width)
            if uses_x:
                _check("activations", x[0], x[1] + (panels - 1) * width, rows, x[2], width)
        for p in range(panels):
            c_at, b_at, x_at = c[1] + p * c[3], b[1] + p * b[3], x[1] + p * width
            if width == PANEL:
                r = wide(c, c_at, a, b, b_at, x, x_at, 0, rows, depth)
                if wide_half is not None:
                    r = wide_half(c, c_at, a, b, b_at, x, x_at, r, rows, depth)
                wide_rest(c, c_at, a, b, b_at, x, x_at, r, rows, depth)
            else:
                r = narrow(c, c_at, a, b, b_at, x, x_at, 0, rows, depth)
                narrow_rest(c, c_at, a, b, b_at, x, x_at, r, rows, depth)

    return product


def _make_dots(rows: int) -> Any:
    """The intrinsic for `rows` numbers of one column of C, each the product of a row of A and a row of B.

    That row of B is in panels of PANEL columns, `b_stride` apart.
    """

    @intrinsic
    def dots(typing_context: Any, c: Any, c_at: Any, c_stride: Any, a: Any, a_at: Any, a_stride: Any, b: Any, b_at: Any,
             b_stride: Any, panels: Any, start: Any) -> Any:  # fmt: skip
        i8 = types.int64

        def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            made = Tile(builder, VECTORS)

            def pointer(n: int) -> Any:
                array = context.make_array(signature.args[n])(context, builder, arguments[n])
                return made.at(array.data, arguments[n + 1])

            c_first, a_first, b_first = map(pointer, (0, 3, 6))
            c_step, a_step, b_step, length = (arguments[n] for n in (2, 5, 8, 9))
            a_rows = [made.at(a_first, builder.mul(a_step, ir.Constant(i64, r))) for r in range(rows)]

            def step(k: Any, count: int, sums: list[Any]) -> list[Any]:
                sums = list(sums)
                for u in range(count):
                    panel = builder.add(k, ir.Constant(i64, u))
                    column, row = builder.mul(panel, ir.Constant(i64, PANEL)), made.at(b_first, builder.mul(panel, b_step))
                    for lane in range(0, PANEL, WIDTH):
                        vector = made.load(made.at(row, lane))
                        for r in range(rows):
                            sums[r] = made.fma(made.load(made.at(a_rows[r], column, lane)), vector, sums[r])
                return sums

            for r, total in enumerate(made.sums([made.constant(0.0)] * rows, length, step)):
                place = made.at(c_first, builder.mul(c_step, ir.Constant(i64, r)))
                builder.store(made.total(arguments[10], total), place)
            return context.get_dummy_value()

        return types.void(c, i8, i8, a, i8, i8, b, i8, i8, i8, types.float32), codegen

    return dots


def _make_column(rows: int) -> Any:
    """A compiled function for one column, `rows` rows at a time, from row `r` on; returns the first row not done."""
    dots = _make_dots(rows)

    @joined
    def column(c, a, b, bias, r, count, panels):
        c_array, c_at, c_stride = c
        a_array, a_at, a_stride = a
        b_array, b_at, b_stride = b
        while r + rows <= count:
            c_first, a_first = c_at + r * c_stride, a_at + r * a_stride
            dots(c_array, c_first, c_stride, a_array, a_first, a_stride, b_array, b_at, b_stride, panels, bias)
            r += rows
        return r

    return column


_column, _column_rest = _make_column(ROWS), _make_column(1)


@joined
def few_columns(c, a, b, x, rows, columns, panels):
    """C = bias + A · B for up to FEW columns, with B transposed, in panels of PANEL columns.

    c = (flat array, offset, row stride), b = (array, offset, stride of panels), x = (array, offset); a as for products.
    """
    if CHECKED:
        _check("result", c[0], c[1], rows, c[2], columns)
        _check("left factor", a[0], a[1], rows, a[2], panels * PANEL)
        _check("right factor", b[0], b[1], panels, b[2], columns * PANEL)
    for j in range(columns):
        into, weights, bias = (c[0], c[1] + j, c[2]), (b[0], b[1] + j * PANEL, b[2]), x[0][x[1] + j]
        r = _column(into, a, weights, bias, 0, rows, panels)
        _column_rest(into, a, weights, bias, r, rows, panels)


linear = _make_product("bias", "none")
linear_tanh = _make_product("bias", "tanh")
linear_relu = _make_product("bias", "relu")
times = _make_product("zero", "none")
times_tanh_slope = _make_product("zero", "tanh_slope")
times_relu_slope = _make_product("zero", "relu_slope")
add_transposed = _make_product("add", "none", transposed=True)
