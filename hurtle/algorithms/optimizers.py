"""Optimizers by name: Adam, AdamW, RMSprop, Muon; torch's own, fused where torch can."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from torch import nn

from hurtle.errors import HurtleError, NonFiniteError, UnknownNameError, did_you_mean

OPTIMIZERS = ("adam", "adamw", "rmsprop", "muon")
ADAM_BETAS = (0.9, 0.999)
RMSPROP_ALPHA = 0.99


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
        self.name, self.learning_rate, self.eps, self.weight_decay = name, learning_rate, eps, weight_decay
        self.parameters = [parameter for parameter in policy.parameters() if parameter.requires_grad]
        if not self.parameters:
            raise HurtleError("The policy has no parameters to train.")
        self._matrices = _hidden_matrices(policy) if name == "muon" else []
        if name == "muon":
            _check_muon()

    @cached_property
    def parts(self) -> list[torch.optim.Optimizer]:
        """Torch's optimizers; made when they are first needed, since that takes seconds (they import torch's compiler)."""
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
        """Of all parameters."""
        self.learning_rate = learning_rate
        if "parts" not in self.__dict__:
            return
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
        self.check_name(saved)
        for part, state in zip(self.parts, saved["parts"], strict=True):
            part.load_state_dict(state)

    def check_name(self, saved: dict[str, Any]) -> None:
        """Refuse what another optimizer has saved."""
        if saved["name"] != self.name:
            raise HurtleError(
                f"The checkpoint was written with optimizer={saved['name']!r}, and this is {self.name!r}: use that."
            )


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


def _check_muon() -> None:
    if not hasattr(torch.optim, "Muon"):
        raise HurtleError(f"Muon is in torch 2.9 and later; this is torch {torch.__version__}. Use optimizer='adamw'.")
