"""`NetworkPlan`: a policy as the compiled kernels see it: tables of layers and offsets instead of modules.

flat weights, as torch stores them → packed weights, as the kernels read them, and back. planner.py makes plans.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hurtle.errors import HurtleError
from hurtle.kernels.cpu import gemm, network, sparse
from hurtle.kernels.loader import load_kernels, say_if_new
from hurtle.policies.nested_mlp import Part

PLAIN, SCALED, ONE_HOT, NESTED = range(4)
"""Kinds of inputs."""


class Places(NamedTuple):
    """Where weights are in the flat and in the packed buffer."""

    packed: np.ndarray
    """The place in the packed buffer of each element of the flat one."""
    flat: np.ndarray
    """The place in the flat buffer of each element of the packed one, transposed copies included; its end for padding."""

    @classmethod
    def of(cls, plan: NetworkPlan) -> Places:
        """The places of a plan's weights."""
        found = np.full(plan.packed_size, plan.num_weights, np.intp)
        for layer, across in zip(plan.layers, plan.flat_inputs, strict=True):
            inputs, outputs, width = (int(layer[n]) for n in (network.INPUTS, network.OUTPUTS, network.PANEL_WIDTH))
            j, k = np.arange(outputs), np.arange(inputs)[:, None]
            flat = layer[network.FLAT_WEIGHT] + j * layer[network.FLAT_DOWN] + across[:, None]
            if layer[network.KIND] != network.FEW_OUTPUTS:
                found[layer[network.WEIGHT] + j // width * inputs * width + k * width + j % width] = flat
            if layer[network.FLAT_BIAS] >= 0:
                found[layer[network.BIAS] + j] = layer[network.FLAT_BIAS] + j
            if layer[network.TRANSPOSED] >= 0:
                other = int(plan.layers[layer[network.SOURCE], network.READ_WIDTH])
                found[layer[network.TRANSPOSED] + k // other * outputs * other + j * other + k % other] = flat
        found[plan.log_std_at : plan.log_std_at + plan.log_stds] = plan.log_std_flat + np.arange(plan.log_stds)
        packed = np.empty(plan.num_weights + 1, np.intp)
        packed[found[: plan.trained_size]] = np.arange(plan.trained_size)
        return cls(packed[:-1], found)


@dataclass(frozen=True, eq=False)
class NetworkPlan:
    """Layers, sizes and offsets of a policy.

    Attributes:
        layers: One row per layer, columns as in kernels/cpu/network.py. int64 [L, COLUMNS]
        split: Layers [0, split) compute the policy's outputs; the others, if any, the values.
        actor: The layer of the policy's outputs.
        critic: The layer of the values.
        num_weights: Elements of the flat buffer: all parameters in the order of `policy.parameters()`.
        trained_size: Elements of the packed buffer that are trained; the transposed copies follow.
        packed_size: Elements of the packed buffer.
        work_size: Workspace for one tile, in floats.
        head_kind: As in `HEAD_KINDS`.
        nvec: Options of each choice; for a Box, the size of an action. int64
        log_std_flat: Offset of log_std in the flat buffer.
        log_std_at: Offset of log_std in the packed buffer.
        log_stds: Size of log_std; 0 if the policy has none.
        input_kind: 0 numbers, 1 bytes scaled to [0, 1], 2 one-hot, 3 nested.
        num_inputs: Inputs of the first layer, or of all that read nested observations.
        flat_inputs: For each layer, where torch stores the weights of each input, relative to those of the first one.
        memory: The layer that steps the memory, see kernels/cpu/cells.py; layers [memory + 1, …) follow it. -1: there is none.
        encoded: Layers [0, encoded) come before the memory.
        num_states: Parts of the memory's state …
        state_size: … and the numbers of each.
        num_values: Outputs of the critic, of which the highest is the value.
        num_explorations: Numbers at `log_std_at` that tell how to explore; the network's `exploration` gives them.
        parts: Of nested observations, in the order of their inputs.
        kept: Arrays that the table points to.
    """

    NUMBERS: ClassVar[tuple[str, ...]] = (
        *("split", "actor", "critic", "num_values", "head_kind", "mask_size", "log_std_at", "num_uniforms", "memory"),
    )
    """The fields that jobs of acting kernels take from a plan."""
    layers: np.ndarray
    split: int
    actor: int
    critic: int
    num_weights: int
    trained_size: int
    packed_size: int
    work_size: int
    head_kind: int
    nvec: np.ndarray
    num_uniforms: int
    mask_size: int
    log_std_flat: int
    log_std_at: int
    log_stds: int
    input_kind: int
    num_inputs: int
    flat_inputs: tuple[np.ndarray, ...]
    memory: int = -1
    encoded: int = 0
    num_states: int = 0
    state_size: int = 0
    num_values: int = 1
    num_explorations: int = 0
    low: np.ndarray = field(default_factory=lambda: np.zeros(1, np.float32))
    range: np.ndarray = field(default_factory=lambda: np.ones(1, np.float32))
    parts: tuple[Part, ...] = ()
    kept: tuple[np.ndarray, ...] = ()

    @property
    def shared(self) -> bool:
        """Whether policy and value share one body."""
        return self.split == len(self.layers)

    @property
    def scales(self) -> bool:
        """Whether inputs are scaled."""
        return self.input_kind == SCALED and bool(self.low.any() or (self.range != 1).any())

    def listed_inputs(self, dtype: torch.dtype) -> int:
        """Maximum number of non-zeros that the kernels list for an observation of this dtype; 0 if they do not skip zeros."""
        if self.input_kind == SCALED:
            special = dtype == torch.uint8 and not self.low.any()
        else:
            special = self.input_kind == PLAIN and dtype in (torch.uint8, torch.float32)
        return sparse.list_length(self.num_inputs) if special else 0

    def compiled(self) -> tuple[int, int]:
        """Compile what these layers need, and put its addresses into the table; returns those of forward and backward."""
        kernels, kinds = load_kernels(), self.layers[:, network.KIND]
        listed = self.input_kind == ONE_HOT or sparse.list_length(self.num_inputs) > 0
        more = listed or bool((self.layers[:, network.ACTIVATION] == gemm.RELU).any())
        has_convolution = bool((kinds == network.OWN_CODE).sum() > (self.memory >= 0))
        say_if_new(more, has_convolution, self.memory >= 0)
        for n in np.flatnonzero(kinds == network.OWN_CODE):
            own = kernels.cells if n == self.memory else kernels.conv
            self.layers[n, [network.FORWARD, network.BACKWARD]] = own.addresses()
        return kernels.network.forward_address(more), kernels.network.backward_address(more)

    def new_weights(self) -> np.ndarray:
        """An empty packed buffer."""
        return np.zeros(self.packed_size, np.float32)

    def new_states(self, rows: int) -> Tensor:
        """The memory's states at the start of episodes, float32 [parts, rows, size]; no parts without a memory."""
        return torch.zeros(self.num_states, rows, self.state_size)

    def pack(self, flat: np.ndarray, weights: np.ndarray, transposed: bool = True) -> None:
        """Copy a flat buffer into a packed one; `transposed=False` skips the transposed copies, for optimizer moments."""
        self._check(flat, weights)
        size = self.packed_size if transposed else self.trained_size
        np.take(np.append(flat, np.float32(0.0)), self._places.flat[:size], out=weights[:size], mode="clip")

    def pack_exploration(self, network: Any, weights: np.ndarray) -> None:
        """Write the numbers that tell how to explore, of policies that have them, into a packed buffer."""
        if self.num_explorations:
            weights[self.log_std_at : self.log_std_at + self.num_explorations] = network.exploration()

    def checked(self, flat: Tensor) -> np.ndarray:
        """Flat weights as an array.

        Raises:
            HurtleError: They have the wrong size, dtype or layout.
        """
        fits = flat.shape == (self.num_weights,) and flat.dtype == torch.float32 and flat.device.type == "cpu"
        if not (fits and flat.is_contiguous()):
            given = str(flat.dtype).removeprefix("torch.")
            raise HurtleError(
                f"load_weights takes one contiguous float32 buffer of {self.num_weights} weights on the CPU, as "
                f"Weights.of(policy) makes it; got {given} of shape {tuple(flat.shape)} on {flat.device}"
                f"{'' if flat.is_contiguous() else ', with gaps'}."
            )
        return flat.detach().numpy()

    def unpack(self, weights: np.ndarray, flat: np.ndarray) -> None:
        """Copy a packed buffer into a flat one."""
        self._check(flat, weights)
        np.take(weights, self._places.packed, out=flat, mode="clip")

    @cached_property
    def _places(self) -> Places:
        return Places.of(self)

    def _check(self, flat: np.ndarray, weights: np.ndarray) -> None:
        if flat.dtype != np.float32 or flat.shape != (self.num_weights,) or len(weights) < self.trained_size:
            raise HurtleError(
                f"Expected a float32 buffer of {self.num_weights} weights, got {flat.dtype} of shape {flat.shape}."
            )
