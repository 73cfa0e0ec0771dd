"""`Losses`: an algorithm's losses and their gradients for many seeds in one pass, mapped over an axis of seeds by `torch.func`.

loss of one seed, parameters of all → gradients of all, `[seeds, size]`. Knows no algorithm.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.utils._pytree import tree_map

from hurtle.kernels.cuda_graphs import autocast
from hurtle.kernels.flat_parameters import FlatRows


class Losses:
    """Losses and gradients of all seeds in one pass.

    Args:
        compiled: Run them through `torch.compile`, which fuses all but the products.
    """

    def __init__(self, compiled: bool):
        self._compiled = compiled
        self._rows: dict[str, FlatRows] = {}
        self._values: dict[str, dict[str, Tensor]] = {}  # parameters [N, …], by network
        self._buffers: dict[str, Tensor] = {}  # of all networks
        self._functions: dict[tuple[str, str], Callable[..., Any]] = {}

    def add(self, name: str, rows: FlatRows, buffers: dict[str, Tensor] | None = None) -> None:
        """A network that losses may use; buffers are those that differ between the seeds."""
        self._rows[name] = rows
        self._values[name] = {f"networks.{name}.{key}": view for key, view in rows.views().items()}
        self._buffers |= {f"networks.{name}.{key}": buffer for key, buffer in (buffers or {}).items()}

    def gradients(self, name: str, loss: Callable[..., Any], inputs: tuple[Any, ...], dtype: torch.dtype | None) -> Any:
        """The gradient of the sum of all seeds' losses for one network, [N, size], and what the losses return besides."""
        function = self._functions.get((name, loss.__name__))
        if function is None:
            function = self._function(name, loss, dtype)
            if self._compiled:
                function = torch.compile(function, dynamic=False)
            self._functions[name, loss.__name__] = function
        own = self._values[name]
        fixed = {key: view for other, views in self._values.items() if other != name for key, view in views.items()}
        return function(own, {**fixed, **self._buffers}, *inputs)

    def _function(self, name: str, loss: Callable[..., Any], dtype: torch.dtype | None) -> Callable[..., Any]:
        rows = self._rows[name]
        networks = _Networks(loss, {key: part.module for key, part in self._rows.items()})
        device = rows.values.device

        def one(own: dict[str, Tensor], fixed: dict[str, Tensor], *inputs: Any) -> tuple[Tensor, tuple[Tensor, ...]]:
            with autocast(device, dtype):
                first, *others = functional_call(networks, {**own, **fixed}, inputs)
            return first, tuple(others)

        def together(own: dict[str, Tensor], fixed: dict[str, Tensor], *inputs: Any) -> tuple[Tensor, tuple[Tensor, ...]]:
            axes = tree_map(lambda part: 0 if isinstance(part, Tensor) else None, inputs)
            found, others = vmap(grad(one, has_aux=True), in_dims=(0, 0, *axes))(own, fixed, *inputs)
            return rows.packed(list(found.values())), others

        return together


class _Networks(nn.Module):
    """The first seed's networks, whose parameters `functional_call` replaces, and a loss of them."""

    def __init__(self, loss: Callable[..., Any], networks: dict[str, nn.Module]):
        super().__init__()
        self.networks, self.loss = nn.ModuleDict(networks), loss

    def forward(self, *inputs: Any) -> Any:
        """The loss."""
        return self.loss(*inputs)
