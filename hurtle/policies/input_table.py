"""`InputTable`: what compiled code must know to turn observations into the inputs of first layers.

observation space → kind, dtype, sizes and constants → columns of kernels/cpu/policy_table.py. Imports no torch.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
from gymnasium import spaces

from hurtle.kernels.cpu import policy_table, sparse

if TYPE_CHECKING:  # these import torch
    from hurtle.policies.layers import Numbers, OneHot
    from hurtle.policies.nested_mlp import Part
    from hurtle.policies.network_plan import NetworkPlan
    from hurtle.policies.policy import Policy

ALIGNMENT = 64
"""Bytes of a cache line."""


class InputTable:
    """The table that describes a policy to compiled code, with the columns of its observations filled in.

    Args:
        space: The space of one observation: Box, Discrete, MultiDiscrete or MultiBinary.
        dtype: What the observations that compiled code reads are stored as.
        extra: More columns after the last one.

    Attributes:
        numbers: The table, int64.
        kept: The arrays it points to.
    """

    def __init__(self, space: spaces.Space, dtype: np.dtype, extra: int = 0):
        self.numbers = np.zeros(policy_table.SHAPE + extra, np.int64)
        self.kept: list[np.ndarray] = []
        size = inputs = math.prod(space.shape or ())
        kind = policy_table.NUMBERS
        if isinstance(space, spaces.Discrete | spaces.MultiDiscrete):
            kind = policy_table.INTEGER if isinstance(space, spaces.Discrete) else policy_table.ONE_HOT
            nvec = np.asarray(space.n if isinstance(space, spaces.Discrete) else space.nvec, np.int64).ravel()
            inputs = int(nvec.sum())
            self.keep(policy_table.FIRST_AT, space.start, np.int64)
            self.keep(policy_table.LAST_AT, nvec - 1, np.int64)
            self.keep(policy_table.OFFSET_AT, np.cumsum(nvec) - nvec, np.int64)
        elif isinstance(space, spaces.Box) and space.dtype in (np.uint8, np.int8):
            low, high = space.low.astype(np.float32), space.high.astype(np.float32)
            span = np.maximum(high - low, np.float32(1.0))
            if low.any() or (span != 1.0).any():
                kind = policy_table.SCALED
                self.keep(policy_table.LOW_AT, low, np.float32)
                self.keep(policy_table.SPAN_AT, span, np.float32)
        t, listed = self.numbers, kind in (policy_table.ONE_HOT, policy_table.INTEGER)
        t[policy_table.NUM_NUMBERS], t[policy_table.OBS_DTYPE] = size, policy_table.DTYPES.index(dtype)
        t[policy_table.INPUT_KIND], t[policy_table.NUM_INPUTS] = kind, inputs
        t[policy_table.LISTED] = size if listed else sparse.list_length(inputs)

    @classmethod
    def of(cls, policy: Policy, plan: NetworkPlan) -> InputTable:
        """The table for what a policy sees in rollouts, flat or nested."""
        from hurtle.buffers.rollout import Rollout

        network: Any = policy.network
        body = network.body if hasattr(network, "body") else network.actor_body
        space, stored = policy.observation_space, Rollout(policy, 1, 1).inputs.numpy().dtype
        if not plan.parts:
            return cls(space_of_input(space, body.input), stored)
        return cls(space, stored)._nest(plan.parts, body.layout.is_bytes)

    def _nest(self, parts: tuple[Part, ...], is_bytes: bool) -> InputTable:
        """Read these parts, each as its own space says."""
        rows, x_at, stored = [], 0, policy_table.DTYPES[self.numbers[policy_table.OBS_DTYPE]]
        for part in parts:
            leaf, dtype = part.leaf, part.leaf.dtype if is_bytes else stored
            table = InputTable(leaf.space, dtype)
            self.kept += [table.numbers, *table.kept]
            rows.append((table.address, leaf.offset if is_bytes else leaf.start * dtype.itemsize, x_at, part.compressed))
            x_at += part.num_inputs
        self.keep(policy_table.PARTS_AT, rows, np.int64)
        t = self.numbers
        t[policy_table.NUM_PARTS], t[policy_table.NUM_INPUTS] = len(rows), x_at
        t[policy_table.INPUT_KIND], t[policy_table.LISTED] = policy_table.NESTED, 0
        return self

    @property
    def address(self) -> int:
        """The address of the table."""
        return int(self.numbers.ctypes.data)

    @property
    def num_inputs(self) -> int:
        """Inputs of the first layer."""
        return int(self.numbers[policy_table.NUM_INPUTS])

    def keep(self, column: int, values: Any, dtype: Any) -> None:
        """Copy an array to the start of a cache line, and put its address into the table."""
        array = np.asarray(values, dtype).ravel()
        room = np.empty(array.nbytes + ALIGNMENT, np.uint8)
        first = -room.ctypes.data % ALIGNMENT
        aligned = room[first : first + array.nbytes].view(dtype)
        aligned[:] = array
        self.kept.append(aligned)
        self.numbers[column] = aligned.ctypes.data


def space_of_input(space: spaces.Space, layer: Numbers | OneHot) -> spaces.Space:
    """The observation space as a network with this input layer takes it.

    Emulation makes integer arrays out of Discrete spaces, for which the network still has one-hot inputs.
    """
    from hurtle.policies.layers import OneHot

    if not isinstance(layer, OneHot) or isinstance(space, spaces.Discrete | spaces.MultiDiscrete):
        return space
    assert space.shape is not None
    first, last = (part.cpu().numpy().reshape(space.shape) for part in (layer.starts, layer.last))
    return spaces.MultiDiscrete(last + 1, dtype=space.dtype.type, start=first)  # type: ignore[union-attr]
