"""`Actor`: a policy acting for many rows: normalizing, sampling from each row's own random stream, carrying its memory.

observations `[rows, …]` → (raw actions, log-probs, values). Knows nothing of envs or rollouts.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from hurtle.buffers.rollout import torch_dtype
from hurtle.collect.transfer import Arrival, Staging
from hurtle.native.rng import ACTION_STREAM, seed_range, stream_states
from hurtle.native.uniforms import uniforms
from hurtle.policies.policy import Policy


class Actor:
    """Acts for `num_rows` rows.

    Row n draws its k-th action from the uniforms of (seed + n, k), whatever the other rows do and in whatever order they come.
    On a GPU nothing here waits for the device but `env_actions`, and that for the actions alone.

    Args:
        policy: What acts; its device is where inference happens.
        num_rows: Envs times agents.
        seed: Of the action streams.
        compiled: Run the policy through `torch.compile`.
        autocast: A dtype for mixed precision, or None.
        staging: How arrays get to the policy's device and back; None makes one.
    """

    def __init__(
        self,
        policy: Policy,
        num_rows: int,
        seed: int,
        *,
        compiled: bool = False,
        autocast: torch.dtype | None = None,
        staging: Staging | None = None,
    ):
        self.policy, self.num_rows = policy, num_rows
        self.device = next((parameter.device for parameter in policy.parameters()), torch.device("cpu"))
        self.staging = staging or Staging(self.device)
        self._forward = torch.compile(policy) if compiled else policy
        self._autocast = autocast
        self._streams = stream_states(seed_range(seed, num_rows), ACTION_STREAM)
        self._steps = np.zeros(num_rows, np.int64)  # actions drawn so far
        self.state = policy.initial_state(num_rows, self.device)
        self._chosen: Arrival | None = None  # the actions that `act` chose last

    def see(self, obs: np.ndarray) -> Tensor:
        """Observations as the policy sees them, on its device; as `see` below has them."""
        normalizer = self.policy.normalizer
        if normalizer is not None:
            return normalizer.normalize(self.staging.to_device("obs", obs))
        return self.staging.to_device("obs", obs, torch_dtype(self.policy.observation_space.dtype))

    @torch.no_grad()
    def act(
        self, seen: Tensor, mask: Tensor | None, starts: Tensor, rows: np.ndarray | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Choose actions for all rows, or for `rows` in a pool.

        On a GPU all of it is launched and nothing waited for; the actions' copy to the host is launched before the log-probs.

        Args:
            seen: What `see` returned, `[batch, …]`.
            mask: Legal actions, bool `[batch, actions]`, or None.
            starts: Rows that begin an episode and so remember nothing, bool `[batch]`.
            rows: Which rows these are.

        Returns:
            Raw actions, their log-probs and the values, `[batch, …]`.
        """
        chosen = slice(None) if rows is None else rows
        drawn = self.staging.to_device(
            "uniforms", uniforms(self._streams[chosen], self._steps[chosen], self.policy.num_uniforms)
        )
        self._steps[chosen] += 1
        at = None if rows is None or not self.state else self.staging.to_device("rows", rows)
        state = self.state if at is None else tuple(part[at] for part in self.state)
        with torch.autocast(self.device.type, self._autocast, enabled=self._autocast is not None):
            distribution, value, state = self._forward(seen, state, mask, starts)
        if at is None:  # under autocast an LSTM's may come in half precision; rollouts store float32
            self.state = tuple(new.to(part.dtype) for part, new in zip(self.state, state, strict=True))
        else:
            for part, new in zip(self.state, state, strict=True):
                part[at] = new.to(part.dtype)
        actions = distribution.sample(drawn)
        self._chosen = self.staging.start_to_host("actions", actions)
        return actions, distribution.log_prob(actions).float(), value.float()

    @torch.no_grad()
    def values(self, obs: np.ndarray, state: tuple[Tensor, ...] | None = None, starts: np.ndarray | None = None) -> Tensor:
        """V of observations, `[batch]`; nobody acts, and no memory changes."""
        state = self.state if state is None else state
        begun = None if starts is None else self.staging.to_device("starts", starts)
        with torch.autocast(self.device.type, self._autocast, enabled=self._autocast is not None):
            return self.policy.value(self.see(obs), state, begun).float()

    def env_actions(self) -> np.ndarray:
        """The actions that `act` chose last, as the env takes them; waits for them, and for nothing launched after them."""
        assert self._chosen is not None
        return self.policy.head.env_actions(self._chosen.wait())

    def state_of(self, rows: np.ndarray) -> tuple[Tensor, ...]:
        """The memory of some rows; a copy."""
        if not self.state:
            return ()
        chosen = self.staging.to_device("rows", rows)
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


def see(policy: Policy, obs: np.ndarray | Tensor, device: torch.device) -> Tensor:
    """Observations `[batch, …]` as the policy sees them: normalized if it normalizes, else in the dtype rollouts store."""
    seen = torch.as_tensor(obs, device=device)
    if policy.normalizer is not None:
        return policy.normalizer.normalize(seen)
    return seen.to(torch_dtype(policy.observation_space.dtype))
