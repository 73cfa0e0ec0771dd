"""Spaces of a whole env from those of one agent, and the infos that every adapter returns."""

from __future__ import annotations

from typing import Any

from gymnasium import spaces
from gymnasium.vector.utils import batch_space

from hurtle.native.env import EnvSpec


def env_observation_space(spec: EnvSpec) -> spaces.Space:
    """The agent's space, or its batch over the agents."""
    return batch_space(spec.observation_space, spec.num_agents) if spec.num_agents > 1 else spec.observation_space


def env_action_space(spec: EnvSpec) -> spaces.Space:
    """The agent's space, or its batch over the agents."""
    return batch_space(spec.action_space, spec.num_agents) if spec.num_agents > 1 else spec.action_space


def infos_of(spec: EnvSpec, arrays: Any) -> dict[str, Any]:
    """The infos that the next action may depend on: legal actions, present agents."""
    infos: dict[str, Any] = {}
    if spec.has_mask:
        infos["action_mask"] = arrays.mask.reshape(-1, *spec.mask_shape)
    if spec.has_present:
        infos["agent_mask"] = arrays.present
    return infos
