"""Algorithms by name: each is a config and the factories of its learners, one per gear.

name or "my_algo.py:Class" → `Algorithm`. The built-in ones are the files `algorithms/*_config.py`. Imports torch
only when a learner is made, so that `hurtle train --help` stays fast.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, is_dataclass, replace
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

from hurtle.contracts import Learner
from hurtle.errors import HurtleError, UnknownNameError, UnsupportedError, did_you_mean
from hurtle.native.rng import stream_state
from hurtle.ranges import at_least, between
from hurtle.references import absolute_reference, is_reference, load_reference, reference_to
from hurtle.trust import SIGNATURE, check_code, is_signed

RANK_STREAM = 1_000
"""Streams from this one on are those of learners beside the first."""
MakeLearner = Callable[..., Learner]
"""Called as `make(policy, config, setup)`; raises `UnsupportedError` if it cannot train this policy."""


@dataclass(frozen=True)
class AlgorithmConfig:
    """The settings of every rollout-based algorithm; its own config adds to them."""

    num_steps: Annotated[int, at_least(1)] = 128
    """Steps per env and rollout."""
    gamma: Annotated[float, between(0, 1)] = 0.99
    """Discount of future rewards."""

    def check(self, num_rows: int, is_recurrent: bool) -> None:
        """Reject settings that do not fit the envs or the policy.

        Args:
            num_rows: Envs times agents.
            is_recurrent: Whether the policy has a memory.

        Raises:
            HurtleError: Names the settings, and values that fit.
        """
        return

    def diversify(self, policy: Any, actor: int, num_actors: int) -> None:
        """Set what is to differ between the policies of a run's actors, such as how much they explore."""
        return


@dataclass(frozen=True)
class LearnerSetup:
    """What a learner needs besides policy and config.

    Attributes:
        seed: Seed of minibatches and any other random draws.
        rewards: The run's `RewardRule`; None leaves rewards as they are.
        compiled: Run networks through `torch.compile`.
        precision: "float32", "tf32" or "bf16", for matrix products on a GPU.
        num_threads: The most threads of compiled updates; None means all free cores.
        num_rows: Envs times agents; None: as many as a rollout has columns.
        is_pool: Whether rollouts come from a pool: their columns are segments of any rows.
        graphs: The CUDA graphs shared with the collector, or None.
        lags: Whether rollouts may come from a policy some updates older.
        ranks: The learners that train the policy together; None: this one alone.
    """

    seed: int = 0
    rewards: Any = None
    compiled: bool = False
    precision: str = "float32"
    num_threads: int | None = None
    graphs: Any = None
    num_rows: int | None = None
    is_pool: bool = False
    lags: bool = False
    ranks: Any = None

    @property
    def drawing_seed(self) -> int:
        """Seed of what each of several learners draws for itself, such as minibatches; the first draws as one alone does."""
        rank = 0 if self.ranks is None else self.ranks.rank
        return stream_state(self.seed, RANK_STREAM + rank) >> 1 if rank else self.seed


@dataclass(frozen=True)
class Algorithm:
    """An algorithm: its config and its learners.

    Attributes:
        config: A frozen dataclass; its fields are settings of `hurtle.train`, flags and TOML keys.
        learners: Factories of its learner, by gear: a callable, or "module:name", which is imported when needed.
            "general" is torch and required; "native" and "device" are optional.
        network: What makes the network that it acts with, as "module:name", called as `make(config, head, make_body)`; empty:
            an actor–critic.
        defaults: Defaults of other settings, such as hidden_sizes, where this algorithm's differ.
        side_by_side: Whether `EpochsTogether` trains many seeds of it; those with a replay buffer have `SideBySide`.
        takes_lag: See `Learner.takes_lag`.
        num_actors: How many actors it has, unless the user says or there are fewer envs.
        alone: Why it trains with one learner only; empty: its learner's `rank_state` says whether it can with several.
        name: The name users give.
    """

    config: type
    learners: Mapping[str, str | MakeLearner] = field(default_factory=dict)
    network: str = ""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    side_by_side: bool = False
    takes_lag: bool = False
    num_actors: int = 1
    alone: str = ""
    name: str = ""

    def network_maker(self, config: Any) -> Callable[..., Any] | None:
        """What makes the network that it acts with, see `build_policy`; None: an actor–critic."""
        return partial(_imported(self.network), config) if self.network else None

    @property
    def why_alone(self) -> str:
        """Why it trains with one learner only, or an empty string."""
        place = self.learners["general"]
        made_by = _imported(place) if isinstance(place, str) else place
        averages = not isinstance(made_by, type) or bool(getattr(made_by, "rank_state", ()))  # a function's is not known yet
        return self.alone or ("" if averages else "it does not average gradients")

    def make_learner(self, gear: str, policy: Any, config: Any, setup: LearnerSetup) -> Learner:
        """The learner for a gear.

        Raises:
            UnsupportedError: There is none for this gear, policy or config.
        """
        make = self.learners.get(gear)
        if make is None:
            raise UnsupportedError(f"{self.name} has no update for the {gear} gear")
        return (_imported(make) if isinstance(make, str) else make)(policy, config, setup)


def _imported(place: str) -> Any:
    """What "module:name" names."""
    module, _, name = place.partition(":")
    return getattr(import_module(module), name)


_KNOWN: dict[str, type] = {}
"""Classes that the user passed in this process, by the name in their runs."""
_ALLOWED: set[str] = set()
"""References to code that the user named, or has allowed a file to name."""


def find_algorithm(name: str) -> Algorithm:
    """The algorithm with this name; "my_algo.py:Reinforce" only after `algorithm_name` was called with it.

    Raises:
        UnknownNameError: There is no such algorithm; suggests the closest name.
        TrustError: A file names this code, and the user has not allowed it.
        HurtleError: The class is not a learner, or has no `Config`.
    """
    name = absolute_reference(name)
    if name in _KNOWN:
        return _of_class(_KNOWN[name], name)
    if is_reference(name):
        check_code("A file", {"algorithm": name}, name in _ALLOWED)
        _KNOWN[name] = load_reference(name)
        return _of_class(_KNOWN[name], name)
    if name not in algorithm_names():
        raise UnknownNameError(f"No algorithm {name!r}. {did_you_mean(str(name), algorithm_names())}")
    found: Algorithm = import_module(f"hurtle.algorithms.{name}_config").ALGORITHM
    return replace(found, name=name)


@cache
def algorithm_names() -> tuple[str, ...]:
    """The built-in algorithms: the files `algorithms/NAME_config.py`."""
    return tuple(sorted(file.stem.removesuffix("_config") for file in Path(__file__).parent.glob("*_config.py")))


def algorithm_name(algorithm: str | type) -> str:
    """The name of a user's algorithm in settings; from here on it is allowed to run.

    Args:
        algorithm: A name, "my_algo.py:Reinforce", or a class. A class that no other process can find, such as one defined in a
            function, is known by its own name for the rest of this process: pass it again to resume its run.
    """
    if isinstance(algorithm, str):
        name = absolute_reference(algorithm)
        _ALLOWED.add(name)
        return name
    try:
        name = reference_to(algorithm)
    except UnknownNameError:
        name = algorithm.__name__
        if name in algorithm_names():
            raise HurtleError(f"{name} is the name of a built-in algorithm: give your class another one.") from None
    _of_class(algorithm, name)
    _KNOWN[name] = algorithm
    return name


def short_name(algorithm: str) -> str:
    """An algorithm's name without its file, for titles and folders.

    Example:
        >>> short_name("/home/me/my_algo.py:Reinforce"), short_name("ppo")
        ('reinforce', 'ppo')
    """
    return algorithm.rpartition(":")[2].lower()


def allow_algorithm(source: Any, settings: Mapping[str, Any], trust: bool) -> None:
    """Allow the algorithm that a file names, if the user trusts the file or has signed it.

    Args:
        source: The file.
        settings: Its settings, flat.
        trust: Whether the user allows it to name code.

    Raises:
        TrustError: Names the file and the code.
    """
    if "algorithm" in settings:
        signature = settings.get(SIGNATURE)
        trusted = trust or is_signed(settings, signature)
        check_code(source, {"algorithm": settings["algorithm"]}, trusted, signature)
        algorithm_name(settings["algorithm"])


def _of_class(cls: Any, name: str) -> Algorithm:
    config = getattr(cls, "Config", None)
    if not (isinstance(config, type) and is_dataclass(config) and issubclass(config, AlgorithmConfig)):
        raise HurtleError(
            f"{name} is not an algorithm: it needs a dataclass `Config` with its settings, derived from AlgorithmConfig; "
            "see docs/algorithms.md."
        )
    missing = [name for name in ("update", "weights") if getattr(cls, name, None) in (None, getattr(Learner, name))]
    if missing:
        raise HurtleError(f"{name} is not an algorithm: it has no {' and no '.join(missing)}; see docs/algorithms.md.")
    return Algorithm(config, {"general": cls}, takes_lag=getattr(cls, "takes_lag", False), name=name)
