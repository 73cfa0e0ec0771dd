"""`Actor`: a policy acting for many rows: normalizing, sampling from each row's own random stream, carrying its memory.

observations `[rows, …]` → (raw actions, log-probs, values). Knows nothing of envs or rollouts.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from hurtle.buffers.rollout import torch_dtype
from hurtle.native.rng import ACTION_STREAM, seed_range, stream_states
from hurtle.native.uniforms import uniforms
from hurtle.policies.policy import Policy


class Actor:
    """Acts for `num_rows` rows.

    Row n draws its k-th action from the uniforms of (seed + n, k), whatever the other rows do and in whatever order they come.

    Args:
        policy: What acts; its device is where inference happens.
        num_rows: Envs times agents.
        seed: Of the action streams.
        compiled: Run the policy through `torch.compile`.
        autocast: A dtype for mixed precision, or None.
    """

    def __init__(
        self, policy: Policy, num_rows: int, seed: int, *, compiled: bool = False, autocast: torch.dtype | None = None
    ):
        self.policy, self.num_rows = policy, num_rows
        self.device = next((parameter.device for parameter in policy.parameters()), torch.device("cpu"))
        self._forward = torch.compile(policy) if compiled else policy
        self._autocast = autocast
        self._streams = stream_states(seed_range(seed, num_rows), ACTION_STREAM)
        self._steps = np.zeros(num_rows, np.int64)  # actions drawn so far
        self.state = policy.initial_state(num_rows, self.device)

    def see(self, obs: np.ndarray) -> Tensor:
        """Observations as the policy sees them, on its device."""
        return see(self.policy, obs, self.device)

    @torch.no_grad()
    def act(
        self, seen: Tensor, mask: Tensor | None, starts: Tensor, rows: np.ndarray | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Choose actions for all rows, or for `rows` in a pool.

        Args:
            seen: What `see` returned, `[batch, …]`.
            mask: Legal actions, bool `[batch, actions]`, or None.
            starts: Rows that begin an episode and so remember nothing, bool `[batch]`.
            rows: Which rows these are.

        Returns:
            Raw actions, their log-probs and the values, `[batch, …]`.
        """
        chosen = slice(None) if rows is None else rows
        drawn = uniforms(self._streams[chosen], self._steps[chosen], self.policy.num_uniforms)
        self._steps[chosen] += 1
        state = self.state if rows is None else self.state_of(rows)
        with torch.autocast(self.device.type, self._autocast, enabled=self._autocast is not None):
            distribution, value, state = self._forward(seen, state, mask, starts)
        if rows is None:  # under autocast an LSTM's may come in half precision; rollouts store float32
            self.state = tuple(new.to(part.dtype) for part, new in zip(self.state, state, strict=True))
        else:
            for part, new in zip(self.state, state, strict=True):
                part[torch.from_numpy(rows).to(self.device)] = new.to(part.dtype)
        actions = distribution.sample(torch.from_numpy(drawn).to(self.device))
        return actions, distribution.log_prob(actions).float(), value.float()

    @torch.no_grad()
    def values(self, obs: np.ndarray, state: tuple[Tensor, ...] | None = None, starts: np.ndarray | None = None) -> Tensor:
        """V of observations, `[batch]`; nobody acts, and no memory changes."""
        state = self.state if state is None else state
        begun = None if starts is None else torch.from_numpy(starts).to(self.device)
        with torch.autocast(self.device.type, self._autocast, enabled=self._autocast is not None):
            return self.policy.value(self.see(obs), state, begun).float()

    def env_actions(self, actions: Tensor) -> np.ndarray:
        """Raw actions as the env takes them."""
        return self.policy.head.env_actions(actions.cpu().numpy())

    def state_of(self, rows: np.ndarray) -> tuple[Tensor, ...]:
        """The memory of some rows; a copy."""
        chosen = torch.from_numpy(rows).to(self.device)
        return tuple(part[chosen] for part in self.state)

    def state_dict(self) -> dict[str, Any]:
        """Memory and random streams."""
        return {"steps": torch.from_numpy(self._steps.copy()), "state": [part.clone() for part in self.state]}

    def load_state_dict(self, saved: dict[str, Any], with_state: bool = True) -> None:
        """Go on drawing where the saved one stopped; `with_state=False` forgets, for envs that begin anew."""
        if saved["steps"].numel() == self.num_rows:
            self._steps[:] = saved["steps"].numpy()
        else:  # another number of envs: new streams, from a step that none of the old ones has reached
            self._steps[:] = int(saved["steps"].max())
        if with_state:
            self.state = tuple(part.to(self.device) for part in saved["state"])


def see(policy: Policy, obs: np.ndarray, device: torch.device) -> Tensor:
    """Observations `[batch, …]` as the policy sees them: normalized if it normalizes, else in the dtype rollouts store."""
    seen = torch.as_tensor(obs, device=device)
    if policy.normalizer is not None:
        return policy.normalizer.normalize(seen)
    return seen.to(torch_dtype(policy.observation_space.dtype))
