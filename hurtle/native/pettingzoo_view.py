"""`NativeParallelEnv`: one native env behind PettingZoo's `ParallelEnv`, for its tests, wrappers and tutorials.

dict of actions → `NativeEnv` → rows of agents → dicts. Needs PettingZoo; knows no vectors.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
from gymnasium import spaces
from pettingzoo import ParallelEnv

from hurtle.errors import ActionError, UnknownNameError, did_you_mean
from hurtle.native.env import Env
from hurtle.native.single_env import NativeEnv

Flags = tuple[bool, bool]  # terminated, truncated


class NativeParallelEnv(ParallelEnv):
    """A native env as a PettingZoo env; agent a is "agent_a".

    PettingZoo has no agents that end and come back under the same name, and native envs do. All agents therefore stay in
    `agents` until the whole env is over, and only then are they terminated or truncated. Until then
    infos report each agent: `agent_mask` says whether it is present, and the step that ends its episode has `terminated`,
    `truncated` and `episode` (`r`, `l`). While it is away, its action is ignored, and its observation and reward are zero.

    Args:
        env: The native env.
        render_mode: "rgb_array", "ansi" or None.
        debug: Run the author's code uncompiled.
    """

    def __init__(self, env: Env, render_mode: str | None = None, debug: bool = False):
        self._env = NativeEnv(env, render_mode, debug)
        self._spec = self._env.native_spec
        self.render_mode = render_mode
        self.metadata = {**NativeEnv.metadata, "name": self._spec.name}
        self.possible_agents = [f"agent_{a}" for a in range(self._spec.num_agents)]
        self.agents: list[str] = []
        # A space of its own for each agent: PettingZoo seeds them one by one.
        self._observation_spaces = {name: copy.deepcopy(self._spec.observation_space) for name in self.possible_agents}
        self._action_spaces = {name: copy.deepcopy(self._spec.action_space) for name in self.possible_agents}
        self._present = np.zeros(self._spec.num_agents, np.bool_)
        self._last_flags: dict[str, Flags] = {}

    def observation_space(self, agent: str) -> spaces.Space:
        """The agent's observation space, the same object each time."""
        return self._space(self._observation_spaces, agent)

    def action_space(self, agent: str) -> spaces.Space:
        """The agent's action space, the same object each time."""
        return self._space(self._action_spaces, agent)

    def _space(self, known: Mapping[str, spaces.Space], agent: str) -> spaces.Space:
        if agent not in known:
            raise UnknownNameError(f"{self._spec.name} has no agent {agent!r}. {did_you_mean(str(agent), known)}")
        return known[agent]

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[dict[str, Any], dict[str, Any]]:
        """Begin an episode: observations and infos by agent.

        Args:
            seed: Restarts the env's random stream.
            options: Runtime parameters; others are ignored with a warning, as PettingZoo's tests pass some.
        """
        known = self._spec.runtime_parameters
        if unknown := [name for name in options or {} if name not in known]:
            hint = did_you_mean(str(unknown[0]), known)
            warnings.warn(f"{self._spec.name} has no option {unknown[0]!r}, which is ignored. {hint}", stacklevel=2)
        obs, info = self._env.reset(seed=seed, options={k: v for k, v in (options or {}).items() if k in known})
        self.agents = list(self.possible_agents)
        self._last_flags = {}
        self._present = self._told_present(info)
        return self._observations(obs, self._present), {name: self._info(a, info) for a, name in enumerate(self.agents)}

    def step(self, actions: dict[str, Any]) -> tuple[dict[str, Any], ...]:
        """Step with one action per agent; those of agents that are away are ignored, and may be missing.

        Raises:
            ActionError: An agent that is there has no action, or one that is not in its space.
            gymnasium.error.ResetNeeded: The episode is over, or has not begun.
        """
        acted, names = self._present, self.possible_agents
        obs, rewards, terminated, truncated, info = self._env.step(self._chosen(actions) if self.agents else actions)
        flags = list(zip(np.atleast_1d(terminated).tolist(), np.atleast_1d(truncated).tolist(), strict=True))
        self._present = self._told_present(info)
        infos = {name: self._info(a, info) for a, name in enumerate(names)}
        for a, name in enumerate(names):
            if acted[a] and any(flags[a]):
                self._last_flags[name] = flags[a]
                infos[name] |= {"terminated": flags[a][0], "truncated": flags[a][1]}
        over = not self._env._running
        shown: dict[str, Flags] = {
            name: self._last_flags.get(name, (True, False)) if over else (False, False) for name in names
        }
        self.agents = [] if over else list(names)
        return (
            self._observations(obs, acted | self._present),
            {name: float(reward) if acted[a] else 0.0 for a, (name, reward) in enumerate(self._by_agent(rewards))},
            {name: flag[0] for name, flag in shown.items()},
            {name: flag[1] for name, flag in shown.items()},
            infos,
        )

    def render(self) -> Any:
        """A picture of the current state in the env's `render_mode`."""
        return self._env.render()

    def close(self) -> None:
        """Do nothing; PettingZoo's API asks for it."""

    def _by_agent(self, array: Any) -> list[tuple[str, Any]]:
        rows = array if self._spec.num_agents > 1 else [array]
        return list(zip(self.possible_agents, rows, strict=True))

    def _told_present(self, info: dict[str, Any]) -> np.ndarray:
        return np.array(info.get("agent_mask", np.ones(self._spec.num_agents, np.bool_)))

    def _observations(self, obs: np.ndarray, shown: np.ndarray) -> dict[str, Any]:
        return {name: row if shown[a] else np.zeros_like(row) for a, (name, row) in enumerate(self._by_agent(obs))}

    def _info(self, a: int, info: dict[str, Any]) -> dict[str, Any]:
        own: dict[str, Any] = {"agent_mask": bool(self._present[a])}
        if "action_mask" in info:
            own["action_mask"] = self._by_agent(info["action_mask"])[a][1].astype(np.int8)  # as Discrete.sample takes it
        if "episode" in info and np.atleast_1d(info.get("_episode", True))[a]:
            own["episode"] = {k: v if np.ndim(v) == 0 else v[a].item() for k, v in info["episode"].items()}
        return own

    def _chosen(self, actions: dict[str, Any]) -> Any:
        space = self._spec.action_space
        rows = []
        for a, name in enumerate(self.possible_agents):
            if self._present[a] and name not in actions:
                raise ActionError(f"Agent {name!r} is there but got no action; got actions for {list(actions)}.")
            row = np.asarray(actions[name]) if self._present[a] else _any_action(space)
            if row.shape != space.shape:
                raise ActionError(f"The action of {name!r} must have the shape {space.shape}, got {row.shape}.")
            rows.append(row)
        return np.stack(rows) if self._spec.num_agents > 1 else rows[0]


def _any_action(space: Any) -> np.ndarray:
    """An action of the space, for agents whose action does not matter."""
    zeros = np.zeros(space.shape, space.dtype)
    return zeros.clip(space.low, space.high) if isinstance(space, spaces.Box) else zeros + space.start
