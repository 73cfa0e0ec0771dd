"""`PoliciesTogether`: the policies of several seeds as one policy, whose matrix products are batched over the seeds.

rows of the first seed, then of the second … → each seed's normalizer, network and head → one distribution over all rows.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

from torch import Tensor
from torch.func import functional_call, vmap

from hurtle.errors import UnsupportedError
from hurtle.kernels.flat_parameters import FlatRows
from hurtle.policies.distributions import Distribution
from hurtle.policies.normalizers import ObservationNormalizer
from hurtle.policies.policy import Policy
from hurtle.policies.recurrent import State


class PoliciesTogether(Policy):
    """Acts for all seeds at once. Every batch has equally many rows of each seed, those of the first one first.

    Args:
        policies: One for each seed, of one shape and without a memory.
        rows: Their parameters.

    Raises:
        UnsupportedError: They have a memory.
    """

    def __init__(self, policies: Sequence[Policy], rows: FlatRows):
        first = policies[0]
        if first.is_recurrent:
            raise UnsupportedError("the policy has a memory")
        normalizers = [policy.normalizer for policy in policies if policy.normalizer is not None]
        normalizer = NormalizersTogether(normalizers) if normalizers else None
        super().__init__(
            first.observation_space, first.action_space, first.network, first.head,
            normalizer=normalizer, num_uniforms=first.num_uniforms,
        )  # fmt: skip
        self._first, self._rows, self._seeds = [first], rows, len(policies)  # in a list: not a submodule, it is the first row

    def forward(
        self, obs: Tensor, state: State = (), mask: Tensor | None = None, starts: Tensor | None = None
    ) -> tuple[Distribution, Tensor, State]:
        """See `Policy.forward`."""
        (policy,), made = self._first, []

        def of_one_seed(parameters: dict[str, Tensor], obs: Tensor, mask: Tensor | None) -> tuple[dict[str, Tensor], Tensor]:
            distribution, values, _ = functional_call(policy, parameters, (obs, (), mask))
            made.append(distribution)
            return _tensors(distribution, len(obs)), values

        seen = obs.unflatten(0, (self._seeds, -1))
        legal = None if mask is None else mask.unflatten(0, (self._seeds, -1))
        axes = (0, 0, None if mask is None else 0)
        tensors, values = vmap(of_one_seed, axes)(self._rows.views(), seen, legal)
        distribution = copy.copy(made[-1])
        for name, tensor in tensors.items():
            setattr(distribution, name, tensor.flatten(0, 1))
        return distribution, values.flatten(), ()


class NormalizersTogether(ObservationNormalizer):
    """The observation normalizers of several seeds; their statistics become rows of one tensor.

    Args:
        each: One for each seed.
    """

    def __init__(self, each: Sequence[ObservationNormalizer]):
        super().__init__(tuple(each[0].mean.shape), each[0].clip, each[0].eps)
        self.share(each)

    def normalize(self, obs: Tensor) -> Tensor:
        """See `ObservationNormalizer.normalize`; [rows of all seeds, …], also with an axis of steps before it."""
        mean, std = self.mean.unsqueeze(1), (self.variance + self.eps).sqrt().unsqueeze(1)
        seen = obs.unflatten(obs.ndim - mean.ndim + 1, (len(self.count), -1))
        return ((seen - mean) / std).clamp(-self.clip, self.clip).float().view(obs.shape)


def _tensors(distribution: Distribution, rows: int) -> dict[str, Tensor]:
    """What a distribution is made of; tensors that all rows share get an axis of rows."""
    found = {name: part for name, part in vars(distribution).items() if isinstance(part, Tensor)}
    if not found:
        raise UnsupportedError(f"a {type(distribution).__name__} cannot be split among seeds")
    most = max(part.ndim for part in found.values())
    return {name: part if part.ndim == most else part.expand(rows, *part.shape) for name, part in found.items()}
