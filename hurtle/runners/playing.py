"""`Player`: plays a policy on a vector env, for evaluating and watching; keeps its recurrent state and random streams.

observations → normalizer (frozen) → policy (state, masks) → mode or sample → the env's actions. Knows nothing of learning.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from hurtle.collect.compiled_actor import CompiledActor
from hurtle.emulation.flat_layout import SpaceLayout
from hurtle.emulation.nan import nan_rows
from hurtle.errors import DeviceError, HurtleError, NonFiniteError, UnsupportedError
from hurtle.kernels.cpu import host
from hurtle.kernels.uniforms import uniforms
from hurtle.native.rng import seed_range, stream_state, stream_states
from hurtle.policies.numpy_acting import choose
from hurtle.policies.policy import Policy
from hurtle.policies.torch_device import find_device
from hurtle.vector.vec_env import VecEnv

EVAL_STREAM = 0x65766C  # streams that training never uses
EVAL_ACTION_STREAM = 0x657661


def eval_seed(seed: int) -> int:
    """The seed of env 0 of an evaluation, hashed into a separate stream, so that no training run has seen its episodes.

    It has 31 bits, since some envs reject larger seeds; the highest bit is set, unlike in training.

    Example:
        >>> eval_seed(0) == eval_seed(0) != eval_seed(1)
        True
    """
    return 1 << 30 | stream_state(seed, EVAL_STREAM) >> 34


class RowPolicy(Protocol):
    """A policy that acts on rows of flat observations. `TorchRows` wraps a torch `Policy`."""

    observation_space: spaces.Space
    action_space: spaces.Space
    num_uniforms: int

    def initial_state(self, batch: int) -> tuple[Any, ...]:
        """The recurrent state of `batch` rows at the start of an episode."""
        ...

    def choose_rows(
        self,
        rows: np.ndarray,
        state: tuple[Any, ...],
        mask: np.ndarray | None,
        starts: np.ndarray,
        drawn: np.ndarray | None = None,
    ) -> tuple[np.ndarray, tuple[Any, ...]]:
        """The env's actions for flat observations, and the next recurrent state.

        Args:
            rows: Observations [B, …].
            state: The recurrent state of each row.
            mask: Legal actions, bool [B, n], or None.
            starts: Rows that begin an episode and have their state cleared, bool [B].
            drawn: Uniforms [B, num_uniforms] to sample with; None: the policy's own default.
        """
        ...


class TorchRows:
    """A torch policy as a `RowPolicy`.

    Args:
        policy: The policy.
        device: Its device.
    """

    def __init__(self, policy: Policy, device: str):
        self._policy, self._device = policy, _device_of(policy, device)
        self.observation_space, self.action_space = policy.observation_space, policy.action_space
        self.num_uniforms = policy.num_uniforms

    def initial_state(self, batch: int) -> tuple[Tensor, ...]:
        """The recurrent state of `batch` rows at the start of an episode."""
        return self._policy.initial_state(batch, device=self._device)

    def choose_rows(
        self,
        rows: np.ndarray,
        state: tuple[Any, ...],
        mask: np.ndarray | None,
        starts: np.ndarray,
        drawn: np.ndarray | None = None,
    ) -> tuple[np.ndarray, tuple[Any, ...]]:
        """See `RowPolicy`; without `drawn`, takes the most likely actions."""
        return choose(self._policy, rows, state, mask, starts, drawn, self._device)


class CompiledRows:
    """A policy on the CPU as a `RowPolicy` that takes the most likely actions in compiled code.

    Args:
        policy: The policy.
        num_rows: Rows of each call.

    Raises:
        UnsupportedError: The kernels do not support this policy.
    """

    def __init__(self, policy: Policy, num_rows: int):
        if host.CHECKED:
            raise UnsupportedError("checked kernels only sample")
        self._actor = CompiledActor(policy, num_rows, 0, deterministic=True)
        self.observation_space, self.action_space = policy.observation_space, policy.action_space
        self.num_uniforms = policy.num_uniforms

    def initial_state(self, batch: int) -> tuple[Any, ...]:
        """Nothing: the compiled policy keeps the state of its rows itself."""
        return ()

    def choose_rows(
        self,
        rows: np.ndarray,
        state: tuple[Any, ...],
        mask: np.ndarray | None,
        starts: np.ndarray,
        drawn: np.ndarray | None = None,
    ) -> tuple[np.ndarray, tuple[Any, ...]]:
        """See `RowPolicy`; the state is that of the call before, whatever `state` is."""
        assert drawn is None
        return self._actor.choose(rows, mask, starts), state


def compiled_rows(policy: Policy, vec: VecEnv, deterministic: bool) -> Policy | RowPolicy:
    """The policy in compiled code if that is possible, else itself."""
    if not deterministic:
        return policy
    try:
        return CompiledRows(policy, vec.num_envs * vec.num_agents)
    except UnsupportedError:
        return policy


class Player:
    """Plays a policy on all rows (agents of envs) of a vector env.

    Args:
        policy: The policy; a torch policy is on `device`.
        vec: The vector env.
        deterministic: Take the mode of the distribution instead of sampling.
        seed: Seed of sampled actions; each row draws from its own stream.
        device: The policy's device.

    Raises:
        HurtleError: The policy's spaces differ from the envs'.
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
        """Actions for the observations and infos that `vec.reset` or `vec.step` returned."""
        shape = self.policy.observation_space.shape or ()
        lead = obs.shape[: obs.ndim - len(shape)]  # (envs,) or (envs, agents)
        rows = obs.reshape(self._rows, *shape)
        present = np.asarray(infos["agent_mask"]).reshape(-1) if "agent_mask" in infos else np.ones(self._rows, np.bool_)
        self._check_numbers(rows, present)
        starts = self._starts
        self._starts = starts & ~present  # an absent agent has yet to take its first step
        mask = np.asarray(infos["action_mask"], np.bool_).reshape(self._rows, -1) if "action_mask" in infos else None
        drawn = None if self._deterministic else uniforms(self._streams, self._steps, self.policy.num_uniforms)
        self._steps += 1
        actions, self._state = self.policy.choose_rows(rows, self._state, mask, starts, drawn)
        return actions.reshape(*lead, *actions.shape[1:])

    def end(self, terminated: np.ndarray, truncated: np.ndarray, over: np.ndarray) -> None:
        """Mark the rows whose episode ended, so that their recurrent state is cleared.

        Args:
            terminated: bool [envs] or [envs, agents], as `vec.step` returned it.
            truncated: Likewise.
            over: Envs whose episode ended for all agents, bool [envs].
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
                f"{who} returned an observation with NaN after {self._steps[row]} steps of the evaluation. "
                "Look for a division by zero, a log or an overflow in the env."
            )


def _check_spaces(policy: Policy | RowPolicy, vec: VecEnv) -> None:
    pairs = {
        "observations": (policy.observation_space, vec.agent_observation_space),
        "actions": (policy.action_space, vec.agent_action_space),
    }
    for what, (known, given) in pairs.items():
        if _kind(known) != _kind(given):
            raise HurtleError(f"The policy is for {what} in {known}, but this env has {given}. Was it trained on another env?")


def _kind(space: Any) -> tuple[Any, ...]:
    """The properties that must match between spaces; the bounds of a Box may differ."""
    choices = getattr(space, "nvec", getattr(space, "n", None))
    return type(space), space.shape, space.dtype, None if choices is None else np.asarray(choices).tolist()


def _device_of(policy: Policy, device: str) -> torch.device:
    wanted = find_device(device)
    found = next((parameter.device for parameter in policy.parameters()), wanted)
    if found.type != wanted.type or (wanted.index is not None and found.index != wanted.index):
        raise DeviceError(f"The policy is on {found}, but device={device!r}: pass its device, or move it with policy.to().")
    return found
