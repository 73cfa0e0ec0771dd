"""`NativePlayer`: native envs × compiled policies for evaluation, stretches of many steps inside compiled code.

policy, seed → steps of all envs → which episodes ended, their returns and lengths. The policy does not change.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from hurtle.collect.native_collector import NativeCollector, vector_obstacle
from hurtle.errors import UnsupportedError
from hurtle.kernels.cpu import host
from hurtle.kernels.loader import load_kernels
from hurtle.native.build import COMPILING
from hurtle.native.rng import seed_range, stream_states
from hurtle.policies.native_plan import flat_plan
from hurtle.policies.policy import Policy
from hurtle.vector.native_vec import NativeVecEnv

MOST_STEPS = 128
"""Steps per stretch: enough to make the cost of Python in between negligible."""
STRETCH_BYTES = 1 << 24
"""Memory for the observations of a stretch; large observations shorten it."""


class Played(NamedTuple):
    """What happened in a stretch of T steps; `over` is `ended` if an env has one agent."""

    over: np.ndarray
    """bool [T, envs]: envs that ended as a whole."""
    ended: np.ndarray
    """bool [T, envs, agents]: agents whose episode ended."""
    returns: np.ndarray
    """float32 [T, envs, agents], where `ended`."""
    lengths: np.ndarray
    """int32 [T, envs, agents], likewise."""


class NativePlayer(NativeCollector):
    """Plays a policy on native envs as `runners.playing.Player` does, many steps in one call.

    Args:
        vec: A vector of native envs, see `NativeCollector`.
        policy: A policy that `flat_plan` accepts; its normalizer is applied and not changed.
        deterministic: Take the most likely actions; else sample.
        seed: Seed of the envs and of the streams of sampled actions.
        stream: Which random streams to use; not those of training.

    Raises:
        HurtleError: See `player_obstacle`.
    """

    def __init__(self, vec: NativeVecEnv, policy: Policy, *, deterministic: bool, seed: int, stream: int):
        super().__init__(vec, policy, seed=seed)
        self.actor.streams[:] = stream_states(seed_range(seed, self.rows.num_rows), stream)
        if deterministic:
            with COMPILING:
                self._tell_numbers(sample=load_kernels().modes.mode_address(self._plan.head_kind))
        size = vec.num_envs * vec.native_spec.obs_size * vec.agent_observation_space.dtype.itemsize  # type: ignore[union-attr]
        # With several agents, compiled code does not record when the env itself is over; after one step the batch knows.
        steps = 1 if vec.num_agents > 1 else max(1, min(MOST_STEPS, STRETCH_BYTES // size))
        self._rollout = self.new_rollout(steps)

    def play(self) -> Played | None:
        """Play the next stretch; None if `request_stop` ended it.

        Raises:
            NonFiniteError: An env returned NaN or infinity; names the env and its step.
        """
        if not self.fill(self._rollout):
            return None
        steps, shape = self._rollout.num_steps, (-1, self.rows.num_envs, self.rows.num_agents)
        log = {name: array.reshape(shape) for name, array in self._episodes.arrays.items() if name not in ("over", "metrics")}
        over = log["ended"][..., 0] if self.rows.num_agents == 1 else self._batch.arrays.ended.reshape(steps, -1)
        return Played(over, log["ended"], log["episode_returns"], log["episode_lengths"])


def player_obstacle(vec: object, policy: Policy, deterministic: bool) -> str | None:
    """The reason a `NativePlayer` cannot play this policy on this vector, or None."""
    if (obstacle := vector_obstacle(vec)) is not None:
        return obstacle
    assert isinstance(vec, NativeVecEnv)
    try:
        flat_plan(policy)
    except UnsupportedError as error:
        return str(error)
    if (policy.observation_space, policy.action_space) != (vec.agent_observation_space, vec.agent_action_space):
        return "the spaces' bounds differ from those the policy was trained on"
    return "checked kernels only sample" if deterministic and host.CHECKED else None
