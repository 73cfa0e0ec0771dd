"""Memory between `encode` and `decode`: LSTM, GRU and MinGRU, each over single steps and over whole sequences.

features, state → step or sequence → features, state. Where `starts` is True the state is zero before that step. Knows nothing
of what encodes and decodes.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hurtle.errors import UnknownNameError, did_you_mean

State = tuple[Tensor, ...]
"""Tensors [B, F]; () where nothing is remembered."""


class Memory(nn.Module):
    """What the three have in common.

    Args:
        size: Width F of the features, which is that of the state too.
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
    """torch's own recurrent layers, which run over the stretches between steps at which some row starts."""

    cell: nn.RNNBase

    def sequence(self, features: Tensor, state: State, starts: Tensor) -> tuple[Tensor, State]:
        """Features [T, B, F] → outputs [T, B, F], last state."""
        cuts = starts.any(1).nonzero().squeeze(1).tolist()
        begins = cuts if cuts[:1] == [0] else [0, *cuts]
        outputs = []
        for begin, end in zip(begins, [*begins[1:], len(features)], strict=True):
            stretch, state = self._stretch(features[begin:end], zeroed(state, starts[begin]))
            outputs.append(stretch)
        return torch.cat(outputs), state

    def _initialize(self) -> None:
        for name, parameter in self.cell.named_parameters():
            if "weight" in name:
                nn.init.orthogonal_(parameter)
            else:
                nn.init.zeros_(parameter)


class LSTM(_TorchMemory):
    """Hochreiter and Schmidhuber's, with orthogonal weights and zero biases."""

    num_states = 2

    def __init__(self, size: int):
        super().__init__(size)
        self.cell = nn.LSTM(size, size)
        self._initialize()

    def _stretch(self, features: Tensor, state: State) -> tuple[Tensor, State]:
        outputs, (hidden, cell) = self.cell(features, (state[0].unsqueeze(0), state[1].unsqueeze(0)))
        return outputs, (hidden.squeeze(0), cell.squeeze(0))


class GRU(_TorchMemory):
    """Cho et al.'s gated recurrent unit, with orthogonal weights and zero biases."""

    def __init__(self, size: int):
        super().__init__(size)
        self.cell = nn.GRU(size, size)
        self._initialize()

    def _stretch(self, features: Tensor, state: State) -> tuple[Tensor, State]:
        outputs, hidden = self.cell(features, state[0].unsqueeze(0))
        return outputs, (hidden.squeeze(0),)


class MinGRU(Memory):
    """Feng et al.'s minimal GRU: h' = (1 - z) h + z c, with gate z and candidate c of the features alone.

    Being linear in h, a whole sequence takes log2(T) parallel steps.
    """

    def __init__(self, size: int):
        super().__init__(size)
        self.gate_and_candidate = nn.Linear(size, 2 * size)
        for weight in self.gate_and_candidate.weight.detach().chunk(2):
            nn.init.orthogonal_(weight)
        nn.init.zeros_(self.gate_and_candidate.bias)

    def sequence(self, features: Tensor, state: State, starts: Tensor) -> tuple[Tensor, State]:
        """Features [T, B, F] → outputs [T, B, F], last state."""
        keep, add = self._terms(features)
        return self._scanned(keep.masked_fill(starts.unsqueeze(-1), 0.0), add, state)

    def _stretch(self, features: Tensor, state: State) -> tuple[Tensor, State]:
        return self._scanned(*self._terms(features), state)

    def _terms(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """H' = keep * h + add."""
        gate, candidate = self.gate_and_candidate(features).chunk(2, -1)
        return torch.sigmoid(-gate), torch.sigmoid(gate) * candidate

    @staticmethod
    def _scanned(keep: Tensor, add: Tensor, state: State) -> tuple[Tensor, State]:
        """All h of h' = keep * h + add, by doubling: after k rounds, entry t has gathered the 2^k steps up to t."""
        add = torch.cat([add[:1] + keep[:1] * state[0], add[1:]])
        reach = 1
        while reach < len(add):
            add = torch.cat([add[:reach], add[reach:] + keep[reach:] * add[:-reach]])
            keep = torch.cat([keep[:reach], keep[reach:] * keep[:-reach]])
            reach *= 2
        return add, (add[-1],)


MEMORIES: dict[str, type[Memory]] = {"lstm": LSTM, "gru": GRU, "mingru": MinGRU}


def make_memory(name: str, size: int) -> Memory | None:
    """The memory of that name; None for "none".

    Raises:
        UnknownNameError: There is none of that name.
    """
    if name == "none":
        return None
    if name not in MEMORIES:
        raise UnknownNameError(f"No memory {name!r}. {did_you_mean(name, ['none', *MEMORIES])}")
    return MEMORIES[name](size)


def zeroed(state: State, starts: Tensor) -> State:
    """The state with zeros in the rows where starts, bool [B], is True."""
    return tuple(part.masked_fill(starts.unsqueeze(-1), 0.0) for part in state)
