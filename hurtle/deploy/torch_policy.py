"""`LoadedPolicy`: acts with the torch policy of a run or checkpoint. Makes no env."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hurtle.deploy.acting_policy import ActingPolicy, State
from hurtle.deploy.restore import Restored, find_checkpoint, restore
from hurtle.kernels.uniforms import uniforms
from hurtle.native.rng import seed_range, stream_states
from hurtle.policies.numpy_acting import choose, see
from hurtle.policies.policy import Policy

LOADED_STREAM = 0x6C6F61  # the random stream of a loaded policy's sampled actions; nothing else draws from it


def load_run(
    path: Any, policy: nn.Module | type[nn.Module] | str | None = None, device: str = "cpu", trust: bool = False
) -> LoadedPolicy:
    """The policy of a run or a checkpoint; see `hurtle.load`."""
    _, file = find_checkpoint(path)
    return LoadedPolicy(restore(file, module=policy, device=device, trust=trust), file)


class LoadedPolicy(ActingPolicy):
    """The torch policy of a run.

    Args:
        restored: The policy, with its settings and layouts.
        file: The checkpoint that it was restored from.

    Attributes:
        module: The torch policy.
        settings: All settings of the run, flat.
        steps: Steps trained.
    """

    def __init__(self, restored: Restored, file: Path):
        module = restored.policy
        flat_spaces = module.observation_space, module.action_space
        super().__init__(flat_spaces, (restored.layout, restored.action_layout), module.head.mask_size)
        self.module: Policy = module
        self.steps = restored.steps
        self.settings = restored.settings
        self.file = file
        self._device = next((weight.device for weight in self.module.parameters()), torch.device("cpu"))
        self._seed = restored.settings["seed"]
        self._calls = 0

    def initial_state(self, batch: int = 1) -> State:
        """The recurrent state at the start of an episode; () for a policy without recurrence."""
        return self.module.initial_state(batch, device=self._device)

    def _choose(
        self, rows: np.ndarray, memory: State, mask: np.ndarray | None, deterministic: bool | None
    ) -> tuple[np.ndarray, State]:
        drawn = self._uniforms(len(rows)) if deterministic is False else None
        return choose(self.module, rows, memory, mask, None, drawn, self._device)

    def _values(self, rows: np.ndarray, memory: State) -> np.ndarray:
        with torch.inference_mode():
            values = self.module.value(see(self.module, rows, self._device), memory)
        return values.float().cpu().numpy()

    def _forgotten(self, part: Tensor, rows: np.ndarray) -> Tensor:
        chosen = torch.as_tensor(rows, device=self._device)
        return part.masked_fill(chosen.view(-1, *[1] * (part.ndim - 1)), 0.0)

    def _as_memory(self, part: Any) -> Tensor:
        return torch.as_tensor(part, device=self._device)

    def _uniforms(self, batch: int) -> np.ndarray:
        streams = stream_states(seed_range(self._seed, batch), LOADED_STREAM)
        self._calls += 1
        return uniforms(streams, np.full(batch, self._calls, np.int64), self.module.num_uniforms)

    def __repr__(self) -> str:
        return f"LoadedPolicy({self.settings['env']}, {self.steps:,} steps, {self.file})"
