"""`Planner`: lays out a policy's layers for the compiled kernels: a row of the table for each, and room for its weights.

layers that plain_mlp.py, nested_mlp.py or plain_cnn.py found, memory → `NetworkPlan`. Knows nothing of rollouts or losses.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
from torch import Tensor

from hurtle.errors import UnsupportedError
from hurtle.kernels.cpu import cells, conv, gemm, network
from hurtle.kernels.cpu.host import CACHE_LINE, TILE
from hurtle.kernels.cpu.policy_table import EPSILON_GREEDY
from hurtle.policies.action_transform import HEAD_KINDS
from hurtle.policies.layers import Numbers, OneHot
from hurtle.policies.nested_mlp import NestedMLP, Part
from hurtle.policies.network_plan import NESTED, ONE_HOT, PLAIN, SCALED, NetworkPlan
from hurtle.policies.plain_cnn import Convolution, PlainCNN
from hurtle.policies.plain_mlp import Dense, PlainMLP
from hurtle.policies.policy import Policy
from hurtle.policies.q_network import QNetwork
from hurtle.policies.recurrent import GRU, LSTM, Memory, MinGRU

Found = PlainMLP | NestedMLP | PlainCNN
"""What a policy was found to consist of."""
PART_WIDTH = 16
"""Columns of a panel of outputs that lie side by side, without padding: a divisor of the number of each."""
GATES: dict[type[Memory], int] = {LSTM: 4, GRU: 3, MinGRU: 2}
"""Gates, candidate included, of each memory."""
KINDS: dict[type[Memory], int] = {LSTM: cells.LSTM, GRU: cells.GRU, MinGRU: cells.MINGRU}


class Planner:
    """Makes the plan of one policy."""

    def __init__(self, policy: Policy, found: Found):
        self.policy, self.found = policy, found
        self.flat: dict[int, int] = {}
        self.num_weights = 0
        for parameter in policy.parameters():
            self.flat[id(parameter)] = self.num_weights
            self.num_weights += parameter.numel()
        self.rows: list[list[int]] = []
        self.flat_inputs: list[np.ndarray] = []
        self.kept: list[np.ndarray] = []
        self.pixels: dict[int, int] = {}  # of each convolution
        self.trained = self.transposed = self.work = self.most_work = 0

    def plan(self) -> NetworkPlan:
        """The plan.

        Raises:
            UnsupportedError: The policy has more parameters than its layers.
        """
        found, head = self.found, self.policy.head
        hidden = self._layers(found.actor[:-1], self._encoders(found.parts) if isinstance(found, NestedMLP) else -1)
        memory, encoded, step = self.policy.memory, len(self.rows), -1
        if memory is not None:
            encoded, step, hidden = self._memory(memory, hidden)
        actor = self._layers(found.actor[-1:], hidden)
        split = len(self.rows)
        if not found.is_shared:
            self.work = 0  # the critic reuses the actor's workspace
            hidden = self._layers(found.critic[:-1], -1)
        critic = self._layers(found.critic[-1:], hidden) if found.critic else actor
        layers = np.array(self.rows, np.int64)
        log_std: Any = getattr(self.policy.network, "log_std", None)
        log_stds = 0 if log_std is None else log_std.numel()
        kind, explorations = _exploring(self.policy)
        log_std_at = self.trained
        trained = -(-(self.trained + log_stds + explorations) // CACHE_LINE) * CACHE_LINE
        inputs = layers[:, network.INPUTS] + (layers[:, network.FLAT_BIAS] >= 0)
        if int(inputs @ layers[:, network.OUTPUTS]) + log_stds != self.num_weights:
            raise UnsupportedError("it has parameters besides those of its layers")
        copied = (layers[:, network.TRANSPOSED] >= 0) & (layers[:, network.KIND] != network.FEW_OUTPUTS)
        layers[:, network.TRANSPOSED] += np.where(copied, trained, 0)
        return NetworkPlan(
            layers=layers,
            split=len(layers) if found.is_shared else split,
            actor=actor,
            critic=critic,
            num_weights=self.num_weights,
            trained_size=trained,
            packed_size=trained + self.transposed,
            work_size=self.most_work,
            head_kind=kind,
            nvec=np.array(head.nvec or ([head.num_outputs] if head.kind == "categorical" else head.action_shape), np.int64),
            num_uniforms=head.num_uniforms,
            mask_size=head.mask_size or 0,
            log_std_flat=0 if log_std is None else self.flat[id(log_std)],
            log_std_at=log_std_at,
            log_stds=log_stds,
            num_values=head.num_outputs if kind == EPSILON_GREEDY else 1,
            num_explorations=explorations,
            flat_inputs=tuple(self.flat_inputs),
            memory=step,
            encoded=encoded,
            num_states=0 if memory is None else memory.num_states,
            state_size=0 if memory is None else memory.size,
            kept=tuple(self.kept),
            **self._input(),  # type: ignore[arg-type]
        )

    def _encoders(self, parts: tuple[Part, ...]) -> int:
        """Add the layers that read the parts of nested observations and write their outputs side by side; returns the first."""
        x_at, first, columns = 0, len(self.rows), 0
        for part in parts:
            encoder = part.encoder
            if isinstance(encoder, Dense):
                layer = encoder.linear
                row = self._row(part.num_inputs, layer.out_features, -1, PART_WIDTH)
                self._stored(row, layer.weight, layer.bias)
                row[network.ACTIVATION], row[network.X_AT] = getattr(gemm, encoder.activation.upper()), x_at
            else:
                table, offsets = encoder.embedding.weight, [*encoder.one_hot.offsets.tolist(), part.num_inputs]
                for begin, end in pairwise(offsets):
                    row = self._row(end - begin, table.shape[1], -1, PART_WIDTH)
                    row[network.FLAT_WEIGHT] = self.flat[id(table)] + begin * table.shape[1]
                    row[network.FLAT_BIAS], row[network.FLAT_DOWN] = -1, 1
                    self.flat_inputs[-1] = np.arange(end - begin) * table.shape[1]
                    row[network.X_AT] = x_at + begin
            x_at += part.num_inputs
        rows = self.rows[first:]
        for row in rows:
            assert row[network.OUTPUTS] % PART_WIDTH == 0  # their outputs lie side by side, without padding
            row[network.WORK], columns = self.work + columns, columns + row[network.OUTPUTS]
        for row in rows:
            row[network.STRIDE] = columns
        rows[0][network.PARTS] = len(rows)
        self._use_work(columns)
        return first

    def _layers(self, layers: tuple[Dense | Convolution, ...], source: int) -> int:
        """Add layers, the first of which reads layer `source` (-1: the observation); returns the last."""
        for layer in layers:
            source = self._convolution(layer) if isinstance(layer, Convolution) else self._dense(layer, source)
        return source

    def _dense(self, layer: Dense, source: int) -> int:
        linear = layer.linear
        row = self._written(self._row(linear.in_features, linear.out_features, source, may_be_few=True))
        self._stored(row, linear.weight, linear.bias)
        row[network.ACTIVATION] = getattr(gemm, layer.activation.upper())
        if source in self.pixels:  # torch has the pixels of a filter side by side, the kernels the filters of a pixel
            self.flat_inputs[-1] = np.arange(linear.in_features).reshape(-1, self.pixels[source]).T.ravel()
        return len(self.rows) - 1

    def _convolution(self, found: Convolution) -> int:
        layer, (pixels, depth), features = found.layer, found.taps.shape, found.num_features
        row = self._row(depth, layer.out_channels, -1, PART_WIDTH)
        assert layer.bias is not None
        self._stored(row, layer.weight, layer.bias)
        self.flat_inputs[-1] = found.flat
        inputs = self.found.input.num_features  # type: ignore[union-attr]
        self.kept.append(conv.tables(found.taps, inputs, layer.out_channels, row[network.PANEL_WIDTH]))
        row[network.KIND], row[network.ACTIVATION] = network.OWN_CODE, gemm.RELU
        row[network.READ_WIDTH] = PART_WIDTH if features % gemm.PANEL else gemm.PANEL
        row[network.READ_PANELS] = features // row[network.READ_WIDTH]
        row[network.STRIDE] = features + PART_WIDTH  # rows a power of two apart would share cache lines
        row[conv.TAPS], row[conv.PIXELS], row[conv.X_INPUTS] = self.kept[-1].ctypes.data, pixels, inputs
        self._written(row)
        row[conv.PATCH] = self.work
        self._use_work(-(-pixels * depth // TILE))
        self.pixels[len(self.rows) - 1] = pixels
        return len(self.rows) - 1

    def _memory(self, memory: Memory, source: int) -> tuple[int, int, int]:
        """Add a memory; returns the first layer that does not encode, the one that steps, and the one that the heads read."""
        size, gates = memory.size, GATES[type(memory)]
        if source >= 0 and self.rows[source][network.OUTPUTS] != size:
            raise UnsupportedError("its memory does not have the size of the layer before it")
        of_features, of_state = _gates_of(memory)
        self._stored(self._written(self._row(size, gates * size, source)), *of_features)
        encoded = len(self.rows)
        before, state_gates = self._held(size), -1
        if of_state is not None:
            row = self._written(self._row(size, gates * size, before))
            self._stored(row, *of_state)
            row[network.KIND], state_gates = network.HELD, len(self.rows) - 1
        step = self._held(size)
        row = self.rows[step]
        row[network.KIND], row[cells.CELL] = network.OWN_CODE, KINDS[type(memory)]
        row[cells.OF_FEATURES], row[cells.OF_STATE], row[cells.BEFORE] = encoded - 1, state_gates, before
        row[cells.STATES] = self.work
        self._use_work(memory.num_states * size)
        read = self._dense(Dense(memory.output, "tanh"), step) if isinstance(memory, MinGRU) else step
        return encoded, step, read

    def _held(self, size: int) -> int:
        """Add memory for a state of the memory: a layer's outputs, and as many cells."""
        row = self._written(self._row(0, size, -1))
        row[network.KIND], row[network.FLAT_BIAS], row[cells.CELLS] = network.HELD, -1, self.work
        self.trained -= row[network.STRIDE]  # it has no biases
        self._use_work(row[network.STRIDE])
        return len(self.rows) - 1

    def _row(self, inputs: int, outputs: int, source: int, width: int | None = None, *, may_be_few: bool = False) -> list[int]:
        """Add a layer: its sizes, and room for its weights."""
        width = gemm.panel_width(outputs) if width is None else width
        row, panels = [0] * network.COLUMNS, -(-outputs // width)
        row[network.SOURCE], row[network.INPUTS], row[network.OUTPUTS] = source, inputs, outputs
        row[network.PANELS], row[network.PANEL_WIDTH], row[network.STRIDE] = panels, width, panels * width
        row[network.READ_PANELS], row[network.READ_WIDTH] = panels, width
        row[network.WEIGHT] = self.trained
        if may_be_few and outputs <= gemm.FEW and self._fills_panels(source, inputs):
            row[network.KIND], row[network.TRANSPOSED] = network.FEW_OUTPUTS, self.trained
            row[network.BIAS] = self.trained + inputs * outputs
            self.trained += inputs * outputs + panels * width
        else:
            row[network.BIAS] = self.trained + inputs * panels * width
            self.trained += (inputs + 1) * panels * width
            row[network.TRANSPOSED] = -1 if source < 0 else self.transposed
            self.transposed += 0 if source < 0 else outputs * gemm.padded(inputs)
        row[network.PARTS] = 1
        self.rows.append(row)
        self.flat_inputs.append(np.arange(inputs))
        return row

    def _fills_panels(self, source: int, inputs: int) -> bool:
        """Whether a layer's outputs are `inputs` numbers in wide panels, without padding."""
        read = self.rows[source] if source >= 0 else None
        return read is not None and read[network.READ_WIDTH] == gemm.PANEL and read[network.READ_PANELS] * gemm.PANEL == inputs

    def _written(self, row: list[int]) -> list[int]:
        """The layer, with room for its outputs."""
        row[network.WORK] = self.work
        self._use_work(row[network.STRIDE])
        return row

    def _stored(self, row: list[int], weight: Tensor, bias: Tensor) -> None:
        """Where torch keeps its weights."""
        row[network.FLAT_WEIGHT], row[network.FLAT_BIAS] = self.flat[id(weight)], self.flat[id(bias)]
        row[network.FLAT_DOWN] = weight[0].numel()

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


def _exploring(policy: Policy) -> tuple[int, int]:
    """The kind of head, and the count of numbers that tell it how to explore."""
    network: Any = policy.network
    kind = EPSILON_GREEDY if isinstance(network, QNetwork) else HEAD_KINDS[policy.head.kind]
    return kind, len(network.exploration()) if hasattr(network, "exploration") else 0


def _gates_of(memory: Memory) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor] | None]:
    """Weights and biases of the gates of the features, and of those of the state."""
    if isinstance(memory, MinGRU):
        return (memory.gate_and_candidate.weight, memory.gate_and_candidate.bias), None
    assert isinstance(memory, LSTM | GRU)
    if [len(layer) for layer in memory.cell.all_weights] != [4]:
        raise UnsupportedError("its memory was changed after it was built")
    weight, state_weight, bias, state_bias = memory.cell.all_weights[0]
    return (weight, bias), (state_weight, state_bias)
