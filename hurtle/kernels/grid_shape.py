"""`GridCNNShape`: the sizes that the fused Triton kernels of a small CNN are compiled for, and their limits."""

from __future__ import annotations

from dataclasses import dataclass

FILTERS, HIDDEN = 16, 128
MAX_COLUMNS = 10
"""Of a grid: eight outputs of the convolution, side by side."""
MAX_ROW = 127
"""Numbers in a row of a grid: three rows are multiplied in pieces of 128, at most three."""
MAX_CHOICES = 15
"""The value is the 16th output."""


@dataclass(frozen=True)
class GridCNNShape:
    """One 3x3 convolution of a grid, one hidden layer, both with ReLU; actor and critic read the hidden layer.

    Attributes:
        height: Rows of an observation.
        columns: Its columns.
        channels: Its channels, which are stored last.
        filters: Outputs of the convolution per place.
        hidden: Width of the hidden layer.
        outputs: Number of logits.
        offsets: Offsets in the flat parameters of weight and bias of convolution, hidden layer, actor and critic: 8 in all.
        size: Total number of parameters.
    """

    height: int
    columns: int
    channels: int
    filters: int
    hidden: int
    outputs: int
    offsets: tuple[int, ...]
    size: int
