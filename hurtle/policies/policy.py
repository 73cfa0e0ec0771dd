"""`Policy`: what collectors and algorithms call, whatever network is inside.

obs → network.encode → memory → network.decode → masked Distribution, value. Callers normalize observations first, with
`policy.normalizer`. Knows nothing of envs.
"""

from __future__ import annotations

import torch
from gymnasium import spaces
from torch import Tensor, nn

from hurtle.policies.action_head import ActionHead
from hurtle.policies.distributions import Distribution, adapted, masked
from hurtle.policies.normalizers import ObservationNormalizer
from hurtle.policies.recurrent import Memory, State, zeroed


class Policy(nn.Module):
    """A network, its memory, and its action head. `build_policy` makes one.

    Args:
        observation_space: The space of one row, flat if emulated.
        action_space: The space of one row.
        network: A module with `encode` and `decode`, see `TorchPolicy`.
        head: Turns raw actions into the env's.
        memory: The module between encode and decode, or None.
        normalizer: Saved with the policy; callers apply it.
        num_uniforms: Uniforms that sampling needs per row; None: the head's.
    """

    network: nn.Module
    memory: Memory | None
    normalizer: ObservationNormalizer | None

    def __init__(
        self,
        observation_space: spaces.Space,
        action_space: spaces.Space,
        network: nn.Module,
        head: ActionHead,
        memory: Memory | None = None,
        normalizer: ObservationNormalizer | None = None,
        num_uniforms: int | None = None,
    ):
        super().__init__()
        self.observation_space, self.action_space = observation_space, action_space
        self.network, self.memory, self.normalizer = network, memory, normalizer
        self.head = head
        self.num_uniforms = head.num_uniforms if num_uniforms is None else num_uniforms

    @property
    def is_recurrent(self) -> bool:
        """Whether it has a memory."""
        return self.memory is not None

    def initial_state(self, rows: int, device: torch.device | str | None = None) -> State:
        """The state at the start of an episode: zeros [rows, F], or () without a memory."""
        return () if self.memory is None else self.memory.initial_state(rows, device)

    def forward(
        self, obs: Tensor, state: State = (), mask: Tensor | None = None, starts: Tensor | None = None
    ) -> tuple[Distribution, Tensor, State]:
        """One step.

        Args:
            obs: [B, ...].
            state: The state that the last step returned; () for the initial state.
            mask: Legal actions, bool [B, head.mask_size].
            starts: Rows whose episode begins with this observation, bool [B]; their state is zeroed first.

        Returns:
            The action distribution, the values [B] and the new state.
        """
        features = self.network.encode(obs)  # type: ignore[operator]
        if self.memory is not None:
            state = state or self.memory.initial_state(features.shape[0], features.device)
            state = state if starts is None else zeroed(state, starts)
            features, state = self.memory.step(features, state)
        return *self._decode(features, mask), state

    def forward_sequence(
        self, obs: Tensor, state: State, starts: Tensor, mask: Tensor | None = None
    ) -> tuple[Distribution, Tensor, State]:
        """Many steps at once, for training.

        Args:
            obs: [T, B, ...].
            state: The state before the first step; () for the initial state.
            starts: Where an episode begins, bool [T, B]; the state is zeroed before that step.
            mask: Legal actions, bool [T, B, head.mask_size].

        Returns:
            The distribution over T * B rows, time-major, the values [T * B] and the last state.
        """
        features = self.network.encode(obs.flatten(0, 1))  # type: ignore[operator]
        if self.memory is not None:
            state = state or self.memory.initial_state(obs.shape[1], features.device)
            features, state = self.memory.sequence(features.unflatten(0, obs.shape[:2]), state, starts)
            features = features.flatten(0, 1)
        return *self._decode(features, None if mask is None else mask.flatten(0, 1)), state

    def value(self, obs: Tensor, state: State = (), starts: Tensor | None = None) -> Tensor:
        """Only the values [B]; the state does not change."""
        return self(obs, state, None, starts)[1]

    def _decode(self, features: Tensor, mask: Tensor | None) -> tuple[Distribution, Tensor]:
        distribution, value = self.network.decode(features)  # type: ignore[operator]
        distribution = adapted(distribution)
        return distribution if mask is None else masked(distribution, mask), value.reshape(features.shape[0])
