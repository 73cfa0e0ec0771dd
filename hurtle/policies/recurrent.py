"""Memory between `encode` and `decode`: LSTM, GRU and MinGRU, each for single steps and for sequences.

features, state → step or sequence → features, state. `starts` zeroes the state before a step. Knows nothing
of what encodes and decodes.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from hurtle.errors import UnknownNameError, did_you_mean
from hurtle.policies.layers import layer_output, takes_dense, takes_kernels

State = tuple[Tensor, ...]
"""Tensors [B, F]; () without a memory."""


class Memory(nn.Module):
    """Base class of the three.

    Args:
        size: Width F of the features, which is also that of the state.
    """

    num_states = 1

    def __init__(self, size: int):
        super().__init__()
        self.size = size

    def initial_state(self, rows: int, device: torch.device | str | None = None) -> State:
        """Zeros, [rows, F] each."""
        return tuple(torch.zeros(rows, self.size, device=device) for _ in range(self.num_states))

    def step(self, features: Tensor, state: State) -> tuple[Tensor, State]:
        """One step: features [B, F] → outputs [B, F] and the state after it."""
        outputs, state = self._stretch(features.unsqueeze(0), state)
        return outputs.squeeze(0), state

    def sequence(self, features: Tensor, state: State, starts: Tensor) -> tuple[Tensor, State]:
        """Features [T, B, F], where starts, bool [T, B], zeroes the state before a step → outputs [T, B, F], last state."""
        raise NotImplementedError

    def _stretch(self, features: Tensor, state: State) -> tuple[Tensor, State]:
        """A sequence in which nothing starts."""
        raise NotImplementedError


class _TorchMemory(Memory):
    """torch's own recurrent layers, which run over the stretches between episode starts of any row, unless these are short.

    Finding the stretches reads `starts` on the host, which a CUDA graph cannot do: on a GPU the steps are unrolled.

    Attributes:
        capturable: Unroll the steps on any device.
    """

    cell: nn.RNNBase
    capturable = False

    def step(self, features: Tensor, state: State) -> tuple[Tensor, State]:
        """One step: features [B, F] → outputs [B, F] and the state after it."""
        if not self._is_unrolled(features):
            return super().step(features, state)
        state = self._cell_step(self._input_gates(features), state)
        return state[0], state

    def sequence(self, features: Tensor, state: State, starts: Tensor) -> tuple[Tensor, State]:
        """Features [T, B, F] → outputs [T, B, F], last state."""
        if self._is_unrolled(features):
            return self._unrolled(features, state, starts)
        cuts = starts.any(1).nonzero().squeeze(1).tolist()
        begins = cuts if cuts[:1] == [0] else [0, *cuts]
        if len(begins) > len(features) // 2:  # a call of the layer for one or two steps costs more than they do
            return self._unrolled(features, state, starts)
        outputs = []
        for begin, end in zip(begins, [*begins[1:], len(features)], strict=True):
            stretch, state = self._stretch(features[begin:end], zeroed(state, starts[begin]))
            outputs.append(stretch)
        return torch.cat(outputs), state

    def _is_unrolled(self, features: Tensor) -> bool:
        return self.capturable or (features.is_cuda and not torch.compiler.is_compiling())

    def _unrolled(self, features: Tensor, state: State, starts: Tensor) -> tuple[Tensor, State]:
        outputs = []
        for gates, begins in zip(self._input_gates(features), starts, strict=True):
            state = self._cell_step(gates, zeroed(state, begins))
            outputs.append(state[0])
        return torch.stack(outputs), state

    def _input_gates(self, features: Tensor) -> Tensor:
        """Contribution of the features [..., F] to the gates: [..., gates * F]."""
        raise NotImplementedError

    def _cell_step(self, gates: Tensor, state: State) -> State:
        """One step of the layer, given `_input_gates`; the output is the first part of the state."""
        raise NotImplementedError

    def _initialize(self) -> None:
        for name, parameter in self.cell.named_parameters():
            if "weight" in name:
                nn.init.orthogonal_(parameter)
            else:
                nn.init.zeros_(parameter)


class LSTM(_TorchMemory):
    """Hochreiter and Schmidhuber's LSTM, with orthogonal weights and zero biases."""

    num_states = 2

    def __init__(self, size: int):
        super().__init__(size)
        self.cell = nn.LSTM(size, size)
        self._initialize()

    def _stretch(self, features: Tensor, state: State) -> tuple[Tensor, State]:
        outputs, (hidden, cell) = self.cell(features, (state[0].unsqueeze(0), state[1].unsqueeze(0)))
        return outputs, (hidden.squeeze(0), cell.squeeze(0))

    def step(self, features: Tensor, state: State) -> tuple[Tensor, State]:
        """One step: features [B, F] → outputs [B, F] and the state after it."""
        if not takes_kernels(features):
            return super().step(features, state)
        outputs, state = self._fused(features.unsqueeze(0), state, None)
        return outputs.squeeze(0), state

    def sequence(self, features: Tensor, state: State, starts: Tensor) -> tuple[Tensor, State]:
        """Features [T, B, F] → outputs [T, B, F], last state."""
        return self._fused(features, state, starts) if takes_kernels(features) else super().sequence(features, state, starts)

    def _fused(self, features: Tensor, state: State, starts: Tensor | None) -> tuple[Tensor, State]:
        from hurtle.kernels.triton.dense import dense
        from hurtle.kernels.triton.lstm import lstm

        weight, hidden_weight, bias, hidden_bias = self.cell.all_weights[0]
        product = dense if takes_dense(features) else linear
        gates = product(features, weight, bias + hidden_bias)
        outputs, hidden, cell = lstm(gates, starts, (state[0], state[1]), hidden_weight)
        return outputs, (hidden, cell)

    def _input_gates(self, features: Tensor) -> Tensor:
        weight, _, bias, hidden_bias = self.cell.all_weights[0]
        return linear(features, weight, bias + hidden_bias)

    def _cell_step(self, gates: Tensor, state: State) -> State:
        hidden, cell = state
        hidden_gates = linear(hidden, self.cell.all_weights[0][1])
        if _takes_fused_cell(gates, hidden_gates, hidden, cell):
            return torch.ops.aten._thnn_fused_lstm_cell(gates, hidden_gates, cell)[:2]
        take, keep, candidate, give = (gates + hidden_gates).chunk(4, -1)
        cell = torch.sigmoid(keep) * cell + torch.sigmoid(take) * torch.tanh(candidate)
        return torch.sigmoid(give) * torch.tanh(cell), cell


class GRU(_TorchMemory):
    """Cho et al.'s gated recurrent unit, with orthogonal weights and zero biases."""

    def __init__(self, size: int):
        super().__init__(size)
        self.cell = nn.GRU(size, size)
        self._initialize()

    def _stretch(self, features: Tensor, state: State) -> tuple[Tensor, State]:
        outputs, hidden = self.cell(features, state[0].unsqueeze(0))
        return outputs, (hidden.squeeze(0),)

    def _input_gates(self, features: Tensor) -> Tensor:
        weight, _, bias, _ = self.cell.all_weights[0]
        return linear(features, weight, bias)

    def _cell_step(self, gates: Tensor, state: State) -> State:
        _, weight, _, bias = self.cell.all_weights[0]
        hidden_gates = linear(state[0], weight, bias)
        if _takes_fused_cell(gates, hidden_gates, *state):
            return torch.ops.aten._thnn_fused_gru_cell(gates, hidden_gates, state[0])[:1]
        reset, keep, candidate = gates.chunk(3, -1)
        hidden_reset, hidden_keep, hidden_candidate = hidden_gates.chunk(3, -1)
        candidate = torch.tanh(candidate + torch.sigmoid(reset + hidden_reset) * hidden_candidate)
        kept = torch.sigmoid(keep + hidden_keep)
        return (candidate + kept * (state[0] - candidate),)


class MinGRU(Memory):
    """Feng et al.'s minimal GRU: h' = (1 - z) h + z c, with gate z and candidate c of the features alone; output tanh(W h + b).

    Being linear in h, a sequence takes log2(T) parallel steps, or one kernel on a GPU. The heads read linearly, just as h is
    written; the layer after h is what lets an output depend on when something was seen.
    """

    def __init__(self, size: int):
        super().__init__(size)
        self.gate_and_candidate = nn.Linear(size, 2 * size)
        self.output = nn.Linear(size, size)
        for weight in (*self.gate_and_candidate.weight.detach().chunk(2), self.output.weight):
            nn.init.orthogonal_(weight)
        nn.init.zeros_(self.gate_and_candidate.bias)
        nn.init.zeros_(self.output.bias)

    def sequence(self, features: Tensor, state: State, starts: Tensor) -> tuple[Tensor, State]:
        """Features [T, B, F] → outputs [T, B, F], last state."""
        hidden, last = self._hidden(features, state, starts)
        return layer_output(self.output, hidden, "tanh"), (last,)

    def _stretch(self, features: Tensor, state: State) -> tuple[Tensor, State]:
        hidden, last = self._hidden(features, state, None)
        return layer_output(self.output, hidden, "tanh"), (last,)

    def _hidden(self, features: Tensor, state: State, starts: Tensor | None) -> tuple[Tensor, Tensor]:
        terms = layer_output(self.gate_and_candidate, features)
        if _takes_min_gru(terms, state[0]):
            from hurtle.kernels.triton.scan import min_gru

            return min_gru(terms, starts, state[0], terms.dtype)
        gate, candidate = terms.chunk(2, -1)
        keep, add = torch.sigmoid(-gate), torch.sigmoid(gate) * candidate
        hidden = self._scanned(keep if starts is None else keep.masked_fill(starts.unsqueeze(-1), 0.0), add, state)
        return hidden, hidden[-1]

    @staticmethod
    def _scanned(keep: Tensor, add: Tensor, state: State) -> Tensor:
        """All h of h' = keep * h + add, by doubling: after k rounds, entry t covers the 2^k steps up to t."""
        add = torch.cat([add[:1] + keep[:1] * state[0], add[1:]])
        reach = 1
        while reach < len(add):
            add = torch.cat([add[:reach], add[reach:] + keep[reach:] * add[:-reach]])
            keep = torch.cat([keep[:reach], keep[reach:] * keep[:-reach]])
            reach *= 2
        return add


MEMORIES: dict[str, type[Memory]] = {"lstm": LSTM, "gru": GRU, "mingru": MinGRU}


def make_memory(name: str, size: int) -> Memory | None:
    """The memory with that name; None for "none".

    Raises:
        UnknownNameError: There is no such memory.
    """
    if name == "none":
        return None
    if name not in MEMORIES:
        raise UnknownNameError(f"No memory {name!r}. {did_you_mean(name, ['none', *MEMORIES])}")
    return MEMORIES[name](size)


def _takes_fused_cell(*tensors: Tensor) -> bool:
    """Whether torch's kernels for the pointwise part of a cell, which are GPU-only, accept these."""
    return all(tensor.is_cuda and tensor.dtype == torch.float32 for tensor in tensors)


def _takes_min_gru(terms: Tensor, state: Tensor) -> bool:
    """Whether the kernel accepts these and can run here."""
    if not terms.is_cuda or torch.compiler.is_compiling():
        return False
    from hurtle.kernels.triton import has_triton

    return has_triton() and terms.dtype in (torch.float32, torch.bfloat16, torch.float16) and state.dtype == torch.float32


def zeroed(state: State, starts: Tensor) -> State:
    """The state with zeros in the rows where starts, bool [B], is True."""
    return tuple(part.masked_fill(starts.unsqueeze(-1), 0.0) for part in state)
