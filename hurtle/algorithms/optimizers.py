"""Optimizers by name: Adam, AdamW, RMSprop, Muon; torch's own, fused where torch can."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hurtle.errors import HurtleError, NonFiniteError, UnknownNameError, did_you_mean

OPTIMIZERS = ("adam", "adamw", "rmsprop", "muon")


class Optimizers:
    """One or more torch optimizers that step together.

    Args:
        name: "adam", "adamw", "rmsprop" or "muon" (Muon for the hidden layers' matrices, AdamW for everything else).
        policy: Whose parameters to train.
        learning_rate: Set anew by `set_learning_rate` as it is annealed.
        eps: Added to the denominator of Adam and RMSprop.
        weight_decay: Of AdamW and Muon; Adam's is an L2 penalty.
    """

    def __init__(self, name: str, policy: nn.Module, learning_rate: float, eps: float = 1e-5, weight_decay: float = 0.0):
        if name not in OPTIMIZERS:
            raise UnknownNameError(f"No optimizer {name!r}. {did_you_mean(name, OPTIMIZERS)}")
        self.name = name
        parameters = [parameter for parameter in policy.parameters() if parameter.requires_grad]
        if not parameters:
            raise HurtleError("The policy has no parameters to train.")
        common: dict[str, Any] = {"lr": learning_rate, "weight_decay": weight_decay}
        if name == "rmsprop":
            self.parts: list[torch.optim.Optimizer] = [torch.optim.RMSprop(parameters, eps=eps, alpha=0.99, **common)]
        elif name == "muon":
            matrices = _hidden_matrices(policy)
            ids = {id(parameter) for parameter in matrices}
            others = [parameter for parameter in parameters if id(parameter) not in ids]
            self.parts = [_muon(matrices, common)] if matrices else []
            self.parts += [torch.optim.AdamW(others, eps=eps, fused=True, **common)] if others else []
        else:
            made = torch.optim.Adam if name == "adam" else torch.optim.AdamW
            self.parts = [made(parameters, eps=eps, fused=True, **common)]
        self.parameters = parameters

    def set_learning_rate(self, learning_rate: float) -> None:
        """Of all parameters."""
        for part in self.parts:
            for group in part.param_groups:
                group["lr"] = learning_rate

    def step(self, loss: torch.Tensor, max_grad_norm: float) -> torch.Tensor:
        """Backward, clip the global norm of the gradients, and step; returns the norm before clipping.

        Raises:
            NonFiniteError: The gradient is not finite; no parameter was changed. On a GPU, where looking would mean waiting,
                the caller looks at the norms after the update.
        """
        for part in self.parts:
            part.zero_grad(set_to_none=True)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(self.parameters, max_grad_norm)
        if norm.device.type == "cpu" and not norm.isfinite():
            raise NonFiniteError(
                f"The gradient is not finite (its norm is {norm:g}, the loss {loss:g}). Try a lower learning_rate."
            )
        for part in self.parts:
            part.step()
        return norm

    def state_dict(self) -> dict[str, Any]:
        """Of every optimizer."""
        return {"name": self.name, "parts": [part.state_dict() for part in self.parts]}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Go on with saved moments."""
        if saved["name"] != self.name:
            raise HurtleError(
                f"The checkpoint was written with optimizer={saved['name']!r}, and this is {self.name!r}: use that."
            )
        for part, state in zip(self.parts, saved["parts"], strict=True):
            part.load_state_dict(state)


def _hidden_matrices(policy: nn.Module) -> list[nn.Parameter]:
    """Matrices of linear layers and recurrent cells; not embeddings, nor the last layers, which give logits and values."""
    head = getattr(policy, "head", None)
    outputs = {1} if head is None else {1, head.num_outputs}
    left_out = {
        id(module.weight)
        for module in policy.modules()
        if isinstance(module, nn.Embedding) or (isinstance(module, nn.Linear) and module.out_features in outputs)
    }
    return [p for p in policy.parameters() if p.requires_grad and p.ndim == 2 and id(p) not in left_out]


def _muon(matrices: list[nn.Parameter], common: dict[str, Any]) -> torch.optim.Optimizer:
    if not hasattr(torch.optim, "Muon"):
        raise HurtleError(f"Muon is in torch 2.9 and later; this is torch {torch.__version__}. Use optimizer='adamw'.")
    return torch.optim.Muon(matrices, adjust_lr_fn="match_rms_adamw", **common)
