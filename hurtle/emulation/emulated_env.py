"""`EmulatedEnv`: a Gymnasium env with a flat observation and a flat action.

flat action → decode → env.step → featurize → writer → flat view (bound memory) or a copy of it. Knows nothing of agents or
vector envs; with `bind`, a vector env has observations written straight into its batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
from gymnasium.error import ResetNeeded
from gymnasium.utils import RecordConstructorArgs

from hurtle.emulation.action_layout import ActionLayout
from hurtle.emulation.flat_layout import SpaceLayout
from hurtle.emulation.hooks import Featurize, PrintLog, ShapeReward, featurized_space
from hurtle.emulation.outcome_checks import CHECKED_STEPS, check_info, check_outcome
from hurtle.errors import ActionError


class EmulatedEnv(gymnasium.Wrapper, RecordConstructorArgs):
    """A Gymnasium env whose observation is one flat array and whose action is Discrete, MultiDiscrete or Box.

    `layout` and `action_layout` describe the structure (None if switched off); `unflatten(obs)` restores it.
    `hurtle.emulate` documents the options.
    """

    def __init__(
        self,
        env: gymnasium.Env,
        *,
        featurize: Featurize | None = None,
        shape_reward: ShapeReward | None = None,
        observations: bool = True,
        actions: bool = True,
        check: bool = True,
        capture_prints: bool = False,
        **limits: Any,
    ):
        options = {"observations": observations, "actions": actions, "check": check, "capture_prints": capture_prints}
        RecordConstructorArgs.__init__(self, featurize=featurize, shape_reward=shape_reward, **options, **limits)
        gymnasium.Wrapper.__init__(self, env)
        self._featurize, self._shape_reward = featurize, shape_reward
        space = env.observation_space if featurize is None else featurized_space(featurize, env.observation_space)
        self.layout: Any = SpaceLayout(space, **limits) if observations else None
        self.action_layout: Any = ActionLayout(env.action_space) if actions else None
        self.observation_space = space if self.layout is None else self.layout.flat_space
        self.action_space = env.action_space if self.action_layout is None else self.action_layout.flat_space
        self.checks_left = 1 + CHECKED_STEPS if check else 0
        self._log = PrintLog() if capture_prints else None
        self._was_reset = False
        self.bind(None)

    def bind(self, memory: np.ndarray | None) -> None:
        """Write observations into this memory from now on, and return the same view of it each time.

        Args:
            memory: uint8 [layout.nbytes]; None returns a new array each time.
        """
        self._memory = memory
        self._connect()

    def _connect(self) -> None:
        """Bind the functions that each step calls once, to save lookups."""
        self._env_reset, self._env_step = self.env.reset, self.env.step
        if self._log is not None:
            self._env_reset, self._env_step = self._log.around(self.env.reset), self._log.around(self.env.step)
        self._decode: Callable[[Any], Any] = _refuse if not self._was_reset else self._decoder()
        self._flatten = self._flattener()

    def _decoder(self) -> Callable[[Any], Any]:
        return _same if self.action_layout is None else self.action_layout.decode

    def _flattener(self) -> Callable[[Any], Any]:
        featurize = self._featurize
        if self.layout is None:
            return _same if featurize is None else featurize
        bound = self._memory is not None
        memory = self._memory if bound else self.layout.memory()
        write, flat = self.layout.writer(memory), self.layout.flat(memory)

        def into_memory(observation: Any) -> np.ndarray:
            write(observation)
            return flat

        def copied(observation: Any) -> np.ndarray:
            write(observation)
            return flat.copy()

        flatten = into_memory if bound else copied
        return flatten if featurize is None else lambda observation: flatten(featurize(observation))

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Start an episode."""
        observation, info = self._env_reset(seed=seed, options=options)
        if not self._was_reset:
            self._was_reset = True
            self._decode = self._decoder()
        if self.checks_left:
            self.checks_left -= 1
            self._check_observation(observation)
            check_info(info)
        return self._flatten(observation), info

    def step(self, action: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Step with a flat action."""
        if self.checks_left:
            return self._checked_step(action)
        own_action = self._decode(action)
        observation, reward, terminated, truncated, info = self._env_step(own_action)
        if self._shape_reward is not None:
            info = {**info, "raw_reward": reward}
            reward = self._shape_reward(reward, observation, own_action, info)
        return self._flatten(observation), reward, terminated, truncated, info

    def _checked_step(self, action: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Like `step`, with the checks of the first few steps."""
        own_action = self._decode(action)
        if not self.env.action_space.contains(own_action):
            raise ActionError(f"action: expected one of {self.action_space}, got {action!r}.")
        self.checks_left -= 1
        observation, reward, terminated, truncated, info = self._env_step(own_action)
        check_outcome(reward, terminated, truncated, info)
        self._check_observation(observation)
        if self._shape_reward is not None:
            info = {**info, "raw_reward": reward}
            reward = self._shape_reward(reward, observation, own_action, info)
            check_outcome(reward, terminated, truncated, info, " (shaped)")
        return self._flatten(observation), reward, terminated, truncated, info

    def _check_observation(self, observation: Any) -> None:
        if self.layout is not None:
            self.layout.check(observation if self._featurize is None else self._featurize(observation))

    def unflatten(self, observation: Any) -> Any:
        """Restore the structure of a flat observation (NumPy or torch, any leading axes), as views of it."""
        return observation if self.layout is None else self.layout.unflatten(observation)

    @property
    def prints(self) -> list[str]:
        """The last lines the env printed; kept with capture_prints=True."""
        return self._log.lines if self._log is not None else []

    def __getstate__(self) -> dict[str, Any]:
        bound_functions = ("_env_reset", "_env_step", "_decode", "_flatten")
        return {name: value for name, value in self.__dict__.items() if name not in bound_functions}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._connect()


def _same(value: Any) -> Any:
    return value


def _refuse(action: Any) -> Any:
    raise ResetNeeded("Call reset() before the first step().")
