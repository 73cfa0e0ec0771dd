"""A policy's parameters, gradients and moments as flat tensors, and the optimizers that step them without waiting for a device.

backward → flat gradients → norm, clipped → Adam, AdamW or RMSprop → flat parameters. Knows nothing of losses and rollouts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hurtle.algorithms.optimizers import ADAM_BETAS, RMSPROP_ALPHA, Optimizers
from hurtle.errors import HurtleError
from hurtle.native.triton import has_triton

MOMENTS = {"adam": ("exp_avg", "exp_avg_sq"), "adamw": ("exp_avg", "exp_avg_sq"), "rmsprop": (None, "square_avg")}
"""What torch's optimizers call their first and second moments."""
BETAS = {"adam": ADAM_BETAS, "adamw": ADAM_BETAS, "rmsprop": (0.0, RMSPROP_ALPHA)}
"""How much of them stays at each step."""


def saved_moments(optimizer: Optimizers, steps: int, first: Sequence[Tensor], second: Sequence[Tensor]) -> dict[str, Any]:
    """What `Optimizers.state_dict` gives, of moments that are kept elsewhere: a run may go on in any gear.

    Args:
        optimizer: The settings.
        steps: How many steps made these moments.
        first: One per parameter, in their order; not looked at for RMSprop.
        second: As `first`.

    Returns:
        Names, numbers and copies of the moments.
    """
    names, states = MOMENTS[optimizer.name], {}
    for n, moments in enumerate(zip(first, second, strict=True)) if steps else ():
        copies = {name: moment.clone() for name, moment in zip(names, moments, strict=True) if name}
        states[n] = {"step": torch.tensor(float(steps)), **copies}
    group: dict[str, Any] = {"lr": optimizer.learning_rate, "eps": optimizer.eps, "weight_decay": optimizer.weight_decay}
    if optimizer.name == "rmsprop":
        group |= {"alpha": RMSPROP_ALPHA, "momentum": 0, "centered": False}
    else:
        group |= {"betas": ADAM_BETAS, "fused": True}
    group["params"] = list(range(len(second)))
    return {"name": optimizer.name, "parts": [{"state": states, "param_groups": [group]}]}


def loaded_moments(optimizer: Optimizers, saved: dict[str, Any]) -> tuple[int, list[Tensor], list[Tensor]]:
    """The steps and the first and second moments that `Optimizers.state_dict` or `saved_moments` gave; zeros where none are.

    Raises:
        HurtleError: They are another optimizer's, or another network's.
    """
    optimizer.check_name(saved)
    (part,), parameters = saved["parts"], optimizer.parameters
    states, (group,) = part["state"], part["param_groups"]
    first_name, second_name = MOMENTS[optimizer.name]
    if len(group["params"]) != len(parameters) or any(
        state[second_name].shape != parameters[n].shape for n, state in states.items()
    ):
        raise HurtleError("The checkpoint's optimizer belongs to a policy that is built differently.")

    def moments(name: str | None) -> list[Tensor]:
        zeros = [torch.zeros_like(parameter) for parameter in parameters]
        return [states[n][name].to(zero.device) if name and n in states else zero for n, zero in enumerate(zeros)]

    return max((int(state["step"]) for state in states.values()), default=0), moments(first_name), moments(second_name)


class FlatParameters:
    """A module's trainable parameters as views of one tensor, and their gradients as views of another.

    Args:
        module: Its parameters are bound to the flat tensors, in their order and without gaps. Load weights into it in place.

    Attributes:
        values: Of all parameters. [size]
        gradients: What backward adds to. [size]
        offsets: Where each parameter begins, by its name.
        size: How many numbers there are.

    Raises:
        HurtleError: It has nothing to train, or parameters that do not go into one float32 tensor.

    Example:
        >>> layer = nn.Linear(3, 2)
        >>> flat = FlatParameters(layer)
        >>> layer(torch.ones(1, 3)).sum().backward()
        >>> flat.offsets, flat.gradients.tolist()
        ({'weight': 0, 'bias': 6}, [1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0])
    """

    def __init__(self, module: nn.Module):
        named = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
        if not named:
            raise HurtleError("The policy has no parameters to train.")
        kinds = {(parameter.dtype, parameter.device) for parameter in named.values()}
        if len(kinds) > 1 or {dtype for dtype, _ in kinds} != {torch.float32}:
            found = ", ".join(sorted(f"{dtype} on {device}" for dtype, device in kinds))
            raise HurtleError(f"All parameters must be torch.float32 on one device, found {found}: move them with `policy.to`.")
        self.module = module
        self.values = torch.cat([parameter.detach().flatten() for parameter in named.values()])
        self.gradients = torch.zeros_like(self.values)
        self.size = len(self.values)
        self._shapes = [parameter.shape for parameter in named.values()]
        self.offsets: dict[str, int] = {}
        self._bound: list[tuple[nn.Parameter, Tensor, Tensor]] = []
        at = 0
        for (name, parameter), value, gradient in zip(
            named.items(), self.views(self.values), self.views(self.gradients), strict=True
        ):
            parameter.data, parameter.grad = value, gradient
            self._bound.append((parameter, value, gradient))
            self.offsets[name] = at
            at += parameter.numel()

    def views(self, flat: Tensor) -> list[Tensor]:
        """A flat tensor `[size]` as one view per parameter, of its shape."""
        parts = flat.split([shape.numel() for shape in self._shapes])
        return [part.view(shape) for part, shape in zip(parts, self._shapes, strict=True)]

    def check(self) -> None:
        """See that the module's parameters still are these; gradients that somebody took away are put back.

        Raises:
            HurtleError: They were replaced or frozen: nothing that is learned here would reach them.
        """
        for parameter, value, gradient in self._bound:
            if parameter.data_ptr() != value.data_ptr() or not parameter.requires_grad:
                raise HurtleError(
                    "The policy's parameters were replaced or frozen after the learner was made (by policy.to(…), .double() or "
                    "requires_grad_, perhaps): change a copy of the policy, or make a new learner."
                )
            if parameter.grad is None or parameter.grad.data_ptr() != gradient.data_ptr():
                parameter.grad = gradient

    def zero_gradients(self) -> None:
        """In place, as backward adds to them."""
        self.gradients.zero_()


class FlatOptimizer:
    """Torch's Adam, AdamW or RMSprop with clipped gradients, in a few launches that a CUDA graph can capture.

    A step whose gradient is not finite changes nothing, and nobody waits for the device to see that.

    Args:
        parameters: What to train.
        name: "adam", "adamw" or "rmsprop".
        eps: Added to the denominator.
        weight_decay: Of AdamW; that of the others is an L2 penalty.
        max_grad_norm: Bound of the global norm of the gradients.

    Attributes:
        learning_rate: Float32, on the device, 0 at first; to be set in place. [1]
        first: The first moments; RMSprop has none and leaves them 0. [size]
        second: The second moments. [size]
        count: How many steps were made, as a float on the device. []
        fused: Whether Triton kernels are launched, as where there is a GPU; else torch does it, one operation at a time.

    Raises:
        HurtleError: There is no such optimizer here.
    """

    def __init__(
        self,
        parameters: FlatParameters,
        name: str = "adam",
        eps: float = 1e-5,
        weight_decay: float = 0.0,
        max_grad_norm: float = 0.5,
    ):
        self.settings = Optimizers(name, parameters.module, 0.0, eps, weight_decay)
        if name not in MOMENTS:
            raise HurtleError(f"optimizer={name!r} cannot run on flat parameters: use {', '.join(MOMENTS)}.")
        self.parameters, self.max_grad_norm = parameters, max_grad_norm
        values = parameters.values
        self.first, self.second = torch.zeros_like(values), torch.zeros_like(values)
        self.learning_rate = torch.zeros(1, device=values.device)
        self._counts = torch.zeros(2, device=values.device)  # before the last step, and now: kernels read one, write the other
        self.count = self._counts[1]
        self.fused = values.is_cuda and has_triton()

    def set_learning_rate(self, learning_rate: float) -> None:
        """Of all parameters."""
        self.learning_rate.fill_(learning_rate)

    @torch.no_grad()
    def step(self, partials: Tensor | None = None) -> Tensor:
        """Clip the gradients' global norm and step.

        Args:
            partials: Gradients of parts of the minibatch, whose sum is taken in place of what `gradients` held. [P, size]

        Returns:
            The norm before clipping, on the device. Where it is not finite, nothing was changed.
        """
        return self._step_fused(partials) if self.fused else self._step(partials)

    def _step_fused(self, partials: Tensor | None) -> Tensor:
        from hurtle.native.triton.optimizer import optimizer_step

        flat, settings = self.parameters, self.settings
        return optimizer_step(
            flat.values, flat.gradients, self.first, self.second, self._counts, self.learning_rate, partials,
            name=settings.name, betas=BETAS[settings.name], eps=settings.eps, weight_decay=settings.weight_decay,
            max_grad_norm=self.max_grad_norm,
        )  # fmt: skip

    def _step(self, partials: Tensor | None) -> Tensor:
        """What the kernels compute, spelled out."""
        flat, name, eps, decay = self.parameters, self.settings.name, self.settings.eps, self.settings.weight_decay
        values, rate = flat.values, self.learning_rate
        if partials is not None:
            torch.sum(partials, 0, out=flat.gradients)
        norm = flat.gradients.norm()
        gradients = flat.gradients * (self.max_grad_norm / (norm + 1e-6)).clamp(max=1.0)
        if name == "adamw":
            values = values * (1 - rate * decay)
        else:
            gradients = gradients + decay * values

        beta1, beta2 = BETAS[name]
        count = self.count + 1
        first = beta1 * self.first + (1 - beta1) * gradients
        second = beta2 * self.second + (1 - beta2) * gradients**2
        if name == "rmsprop":
            first, values = self.first, values - rate * gradients / (second.sqrt() + eps)
        else:
            correction1, correction2 = 1 - beta1 ** count.double(), 1 - beta2 ** count.double()
            denominator = second.sqrt() / correction2.sqrt().float() + eps
            values = values - rate / correction1.float() * first / denominator

        finite = norm.isfinite()
        for old, new in ((flat.values, values), (self.first, first), (self.second, second), (self.count, count)):
            old.copy_(torch.where(finite, new, old))
        return norm

    def state_dict(self) -> dict[str, Any]:
        """What `Optimizers.state_dict` gives, so that a run may go on in any gear."""
        self.settings.set_learning_rate(float(self.learning_rate))
        views = self.parameters.views
        return saved_moments(self.settings, int(self.count), views(self.first), views(self.second))

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Go on with saved moments, in place: a captured graph sees them."""
        steps, first, second = loaded_moments(self.settings, saved)
        self._counts.fill_(steps)
        self.first.copy_(torch.cat([moment.flatten() for moment in first]))
        self.second.copy_(torch.cat([moment.flatten() for moment in second]))
