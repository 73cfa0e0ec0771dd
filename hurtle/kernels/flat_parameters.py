"""Flat parameters: a module's as views of one tensor, and those of several modules as rows of one matrix.

module → `FlatParameters` → `FlatRows`; optimizer steps, target networks and compiled code take whole tensors. Knows no
optimizer.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, chain
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from hurtle.errors import HurtleError

ALIGNMENT = 16
"""Elements to which padded parameters are padded, so that kernels read rows of them in whole vectors."""
_REQUIRES_GRAD = attrgetter("requires_grad")


class FlatParameters:
    """A module's trainable parameters as views of one tensor, and their gradients as views of another.

    Args:
        module: Its parameters become views of the flat tensor, in their order and without gaps. Load weights into it in place.
        has_gradients: False for updates that compute gradients without torch.
        padded: Lay them out for `FlatRows`: zeros at the end keep rows aligned, and the networks that a module stacks along the
            first axis of all its parameters (`module.num_stacked`) follow each other, so that they join the axis of rows.

    Attributes:
        values: All parameters. [size]
        gradients: What backward adds to. [size], or [0] without gradients
        offsets: Where each parameter begins, by its name; in the first of several stacked networks.
        size: Elements of all parameters, padding included.
        is_whole: Whether these are all of the module's parameters: none is frozen.

    Raises:
        HurtleError: It has nothing to train, or parameters that do not fit into one float32 tensor.

    Example:
        >>> layer = nn.Linear(3, 2)
        >>> flat = FlatParameters(layer)
        >>> layer(torch.ones(1, 3)).sum().backward()
        >>> flat.offsets, flat.gradients.tolist()
        ({'weight': 0, 'bias': 6}, [1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0])
    """

    def __init__(self, module: nn.Module, has_gradients: bool = True, padded: bool = False):
        named = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
        if not named:
            raise HurtleError("The policy has no parameters to train.")
        kinds = {(parameter.dtype, parameter.device) for parameter in named.values()}
        if len(kinds) > 1 or {dtype for dtype, _ in kinds} != {torch.float32}:
            found = ", ".join(sorted(f"{dtype} on {device}" for dtype, device in kinds))
            raise HurtleError(f"All parameters must be torch.float32 on one device, found {found}: move them with `policy.to`.")
        self.module = module
        self.is_whole = len(named) == len(list(module.parameters()))
        self._stacked = int(getattr(module, "num_stacked", 1)) if padded else 1
        self._shapes = [parameter.shape for parameter in named.values()]
        self._widths = [shape.numel() // self._stacked for shape in self._shapes]
        self.offsets = dict(zip(named, accumulate([0, *self._widths[:-1]]), strict=True))
        self._padding = -sum(self._widths) % ALIGNMENT if padded else 0
        self.values = self.packed([parameter.detach() for parameter in named.values()])
        self.gradients = torch.zeros_like(self.values if has_gradients else self.values[:0])
        self.size, self._is_moved = len(self.values), False
        self._views = self.views(self.values)
        self._addresses = [view.data_ptr() for view in self._views]
        self._gradients: list[Tensor] = self.views(self.gradients) if has_gradients else []
        self._bind(list(named.values()))

    @property
    def is_row(self) -> bool:
        """Whether the parameters are a row of `FlatRows`."""
        return self._is_moved

    def move(self, values: Tensor) -> None:
        """Copy the parameters to other memory of the same size, and keep them there."""
        self._is_moved = True
        values.copy_(self.values)
        self.values, self._views = values, self.views(values)
        self._addresses = [view.data_ptr() for view in self._views]
        self._bind(self._parameters)

    def _bind(self, parameters: list[nn.Parameter]) -> None:
        self._parameters, self._places = parameters, _Places(self.module)
        for parameter, view in zip(parameters, self._views, strict=True):
            parameter.data = view
        for parameter, gradient in zip(parameters, self._gradients, strict=False):
            parameter.grad = gradient

    def views(self, flat: Tensor) -> list[Tensor]:
        """A flat tensor `[…, size]` as one view per parameter, of its shape."""
        lead, networks = flat.shape[:-1], flat.unflatten(-1, (self._stacked, -1))
        parts = networks.split([*self._widths, self._padding], -1)[: len(self._widths)]
        return [part.view((*lead, *shape)) for part, shape in zip(parts, self._shapes, strict=True)]

    def packed(self, tensors: Sequence[Tensor], out: Tensor | None = None) -> Tensor:
        """One tensor per parameter, `[…, *shape]`, as a flat tensor `[…, size]`: `out` if given, else a new one."""
        lead = tensors[0].shape[: tensors[0].ndim - len(self._shapes[0])]
        parts = [tensor.reshape(*lead, self._stacked, -1) for tensor in tensors]
        padding = [parts[0].new_zeros(*lead, self._stacked, self._padding)] if self._padding else []
        networks = None if out is None else out.unflatten(-1, (self._stacked, -1))
        return torch.cat(parts + padding, -1, out=networks).flatten(-2)

    def refresh(self) -> None:
        """Copy the values of parameters replaced since the last call into the same memory.

        Raises:
            HurtleError: One was frozen.
        """
        if not self._places.are_current():
            self._parameters, self._places = list(self.module.parameters()), _Places(self.module)
        if not all(map(_REQUIRES_GRAD, self._parameters)):
            raise HurtleError("A parameter was frozen after the learner was made: make a new one, which trains in torch.")
        if list(map(Tensor.data_ptr, self._parameters)) != self._addresses:
            self.values.copy_(self.packed([parameter.detach() for parameter in self._parameters]))
            self._bind(self._parameters)

    def check(self) -> None:
        """Check that the module's parameters are still these; restores gradients that were removed.

        Raises:
            HurtleError: They were replaced or frozen: updates would not reach them.
        """
        for parameter, value, gradient in zip(self._parameters, self._views, self._gradients, strict=True):
            if parameter.data_ptr() != value.data_ptr() or not parameter.requires_grad:
                raise HurtleError(
                    "The policy's parameters were replaced or frozen after the learner was made (by policy.to(…), .double() or "
                    "requires_grad_, perhaps): change a copy of the policy, or make a new learner."
                )
            if parameter.grad is None or parameter.grad.data_ptr() != gradient.data_ptr():
                parameter.grad = gradient

    def zero_gradients(self) -> None:
        """Zero in place, since backward accumulates into them."""
        self.gradients.zero_()


class FlatRows:
    """The parameters of several modules of one shape as rows of one matrix, so that one launch steps all of them.

    Args:
        flats: One for each module; they keep their parameters in the rows from now on. Rows of padded ones are aligned.

    Attributes:
        values: All parameters. [N, size]
        gradients: Set before each optimizer step. [N, size]
        module: The first module.

    Raises:
        HurtleError: The modules have different shapes.

    Example:
        >>> layers = [nn.Linear(3, 2) for _ in range(4)]
        >>> rows = FlatRows([FlatParameters(layer, padded=True) for layer in layers])
        >>> rows.values.shape, rows.views()["weight"].shape, bool((rows.views()["bias"][1] == layers[1].bias).all())
        (torch.Size([4, 16]), torch.Size([4, 2, 3]), True)
    """

    def __init__(self, flats: Sequence[FlatParameters]):
        if any((flat.offsets, flat._shapes) != (flats[0].offsets, flats[0]._shapes) for flat in flats):
            raise HurtleError("Only modules of one shape can learn side by side.")
        self._flat, self.module = flats[0], flats[0].module
        self.values = torch.stack([flat.values for flat in flats])
        self.gradients = torch.zeros_like(self.values)
        for flat, row in zip(flats, self.values, strict=True):
            flat.move(row)

    def views(self) -> dict[str, Tensor]:
        """The parameters of all modules by name, `[N, *shape]`."""
        return dict(zip(self._flat.offsets, self._flat.views(self.values), strict=True))

    def packed(self, tensors: Sequence[Tensor]) -> Tensor:
        """One tensor per parameter, `[N, *shape]`, as a new matrix `[N, size]`."""
        return self._flat.packed(tensors)


class _Places:
    """Where a module keeps its submodules and parameters: `are_current` tells in microseconds whether any was replaced."""

    def __init__(self, module: nn.Module):
        self._dicts: list[dict[str, Any]] = [place for part in module.modules() for place in (part._modules, part._parameters)]
        self._sizes = list(map(len, self._dicts))
        self._parts = list(chain.from_iterable(map(dict.values, self._dicts)))  # alive, so no other object gets its id
        self._ids = list(map(id, self._parts))

    def are_current(self) -> bool:
        """Whether the module has the same submodules and parameters as before."""
        return (
            list(map(len, self._dicts)) == self._sizes
            and list(map(id, chain.from_iterable(map(dict.values, self._dicts)))) == self._ids
        )
