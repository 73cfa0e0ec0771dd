"""`DenseChain`: dense layers, one after the other, laid out for the compiled kernels: a table, and where each weight goes.

sizes, activation → table of layers, packed sizes; torch's matrices ↔ packed weights. Layer 0 of the table is the input, so that
its gradient can be computed. Actor–critics have a `NetworkPlan` instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from torch import nn

from hurtle.errors import UnsupportedError
from hurtle.kernels.cpu import gemm, network
from hurtle.kernels.cpu.host import TILE
from hurtle.policies.mlp import VectorBody
from hurtle.policies.plain_mlp import ACTIVATIONS, layers_of

Matrices = list[tuple[np.ndarray, np.ndarray]]
"""Weights [outputs, inputs] and biases [outputs] of each layer."""


class DenseChain:
    """The layout of a network.

    Args:
        sizes: Inputs, width of each hidden layer, outputs.
        activation: Of the hidden layers: "tanh" or "relu".

    Attributes:
        layers: The table, columns as in kernels/cpu/network.py. int64 [L, COLUMNS]
        trained_size: Elements of packed weights, padding included.
        packed_size: The same with the transposed copies, which follow them.
        work_size: Floats of a workspace.
    """

    def __init__(self, sizes: Sequence[int], activation: str):
        rows = np.zeros((len(sizes), network.COLUMNS), np.int64)
        widths = [gemm.panel_width(size) for size in sizes]
        panels = [-(-size // width) for size, width in zip(sizes, widths, strict=True)]
        rows[:, network.OUTPUTS], rows[:, network.PANEL_WIDTH], rows[:, network.PANELS] = sizes, widths, panels
        rows[:, network.STRIDE] = rows[:, network.PANELS] * rows[:, network.PANEL_WIDTH]
        rows[:, network.READ_WIDTH], rows[:, network.READ_PANELS], rows[:, network.PARTS] = widths, panels, 1
        rows[:, network.SOURCE] = np.arange(len(sizes)) - 1
        rows[1:, network.INPUTS] = sizes[:-1]
        rows[:, network.WORK] = TILE * (np.cumsum(rows[:, network.STRIDE]) - rows[:, network.STRIDE])
        rows[0, network.KIND], rows[0, network.FLAT_BIAS] = network.INPUT, -1
        rows[1:-1, network.ACTIVATION] = getattr(gemm, activation.upper())
        self.work_size = TILE * int(rows[:, network.STRIDE].sum())
        self.places: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        self.trained_size = int(sum((row[network.INPUTS] + 1) * row[network.STRIDE] for row in rows[1:]))
        at, transposed = 0, self.trained_size
        for n, (inputs, outputs) in enumerate(pairwise(sizes), 1):
            row, width, other = rows[n], widths[n], widths[n - 1]
            row[network.WEIGHT], row[network.BIAS] = at, at + inputs * row[network.STRIDE]
            row[network.TRANSPOSED] = transposed
            j, k = np.arange(outputs)[:, None], np.arange(inputs)
            self.places.append(
                (
                    at + j // width * inputs * width + k * width + j % width,
                    row[network.BIAS] + np.arange(outputs),
                    transposed + k // other * outputs * other + j * other + k % other,
                )
            )
            at += (inputs + 1) * int(row[network.STRIDE])
            transposed += outputs * gemm.padded(inputs)
        self.layers, self.packed_size = rows, transposed

    def pack(self, matrices: Matrices, into: np.ndarray, transposed: bool = True) -> None:
        """Copy matrices into packed weights, or into moments, which have no transposed copies."""
        for (weight, bias), (places, bias_places, others) in zip(matrices, self.places, strict=True):
            into[places], into[bias_places] = weight, bias
            if transposed:
                into[others] = weight

    def unpack(self, packed: np.ndarray) -> Matrices:
        """Copies of the matrices in packed weights or moments."""
        return [(packed[places], packed[bias_places]) for places, bias_places, _ in self.places]


def chain_of(body: nn.Module, num_inputs: int, num_outputs: int) -> DenseChain:
    """The layout of a network with the hidden layers of a body.

    Args:
        body: A `VectorBody`.
        num_inputs: Inputs of the first layer.
        num_outputs: Outputs of the last one.

    Raises:
        UnsupportedError: The body is of another kind, or has other layers.
    """
    if not isinstance(body, VectorBody):
        raise UnsupportedError(f"its observations are encoded by a {type(body).__name__}")
    hidden = layers_of(body)
    activations = {layer.activation for layer in hidden}
    if not hidden or len(activations) != 1 or activations & {ACTIVATIONS[nn.Identity]}:
        raise UnsupportedError("it has no hidden layers, or different activations")
    return DenseChain([num_inputs, *(layer.linear.out_features for layer in hidden), num_outputs], activations.pop())
