"""`Actor`: a policy acting for many rows: normalizes, samples from each row's random stream, and carries its memory.

observations `[rows, …]` → raw actions, log-probs, values, in a step of a rollout. Knows nothing of envs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hurtle.buffers.rollout import Done, Rollout
from hurtle.collect.transfer import Arrival, Staging
from hurtle.contracts import Weights
from hurtle.errors import HurtleError
from hurtle.kernels.uniforms import uniforms
from hurtle.native.rng import ACTION_STREAM, seed_range, stream_states
from hurtle.policies.policy import Policy


def copy_states(source: Iterable[Tensor], into: Iterable[Tensor]) -> None:
    """Copy the parts of a memory's state.

    Raises:
        HurtleError: They differ in number or shape.
    """
    source, into = tuple(source), tuple(into)
    shapes, expected = ([tuple(part.shape) for part in parts] for parts in (source, into))
    if shapes != expected:
        raise HurtleError(f"The state of a memory has the shapes {shapes}; the policy's memory needs {expected}.")
    for part, other in zip(source, into, strict=True):
        other.copy_(part)


class Actor:
    """Acts for `num_rows` rows.

    Row n draws its k-th action from the uniforms of (seed + n, k), regardless of the other rows and of their order. On a GPU
    only `env_actions` waits for the device, and only for the actions.

    Args:
        policy: The policy; inference runs on its device.
        num_rows: Envs times agents.
        seed: Seed of the action streams.
        compiled: Run the policy through `torch.compile`.
        autocast: A dtype for mixed precision, or None.
        staging: Copies arrays to the policy's device and back; None makes one.
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
        self.name_of: Callable[[int], str] = "row {}".format  # for messages; a collector knows envs and agents
        self.device = next((parameter.device for parameter in policy.parameters()), torch.device("cpu"))
        self.staging = staging or Staging(self.device)
        self._forward = torch.compile(policy) if compiled else policy
        self._autocast = autocast
        self.streams = stream_states(seed_range(seed, num_rows), ACTION_STREAM)
        self.steps = np.zeros(num_rows, np.int64)  # actions drawn so far
        self.state = policy.initial_state(num_rows, self.device)
        self._chosen: Arrival | None = None  # the last actions of `act`

    def load_weights(self, weights: Weights) -> None:
        """Act with these weights from now on."""
        weights.copy_to(self.policy)

    def store_obs(self, obs: Tensor, inputs: Tensor, new: np.ndarray) -> None:
        """Write observations into a rollout: as the env returned them, and as the policy sees them if it normalizes."""
        obs.copy_(self.staging.to_device("obs", new, obs.dtype))
        if self.policy.normalizer is not None:
            inputs.copy_(self.policy.normalizer.normalize(obs))

    def act_step(self, rollout: Rollout, t: int, obs: np.ndarray, mask: np.ndarray | None, starts: np.ndarray) -> np.ndarray:
        """Act for all rows in step t of a rollout, and write there what the policy saw and chose.

        Args:
            rollout: Step t of its `obs`, `masks` and POLICY_FIELDS is written, on a GPU of its `starts` too.
            t: The step.
            obs: As the env returned them, `[rows, …]`.
            mask: Legal actions, bool `[rows, actions]`; None: all.
            starts: Rows that begin an episode, bool `[rows]`.

        Returns:
            The actions as the env expects them, which it may keep.
        """
        self.store_obs(rollout.obs[t], rollout.inputs[t], obs)
        if not self.staging.shares_memory:
            rollout.starts[t] = self.staging.to_device("starts", starts)
        legal = None
        if rollout.masks is not None:
            legal = rollout.masks[t]
            legal.copy_(torch.ones_like(legal) if mask is None else self.staging.to_device("mask", mask))
        rollout.actions[t], rollout.log_probs[t], rollout.values[t] = self.act(rollout.inputs[t], legal, rollout.starts[t])
        return self.env_actions()

    @torch.no_grad()
    def act(
        self, seen: Tensor, mask: Tensor | None, starts: Tensor, rows: np.ndarray | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Choose actions for all rows, or for `rows` in a pool.

        On a GPU this only launches work; the copy of the actions to the host is launched before the log-probs.

        Args:
            seen: Observations as the policy sees them, `[batch, …]`.
            mask: Legal actions, bool `[batch, actions]`, or None.
            starts: Rows that begin an episode and have their memory cleared, bool `[batch]`.
            rows: Which rows these are.

        Returns:
            Raw actions, their log-probs and the values, `[batch, …]`.
        """
        chosen = slice(None) if rows is None else rows
        drawn = self.staging.to_device("uniforms", uniforms(self.streams[chosen], self.steps[chosen], self.policy.num_uniforms))
        self.steps[chosen] += 1
        at = None if rows is None or not self.state else self.staging.to_device("rows", rows)
        state = self.state if at is None else tuple(part[at] for part in self.state)
        with torch.autocast(self.device.type, self._autocast, enabled=self._autocast is not None):
            distribution, value, state = self._forward(seen, state, mask, starts)
        if at is None:  # under autocast an LSTM's state may be half precision; rollouts store float32
            self.state = tuple(new.to(part.dtype) for part, new in zip(self.state, state, strict=True))
        else:
            for part, new in zip(self.state, state, strict=True):
                part[at] = new.to(part.dtype)
        actions = distribution.sample(drawn)
        self._chosen = self.staging.start_to_host("actions", actions)
        return actions, distribution.log_prob(actions).float(), value.float()

    def bootstrap(self, rollout: Rollout) -> Done:
        """Fill `last_values` and `final_values` of a collected rollout, if it is faster here than in `Postprocess`.

        Returns:
            Which parts of the postprocessing this has done.
        """
        return Done.NOTHING

    def env_actions(self) -> np.ndarray:
        """The actions that `act` chose last, as the env expects them. Does not wait for work launched after them."""
        assert self._chosen is not None
        return self.policy.head.env_actions(self._chosen.wait())

    def state_of(self, rows: np.ndarray) -> tuple[Tensor, ...]:
        """A copy of the memory of some rows."""
        if not self.state:
            return ()
        chosen = self.staging.to_device("rows", rows)
        return tuple(part[chosen] for part in self.state)

    def state_dict(self) -> dict[str, Any]:
        """Memory and random streams."""
        return {"steps": torch.from_numpy(self.steps.copy()), "state": [part.clone() for part in self.state]}

    def load_state_dict(self, saved: dict[str, Any], with_state: bool = True) -> None:
        """Continue the saved random streams; `with_state=False` drops the memory, for envs that restart."""
        if saved["steps"].numel() == self.num_rows:
            self.steps[:] = saved["steps"].numpy()
        else:  # another number of envs: new streams, from a step that none of the old ones has reached
            self.steps[:] = int(saved["steps"].max())
        if with_state:
            copy_states(saved["state"], self.state)
