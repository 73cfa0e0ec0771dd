"""`SeedsActor`: the policies of learners side by side, each acting for its own share of the rows; one CUDA graph for all.

rows of the first seed, then of the second … → each seed's policy → actions. Knows nothing of envs or learning.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from hurtle.buffers.rollout import torch_dtype
from hurtle.collect.inference import Actor
from hurtle.contracts import Weights
from hurtle.errors import HurtleError
from hurtle.kernels.cuda_graphs import Graphs
from hurtle.kernels.uniforms import uniforms
from hurtle.native.rng import ACTION_STREAM, seed_range, stream_states
from hurtle.policies.policy import Policy


class SeedsActor(Actor):
    """Acts with the policies that `SideBySide` trains, in place: there are no weights to load.

    Args:
        policies: One for each seed, of one shape; without memory and normalizer, which learners side by side cannot have.
        num_rows: Rows of all seeds together.
        seed: Seed of the action streams: row n has that of seed + n; or one for each policy, whose rows count from 0.
        graphs: What captures the acting; the learners' own.

    Raises:
        HurtleError: The rows cannot be shared evenly.
    """

    def __init__(self, policies: Sequence[Policy], num_rows: int, seed: int | Sequence[int], graphs: Graphs):
        super().__init__(policies[0], num_rows, seed if isinstance(seed, int) else 0)
        if num_rows % len(policies):
            raise HurtleError(f"{num_rows} rows cannot be shared evenly by {len(policies)} seeds.")
        self.policies, self._share = list(policies), num_rows // len(policies)
        if not isinstance(seed, int):
            self.streams = np.concatenate([stream_states(seed_range(own, self._share), ACTION_STREAM) for own in seed])
        shape = self.policy.observation_space.shape or ()
        self._obs = torch.zeros((num_rows, *shape), dtype=torch_dtype(self.policy.observation_space.dtype), device=self.device)
        self._drawn = torch.zeros((num_rows, self.policy.num_uniforms), device=self.device)
        self._found: tuple[Tensor, Tensor, Tensor] | None = None  # actions, log-probs and values of all rows
        self._choose_all = graphs.wrap(self._choose, "rollout")

    def load_weights(self, weights: Weights) -> None:
        """The policies are the learners' own."""

    @torch.no_grad()
    def act(
        self, seen: Tensor, mask: Tensor | None, starts: Tensor, rows: np.ndarray | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `Actor.act`; for all rows, without masks. The next call overwrites what it returns."""
        assert mask is None
        assert rows is None
        self._obs.copy_(seen)
        self._drawn.copy_(self.staging.to_device("uniforms", uniforms(self.streams, self.steps, self.policy.num_uniforms)))
        self.steps += 1
        self._choose_all()
        assert self._found is not None
        self._chosen = self.staging.start_to_host("actions", self._found[0])
        return self._found

    @torch.no_grad()
    def _choose(self) -> None:
        found = []
        shares = zip(self.policies, self._obs.split(self._share), self._drawn.split(self._share), strict=True)
        for policy, obs, drawn in shares:
            distribution, values, _ = policy(obs, (), None, None)
            actions = distribution.sample(drawn)
            found.append((actions, distribution.log_prob(actions).float(), values.float()))
        new = [torch.cat(parts) for parts in zip(*found, strict=True)]
        if self._found is None:
            self._found = (new[0], new[1], new[2])
        else:
            for into, part in zip(self._found, new, strict=True):
                into.copy_(part)
