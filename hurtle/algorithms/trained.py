"""`Trained`: a network and its optimizer, as off-policy learners step and save them; `network_of` checks a policy's network."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from hurtle.algorithms.replay_settings import ReplayConfig
from hurtle.errors import HurtleError
from hurtle.kernels.cuda_graphs import autocast
from hurtle.kernels.flat_parameters import FlatParameters
from hurtle.kernels.optimizers import FlatOptimizer, Optimizers
from hurtle.kernels.ranks import ALONE, Ranks
from hurtle.policies.batch_norm_networks import BatchNormLayers
from hurtle.policies.policy import Policy


class Trained:
    """A module and its optimizer.

    Args:
        module: Trained in place.
        config: Learning rate, clipping.
        learning_rate: None: the config's.
        flat: Keep all parameters in one tensor, and step in a few launches that a CUDA graph can hold.
        ranks: The learners whose gradients are averaged.
    """

    def __init__(
        self,
        module: nn.Module,
        config: ReplayConfig,
        learning_rate: float | None = None,
        flat: bool = False,
        ranks: Ranks = ALONE,
    ):
        self.module, self.max_grad_norm = module, config.max_grad_norm
        self.learning_rate = rate = learning_rate or config.learning_rate
        self.saved_optimizer: dict[str, Any] | None = None  # of a compiled learner, which steps without torch
        if not flat:
            self.optimizer: Any = Optimizers("adam", module, rate, config.adam_eps, ranks=ranks)
            self.flat = None
            return
        self.flat = FlatParameters(module, padded=True)
        self.optimizer = FlatOptimizer(self.flat, "adam", config.adam_eps, max_grad_norm=config.max_grad_norm, ranks=ranks)
        self.optimizer.set_learning_rate(rate)
        self._parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]

    def descend(self, loss: Callable[..., tuple[Tensor, ...]], inputs: tuple[Any, ...], dtype: torch.dtype | None) -> Any:
        """One gradient step on `loss(*inputs)[0]`, computed under autocast with `dtype`.

        Returns:
            The gradient's norm, and what `loss` returned besides the loss.
        """
        with autocast(next(self.module.parameters()).device, dtype):
            first, *others = loss(*inputs)
        return self.step(first), *others

    def step(self, loss: Tensor) -> Tensor:
        """One gradient step; only this module's parameters get gradients. Returns the gradient's norm."""
        if self.flat is None:
            return self.optimizer.step(loss, self.max_grad_norm, only_these=True)
        gradients = torch.autograd.grad(loss, self._parameters)
        self.flat.packed(gradients, out=self.flat.gradients)
        return self.optimizer.step()

    def check(self) -> None:
        """Check that the module still has the parameters that steps change; see `FlatParameters.check`."""
        if self.flat is not None:
            self.flat.check()

    def step_along(self, slope: Tensor) -> None:
        """One step along a given gradient of the module's only parameter."""
        if self.flat is None:
            (parameter,) = self.optimizer.parameters
            self.step((parameter * slope).sum())
            return
        self.flat.gradients[:1].copy_(slope)
        self.optimizer.step()

    def settle(self, found: Tensor, good: Tensor) -> None:
        """After a step: see `BatchNormLayers.settle`."""
        batch_norms_of(self.module)[1].settle(found, good)

    def state_dict(self) -> dict[str, Any]:
        """Weights and moments."""
        return {"module": self.module.state_dict(), "optimizer": self.saved_optimizer or self.optimizer.state_dict()}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Continue with saved weights and moments."""
        self.module.load_state_dict(saved["module"])
        self.optimizer.load_state_dict(saved["optimizer"])
        self.optimizer.set_learning_rate(self.learning_rate)  # the run's, not the saved one's


def batch_norms_of(module: nn.Module) -> tuple[str, Any]:
    """The module's layers with batch norm, after their name; None if it has none."""
    found = (pair for pair in module.named_modules() if isinstance(pair[1], BatchNormLayers))
    return next(found, ("", None))


def network_of(policy: Policy, *kinds: type[nn.Module]) -> Any:
    """The policy's network, which must be of one of these kinds.

    Raises:
        HurtleError: It is of another kind.
    """
    if not isinstance(policy.network, kinds):
        wanted = " or ".join(kind.__name__ for kind in kinds)
        raise HurtleError(
            f"This algorithm trains a {wanted}, got a {type(policy.network).__name__}: leave policy at 'auto', or give the "
            "name of one of Hurtle's networks."
        )
    return policy.network
