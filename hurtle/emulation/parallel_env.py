"""`EmulatedParallelEnv`: PettingZoo's parallel interface to a multi-agent env whose agents share flat spaces.

dicts of flat actions → `Population` → rows → dicts over all agents, including absent ones. Needs PettingZoo.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces
from gymnasium.error import ResetNeeded
from pettingzoo import ParallelEnv

from hurtle.emulation.agents import AgentRows
from hurtle.emulation.flat_layout import SpaceLayout
from hurtle.emulation.population import Population
from hurtle.errors import ActionError


class EmulatedParallelEnv(Population, ParallelEnv):
    """A PettingZoo env with one flat observation space and one flat action space, in which all agents are always listed.

    Besides `reset` and `step` with dicts it has `reset_into` and `step_into`, which write into `AgentRows` and are what vector
    envs use. `hurtle.emulate` documents the options.
    """

    def __init__(self, env: Any, *, pad_agents: bool = True, **options: Any):
        Population.__init__(self, env, **options)
        self.metadata = getattr(env, "metadata", {})
        self.render_mode = getattr(env, "render_mode", None)
        self.agents: list[Any] = []
        self._pad = pad_agents
        self._rows: AgentRows | None = None
        self._raw: dict[int, Any] = {}
        self._last_flags: dict[int, tuple[bool, bool]] = {}

    def observation_space(self, agent: Any) -> spaces.Space:
        """The flat observation space, the same for all agents."""
        return self._spaces.own[self._model_of(agent)] if self.layout is None else self.layout.flat_space

    def action_space(self, agent: Any) -> spaces.Space:
        """The flat action space, the same for all agents."""
        return self.env.action_space(self._model_of(agent)) if self.action_layout is None else self.action_layout.flat_space

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[dict[Any, Any], dict[Any, Any]]:
        """Start an episode.

        Returns:
            Observations and infos of all agents, or only of those present with pad_agents=False. Each info has `agent_mask`
            (bool) and, if the env has action masks, `action_mask` (int8, as `Discrete.sample` takes it).
        """
        observations, infos = self._begin(seed, options)
        if self._rows is None:
            count = self.num_agents_max
            memory = np.zeros((count, 0), np.uint8) if self.layout is None else self.layout.memory(count)
            self._rows = AgentRows.zeros(memory, self._mask_size)
        kept = self._open(self._rows, observations, infos)
        self._last_flags = {}
        shown = self._shown({})
        self.agents = [self.possible_agents[slot] for slot in shown]
        return self._observations(shown), self._infos(shown, kept)

    def step(self, actions: dict[Any, Any]) -> tuple[dict[Any, Any], ...]:
        """Step with one flat action per agent; actions of absent agents are ignored.

        PettingZoo requires that agents in `agents` have no flag set. With padding, all flags are therefore set when the whole
        env ends. When a single agent ends, its info has `terminated`, `truncated` and `episode` (`r`, `l`) in that step, and
        `agent_mask` turns False. With pad_agents=False the flags are the agents' own.
        """
        if self._rows is None or self._acting is None:
            raise ResetNeeded("The episode is over (or has not begun): call reset() before step().")
        rows, names, acting = self._rows, self.possible_agents, self._acting
        try:
            chosen = {agent: actions[names[slot]] for agent, slot in acting.items()}
        except KeyError as error:
            raise ActionError(
                f"Agent {error.args[0]!r} is present but got no action; got actions for {list(actions)}."
            ) from None
        if self.action_layout is not None:
            chosen = {agent: self._spaces.decoders[acting[agent]](action) for agent, action in chosen.items()}
        over, kept = self._advance(chosen, rows)
        shown = self._shown(acting)
        flags = {slot: (bool(rows.terminated[slot]), bool(rows.truncated[slot])) for slot in shown}
        if self._pad:
            for slot in acting.values():
                if any(flags[slot]):
                    self._last_flags[slot] = flags[slot]
                    kept[names[slot]] |= {"terminated": flags[slot][0], "truncated": flags[slot][1]}
            flags = {slot: self._last_flags.get(slot, (True, False)) if over else (False, False) for slot in shown}
        self.agents = [] if over else [names[slot] for slot in self._shown({})]
        return (
            self._observations(shown),
            {names[slot]: float(rows.rewards[slot]) for slot in shown},
            {names[slot]: flags[slot][0] for slot in shown},
            {names[slot]: flags[slot][1] for slot in shown},
            self._infos(shown, kept),
        )

    def render(self) -> Any:
        """Render with the env's own `render`."""
        return self.env.render()

    def state(self) -> Any:
        """The env's own global state."""
        return self.env.state()

    def close(self) -> None:
        """Close the env."""
        self.env.close()

    @property
    def unwrapped(self) -> Any:
        """The env underneath all wrappers."""
        return self.env.unwrapped

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "env":
            raise AttributeError(name)
        return getattr(self.env, name)

    def _model_of(self, agent: Any) -> Any:
        return self._models[self.possible_agents.index(agent)]

    def _shown(self, before: dict[Any, int]) -> list[int]:
        """The rows that the dicts contain: all, or those of agents that acted or act next."""
        return list(range(self.num_agents_max)) if self._pad else sorted({*before.values(), *(self._acting or {}).values()})

    def _store(self, rows: AgentRows, observations: dict[int, Any]) -> None:
        if self.layout is None:
            self._raw = observations
        else:
            super()._store(rows, observations)

    def _observations(self, shown: list[int]) -> dict[Any, Any]:
        assert self._rows is not None
        if self.layout is None:
            return {self.possible_agents[slot]: self._raw_observation(slot) for slot in shown}
        flat = self.layout.flat(self._rows.memory)
        return {self.possible_agents[slot]: flat[slot].copy() for slot in shown}

    def _raw_observation(self, slot: int) -> Any:
        if slot not in self._raw:
            return _blank(self._spaces.own[self._models[slot]])
        return self._raw[slot] if self._spaces.featurize is None else self._spaces.featurize(self._raw[slot])

    def _infos(self, shown: list[int], kept: dict[Any, Any]) -> dict[Any, Any]:
        assert self._rows is not None
        infos: dict[Any, Any] = {}
        for slot in shown:
            name = self.possible_agents[slot]
            infos[name] = {**kept.get(name, {}), "agent_mask": bool(self._rows.agent_mask[slot])}
            if self._rows.action_mask is not None:
                infos[name]["action_mask"] = self._rows.action_mask[slot].astype(np.int8)
        return infos


def _blank(space: spaces.Space) -> Any:
    """An observation of zeros; variable-size parts are empty."""
    layout = SpaceLayout(space, max_length=1, max_nodes=1, max_edges=1)
    return layout.reader(layout.memory())()
