"""A 3x3 convolution of small grids with its bias, ReLU and flattening, forward and backward in one kernel each.

observations [B, H, W, C] as stored, channels last → features [B, K * (H-2) * (W-2)]; gradients go to weight and bias
only. The torch reference is beside it. Knows no network.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from hurtle.errors import HurtleError

PROGRAMS_PER_UNIT = 4
"""Persistent programs per multiprocessor of the GPU."""
WIDTHS = (4, 2, 1)
MOST_INPUTS = 64
MOST_CHANNELS, MOST_FILTERS, MOST_PLACES = MOST_INPUTS // 3, 32, 2**30
BYTES = (torch.uint8, torch.int8)
OLDEST_GPU = (8, 0)
"""The first compute capability with bfloat16 products."""


@dataclass(frozen=True)
class GridShape:
    """What the kernels are compiled for.

    A row in the kernels represents `width` adjacent outputs of one sample. Their inputs in each of three rows of the
    observation are contiguous in memory: (width + 2) * C numbers. So the weights become three banded matrices
    [inputs, width * K]: more to multiply, but much less to load and convert.

    Attributes:
        height: H of an observation.
        columns: W of an observation.
        channels: C of an observation.
        filters: K.
        width: Adjacent outputs in a row.
        inputs: Their inputs in one row of the observation, padded.
        padded_filters: K, padded.
        parts: Number of bfloat16 matrices whose sum represents weights or gradients in products; 0 multiplies float32.
        precision: The precision of float32 products.
    """

    height: int
    columns: int
    channels: int
    filters: int
    width: int
    inputs: int
    padded_filters: int
    parts: int
    precision: str

    @property
    def outputs(self) -> int:
        """Outputs of a row, padded."""
        return self.width * self.padded_filters

    @property
    def rows(self) -> int:
        """Rows per sample."""
        return (self.height - 2) * triton.cdiv(self.columns - 2, self.width)

    @property
    def forward_rows(self) -> int:
        """Rows of a block in the forward kernel that fit into registers and shared memory."""
        return 64 if self.inputs > 32 or self.parts == 0 else 128

    @property
    def backward_rows(self) -> int:
        """The same in the backward kernel."""
        return 32 if self.inputs > 16 else 64

    @property
    def features(self) -> int:
        """Features per sample."""
        return self.filters * (self.height - 2) * (self.columns - 2)


def grid_convolution(
    obs: Tensor, weight: Tensor, bias: Tensor, scale: float = 1.0, shift: float = 0.0, dtype: torch.dtype = torch.float32
) -> Tensor:
    """ReLU of a 3x3 convolution with stride 1 and no padding, flattened like torch's [B, K, H-2, W-2].

    Gradients go to `weight` and `bias`. It can be captured in a CUDA graph.

    Args:
        obs: Any real dtype; bytes, bools and float32 are read without conversion. [B, H, W, C]
        weight: float32. [K, C, 3, 3]
        bias: float32. [K]
        scale: The input is obs * scale + shift.
        shift: See scale.
        dtype: Dtype of the result: bfloat16, with bfloat16 products, or float32, with products about as precise as TF32 if
            torch may use that, else float32.

    Returns:
        The features. [B, K * (H-2) * (W-2)]

    Raises:
        HurtleError: Shapes or dtypes are not supported.

    Example:
        features = grid_convolution(obs, layer.weight, layer.bias)
    """
    _check(obs, weight, bias, dtype)
    obs = obs.view(torch.uint8) if obs.dtype == torch.bool else obs if obs.dtype in BYTES else obs.float()
    return _GridConvolution.apply(obs.contiguous(), weight.contiguous(), bias.contiguous(), scale, shift, dtype)


def grid_convolution_reference(
    obs: Tensor, weight: Tensor, bias: Tensor, scale: float = 1.0, shift: float = 0.0, dtype: torch.dtype = torch.float32
) -> Tensor:
    """The reference for `grid_convolution`, in the precision of the weights."""
    planes = (obs.to(weight.dtype) * scale + shift).permute(0, 3, 1, 2)
    return nn.functional.conv2d(planes, weight, bias).relu().flatten(1).to(dtype)


def supports(obs: Tensor, filters: int) -> bool:
    """Whether the kernels support these observations [B, H, W, C], this number of filters and the GPU."""
    is_small = obs.shape[3] <= MOST_CHANNELS and filters <= MOST_FILTERS and math.prod(obs.shape[:3]) <= MOST_PLACES
    return is_small and (not obs.is_cuda or torch.cuda.get_device_capability(obs.device) >= OLDEST_GPU)


@cache
def grid_shape(height: int, columns: int, channels: int, filters: int, parts: int, precision: str) -> GridShape:
    """The shape with the width that needs the fewest loads, then the fewest products."""
    padded_filters = max(16, triton.next_power_of_2(filters))
    most_weights = 2048 if parts == 0 else 4096  # in one matrix
    shapes = []
    for width in WIDTHS:
        inputs = max(16, triton.next_power_of_2((width + 2) * channels))
        shape = GridShape(height, columns, channels, filters, width, inputs, padded_filters, parts, precision)
        if inputs <= MOST_INPUTS and inputs * shape.outputs <= most_weights:
            shapes.append(shape)
    return min(shapes, key=lambda shape: (shape.rows * shape.inputs, shape.outputs))


@triton.jit
def _band(
    weight, ky: tl.constexpr, C: tl.constexpr, K: tl.constexpr, WIDTH: tl.constexpr, INPUTS: tl.constexpr, KP: tl.constexpr
):
    """The matrix of one row of weights: [INPUTS, WIDTH * KP]."""
    j, n = tl.arange(0, INPUTS)[:, None], tl.arange(0, WIDTH * KP)[None, :]
    k, kx = n % KP, j // C - n // KP
    used = (k < K) & (kx >= 0) & (kx < 3)
    return tl.load(weight + (k * C + j % C) * 9 + ky * 3 + kx, mask=used, other=0.0)


@triton.jit
def _rows(block, ROWS: tl.constexpr, H: tl.constexpr, W: tl.constexpr, WIDTH: tl.constexpr):
    """Sample, y and first x of a block's rows."""
    ACROSS: tl.constexpr = (W - 2 + WIDTH - 1) // WIDTH
    row = block * ROWS + tl.arange(0, ROWS)
    return (row // ((H - 2) * ACROSS)).to(tl.int64), row // ACROSS % (H - 2), row % ACROSS * WIDTH


@triton.jit
def _numbers(
    obs, sample, y, x, num_samples,
    H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, WIDTH: tl.constexpr, INPUTS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """The inputs in row y of the observation to the outputs from x on: [ROWS, INPUTS]."""
    j = tl.arange(0, INPUTS)
    inside = (sample < num_samples)[:, None] & (j < (WIDTH + 2) * C)[None, :]
    if (W - 2) % WIDTH != 0:
        inside = inside & (x[:, None] + j[None, :] // C < W)
    first = sample * (H * W * C) + (y * W + x) * C
    numbers = tl.load(obs + first[:, None] + j[None, :], mask=inside, other=0).to(tl.float32)
    return numbers if PARTS == 0 else numbers.to(tl.bfloat16)


@triton.jit
def _outputs(
    block, num_samples,
    ROWS: tl.constexpr, H: tl.constexpr, W: tl.constexpr, K: tl.constexpr, WIDTH: tl.constexpr, KP: tl.constexpr,
):  # fmt: skip
    """The indices of a block's outputs [ROWS * WIDTH, KP] in the features, and which of them exist."""
    ACROSS: tl.constexpr = (W - 2 + WIDTH - 1) // WIDTH * WIDTH
    at, k = block * (ROWS * WIDTH) + tl.arange(0, ROWS * WIDTH), tl.arange(0, KP)
    sample, y, x = (at // ((H - 2) * ACROSS)).to(tl.int64), at // ACROSS % (H - 2), at % ACROSS
    exists = (sample < num_samples) & (x < W - 2)
    place = sample * (K * (H - 2) * (W - 2)) + y * (W - 2) + x
    return place[:, None] + (k * ((H - 2) * (W - 2)))[None, :], exists[:, None] & (k < K)[None, :]


@triton.jit
def _dot(numbers, b, sums, PARTS: tl.constexpr, PRECISION: tl.constexpr, WIDE: tl.constexpr):
    """Add numbers @ b, with b as the sum of `PARTS` bfloat16 matrices, or unchanged if that is 0."""
    if PARTS == 0:
        sums = tl.dot(numbers, b, sums, input_precision=PRECISION)
    for _ in tl.static_range(PARTS):
        part = b.to(tl.bfloat16)
        sums = tl.dot(numbers.to(tl.float32), part.to(tl.float32), sums) if WIDE else tl.dot(numbers, part, sums)
        b = b - part.to(tl.float32)
    return sums


@triton.jit
def _conv_forward(
    obs, weight, bias, features, num_samples, num_blocks, scale,
    H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, K: tl.constexpr, WIDTH: tl.constexpr, INPUTS: tl.constexpr,
    KP: tl.constexpr, ROWS: tl.constexpr, PARTS: tl.constexpr, PRECISION: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    w0 = _band(weight, 0, C, K, WIDTH, INPUTS, KP)
    w1 = _band(weight, 1, C, K, WIDTH, INPUTS, KP)
    w2 = _band(weight, 2, C, K, WIDTH, INPUTS, KP)
    k = tl.arange(0, KP)
    b = tl.load(bias + k, mask=k < K, other=0.0)
    for block in range(tl.program_id(0), num_blocks, tl.num_programs(0)):
        sample, y, x = _rows(block, ROWS, H, W, WIDTH)
        x0 = _numbers(obs, sample, y, x, num_samples, H, W, C, WIDTH, INPUTS, PARTS)
        x1 = _numbers(obs, sample, y + 1, x, num_samples, H, W, C, WIDTH, INPUTS, PARTS)
        x2 = _numbers(obs, sample, y + 2, x, num_samples, H, W, C, WIDTH, INPUTS, PARTS)
        sums = tl.zeros((ROWS, WIDTH * KP), tl.float32)
        sums = _dot(x0, w0, sums, PARTS, PRECISION, WIDE)
        sums = _dot(x1, w1, sums, PARTS, PRECISION, WIDE)
        sums = _dot(x2, w2, sums, PARTS, PRECISION, WIDE)
        values = tl.maximum(tl.reshape(sums, (ROWS * WIDTH, KP)) * scale + b[None, :], 0.0)
        place, exists = _outputs(block, num_samples, ROWS, H, W, K, WIDTH, KP)
        tl.store(features + place, values, mask=exists)


@triton.jit
def _conv_backward(
    obs, features, d_features, partials, num_samples, num_blocks,
    H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, K: tl.constexpr, WIDTH: tl.constexpr, INPUTS: tl.constexpr,
    KP: tl.constexpr, ROWS: tl.constexpr, PARTS: tl.constexpr, PRECISION: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    N: tl.constexpr = WIDTH * KP
    d0, d1, d2 = tl.zeros((INPUTS, N), tl.float32), tl.zeros((INPUTS, N), tl.float32), tl.zeros((INPUTS, N), tl.float32)
    d_bias = tl.zeros((N,), tl.float32)
    for block in range(tl.program_id(0), num_blocks, tl.num_programs(0)):
        place, exists = _outputs(block, num_samples, ROWS, H, W, K, WIDTH, KP)
        d_values = tl.load(d_features + place, mask=exists, other=0.0).to(tl.float32)
        d_values = tl.where(tl.load(features + place, mask=exists, other=0.0) > 0.0, d_values, 0.0)
        d_values = tl.reshape(d_values, (ROWS, N))
        d_bias += tl.sum(d_values, 0)
        sample, y, x = _rows(block, ROWS, H, W, WIDTH)
        x0 = _numbers(obs, sample, y, x, num_samples, H, W, C, WIDTH, INPUTS, PARTS)
        x1 = _numbers(obs, sample, y + 1, x, num_samples, H, W, C, WIDTH, INPUTS, PARTS)
        x2 = _numbers(obs, sample, y + 2, x, num_samples, H, W, C, WIDTH, INPUTS, PARTS)
        d0 = _dot(tl.trans(x0), d_values, d0, PARTS, PRECISION, WIDE)
        d1 = _dot(tl.trans(x1), d_values, d1, PARTS, PRECISION, WIDE)
        d2 = _dot(tl.trans(x2), d_values, d2, PARTS, PRECISION, WIDE)
    j, n = tl.arange(0, INPUTS)[:, None], tl.arange(0, N)
    own = partials + tl.program_id(0) * ((3 * INPUTS + 1) * N)
    tl.store(own + j * N + n[None, :], d0)
    tl.store(own + (j + INPUTS) * N + n[None, :], d1)
    tl.store(own + (j + 2 * INPUTS) * N + n[None, :], d2)
    tl.store(own + 3 * INPUTS * N + n, d_bias)


class _GridConvolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, obs: Tensor, weight: Tensor, bias: Tensor, scale: float, shift: float, dtype: torch.dtype) -> Tensor:
        shape = grid_shape(*obs.shape[1:], len(weight), *_multiplication(obs.dtype, dtype))
        features = torch.empty(len(obs), shape.features, dtype=dtype, device=obs.device)
        if shift:  # the convolution of a constant is the same everywhere
            bias = bias + shift * weight.sum((1, 2, 3))
        blocks = triton.cdiv(len(obs) * shape.rows, shape.forward_rows)
        programs = _num_programs(blocks, obs.device)
        _launch(
            _conv_forward,
            programs,
            shape,
            shape.forward_rows,
            obs,
            weight,
            bias,
            features,
            len(obs),
            blocks,
            float(scale),
        )
        ctx.save_for_backward(obs, features)
        ctx.shape, ctx.scale, ctx.shift = shape, scale, shift
        return features

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_features: Tensor) -> tuple[Tensor | None, ...]:
        obs, features = ctx.saved_tensors
        shape: GridShape = ctx.shape
        blocks = triton.cdiv(len(obs) * shape.rows, shape.backward_rows)
        programs = _num_programs(blocks, obs.device)
        partials = torch.empty(programs, 3 * shape.inputs + 1, shape.outputs, device=obs.device)
        d_features = d_features.contiguous()
        _launch(_conv_backward, programs, shape, shape.backward_rows, obs, features, d_features, partials, len(obs), blocks)
        d_weight, d_bias = _unbanded(partials.sum(0), shape)
        if ctx.scale != 1.0:
            d_weight = d_weight * ctx.scale
        if ctx.shift:
            d_weight = d_weight + ctx.shift * d_bias[:, None, None, None]
        return None, d_weight, d_bias, None, None, None


def _unbanded(sums: Tensor, shape: GridShape) -> tuple[Tensor, Tensor]:
    """Gradients of weight and bias from those of the banded matrices: sums along the diagonals."""
    row, column = shape.outputs, shape.channels * shape.outputs  # stride of channels, of columns
    sizes = shape.filters, shape.channels, 3, 3, shape.width
    strides = 1, row, shape.inputs * row, column, column + shape.padded_filters
    d_bias = sums[-1].view(shape.width, shape.padded_filters).sum(0)
    return sums.as_strided(sizes, strides).sum(-1), d_bias[: shape.filters]


def _launch(kernel: Any, programs: int, shape: GridShape, rows: int, obs: Tensor, *others: Tensor | float) -> None:
    with torch.cuda.device_of(obs):
        kernel[(programs,)](
            obs, *others,
            H=shape.height, W=shape.columns, C=shape.channels, K=shape.filters, WIDTH=shape.width, INPUTS=shape.inputs,
            KP=shape.padded_filters, ROWS=rows, PARTS=shape.parts, PRECISION=shape.precision,
            WIDE=triton.knobs.runtime.interpret,  # Triton's interpreter cannot multiply bfloat16
            num_stages=2 if shape.parts else 1,
        )  # fmt: skip


def _multiplication(stored: torch.dtype, dtype: torch.dtype) -> tuple[int, str]:
    """`parts` and `precision` of a shape. bfloat16 represents every byte exactly, and three of them a float32."""
    allows_tf32 = torch.get_float32_matmul_precision() != "highest"
    if dtype == torch.bfloat16:
        return 1, "tf32"
    if stored in BYTES:
        return (2 if allows_tf32 else 3), "tf32"
    return 0, "tf32" if allows_tf32 else "tf32x3"


def _num_programs(blocks: int, device: torch.device) -> int:
    return max(1, min(blocks, PROGRAMS_PER_UNIT * _num_units(device)))


@cache
def _num_units(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def _check(obs: Tensor, weight: Tensor, bias: Tensor, dtype: torch.dtype) -> None:
    if obs.ndim != 4 or min(obs.shape[1:3]) < 3 or weight.shape[1:] != (obs.shape[3], 3, 3) or bias.shape != weight.shape[:1]:
        raise HurtleError(
            "grid_convolution takes obs [B, H, W, C] of at least 3x3, weight [K, C, 3, 3] and bias [K], "
            f"got {[*obs.shape]}, {[*weight.shape]} and {[*bias.shape]}."
        )
    if not supports(obs, len(weight)):
        raise HurtleError(
            f"grid_convolution takes up to {MOST_CHANNELS} channels, {MOST_FILTERS} filters and 2^30 places at once, on GPUs "
            f"of compute capability 8.0 or newer; got obs {[*obs.shape]} and {len(weight)} filters. Use nn.Conv2d."
        )
    if weight.dtype != torch.float32 or bias.dtype != torch.float32 or dtype not in (torch.float32, torch.bfloat16):
        raise HurtleError(
            f"grid_convolution takes float32 weights and gives float32 or bfloat16, got {weight.dtype} and {dtype}."
        )
