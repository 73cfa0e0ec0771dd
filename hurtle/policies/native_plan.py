"""`NetworkPlan`: an MLP policy as the compiled kernels see it: tables of layers and offsets instead of modules.

torch policy → plan, or the reason there is none → packed weights. Knows nothing of envs, rollouts or losses.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn

from hurtle.errors import HurtleError, UnsupportedError
from hurtle.kernels.cpu import gemm, network, sparse
from hurtle.kernels.cpu.host import TILE
from hurtle.kernels.mlp_shape import HIDDEN_WIDTHS, MAX_INPUTS, MAX_OUTPUTS, MLPShape
from hurtle.policies.action_transform import HEAD_KINDS
from hurtle.policies.layers import Numbers, OneHot
from hurtle.policies.nested_mlp import NestedMLP, Part, nested_mlp
from hurtle.policies.plain_mlp import Dense, PlainMLP, plain_mlp
from hurtle.policies.policy import Policy
from hurtle.policies.structured import Structured

HEADS = ("categorical", "multi_categorical", "gaussian", "beta")
PLAIN, SCALED, ONE_HOT, NESTED = range(4)
PART_WIDTH = 16
"""Columns of a panel of the layers that read the parts of nested observations: a divisor of the outputs of each."""


class Places(NamedTuple):
    """Where weights are in the packed buffer; padding is nowhere, and stays zero."""

    packed: np.ndarray
    """The place of each element of the flat buffer."""
    transposed: np.ndarray
    """Places of the transposed copies …"""
    transposed_flat: np.ndarray
    """… and of what they are copies of, in the flat buffer."""

    @classmethod
    def of(cls, plan: NetworkPlan) -> Places:
        """The places of a plan's weights."""
        pairs: list[tuple[np.ndarray, np.ndarray]] = []
        copies: list[tuple[np.ndarray, np.ndarray]] = [(np.empty(0, np.int64), np.empty(0, np.int64))]
        for layer in plan.layers:
            inputs, outputs, width = (int(layer[n]) for n in (network.INPUTS, network.OUTPUTS, network.PANEL_WIDTH))
            j, k = np.arange(outputs), np.arange(inputs)[:, None]
            flat = (layer[network.FLAT_WEIGHT] + j * layer[network.FLAT_DOWN] + k * layer[network.FLAT_ACROSS]).ravel()
            pairs.append(((layer[network.WEIGHT] + j // width * inputs * width + k * width + j % width).ravel(), flat))
            if layer[network.FLAT_BIAS] >= 0:
                pairs.append((layer[network.BIAS] + j, layer[network.FLAT_BIAS] + j))
            if layer[network.TRANSPOSED] >= 0:
                other = int(plan.layers[layer[network.SOURCE], network.PANEL_WIDTH])
                at = layer[network.TRANSPOSED] + k // other * outputs * other + j * other + k % other
                copies.append((at.ravel(), flat))
        pairs.append((plan.log_std_at + np.arange(plan.log_stds), plan.log_std_flat + np.arange(plan.log_stds)))
        places, flat = (np.concatenate(part) for part in zip(*pairs, strict=True))
        packed = np.empty(plan.num_weights, np.intp)
        packed[flat] = places
        return cls(packed, *(np.concatenate(part) for part in zip(*copies, strict=True)))


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
        parts: Of nested observations, in the order of their inputs.
    """

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
    low: np.ndarray = field(default_factory=lambda: np.zeros(1, np.float32))
    range: np.ndarray = field(default_factory=lambda: np.ones(1, np.float32))
    parts: tuple[Part, ...] = ()

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

    def new_weights(self) -> np.ndarray:
        """An empty packed buffer."""
        return np.zeros(self.packed_size, np.float32)

    def pack(self, flat: np.ndarray, weights: np.ndarray, transposed: bool = True) -> None:
        """Copy a flat buffer into a packed one; `transposed=False` skips the transposed copies, for optimizer moments."""
        self._check(flat, weights)
        weights[self._places.packed] = flat
        if transposed:
            weights[self._places.transposed] = flat[self._places.transposed_flat]

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


def plan_for(policy: Policy) -> NetworkPlan:
    """The plan of a policy for the CPU kernels.

    Raises:
        UnsupportedError: The policy is not on the CPU, or not a plain MLP actor–critic with a head that the kernels support.
    """
    if any(parameter.device.type != "cpu" for parameter in policy.parameters()):
        raise UnsupportedError("its parameters are not on the CPU")
    return _plan(policy)


def flat_plan(policy: Policy) -> NetworkPlan:
    """`plan_for`, but for observations that are not nested, as those of native envs.

    Raises:
        UnsupportedError: See `plan_for`, or observations are nested.
    """
    plan = plan_for(policy)
    if plan.input_kind == NESTED:
        raise UnsupportedError("its observations are nested")
    return plan


def mlp_shape(policy: Policy) -> MLPShape:
    """The shape of a policy for the fused Triton kernels, derived from its plan; its parameters may be on any device.

    Raises:
        UnsupportedError: The kernels do not support this policy.
    """
    plan, space, actions = _plan(policy), policy.observation_space, policy.action_space
    if plan.input_kind == NESTED:
        raise UnsupportedError("its observations are nested")
    if plan.shared:
        raise UnsupportedError("actor and critic share layers")
    if not isinstance(space, spaces.Box) or space.dtype.kind != "f" or plan.num_inputs > MAX_INPUTS:
        raise UnsupportedError(f"observations are not vectors of at most {MAX_INPUTS} floats")
    activations = set(plan.layers[[0, 1, 3, 4], network.ACTIVATION].tolist()) if len(plan.layers) == 6 else set()
    if plan.split != 3 or activations not in ({gemm.TANH}, {gemm.RELU}):
        raise UnsupportedError("there are not exactly two hidden layers, both with tanh or both with relu")
    widths = set(plan.layers[[0, 1, 3, 4], network.OUTPUTS].tolist())
    if len(widths) != 1 or not widths <= set(HIDDEN_WIDTHS):
        raise UnsupportedError(f"the hidden layers do not share one width of {', '.join(map(str, HIDDEN_WIDTHS))}")
    kind, outputs = policy.head.kind, int(plan.layers[plan.actor, network.OUTPUTS])
    is_whole = isinstance(actions, spaces.Box) and actions.dtype.kind != "f"
    if kind not in ("categorical", "gaussian") or outputs > MAX_OUTPUTS or is_whole:
        raise UnsupportedError(f"actions are {kind}, more than {MAX_OUTPUTS}, or a Box of integers")
    offsets = (*plan.layers[:, [network.FLAT_WEIGHT, network.FLAT_BIAS]].ravel().tolist(), plan.log_std_flat)
    relu, gaussian = activations == {gemm.RELU}, kind == "gaussian"
    return MLPShape(plan.num_inputs, widths.pop(), outputs, relu, gaussian, offsets, plan.num_weights)


def _plan(policy: Policy) -> NetworkPlan:
    found = nested_mlp(policy) if type(policy.network) is Structured else plain_mlp(policy)
    if policy.head.kind not in HEADS:
        raise UnsupportedError(f"its actions are {policy.head.kind}")
    if any(parameter.dtype != torch.float32 or not parameter.requires_grad for parameter in policy.parameters()):
        raise UnsupportedError("its parameters are not all float32 and trained")
    return _Planner(policy, found).plan()


class _Planner:
    def __init__(self, policy: Policy, found: PlainMLP | NestedMLP):
        self.policy, self.found = policy, found
        self.flat: dict[int, int] = {}
        self.num_weights = 0
        for parameter in policy.parameters():
            self.flat[id(parameter)] = self.num_weights
            self.num_weights += parameter.numel()
        self.rows: list[list[int]] = []
        self.trained = self.transposed = self.work = self.most_work = 0

    def plan(self) -> NetworkPlan:
        found, head = self.found, self.policy.head
        hidden, actor = self._layers(found.actor, self._encoders(found.parts) if isinstance(found, NestedMLP) else -1)
        split = len(self.rows)
        if not found.is_shared:
            self.work, hidden = 0, -1  # the critic reuses the actor's workspace
        _, critic = self._layers(found.critic, hidden)
        layers = np.array(self.rows, np.int64)
        log_std = self.policy.network.log_std
        log_std_at = self.trained
        trained = self.trained + head.log_std_size
        inputs = layers[:, network.INPUTS] + (layers[:, network.FLAT_BIAS] >= 0)
        if int(inputs @ layers[:, network.OUTPUTS]) + head.log_std_size != self.num_weights:
            raise UnsupportedError("it has parameters besides those of its layers")
        layers[:, network.TRANSPOSED] += np.where(layers[:, network.TRANSPOSED] >= 0, trained, 0)
        return NetworkPlan(
            layers=layers,
            split=len(layers) if found.is_shared else split,
            actor=actor,
            critic=critic,
            num_weights=self.num_weights,
            trained_size=trained,
            packed_size=trained + self.transposed,
            work_size=self.most_work,
            head_kind=HEAD_KINDS[head.kind],
            nvec=np.array(head.nvec or ([head.num_outputs] if head.kind == "categorical" else head.action_shape), np.int64),
            num_uniforms=head.num_uniforms,
            mask_size=head.mask_size or 0,
            log_std_flat=0 if log_std is None else self.flat[id(log_std)],
            log_std_at=log_std_at,
            log_stds=head.log_std_size,
            **self._input(),  # type: ignore[arg-type]
        )

    def _encoders(self, parts: tuple[Part, ...]) -> int:
        """Add the layers that read the parts of nested observations and write their outputs side by side; returns the first."""
        x_at, rows = 0, []
        for part in parts:
            encoder = part.encoder
            if isinstance(encoder, Dense):
                rows.append(self._row(part.num_inputs, encoder.linear.out_features, -1, PART_WIDTH))
                self._stored(rows[-1], encoder.linear)
                rows[-1][network.ACTIVATION], rows[-1][network.X_AT] = getattr(gemm, encoder.activation.upper()), x_at
            else:
                table, offsets = encoder.embedding.weight, [*encoder.one_hot.offsets.tolist(), part.num_inputs]
                for first, end in pairwise(offsets):
                    row = self._row(end - first, table.shape[1], -1, PART_WIDTH)
                    row[network.FLAT_WEIGHT] = self.flat[id(table)] + first * table.shape[1]
                    row[network.FLAT_BIAS], row[network.FLAT_DOWN], row[network.FLAT_ACROSS] = -1, 1, table.shape[1]
                    row[network.X_AT] = x_at + first
                    rows.append(row)
            x_at += part.num_inputs
        columns = 0
        for row in rows:
            assert row[network.OUTPUTS] % PART_WIDTH == 0  # their outputs lie side by side, without padding
            row[network.WORK], columns = self.work + columns, columns + row[network.OUTPUTS]
        for row in rows:
            row[network.STRIDE] = columns
        rows[0][network.PARTS] = len(rows)
        self._use_work(columns)
        self.rows += rows
        return len(self.rows) - len(rows)

    def _layers(self, layers: tuple[Dense, ...], source: int = -1) -> tuple[int, int]:
        """Add layers, the first of which reads layer `source` (-1: the observation); returns the last two."""
        before = source
        for layer in layers:
            before, source = source, self._layer(layer.linear, source, getattr(gemm, layer.activation.upper()))
        return before, source

    def _layer(self, layer: nn.Linear, source: int, activation: int) -> int:
        row = self._row(layer.in_features, layer.out_features, source, gemm.panel_width(layer.out_features))
        self._stored(row, layer)
        row[network.ACTIVATION], row[network.WORK] = activation, self.work
        self._use_work(row[network.STRIDE])
        self.rows.append(row)
        return len(self.rows) - 1

    def _row(self, inputs: int, outputs: int, source: int, width: int) -> list[int]:
        """A layer's sizes, and room for its weights."""
        row, panels = [0] * network.COLUMNS, -(-outputs // width)
        row[network.SOURCE], row[network.INPUTS], row[network.OUTPUTS] = source, inputs, outputs
        row[network.PANELS], row[network.PANEL_WIDTH], row[network.STRIDE] = panels, width, panels * width
        row[network.WEIGHT], row[network.BIAS] = self.trained, self.trained + inputs * panels * width
        self.trained += (inputs + 1) * panels * width
        row[network.TRANSPOSED] = -1 if source < 0 else self.transposed
        self.transposed += 0 if source < 0 else outputs * gemm.padded(inputs)
        row[network.PARTS] = 1
        return row

    def _stored(self, row: list[int], layer: nn.Linear) -> None:
        """Where torch keeps its weights."""
        row[network.FLAT_WEIGHT], row[network.FLAT_BIAS] = self.flat[id(layer.weight)], self.flat[id(layer.bias)]
        row[network.FLAT_DOWN], row[network.FLAT_ACROSS] = layer.in_features, 1

    def _use_work(self, columns: int) -> None:
        self.work += TILE * columns
        self.most_work = max(self.most_work, self.work)

    def _input(self) -> dict[str, object]:
        if isinstance(self.found, NestedMLP):
            parts = self.found.parts
            return {"input_kind": NESTED, "num_inputs": sum(part.num_inputs for part in parts), "parts": parts}
        layer = self.found.input
        if isinstance(layer, OneHot):
            return {"input_kind": ONE_HOT, "num_inputs": layer.num_features}
        assert isinstance(layer, Numbers)
        size = layer.num_features
        if not layer.scaled:
            return {"input_kind": PLAIN, "num_inputs": size}
        shape = self.policy.observation_space.shape or ()
        low, span = (np.broadcast_to(part.cpu().numpy(), shape).flatten() for part in (layer.low, layer.range))
        return {"input_kind": SCALED, "num_inputs": size, "low": low, "range": span}
