"""`Player`: a policy in front of a vector env, for evaluating and watching: what it sees, remembers and does.

observations → normalizer (frozen) → policy (state, masks) → mode or sample → actions of the env. Knows nothing of learning.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from hurtle.collect.inference import see
from hurtle.emulation.layout import SpaceLayout
from hurtle.emulation.nan import nan_rows
from hurtle.errors import DeviceError, HurtleError, NonFiniteError
from hurtle.native.rng import seed_range, stream_state, stream_states
from hurtle.native.uniforms import uniforms
from hurtle.policies.policy import Policy
from hurtle.runners.devices import find_device
from hurtle.vector.vec_env import VecEnv

EVAL_STREAM = 0x65766C  # streams that training never draws from
EVAL_ACTION_STREAM = 0x657661


def eval_seed(seed: int) -> int:
    """The seed of env 0 of an evaluation: hashed in a stream of its own, so that it plays what no training run has seen.

    It has 31 bits, as some envs refuse larger ones; the highest is set.

    Example:
        >>> eval_seed(0) == eval_seed(0) != eval_seed(1)
        True
    """
    return 1 << 30 | stream_state(seed, EVAL_STREAM) >> 34


class RowPolicy(Protocol):
    """What a `Player` plays: a policy that chooses for rows by itself. A torch `Policy` becomes one as `TorchRows`."""

    observation_space: spaces.Space
    action_space: spaces.Space
    num_uniforms: int

    def initial_state(self, batch: int) -> tuple[Any, ...]:
        """The memory of so many rows at the start of an episode."""
        ...

    def choose_rows(
        self,
        rows: np.ndarray,
        state: tuple[Any, ...],
        mask: np.ndarray | None,
        starts: np.ndarray,
        drawn: np.ndarray | None = None,
    ) -> tuple[np.ndarray, tuple[Any, ...]]:
        """Actions for flat observations, and the next memory; rows that start an episode remember nothing.

        Args:
            rows: [B, …].
            state: The memory of each row.
            mask: Legal actions, bool [B, n], or None.
            starts: Rows that begin an episode, bool [B].
            drawn: Uniforms [B, num_uniforms] to sample with; None: the policy does what it does without.
        """
        ...


class TorchRows:
    """A torch policy as a `RowPolicy`.

    Args:
        policy: What acts.
        device: Where it is.
    """

    def __init__(self, policy: Policy, device: str):
        self._policy, self._device = policy, _device_of(policy, device)
        self.observation_space, self.action_space = policy.observation_space, policy.action_space
        self.num_uniforms = policy.num_uniforms

    def initial_state(self, batch: int) -> tuple[Tensor, ...]:
        """The memory of so many rows at the start of an episode."""
        return self._policy.initial_state(batch, device=self._device)

    def choose_rows(
        self,
        rows: np.ndarray,
        state: tuple[Any, ...],
        mask: np.ndarray | None,
        starts: np.ndarray,
        drawn: np.ndarray | None = None,
    ) -> tuple[np.ndarray, tuple[Any, ...]]:
        """See `RowPolicy`; without `drawn`, the most likely actions."""
        return choose(self._policy, rows, state, mask, starts, drawn, self._device)


class Player:
    """Plays a policy on all rows (agents of envs) of a vector.

    Args:
        policy: What acts; a torch policy on `device`.
        vec: The envs, whose rows it plays.
        deterministic: Take the mode of the distribution; else sample it.
        seed: Of sampled actions: row n draws from its own stream, whatever the others do.
        device: Where the policy is.

    Raises:
        HurtleError: The policy is for envs with other spaces.
    """

    def __init__(self, policy: Policy | RowPolicy, vec: VecEnv, *, deterministic: bool, seed: int, device: str = "cpu"):
        _check_spaces(policy, vec)
        self.policy: RowPolicy = TorchRows(policy, device) if isinstance(policy, Policy) else policy
        self._deterministic = deterministic
        self._layout: SpaceLayout | None = getattr(vec, "layout", None)
        self._num_agents, self._rows = vec.num_agents, vec.num_envs * vec.num_agents
        self._streams = stream_states(seed_range(seed, self._rows), EVAL_ACTION_STREAM)
        self._steps = np.zeros(self._rows, np.int64)
        self._state = self.policy.initial_state(self._rows)
        self._starts = np.ones(self._rows, np.bool_)

    def act(self, obs: Any, infos: dict[str, Any]) -> np.ndarray:
        """Actions for what `vec.reset` or `vec.step` returned."""
        shape = self.policy.observation_space.shape or ()
        lead = obs.shape[: obs.ndim - len(shape)]  # (envs,) or (envs, agents)
        rows = obs.reshape(self._rows, *shape)
        present = np.asarray(infos["agent_mask"]).reshape(-1) if "agent_mask" in infos else np.ones(self._rows, np.bool_)
        self._check_numbers(rows, present)
        starts = self._starts
        self._starts = starts & ~present  # an absent agent's first step is yet to come
        mask = np.asarray(infos["action_mask"], np.bool_).reshape(self._rows, -1) if "action_mask" in infos else None
        drawn = None if self._deterministic else uniforms(self._streams, self._steps, self.policy.num_uniforms)
        self._steps += 1
        actions, self._state = self.policy.choose_rows(rows, self._state, mask, starts, drawn)
        return actions.reshape(*lead, *actions.shape[1:])

    def end(self, terminated: np.ndarray, truncated: np.ndarray, over: np.ndarray) -> None:
        """Say whose episode ended: they begin the next one without memory.

        Args:
            terminated: bool [envs] or [envs, agents], as `vec.step` returned it.
            truncated: Likewise.
            over: bool [envs]: which envs are over as a whole.
        """
        ended = (terminated | truncated).reshape(len(over), -1) | over[:, None]
        self._starts |= ended.reshape(-1)

    def _check_numbers(self, rows: np.ndarray, present: np.ndarray) -> None:
        bad = nan_rows(rows, self._layout) & present
        if bad.any():
            row = int(np.flatnonzero(bad)[0])
            env, agent = divmod(row, self._num_agents)
            who = f"Env {env}" if self._num_agents == 1 else f"Agent {agent} of env {env}"
            raise NonFiniteError(
                f"{who} gave an observation with NaN after {self._steps[row]} steps of the evaluation; "
                "a policy can make nothing of it. Look for a division by zero, a log or an overflow in the env."
            )


@torch.inference_mode()
def choose(
    policy: Policy,
    rows: np.ndarray,
    state: tuple[Tensor, ...],
    mask: np.ndarray | None,
    starts: np.ndarray | None,
    drawn: np.ndarray | None,
    device: torch.device,
) -> tuple[np.ndarray, tuple[Tensor, ...]]:
    """Actions as the env takes them, and the next memory.

    Args:
        policy: What acts.
        rows: Observations [B, …] as the env gave them.
        state: The memory of each row; () without recurrence.
        mask: Legal actions, bool [B, n], or None.
        starts: Rows that begin an episode and remember nothing, bool [B], or None.
        drawn: Uniforms [B, policy.num_uniforms] to sample with; None takes the most likely action.
        device: Where the policy is.
    """

    def tensor(array: np.ndarray | None) -> Tensor | None:
        return None if array is None else torch.as_tensor(array, device=device)

    distribution, _, state = policy(see(policy, rows, device), state, tensor(mask), tensor(starts))
    raw = distribution.mode() if drawn is None else distribution.sample(tensor(drawn))
    return policy.head.env_actions(raw.cpu().numpy()), state


def _check_spaces(policy: Policy | RowPolicy, vec: VecEnv) -> None:
    pairs = {
        "observations": (policy.observation_space, vec.agent_observation_space),
        "actions": (policy.action_space, vec.agent_action_space),
    }
    for what, (known, given) in pairs.items():
        if _kind(known) != _kind(given):
            raise HurtleError(f"The policy is for {what} in {known}, and this env has {given}. Was it trained on another env?")


def _kind(space: Any) -> tuple[Any, ...]:
    """What must be the same of two spaces; the bounds of a Box may differ."""
    choices = getattr(space, "nvec", getattr(space, "n", None))
    return type(space), space.shape, space.dtype, None if choices is None else np.asarray(choices).tolist()


def _device_of(policy: Policy, device: str) -> torch.device:
    wanted = find_device(device)
    found = next((parameter.device for parameter in policy.parameters()), wanted)
    if found.type != wanted.type or (wanted.index is not None and found.index != wanted.index):
        raise DeviceError(f"The policy is on {found} and device={device!r}: say where it is, or move it with policy.to().")
    return found
