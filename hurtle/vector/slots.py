"""One env and its rows: steps the env, resets it when its episode ends, writes the results and collects the infos.

action → env.step → rows of this env; info → the shard's list.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode

from hurtle.emulation.agent_spaces import flat_mask
from hurtle.emulation.agents import AgentRows
from hurtle.emulation.emulated_env import EmulatedEnv
from hurtle.emulation.outcome_checks import USUAL_FLAGS, USUAL_REWARDS, check_info, check_kinds, check_outcome
from hurtle.errors import EmulationError
from hurtle.vector.description import Description
from hurtle.vector.env_rows import Rows

_CHECKED_STEPS = 3
_OUTCOME = ("rewards", "terminated", "truncated")
_Infos = list[tuple[int, dict[str, Any]]]


class EnvSlot:
    """A single-agent env and its rows.

    Attributes:
        step: Steps the env with an action. Replaced as the episode proceeds: checked, regular or resetting.
    """

    step: Callable[[Any], None]

    def __init__(
        self,
        env: gymnasium.Env,
        index: int,
        description: Description,
        rows: Rows,
        autoreset_mode: AutoresetMode,
        infos: _Infos,
        check: bool,
    ):
        self.env = env
        self.seed: int | None = None
        self._index = index
        self._layout = description.layout
        self._obs_row, self._final_row = rows.obs[index], rows.final_obs[index]
        self._write = description.layout.writer(self._obs_row)
        self._write_final = description.layout.writer(self._final_row)
        if _writes_itself(env, self._obs_row):
            self._write = _nothing
            self._write_final = self._copy_row
        # memoryviews cost half as much as NumPy's item assignment
        self._rewards: Any = memoryview(rows.rewards.data)
        self._terminated, self._truncated = memoryview(rows.terminated.data), memoryview(rows.truncated.data)
        self._over = memoryview(rows.over.data)
        self._mask = rows.action_mask[index] if description.mask_size else None
        self._infos = infos
        self._same_step = autoreset_mode is AutoresetMode.SAME_STEP
        self._next_step = autoreset_mode is AutoresetMode.NEXT_STEP
        self._regular_step = self._make_step()
        self._checks_left = _CHECKED_STEPS if check else 0
        self._first_step: Callable[[Any], None] = self._checked_step if check else self._regular_step  # of an episode
        self._check_reset = check

    def reset(self, seed: int | None, options: dict[str, Any] | None) -> None:
        """Start an episode."""
        obs, info = self.env.reset(seed=seed, options=options)
        if self._check_reset:
            self._layout.check(obs)
            self._check_reset = False
        check_info(info)
        i = self._index
        self._rewards[i] = 0.0
        self._terminated[i] = self._truncated[i] = self._over[i] = False
        self._write(obs)
        self.step = self._first_step
        if info or self._mask is not None:
            self._add_info(info)

    def resume(self) -> None:
        """Continue with a state that was assigned to the env; `over` tells whether the next step is a reset."""
        self.step = self._reset_step if self._next_step and self._over[self._index] else self._first_step

    def _make_step(self) -> Callable[[Any], None]:
        """The step that runs millions of times; it uses only local variables."""
        env_step, write, end, add_info, i = self.env.step, self._write, self._end, self._add_info, self._index
        rewards, terminated_row, truncated_row, over = self._rewards, self._terminated, self._truncated, self._over
        masked, numbers, flags = self._mask is not None, USUAL_REWARDS, USUAL_FLAGS

        def step(action: Any) -> None:
            obs, reward, terminated, truncated, info = env_step(action)
            if (
                info.__class__ is not dict
                or terminated.__class__ not in flags
                or truncated.__class__ not in flags
                or reward.__class__ not in numbers
            ):
                check_kinds(reward, terminated, truncated, info)
            rewards[i] = reward
            terminated_row[i] = terminated
            truncated_row[i] = truncated
            if terminated or truncated:
                return end(obs, info)
            over[i] = False
            write(obs)
            if info or masked:
                add_info(info)

        return step

    def _checked_step(self, action: Any) -> None:
        """Like the regular step, with checks."""
        outcome = self.env.step(action)
        if not isinstance(outcome, tuple) or len(outcome) != 5:
            raise EmulationError(f"step() must return (obs, reward, terminated, truncated, info), got {outcome!r}.")
        obs, reward, terminated, truncated, info = outcome
        check_outcome(reward, terminated, truncated, info)
        self._layout.check(obs)
        self._checks_left -= 1
        if self._checks_left == 0:
            self.step = self._first_step = self._regular_step
        i = self._index
        self._rewards[i], self._terminated[i], self._truncated[i] = reward, terminated, truncated
        if terminated or truncated:
            return self._end(obs, info)
        self._over[i] = False
        self._write(obs)
        self._add_info(info)

    def _reset_step(self, action: Any) -> None:
        """Reset instead of stepping: in NEXT_STEP mode, the step after an end ignores its action."""
        self.reset(None, None)

    def _end(self, obs: Any, info: dict[str, Any]) -> None:
        self._over[self._index] = True
        if not self._same_step:
            self._write(obs)
            self.step = self._reset_step if self._next_step else self.step
            return self._add_info(info)
        self._write_final(obs)
        info = dict(info)  # the env may reuse the dict
        obs, next_info = self.env.reset()
        check_info(next_info)
        self._write(obs)
        self._add_info({**next_info, "final_info": info} if info else next_info)

    def _add_info(self, info: dict[str, Any]) -> None:
        if self._mask is not None:
            mask = info.get("action_mask")
            self._mask[...] = True if mask is None else flat_mask(mask)
            info = {key: value for key, value in info.items() if key != "action_mask"}
        if info:
            self._infos.append((self._index, info))

    def _copy_row(self, obs: Any) -> None:
        self._final_row[...] = self._obs_row


class AgentsSlot:
    """A multi-agent env and its rows."""

    def __init__(
        self,
        env: Any,
        index: int,
        description: Description,
        rows: Rows,
        autoreset_mode: AutoresetMode,
        infos: _Infos,
        check: bool,
    ):
        self.env = env
        self.seed: int | None = None
        self._index = index
        mask = rows.action_mask[index] if description.mask_size else None
        outcome = (rows.rewards[index], rows.terminated[index], rows.truncated[index])
        self._agent_rows = AgentRows(rows.obs[index], *outcome, rows.agent_mask[index], mask)
        # An autoreset writes the input of the next action, and keeps the outcome of this step.
        self._next_rows = replace(self._agent_rows, **{k: np.zeros_like(v) for k, v in zip(_OUTCOME, outcome, strict=True)})
        self._final_row, self._obs_row, self._over = rows.final_obs[index], rows.obs[index], rows.over
        self._infos = infos
        self._same_step = autoreset_mode is AutoresetMode.SAME_STEP
        self._next_step = autoreset_mode is AutoresetMode.NEXT_STEP
        self._ended = False

    def reset(self, seed: int | None, options: dict[str, Any] | None) -> None:
        """Start an episode."""
        self._add_info(self.env.reset_into(self._agent_rows, seed=seed, options=options))
        self._ended = self._over[self._index] = False

    def step(self, actions: np.ndarray) -> None:
        """Step all agents with their rows of actions."""
        if self._ended and self._next_step:
            return self.reset(None, None)
        over, infos = self.env.step_into(actions, self._agent_rows)
        self._over[self._index] = over
        if over and self._same_step:
            self._final_row[...] = self._obs_row
            next_infos = self.env.reset_into(self._next_rows)
            infos = {**next_infos, "final_info": infos} if infos else next_infos
        else:
            self._ended = over
        self._add_info(infos)

    def _add_info(self, infos: dict[str, Any]) -> None:
        if infos:
            self._infos.append((self._index, infos))


def _writes_itself(env: gymnasium.Env, row: np.ndarray) -> bool:
    """Let the env write its observations into the row, if it can; returns whether it will."""
    if isinstance(env, EmulatedEnv) and env.layout is not None:
        env.bind(row)
        return True
    observe_into = getattr(type(env), "observe_into", None)  # of this very env: a wrapper around it may change observations
    return observe_into is not None and bool(observe_into(env, row))


def _nothing(obs: Any) -> None:
    pass
