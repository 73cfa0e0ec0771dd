"""`Population`: the agents of one env, which come and go, in fixed rows.

flat actions [agents] → decode → env.step → rows written in place: observations, rewards, flags, masks. Knows nothing of
batches of envs; uses PettingZoo's parallel interface without importing PettingZoo.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from gymnasium import spaces
from gymnasium.error import ResetNeeded

from hurtle.emulation.agent_spaces import AgentSpaces, mask_width
from hurtle.emulation.agents import Agent, AgentRows, natural_order
from hurtle.emulation.hooks import Featurize, PrintLog, ShapeReward
from hurtle.emulation.outcome_checks import CHECKED_STEPS, check_info, check_kinds, check_outcome
from hurtle.errors import EmulationError, HurtleError

ByAgent = Mapping[Agent, Any]
Writers = list[Callable[[Any], None]]


class Population:
    """The array interface of a multi-agent env; `hurtle.emulate` documents the options.

    Row a belongs to `possible_agents[a]`. A row's observation and masks are the input of its agent's next action; its reward
    and flags are the outcome of its last one. When an agent ends, its row has the flag and the last observation, and its
    `agent_mask` is False from then on. Rows of agents that were absent and stay absent are zero. Agents may join late or
    rejoin.
    """

    def __init__(
        self,
        env: Any,
        *,
        featurize: Featurize | None = None,
        shape_reward: ShapeReward | None = None,
        observations: bool = True,
        actions: bool = True,
        check: bool = True,
        capture_prints: bool = False,
        max_agents: int | None = None,
        **limits: Any,
    ):
        self.env = env
        self.checks_left = 1 + CHECKED_STEPS if check else 0
        self._log = PrintLog() if capture_prints else None
        self._shape_reward = shape_reward
        self._take_rows(max_agents)
        self._spaces = known = AgentSpaces(env, self._models, featurize, observations, actions, limits)
        self.layout, self.action_layout = known.layout, known.action_layout
        # Masks in infos are seen only after a reset.
        self._mask_known = known.legal is None or known.mask_in_observation or known.differ_in_choices
        self._mask_size = known.legal.shape[1] if self._mask_known and known.legal is not None else None
        self._acting: dict[Agent, int] | None = None  # agents that act next and their rows; None: needs a reset
        self._returns = [0.0] * self.num_agents_max
        self._lengths = [0] * self.num_agents_max
        self._bound_rows: AgentRows | None = None
        self._bound_writers: Writers = []
        self._writers: WeakKeyDictionary[AgentRows, Writers] = WeakKeyDictionary()

    def _take_rows(self, max_agents: int | None) -> None:
        """Assign a row to each possible agent, or make `max_agents` rows for agents whose names are not known beforehand."""
        possible = list(getattr(self.env, "possible_agents", None) or [])
        self._named = bool(possible) and max_agents is None
        self._slots: dict[Agent, int] = {}
        if self._named:
            self.possible_agents: list[Any] = natural_order(possible)
            self._models: list[Agent] = self.possible_agents  # for each row, an agent that has its spaces
            self._slots = {agent: slot for slot, agent in enumerate(self.possible_agents)}
        elif max_agents is None:
            raise EmulationError(
                f"{self._env_name} has no possible_agents, so the number of its agents is not known. "
                "Pass the maximum: hurtle.emulate(env, max_agents=8)."
            )
        else:
            met = natural_order(possible or getattr(self.env, "agents", None) or self._probe()[0])
            if not met:
                raise EmulationError(f"{self._env_name} has no agent after a reset, so the agents' spaces are not known.")
            self.possible_agents = [f"slot_{slot}" for slot in range(max_agents)]
            self._models = [met[0]] * max_agents
        self.num_agents_max = len(self.possible_agents)

    @property
    def _env_name(self) -> str:
        return str((getattr(self.env, "metadata", None) or {}).get("name") or type(self.env).__name__)

    @property
    def agent_observation_space(self) -> spaces.Space:
        """The flat observation space, the same for all agents."""
        return _flat_space(self.layout)

    @property
    def agent_action_space(self) -> spaces.Space:
        """The flat action space, the same for all agents."""
        return _flat_space(self.action_layout)

    @property
    def mask_size(self) -> int | None:
        """Size of an agent's action mask, or None without masks. Resets the env if that is the only way to find out."""
        if not self._mask_known:
            self._learn_mask(self._probe()[1])
        return self._mask_size

    @property
    def occupants(self) -> list[Any]:
        """For each row, the env's agent that acts in it next, or None."""
        found: list[Any] = [None] * self.num_agents_max
        for agent, slot in (self._acting or {}).items():
            found[slot] = agent
        return found

    @property
    def prints(self) -> list[str]:
        """The last lines the env printed; kept with capture_prints=True."""
        return self._log.lines if self._log is not None else []

    def unflatten(self, observation: Any) -> Any:
        """The structure of a flat observation (NumPy or torch, any leading axes), as views of it."""
        return observation if self.layout is None else self.layout.unflatten(observation)

    def reset_into(self, rows: AgentRows, seed: int | None = None, options: dict[str, Any] | None = None) -> dict[Any, Any]:
        """Start an episode and write the first observations and masks.

        Returns:
            The non-empty infos, by agent.
        """
        _flat_space(self.layout)
        return self._open(rows, *self._begin(seed, options))

    def step_into(self, actions: np.ndarray, rows: AgentRows) -> tuple[bool, dict[Any, Any]]:
        """Step with the flat actions [agents, …]; actions of absent agents are ignored.

        Returns:
            Whether the episode is over (no agent is left: reset next), and the non-empty infos, by agent. The info of an agent
            that ended has `episode`, with its return `r` and its number of steps `l`.
        """
        _flat_space(self.action_layout)
        if self._acting is None:
            raise ResetNeeded("The episode is over (or has not begun): call reset_into() before step_into().")
        decoders = self._spaces.decoders
        return self._advance({agent: decoders[slot](actions[slot]) for agent, slot in self._acting.items()}, rows)

    def _call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return (function if self._log is None else self._log.around(function))(*args, **kwargs)

    def _probe(self) -> tuple[ByAgent, ByAgent]:
        """Reset the env to learn what is known only after a reset; the user's own reset comes later."""
        return self._call(self.env.reset)

    def _learn_mask(self, infos: ByAgent) -> None:
        if not self._mask_known:
            self._mask_known = True
            if any("action_mask" in (info or {}) for info in infos.values()):
                self._mask_size = mask_width(self.action_layout.flat_space)

    def _begin(self, seed: int | None, options: dict[str, Any] | None) -> tuple[ByAgent, ByAgent]:
        observations, infos = self._call(self.env.reset, seed=seed, options=options)
        self._learn_mask(infos)
        self._acting = {}
        self._acting = self._seated(list(self.env.agents))
        self._returns[:] = [0.0] * self.num_agents_max
        self._lengths[:] = [0] * self.num_agents_max
        return observations, infos

    def _open(self, rows: AgentRows, observations: ByAgent, infos: ByAgent) -> dict[Any, Any]:
        """Write the rows of a new episode."""
        acting, names = self._acting or {}, self.possible_agents
        if self.checks_left:
            self._check(acting, observations, infos)
        rows.rewards.fill(0.0)
        rows.terminated.fill(False)
        rows.truncated.fill(False)
        self._publish(rows, observations, infos, {})
        return {names[slot]: infos[agent] for agent, slot in acting.items() if infos.get(agent)}

    def _advance(self, chosen: dict[Agent, Any], rows: AgentRows) -> tuple[bool, dict[Any, Any]]:
        """Step the env with the agents' own actions; write the outcome of these, then the input of the next ones."""
        acting, names = self._acting or {}, self.possible_agents
        if len(self.env.agents) != len(acting):
            self._add_idle(chosen)
        observations, rewards, terminations, truncations, infos = self._call(self.env.step, chosen)
        following = self._seated([a for a in self.env.agents if not (terminations.get(a) or truncations.get(a))])
        if self.checks_left:
            self._check(following, observations, infos, rewards, terminations, truncations)
        over = not following
        rows.rewards.fill(0.0)
        rows.terminated.fill(over and not acting)  # it ended without any agent: set every row's flag
        rows.truncated.fill(False)
        kept: dict[Any, Any] = {}
        last_observations: dict[int, Any] = {}
        for agent, slot in acting.items():
            reward, info = rewards.get(agent, 0.0), infos.get(agent, {})
            check_kinds(reward, terminations.get(agent, False), truncations.get(agent, False), info, f'["{agent}"]')
            if self._shape_reward is not None:
                info = {**info, "raw_reward": reward}
                reward = self._shape_reward(reward, observations.get(agent), chosen[agent], info)
            rows.rewards[slot] = reward
            self._returns[slot] += float(reward)
            self._lengths[slot] += 1
            if agent not in following:
                terminated, truncated = bool(terminations.get(agent)), bool(truncations.get(agent))
                # Gone without a flag: it may come back, unless the env is over or its row can be reassigned.
                terminated |= not truncated and (over or not self._named)
                rows.terminated[slot], rows.truncated[slot] = terminated, truncated
                if terminated or truncated:
                    info = {**info, "episode": {"r": self._returns[slot], "l": self._lengths[slot]}}
                    self._returns[slot], self._lengths[slot] = 0.0, 0
                    if agent in observations:
                        last_observations[slot] = observations[agent]
            if info:
                kept[names[slot]] = info
        for agent, slot in following.items():
            if agent not in acting and infos.get(agent):
                kept[names[slot]] = {**kept.get(names[slot], {}), **infos[agent]}
        self._acting = following
        self._publish(rows, observations, infos, last_observations)
        if over:
            self._acting = None
        return over, kept

    def _add_idle(self, chosen: dict[Agent, Any]) -> None:
        """Add actions for agents that have ended: some envs keep listing them and expect their actions."""
        for agent in self.env.agents if self.action_layout is not None else ():
            if agent not in chosen:
                chosen[agent] = self._spaces.idle_actions[self._slots.get(agent, 0)]

    def _seated(self, listed: list[Agent]) -> dict[Agent, int]:
        """The rows of the agents that act next. Without fixed names, new agents take free rows in natural order."""
        if self._named:
            try:
                return {agent: self._slots[agent] for agent in listed}
            except KeyError as error:
                raise self._unknown(error.args[0], "env.agents") from None
        before = self._acting or {}
        seats = {agent: before[agent] for agent in listed if agent in before}
        newcomers = natural_order(agent for agent in listed if agent not in before)
        used, staying = set(before.values()), set(seats.values())
        # Rows of agents that have just ended come last: they still hold the last observation.
        free = [slot for slot in range(self.num_agents_max) if slot not in used] + sorted(used - staying)
        if len(newcomers) > len(free):
            raise EmulationError(f"{self._env_name} has {len(listed)} agents; increase max_agents={self.num_agents_max}.")
        for agent, slot in zip(newcomers, free, strict=False):
            self._spaces.admit(agent)
            seats[agent] = slot
        return seats

    def _unknown(self, agent: Agent, where: str) -> EmulationError:
        return EmulationError(
            f"Agent {agent!r} is in {where} but not in possible_agents ({', '.join(map(str, self.possible_agents))}). "
            "List it there, or pass max_agents to hurtle.emulate."
        )

    def _publish(self, rows: AgentRows, observations: ByAgent, infos: ByAgent, last_observations: dict[int, Any]) -> None:
        """Write the input of the next actions: observations (the last ones of agents that ended), masks, presence."""
        if self._named and not observations.keys() <= self._slots.keys():
            raise self._unknown(next(agent for agent in observations if agent not in self._slots), "the observations")
        acting, masks = self._acting or {}, rows.action_mask
        present = {slot: observations[agent] for agent, slot in acting.items() if agent in observations}
        if len(present) < len(acting):
            missing = next(agent for agent in acting if agent not in observations)
            raise EmulationError(f"Agent {missing!r} is in env.agents, but the env returned no observation for it.")
        rows.agent_mask.fill(False)
        if masks is not None:
            masks[...] = self._spaces.legal
        for agent, slot in acting.items():
            rows.agent_mask[slot] = True
            if masks is not None:
                mask = self._spaces.mask_of(observations[agent], infos.get(agent) or {})
                if mask is not None and mask.any():  # if nothing is legal, the choice does not matter
                    masks[slot, : mask.size] = mask
        self._store(rows, last_observations | present)

    def _store(self, rows: AgentRows, observations: dict[int, Any]) -> None:
        """Write the observations into their rows and zero all others."""
        if rows is not self._bound_rows:
            if rows not in self._writers:
                self._writers[rows] = self._spaces.writers(rows.memory)
            self._bound_rows, self._bound_writers = rows, self._writers[rows]
        for slot, observation in observations.items():
            self._bound_writers[slot](observation)
        if len(observations) < self.num_agents_max:
            for slot in range(self.num_agents_max):
                if slot not in observations:
                    rows.memory[slot] = 0

    def _check(self, following: dict[Agent, int], observations: ByAgent, infos: ByAgent, *outcome: ByAgent) -> None:
        """Check everything the env returned; only at start-up."""
        self.checks_left -= 1
        for agent, slot in following.items():
            info = infos.get(agent, {})
            check_info(info, f'["{agent}"]')
            if agent in observations:
                self._spaces.check(agent, slot, observations[agent], info)
        if outcome:
            rewards, terminations, truncations = outcome
            for agent in self._acting or {}:
                flags = terminations.get(agent, False), truncations.get(agent, False)
                check_outcome(rewards.get(agent, 0.0), *flags, infos.get(agent, {}), f'["{agent}"]')

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_writers": None, "_bound_rows": None, "_bound_writers": []}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update({**state, "_writers": WeakKeyDictionary()})


def _flat_space(layout: Any) -> spaces.Space:
    if layout is None:
        raise HurtleError("Rows hold flat observations and actions: emulate without observations=False and actions=False.")
    return layout.flat_space
