"""`ActionTransform`: the one rule that turns a raw action into the env's, with its constants as arrays; and the kinds of heads.

action space, kind of head → start, low, range, bounds; raw action → shift, squash or scale → round → clip → cast. Imports no
torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from gymnasium import spaces

from hurtle.errors import HurtleError

HEAD_OUTPUTS = {
    "categorical": ("logits",),
    "multi_categorical": ("logits",),
    "gaussian": ("mean", "log_std"),
    "beta": ("alpha", "beta"),
    "squashed_gaussian": ("mean", "log_std"),
}
"""The kinds of heads, and the parameters of each distribution. Compiled code identifies a kind by its index here: the
constants of kernels/cpu/policy_table.py; tests/policies/test_action_head.py checks that they match."""
HEAD_KINDS = {kind: number for number, kind in enumerate(HEAD_OUTPUTS)}
SCALINGS = {"beta": 1, "squashed_gaussian": 2}
"""What is done to a Box's raw actions before they are clipped, as in kernels/cpu/policy_table.py; 0 for other kinds."""


@dataclass(frozen=True, eq=False)
class ActionTransform:
    """Raw action → env action.

    A raw action is what the distribution samples and what rollouts store. `apply` is the reference; these copies repeat it with
    the constants below, and a test checks each against it:

    | copy | used by | test |
    |---|---|---|
    | `ActionHead.env_tensor` | the device gear, exported files | tests/policies/test_action_head.py |
    | `kernels/cpu/rollout.py` (`send_choices`, `send_numbers`) | the native gear | tests/collect/test_native_collector.py |
    | `kernels/device_rows.py` (`choose_row`, `gauss_row`) | the device gear | tests/kernels/test_device_rows.py |
    | `kernels/triton/mlp.py` (`act`) | the device gear | tests/kernels/triton_kernels/checks_mlp.py |
    | `kernels/cpu/choosing.py` (`write_action`) | compiled policies | tests/deploy/test_compiled.py |

    Attributes:
        space: The env's action space.
        kind: One of `HEAD_OUTPUTS`.
        nvec: Number of options of each choice, int64 [size]; empty for a Box, as is `start`.
        start: First option of each choice, int64 [size].
        low: Lower bound, float64 [size]; empty for discrete spaces, as are the next three.
        range: Upper minus lower bound, float64 [size].
        least: Lower bound in the space's dtype, [size].
        greatest: Upper bound, likewise.

    Example:
        >>> ActionTransform.of(spaces.Box(-2.0, 2.0, (1,)), "gaussian").apply(np.array([[3.0]], np.float32))
        array([[2.]], dtype=float32)
    """

    space: spaces.Space
    kind: str
    nvec: np.ndarray
    start: np.ndarray
    low: np.ndarray
    range: np.ndarray
    least: np.ndarray
    greatest: np.ndarray

    @classmethod
    def of(cls, space: spaces.Space, kind: str) -> ActionTransform:
        """The transform for an action space.

        Raises:
            HurtleError: The kind does not fit the space, or needs finite bounds that the space lacks.
        """
        fitting = kinds_for(space)
        if kind not in fitting:
            raise HurtleError(f"Distribution for actions in {space}: expected {' or '.join(fitting)}, got {kind!r}.")
        if isinstance(space, spaces.Box):
            low, high = space.low.astype(np.float64).ravel(), space.high.astype(np.float64).ravel()
            if kind != "gaussian" and not (np.isfinite(low).all() and np.isfinite(high).all()):
                raise HurtleError(
                    f"The distribution {kind!r} needs a Box with finite bounds, got {space}; use 'gaussian', or bound the "
                    "actions with gymnasium.wrappers.RescaleAction."
                )
            no_choice = np.empty(0, np.int64)
            with np.errstate(invalid="ignore"):  # infinite bounds have no range; a Gaussian needs none
                return cls(
                    space, kind, no_choice, no_choice, low, high - low, space.low.ravel().copy(), space.high.ravel().copy()
                )
        nvec = space.n if isinstance(space, spaces.Discrete) else getattr(space, "nvec", np.full(space.shape or (), 2))
        start = np.broadcast_to(getattr(space, "start", 0), np.shape(nvec))
        nvec, start, no_box = np.array(nvec, np.int64).ravel(), np.array(start, np.int64).ravel(), np.empty(0)
        return cls(space, kind, nvec, start, no_box, no_box, no_box, no_box)

    @property
    def size(self) -> int:
        """Elements of one action."""
        return math.prod(self.space.shape or ())

    @property
    def num_outputs(self) -> int:
        """Outputs of the network's last layer."""
        if self.nvec.size:
            return int(self.nvec.sum())
        return 2 * self.size if self.kind == "beta" else self.size

    def apply(self, raw: np.ndarray) -> np.ndarray:
        """Raw actions [B, …] as the env expects them: [B, *space.shape] in the space's dtype."""
        space, flat = self.space, raw.reshape(len(raw), self.size)
        if not isinstance(space, spaces.Box):
            return (flat + self.start).astype(space.dtype, copy=False).reshape(len(raw), *(space.shape or ()))
        actions = flat
        if self.kind == "squashed_gaussian":
            actions = self.low + (np.tanh(flat, dtype=np.float64) + 1.0) / 2.0 * self.range
        elif self.kind == "beta":
            actions = self.low + flat * self.range
        if space.dtype.kind != "f":
            actions = np.clip(np.rint(actions, dtype=np.float64), self.least, self.greatest).astype(space.dtype)
        else:
            actions = np.clip(actions.astype(space.dtype), self.least, self.greatest)
        return actions.reshape(len(raw), *space.shape)


def kinds_for(space: spaces.Space) -> tuple[str, ...]:
    """The kinds of heads that fit an action space, the default first.

    Raises:
        HurtleError: The space's type is not supported.
    """
    if isinstance(space, spaces.Box):
        return ("gaussian", "squashed_gaussian", "beta")
    if isinstance(space, spaces.Discrete):
        return ("categorical",)
    if isinstance(space, spaces.MultiDiscrete | spaces.MultiBinary):
        return ("multi_categorical",)
    raise HurtleError(
        f"Actions must be Discrete, MultiDiscrete, MultiBinary or Box, got {space}; "
        "hurtle.emulate(env) turns a structured space into one of these."
    )
