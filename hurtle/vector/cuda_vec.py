"""`CudaVecEnv`: many native envs on one GPU behind `gymnasium.vector.VectorEnv`; returns torch tensors on that GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode

from hurtle.errors import ActionError
from hurtle.native.cuda_batch import CudaBatch
from hurtle.native.env import Env
from hurtle.vector.native_vec import NativeVecEnv


class CudaVecEnv(NativeVecEnv):
    """A vector of native envs in GPU memory.

    Like `NativeVecEnv`, but observations, rewards and flags are torch tensors on the device, and nothing synchronizes with
    the GPU: `infos` always has the episode arrays, and `_episode` and `_final_obs` mark the rows that are new. `step` can be
    captured with `torch.cuda.graph`; write the actions into `vec.actions` then.

    Args:
        env: The native env, with its parameters.
        num_envs: Number of copies.
        device: A torch device such as "cuda" or "cuda:0".
        seed: Base seed of the first reset, if that is called without one.
        autoreset_mode: SAME_STEP or NEXT_STEP.
        copy: Return copies instead of the reused tensors.
        render_mode: "rgb_array", "ansi" or None.
    """

    def __init__(
        self,
        env: Env,
        num_envs: int,
        *,
        device: str = "cuda",
        seed: int = 0,
        autoreset_mode: AutoresetMode | str = AutoresetMode.SAME_STEP,
        copy: bool = False,
        render_mode: str | None = None,
    ):
        self.device = device
        super().__init__(env, num_envs, seed=seed, autoreset_mode=autoreset_mode, copy=copy, render_mode=render_mode)

    def _make_batch(self, num_workers: int | None, debug: bool) -> Any:
        return CudaBatch(self.native_spec, self.num_envs, self.device)

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Step every env with its row of `actions`, a tensor on the device (arrays and lists are copied to it)."""
        if self.closed or self._first_seed is not None:
            self._refuse_to_begin("the first step()")
        if actions is not self._actions:
            expected, got = tuple(self._actions.shape), tuple(np.shape(actions))
            if got != expected:
                raise ActionError(f"Actions must have the shape {expected} (one row per env), got {got}.")
            self._actions[...] = actions if type(actions) is type(self._actions) else self._batch.to_device(actions)
        self._batch.step(self._same_step)
        infos = dict(self._episode_infos)
        if self._copy:
            return (*(self._copied(array) for array in self._outcome), self._copied(infos))
        return (*self._outcome, infos)

    def play(self, num_steps: int, seed: int = 0) -> None:  # type: ignore[override]
        """Take `num_steps` steps of uniformly random actions by replaying a CUDA graph; does not count episodes."""
        super().play(num_steps, seed)

    @property
    def states(self) -> np.ndarray:
        """A copy of the State records of all envs on the host; `load_states` writes them back."""
        return self._batch.records()[list(self.native_spec.fields)]

    def load_states(self, states: np.ndarray) -> None:
        """Replace the State records of all envs."""
        records = self._batch.records()
        for name in self.native_spec.fields:
            records[name] = states[name]
        self._batch.load_records(records)

    def state_dict(self) -> dict[str, np.ndarray]:
        """The state of `NativeVecEnv.state_dict`, on the host; waits for the GPU.

        Raises:
            ActionError: The last steps had illegal actions.
            EnvIndexError: The env's code indexed an array out of bounds.
        """
        self._batch.check_faults()
        return super().state_dict()

    def _write(self, array: Any, values: np.ndarray) -> None:
        array[...] = array.new_tensor(values) if hasattr(array, "new_tensor") else values

    def _records(self) -> np.ndarray:
        return self._batch.records()

    def _copied(self, value: Any) -> Any:
        if isinstance(value, dict):
            return {k: self._copied(v) for k, v in value.items()}
        return value.clone() if hasattr(value, "clone") else value.copy()
