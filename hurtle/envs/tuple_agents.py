"""`TupleAgents`: a Gymnasium env with a tuple of observations, actions and rewards, one per agent, as a PettingZoo env.

dict of actions → tuple → env.step → dicts. Level-based foraging and the robot warehouse are written this way. Needs PettingZoo.
"""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from pettingzoo import ParallelEnv

from hurtle.errors import HurtleError


class TupleAgents(ParallelEnv):
    """Agents are "agent_0", "agent_1", …; all end when the env does.

    Args:
        env: A Gymnasium env whose spaces are Tuples with one entry per agent, and whose rewards are lists.

    Example:
        >>> env = TupleAgents(gymnasium.make("Foraging-8x8-2p-1f-v3", disable_env_checker=True))  # doctest: +SKIP
    """

    def __init__(self, env: gymnasium.Env):
        own = [space.spaces for space in (env.observation_space, env.action_space) if isinstance(space, spaces.Tuple)]
        if len(own) != 2 or len(own[0]) != len(own[1]):
            spaces_of_env = f"{env.observation_space} and {env.action_space}"
            raise HurtleError(f"TupleAgents takes an env with a Tuple of as many observations as actions, got {spaces_of_env}.")
        self.env, self.metadata, self.render_mode = env, dict(env.metadata), env.render_mode
        self.possible_agents = [f"agent_{i}" for i in range(len(own[0]))]
        self.agents: list[str] = []
        self.observation_spaces, self.action_spaces = (dict(zip(self.possible_agents, space, strict=True)) for space in own)

    def observation_space(self, agent: str) -> spaces.Space:
        """The observation space of an agent."""
        return self.observation_spaces[agent]

    def action_space(self, agent: str) -> spaces.Space:
        """The action space of an agent."""
        return self.action_spaces[agent]

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[dict, dict]:
        """Start an episode."""
        observations, info = self.env.reset(seed=seed, options=options)
        self.agents = self.possible_agents[:]
        return self._by_agent(observations), {agent: dict(info) for agent in self.agents}

    def step(self, actions: dict[str, Any]) -> tuple[dict, dict, dict, dict, dict]:
        """Step all agents."""
        own = tuple(actions[agent] for agent in self.possible_agents)
        observations, rewards, terminated, truncated, info = self.env.step(own)
        ended, late = np.broadcast_to(terminated, len(own)), np.broadcast_to(truncated, len(own))
        if (ended | late).all():
            self.agents = []
        flags = self._by_agent(ended.tolist()), self._by_agent(late.tolist())
        infos = {agent: dict(info) for agent in self.possible_agents}
        return self._by_agent(observations), self._by_agent(rewards), flags[0], flags[1], infos

    def render(self) -> Any:
        """Render the env."""
        return self.env.render()

    def close(self) -> None:
        """Close the env."""
        self.env.close()

    def _by_agent(self, values: Any) -> dict[str, Any]:
        return dict(zip(self.possible_agents, values, strict=True))


class Foraging(TupleAgents):
    """Level-based foraging, seeded by `reset` alone: in the package, players avoid the places where others last stood."""

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[dict, dict]:
        """Start an episode."""
        for player in self.env.unwrapped.players:
            player.position = None
        return super().reset(seed, options)
