"""Optimizer steps, for every gear: torch's optimizers, and ours on flat parameters.

backward → gradients → norm, clipped → Adam, AdamW, RMSprop or Muon → parameters. All save their moments in one format, so that
a run can change gears. The third implementation, for compiled updates on the CPU, is `cpu/update.py`. Knows no losses.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from hurtle.errors import HurtleError, NonFiniteError, UnknownNameError, did_you_mean
from hurtle.kernels.flat_parameters import FlatParameters, FlatRows
from hurtle.kernels.ranks import ALONE, Ranks
from hurtle.kernels.triton import has_triton

OPTIMIZERS = ("adam", "adamw", "rmsprop", "muon")
ADAM_BETAS = (0.9, 0.999)
RMSPROP_ALPHA = 0.99
MOMENTS = {"adam": ("exp_avg", "exp_avg_sq"), "adamw": ("exp_avg", "exp_avg_sq"), "rmsprop": (None, "square_avg")}
"""What torch's optimizers call their first and second moments; optimizers not listed here have no flat version."""
BETAS = {"adam": ADAM_BETAS, "adamw": ADAM_BETAS, "rmsprop": (0.0, RMSPROP_ALPHA)}
"""Decay of the two moments."""
SETTINGS = ("lr", "eps", "weight_decay")
"""What a resumed run may set anew."""


class Optimizers:
    """One or more torch optimizers that step together.

    Args:
        name: "adam", "adamw", "rmsprop" or "muon" (Muon for the hidden layers' matrices, AdamW for everything else).
        policy: Whose parameters to train.
        learning_rate: Changed by `set_learning_rate` as it is annealed.
        eps: Added to the denominator of Adam and RMSprop.
        weight_decay: Decoupled for AdamW and Muon, an L2 penalty for the others.
        ranks: The learners whose gradients are averaged.
    """

    def __init__(
        self,
        name: str,
        policy: nn.Module,
        learning_rate: float,
        eps: float = 1e-5,
        weight_decay: float = 0.0,
        ranks: Ranks = ALONE,
    ):
        if name not in OPTIMIZERS:
            raise UnknownNameError(f"No optimizer {name!r}. {did_you_mean(name, OPTIMIZERS)}")
        self.name, self.learning_rate, self.eps, self.weight_decay = name, learning_rate, eps, weight_decay
        self.ranks = ranks
        self.parameters = [parameter for parameter in policy.parameters() if parameter.requires_grad]
        if not self.parameters:
            raise HurtleError("The policy has no parameters to train.")
        self._matrices = _hidden_matrices(policy) if name == "muon" else []
        if name == "muon":
            _check_muon()

    @cached_property
    def parts(self) -> list[torch.optim.Optimizer]:
        """Torch's optimizers, made on first use: importing them takes seconds (they import torch's compiler)."""
        common: dict[str, Any] = {"lr": self.learning_rate, "weight_decay": self.weight_decay}
        if self.name == "rmsprop":
            return [torch.optim.RMSprop(self.parameters, eps=self.eps, alpha=RMSPROP_ALPHA, **common)]
        if self.name != "muon":
            made = torch.optim.Adam if self.name == "adam" else torch.optim.AdamW
            return [made(self.parameters, eps=self.eps, fused=True, **common)]
        ids = {id(parameter) for parameter in self._matrices}
        others = [parameter for parameter in self.parameters if id(parameter) not in ids]
        parts = [torch.optim.Muon(self._matrices, adjust_lr_fn="match_rms_adamw", **common)] if self._matrices else []
        return parts + ([torch.optim.AdamW(others, eps=self.eps, fused=True, **common)] if others else [])

    def set_learning_rate(self, learning_rate: float) -> None:
        """Set the learning rate of all parameters."""
        self.learning_rate = learning_rate
        if "parts" not in self.__dict__:
            return
        for part in self.parts:
            for group in part.param_groups:
                group["lr"] = learning_rate

    def step(self, loss: torch.Tensor | None, max_grad_norm: float, only_these: bool = False) -> torch.Tensor:
        """Backward, clip the global norm of the gradients, and step; returns the norm before clipping.

        Args:
            loss: A scalar; None for a rank that has nothing to learn from where others have.
            max_grad_norm: Bound of the norm.
            only_these: Compute no gradients of other modules that the loss depends on.

        Raises:
            NonFiniteError: The gradient is not finite; no parameter was changed. On a GPU checking would synchronize: there the
                caller checks the norms after the update.
        """
        for part in self.parts:
            part.zero_grad(set_to_none=True)
        if loss is not None:
            loss.backward(inputs=self.parameters if only_these else None)
        if self.ranks.several:
            self.ranks.average_gradients(self.parameters)
        norm = nn.utils.clip_grad_norm_(self.parameters, max_grad_norm)
        if norm.device.type == "cpu" and not norm.isfinite():
            raise NonFiniteError(
                f"The gradient is not finite (its norm is {norm:g}, the loss {'unknown' if loss is None else f'{loss:g}'}). "
                "Try a lower learning_rate."
            )
        for part in self.parts:
            part.step()
        return norm

    def state_dict(self) -> dict[str, Any]:
        """The moments of all parameters."""
        return {"name": self.name, "parts": [part.state_dict() for part in self.parts]}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Continue with saved moments; the learning rate, eps and weight decay are this run's, not the saved ones."""
        self.check_name(saved)
        for part, state in zip(self.parts, saved["parts"], strict=True):
            own = [{name: group[name] for name in SETTINGS if name in group} for group in part.param_groups]
            part.load_state_dict(state)
            for group, settings in zip(part.param_groups, own, strict=True):
                group.update(settings)

    def check_name(self, saved: dict[str, Any]) -> None:
        """Reject moments saved by another optimizer."""
        if saved["name"] != self.name:
            raise HurtleError(
                f"The checkpoint was written with optimizer={saved['name']!r}, but this run uses {self.name!r}: use the former."
            )


def saved_moments(optimizer: Optimizers, steps: int, first: Sequence[Tensor], second: Sequence[Tensor]) -> dict[str, Any]:
    """Moments kept elsewhere, in the format of `Optimizers.state_dict`, so that a run can change gears.

    Args:
        optimizer: The settings.
        steps: Number of steps behind these moments.
        first: One per parameter, in their order; ignored for RMSprop.
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
    """The steps and the first and second moments from what `Optimizers.state_dict` or `saved_moments` returned.

    Raises:
        HurtleError: They belong to another optimizer or network.
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


class FlatOptimizer:
    """Torch's Adam, AdamW or RMSprop with clipped gradients, in a few launches that a CUDA graph can capture.

    A step whose gradient is not finite changes nothing; checking that does not synchronize. Rows of parameters (`FlatRows`)
    are stepped together, but clipped, checked and counted each on its own.

    Args:
        parameters: What to train.
        name: "adam", "adamw" or "rmsprop".
        eps: Added to the denominator.
        weight_decay: Decoupled for AdamW, an L2 penalty for the others.
        max_grad_norm: Bound of the global norm of the gradients.
        ranks: The learners whose gradients are averaged.

    Attributes:
        learning_rate: On the device, 0 at first; set it in place. float32 [1]
        first: The first moments; RMSprop has none and leaves them 0. [size], or [N, size] of N rows
        second: The second moments, as `first`.
        count: Steps taken, as a float on the device. [] or [N]
        fused: Whether Triton kernels run it, as on GPUs; else torch does, one operation at a time.

    Raises:
        HurtleError: The optimizer has no flat version.
    """

    def __init__(
        self,
        parameters: FlatParameters | FlatRows,
        name: str = "adam",
        eps: float = 1e-5,
        weight_decay: float = 0.0,
        max_grad_norm: float = 0.5,
        ranks: Ranks = ALONE,
    ):
        self.settings = Optimizers(name, parameters.module, 0.0, eps, weight_decay)
        if name not in MOMENTS:
            raise HurtleError(f"optimizer={name!r} cannot run on flat parameters: use {', '.join(MOMENTS)}.")
        self.parameters, self.max_grad_norm, self.ranks = parameters, max_grad_norm, ranks
        values = parameters.values
        self.first, self.second = torch.zeros_like(values), torch.zeros_like(values)
        self.learning_rate = torch.zeros(1, device=values.device)
        # Before the last step, and now: kernels read one and write the other.
        self._counts = torch.zeros((*values.shape[:-1], 2), device=values.device)
        self.count = self._counts[..., 1]
        self.fused = values.is_cuda and has_triton()

    def set_learning_rate(self, learning_rate: float) -> None:
        """Set the learning rate of all parameters."""
        self.learning_rate.fill_(learning_rate)

    def join(self, rows: FlatOptimizer, n: int) -> None:
        """Keep the moments in row `n` of another optimizer's from now on, and share its learning rate."""
        for name in ("first", "second", "_counts"):
            row = getattr(rows, name)[n]
            row.copy_(getattr(self, name))
            setattr(self, name, row)
        self.count, self.learning_rate = self._counts[1], rows.learning_rate

    @torch.no_grad()
    def step(self, partials: Tensor | None = None) -> Tensor:
        """Clip the gradients' global norm and step.

        Args:
            partials: Gradients of parts of the minibatch, whose sum replaces `gradients`. [P, size], or [N, P, size]

        Returns:
            The norm before clipping, on the device: [] or [N]. If it is not finite, nothing was changed.
        """
        if self.ranks.several:
            if partials is not None:
                torch.sum(partials, 0, out=self.parameters.gradients)
                partials = None
            self.ranks.mean_(self.parameters.gradients)
        return self._step_fused(partials) if self.fused else self._step(partials)

    def _step_fused(self, partials: Tensor | None) -> Tensor:
        from hurtle.kernels.triton.optimizer import optimizer_step

        flat, settings = self.parameters, self.settings
        return optimizer_step(
            flat.values, flat.gradients, self.first, self.second, self._counts, self.learning_rate, partials,
            name=settings.name, betas=BETAS[settings.name], eps=settings.eps, weight_decay=settings.weight_decay,
            max_grad_norm=self.max_grad_norm,
        )  # fmt: skip

    def _step(self, partials: Tensor | None) -> Tensor:
        """What the Triton kernels compute, spelled out."""
        flat, name, eps, decay = self.parameters, self.settings.name, self.settings.eps, self.settings.weight_decay
        values, rate = flat.values, self.learning_rate
        if partials is not None:
            torch.sum(partials, -2, out=flat.gradients)
        norm, count = flat.gradients.norm(dim=-1, keepdim=True), self.count.unsqueeze(-1)
        gradients = flat.gradients * (self.max_grad_norm / (norm + 1e-6)).clamp(max=1.0)
        if name == "adamw":
            values = values * (1 - rate * decay)
        else:
            gradients = gradients + decay * values

        beta1, beta2 = BETAS[name]
        new_count = count + 1
        first = beta1 * self.first + (1 - beta1) * gradients
        second = beta2 * self.second + (1 - beta2) * gradients**2
        if name == "rmsprop":
            first, values = self.first, values - rate * gradients / (second.sqrt() + eps)
        else:
            correction1, correction2 = 1 - beta1 ** new_count.double(), 1 - beta2 ** new_count.double()
            denominator = second.sqrt() / correction2.sqrt().float() + eps
            values = values - rate / correction1.float() * first / denominator

        finite = norm.isfinite()
        for old, new in ((flat.values, values), (self.first, first), (self.second, second), (count, new_count)):
            old.copy_(torch.where(finite, new, old))
        return norm.squeeze(-1)

    def state_dict(self) -> dict[str, Any]:
        """In the format of `Optimizers.state_dict`, so that a run can change gears."""
        self.settings.set_learning_rate(float(self.learning_rate))
        views = self._one.views
        return saved_moments(self.settings, int(self.count), views(self.first), views(self.second))

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Continue with saved moments, copied in place for captured graphs."""
        steps, first, second = loaded_moments(self.settings, saved)
        self._counts.fill_(steps)
        self.first.copy_(self._one.packed(first))
        self.second.copy_(self._one.packed(second))

    @property
    def _one(self) -> FlatParameters:
        if isinstance(self.parameters, FlatRows):
            raise HurtleError("Rows are saved and loaded one by one, each by the optimizer that joined them.")
        return self.parameters


def _hidden_matrices(policy: nn.Module) -> list[nn.Parameter]:
    """Matrices of linear layers and recurrent cells; not embeddings, nor the output layers for logits and values."""
    head = getattr(policy, "head", None)
    outputs = {1} if head is None else {1, head.num_outputs}
    left_out = {
        id(module.weight)
        for module in policy.modules()
        if isinstance(module, nn.Embedding) or (isinstance(module, nn.Linear) and module.out_features in outputs)
    }
    return [p for p in policy.parameters() if p.requires_grad and p.ndim == 2 and id(p) not in left_out]


def _check_muon() -> None:
    if not hasattr(torch.optim, "Muon"):
        raise HurtleError(f"Muon is in torch 2.9 and later; this is torch {torch.__version__}. Use optimizer='adamw'.")
