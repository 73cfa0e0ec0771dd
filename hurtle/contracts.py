"""The protocols that join the stages: collector → `Experience` → learner → `Weights` → collector. Imports nothing heavy.

A runner makes both sides from a `Gear` and calls them, one side from one thread at a time. Collectors and learners subclass
these protocols for their defaults; nothing outside a gear's own files asks which class it has.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor, nn

Metrics = Mapping[str, float]
"""Named numbers of one update: losses, entropy, learning rate …"""
SHOWN = 100
"""Episodes that `Episodes.from_totals` lists one by one: as many as the training curve averages over."""


@dataclass(frozen=True)
class Weights:
    """What a policy acts with. Flows one way: `Learner.weights` → `Collector.load_weights`.

    Attributes:
        flat: All parameters in the order of `policy.parameters()`, one contiguous float32 tensor. It may be the learner's own
            memory, which the next update changes: clone it to keep it.
        version: Updates made so far.
        buffers: The policy's buffers in the order of `policy.buffers()`: the statistics of its normalizer, for one.
        policy: The learner's policy, where both sides are in one process. A collector that acts with this very module has
            nothing to copy.
    """

    flat: Tensor
    version: int = 0
    buffers: tuple[Tensor, ...] = ()
    policy: nn.Module | None = None

    @classmethod
    def of(cls, policy: nn.Module, version: int = 0) -> Weights:
        """The weights of a policy as they are now; `flat` is a copy."""
        import torch

        flat = torch.cat([parameter.detach().reshape(-1) for parameter in policy.parameters()])
        return cls(flat, version, tuple(policy.buffers()), policy)

    def copy_to(self, policy: nn.Module) -> None:
        """Copy into the parameters and buffers of another policy of the same shape, in place."""
        if policy is self.policy:
            return
        parameters = [parameter.data for parameter in policy.parameters()]
        for own, part in zip(parameters, self.flat.split([own.numel() for own in parameters]), strict=True):
            own.copy_(part.view_as(own))
        for own, part in zip(policy.buffers() if self.buffers else (), self.buffers, strict=True):
            own.copy_(part)


ListedEpisodes = tuple[np.ndarray, np.ndarray, Mapping[str, np.ndarray]]
"""Returns, lengths and metrics of some episodes."""


def _joined(parts: Sequence[Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
    names = dict.fromkeys(name for part in parts for name in part)
    return {name: np.concatenate([part[name] for part in parts if name in part]) for name in names}


@dataclass(frozen=True)
class Episodes:
    """Episodes that ended, in the order they did.

    Attributes:
        returns: Undiscounted return of each episode, in the env's own rewards.
        lengths: Steps of each episode.
        metrics: The env's own metrics, one number per episode that reports it.
        count: Episodes in all: more than are listed where a GPU reports only totals.
        best_return: The highest return.
        best_length: The longest episode's steps.
        levels: Of options under a curriculum, where a GPU reports only totals: the count and the sum of the returns of each
            level, float64 [levels, 2].
    """

    returns: np.ndarray = field(default_factory=lambda: np.zeros(0))
    lengths: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    metrics: Mapping[str, np.ndarray] = field(default_factory=dict)
    count: int = 0
    best_return: float = -np.inf
    best_length: float = 0.0
    levels: Mapping[str, np.ndarray] = field(default_factory=dict)

    @classmethod
    def of(cls, returns: Any, lengths: Any, metrics: Mapping[str, Any] | None = None) -> Episodes:
        """Episodes that are known one by one."""
        returns, lengths = np.asarray(returns, np.float64).reshape(-1), np.asarray(lengths).reshape(-1)
        if not len(returns):
            return cls()
        listed = {name: np.asarray(values).reshape(-1) for name, values in (metrics or {}).items()}
        return cls(returns, lengths, listed, len(returns), float(returns.max()), float(lengths.max()))

    @classmethod
    def listed(cls, parts: Sequence[ListedEpisodes]) -> Episodes:
        """Episodes that were gathered in parts."""
        if not parts:
            return cls()
        returns, lengths, metrics = zip(*parts, strict=True)
        return cls.of(np.concatenate(returns), np.concatenate(lengths), _joined(metrics))

    @classmethod
    def from_totals(
        cls,
        count: int,
        returns: float,
        best_return: float,
        lengths: float,
        best_length: float,
        metrics: Metrics,
        levels: Mapping[str, np.ndarray] | None = None,
    ) -> Episodes:
        """Episodes of which only sums are known: each counts as their mean, and at most `SHOWN` are listed."""
        if not count:
            return cls()
        listed = min(count, SHOWN)
        means = {name: np.full(listed, value) for name, value in metrics.items()}
        mean_return, mean_length = np.full(listed, returns / count), np.full(listed, lengths / count)
        return cls(mean_return, mean_length, means, count, best_return, best_length, levels or {})

    @classmethod
    def join(cls, parts: Sequence[Episodes]) -> Episodes:
        """All of them as one."""
        parts = [part for part in parts if part.count]
        if not parts:
            return cls()
        return cls(
            np.concatenate([part.returns for part in parts]),
            np.concatenate([part.lengths for part in parts]),
            _joined([part.metrics for part in parts]),
            sum(part.count for part in parts),
            max(part.best_return for part in parts),
            max(part.best_length for part in parts),
            {name: np.sum([part.levels[name] for part in parts], axis=0) for name in parts[0].levels},
        )


class Experience(Protocol):
    """What a collector fills and a learner learns from: an on-policy `Rollout`, or a batch of replay.

    Preallocated by `Collector.new_rollout`, and used again and again. It holds what the env gave and what the policy did;
    whatever a learner makes of it (scaled rewards, advantages) goes to fields of its own.
    """

    version: int
    """`Weights.version` of the policy that acted; the oldest one if the weights changed in between."""

    @property
    def num_valid(self) -> int:
        """Steps that count: not those of absent agents or resets."""


class Collector(Protocol):
    """Envs × acting policy → experience.

    The runner calls everything from one thread, `request_stop` excepted, which may come from a signal handler or any thread.
    Order: `new_rollout`, `load_state_dict` (resumed runs only), `load_weights`, `prepare`, then `load_weights` and `collect` in
    turn, `close`.
    """

    num_rows: int
    """Envs times agents: columns of a rollout."""
    resumes_exactly: bool = True
    """Whether `state_dict` can hold the states of the envs. If not, the runner calls `request_stop` to end a run quickly."""
    closes_midway: bool = False
    """Whether closing the envs while another thread is in `collect` ends its step: those in processes can be killed."""

    runs_ahead: bool = False
    """Whether it begins a rollout as soon as the last one is finished, before `collect` is called: one more than it was given
    memory for."""
    is_away: bool = False
    """Whether it cannot collect for now, since its process or machine was lost; `is_ready` waits until it is back."""

    @property
    @abstractmethod
    def has_masks(self) -> bool:
        """Whether the envs report legal actions."""

    @abstractmethod
    def new_rollout(self, num_steps: int) -> Any:
        """Memory that `collect` can fill, `num_steps` steps per row."""

    @abstractmethod
    def load_weights(self, weights: Weights) -> None:
        """Act with these weights from now on. The only way in; the runner calls it before every `collect`."""

    def announce(self, weights: Weights) -> None:
        """Hear of new weights, from any thread; a collector that runs ahead may use them before the next `load_weights`."""
        return

    def prepare(self, experience: Any) -> None:
        """Compile or capture what `collect` needs, before the clock starts; leaves everything as it was."""
        return

    def is_ready(self, seconds: float) -> bool:
        """Whether it can collect; waits so many seconds for it at most."""
        return True

    @abstractmethod
    def collect(self, experience: Any) -> Episodes | None:
        """Fill the experience. Releases the GIL wherever possible.

        Returns:
            The episodes that ended, or None if `request_stop` or the loss of its machine cut it short. On a GPU they may
            belong to earlier calls.
        """

    def pending(self, wait: bool = False) -> Episodes:
        """Episodes that a device has reported since the last call; `wait` for all of them. Empty on the CPU."""
        return Episodes()

    def seconds(self) -> dict[str, float]:
        """GPU seconds by stage since the last call. Empty where the host's clock tells the truth."""
        return {}

    def metrics(self) -> dict[str, float]:
        """Counts that the user should see, such as dropped final observations. Usually empty."""
        return {}

    def idle_seconds(self) -> float | None:
        """Seconds in which it had nothing to do, where it knows better than its caller."""
        return None

    def threads(self) -> tuple[int, int] | None:
        """Threads of compiled code that most calls use, and the most they may use; None where there are none."""
        return None

    @property
    def warning(self) -> str:
        """A warning for the user, or an empty string; read after `prepare`."""
        return ""

    @property
    def advice(self) -> str:
        """What limits the speed and what to change, or an empty string; read at the end."""
        return ""

    def request_stop(self) -> None:
        """Make `collect` return None as soon as it can."""

    def state_dict(self, with_envs: bool = True) -> dict[str, Any]:
        """What resuming needs; with the states of the envs it is exact."""
        return {}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Continue from a saved state. Envs whose state was not saved start new episodes, with unused seeds."""

    def close(self, envs: bool = True) -> None:
        """Stop threads and release memory; close the envs too unless they belong to the user."""


class Learner(Protocol):
    """Experience → a better policy. Subclass it to write your own algorithm, see docs/algorithms.md.

    The runner calls everything from one thread: `load_state_dict` (resumed runs only), `weights`, `prepare`, then `update` and
    `weights` in turn, `close`.
    """

    postprocess: Any = None
    """The `Postprocess` that it runs first, of which a collector may do parts sooner; None where it has none."""
    acting_kernels: Any = None
    """Kernels that collectors on the same device may run instead of the policy."""
    planner: Any = None
    """Plans updates before their rollouts are there, see `native_update.Planner`; None where it cannot."""
    note: str = ""
    """What the user should know about how it learns; continues the gear's reason."""
    rank_state: tuple[str, ...] = ()
    """Entries of `state_dict` that each of several learners has of its own, such as its minibatch stream; the others are the
    same on all. Learners without any cannot train with others, see docs/distributed.md."""
    takes_lag: bool = False
    """Whether it learns well from rollouts of a policy some updates older, see docs/async.md."""

    def prepare(self, experience: Any) -> None:
        """Compile or capture what `update` needs, before the clock starts; leaves everything as it was.

        Args:
            experience: The one that `update` will get; what it holds now means nothing.
        """
        return

    @abstractmethod
    def update(self, experience: Any, progress: float = 0.0) -> Metrics:
        """Learn from one experience.

        Args:
            experience: Filled by a collector.
            progress: The finished part of the run, from 0 to 1, for whatever is annealed.

        Returns:
            Metrics. On a GPU those of an earlier update, or none yet.

        Raises:
            NonFiniteError: A loss or gradient is not finite.
        """

    def pending(self, wait: bool = False) -> Metrics:
        """The newest metrics that a device has reported since the last call; `wait` for all. Empty on the CPU."""
        return {}

    @abstractmethod
    def weights(self) -> Weights:
        """The weights to act with from now on."""

    def seconds(self) -> dict[str, float]:
        """GPU seconds by stage since the last call. Empty where the host's clock tells the truth."""
        return {}

    def threads(self) -> tuple[int, int] | None:
        """Threads of compiled code that most calls use, and the most they may use; None where there are none."""
        return None

    def state_dict(self) -> dict[str, Any]:
        """What resuming needs besides the policy, which the runner saves."""
        return {}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Continue from a saved state."""
        return

    def close(self) -> None:
        """Stop threads and release memory."""
        return
