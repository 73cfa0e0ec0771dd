"""`CurriculumCollector`: a collector whose envs draw options by the rules of a curriculum.

rules → ranges of all envs → the collector's rollout → returns by level → rules. A range holds for the episodes that begin in
the rollout; every episode counts for the value that it was played with. Knows nothing of how steps are collected.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from hurtle.collect.curriculum import Rule, by_level
from hurtle.contracts import Collector, Episodes, Weights
from hurtle.errors import HurtleError
from hurtle.kernels.uniforms import uniforms
from hurtle.native.rng import seed_range, stream_states

CURRICULUM_STREAM = 5


class CurriculumCollector(Collector):
    """Another collector under a curriculum.

    Args:
        collector: Collects the rollouts.
        vec: Its envs, which draw the options that have rules.
        rules: The rule of each option.
        texts: How the rules are written, to notice if a resumed run has others.
        seed: The first env's; draws of the rules come from a stream of their own.
        total_steps: Steps of the whole run that this collector's envs take.
        share: The part of the run's envs that it has.

    Raises:
        HurtleError: A rule listens to returns, and envs have several agents.

    Example:
        >>> import hurtle
        >>> from hurtle.collect import NativeCollector
        >>> from hurtle.collect.curriculum import Uniform
        >>> from hurtle.policies.build import PolicyConfig
        >>> vec = hurtle.make_vec("cartpole", num_envs=8)
        >>> collector = CurriculumCollector(NativeCollector(vec, PolicyConfig()), vec, {}, {}, seed=0, total_steps=1_000)
        >>> collector.collect(collector.new_rollout(num_steps=32)).count > 0
        True
    """

    def __init__(
        self,
        collector: Collector,
        vec: Any,
        rules: Mapping[str, Rule],
        texts: Mapping[str, Any],
        seed: int,
        total_steps: float,
        share: float = 1.0,
    ):
        listening = [name for name, rule in rules.items() if rule.edges is not None]
        if listening and int(getattr(vec, "num_agents", 1)) > 1:
            raise HurtleError(
                f"curriculum: the rule of {listening[0]} is judged by returns, which needs envs with one agent; "
                "uniform and linear do not."
            )
        self._collector, self._vec, self._rules, self._texts = collector, vec, dict(rules), dict(texts)
        self._listening, self._share, self._total_steps = listening, share, total_steps
        self.num_rows, self.resumes_exactly = collector.num_rows, collector.resumes_exactly
        self.is_away, self.runs_ahead = collector.is_away, collector.runs_ahead
        self.closes_midway = collector.closes_midway
        self._streams = stream_states(seed_range(seed, int(vec.num_envs)), CURRICULUM_STREAM)
        self._rollouts, self._steps = 0, 0.0
        self._set: dict[str, tuple[np.ndarray, np.ndarray]] = {}  # the ranges in force
        self._set_ranges()  # before anything resets the envs

    def collect(self, experience: Any) -> Episodes | None:
        """See `Collector.collect`; waits for what a GPU reports late if a rule needs it, so that runs repeat."""
        self._set_ranges()
        episodes = self._collector.collect(experience)
        if episodes is None:
            return None
        self._rollouts += 1
        self._steps += experience.num_valid
        if self._listening:
            episodes = Episodes.join([episodes, self._collector.pending(wait=True)])
        return self._heard(episodes)

    def pending(self, wait: bool = False) -> Episodes:
        """See `Collector.pending`."""
        return self._heard(self._collector.pending(wait))

    def _heard(self, episodes: Episodes) -> Episodes:
        """Tell the rules of ended episodes."""
        for name in self._listening if episodes.count else ():
            rule = self._rules[name]
            levels = episodes.levels.get(name)
            if levels is None:
                assert rule.edges is not None
                levels = by_level(episodes.metrics[name], episodes.returns, rule.edges)
            rule.update(levels)
        return episodes

    def _set_ranges(self) -> None:
        """Let the envs draw from what the rules say now."""
        rules, progress = self._rules, min(1.0, self._steps / self._total_steps)
        drawn = uniforms(self._streams, np.full(len(self._streams), self._rollouts), len(rules))
        ranges = {name: rule.ranges(drawn[:, k], progress) for k, (name, rule) in enumerate(rules.items())}
        same = self._set and all(np.array_equal(ranges[name], self._set[name]) for name in rules)
        if rules and not same:
            self._vec.set_ranges(ranges)
            self._set = ranges

    def metrics(self) -> dict[str, float]:
        """The collector's own; of each option the middle of the ranges and their ends, and what its rule says.

        Where several actors add up theirs, each counts by its envs.
        """
        found = {}
        for name, (low, high) in self._set.items():
            found[name] = float((low + high).mean() / 2)
            found |= {f"{name}_low": float(low.min()), f"{name}_high": float(high.max())}
            found |= {f"{name}_{what}": value for what, value in self._rules[name].metrics().items()}
        return {**self._collector.metrics(), **{f"curriculum/{name}": self._share * value for name, value in found.items()}}

    def state_dict(self, with_envs: bool = True) -> dict[str, Any]:
        """See `Collector.state_dict`."""
        own = {
            "rules": {name: rule.state_dict() for name, rule in self._rules.items()},
            "texts": self._texts,
            "rollouts": self._rollouts,
            "steps": self._steps,
            "share": self._share,
        }
        return {**self._collector.state_dict(with_envs), "curriculum": own}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """See `Collector.load_state_dict`; a rule that is written in another way than before begins anew."""
        own = saved.get("curriculum") or next(iter(_of_actors(saved)), None)
        if own is not None:
            same = own["share"] == self._share
            self._rollouts, self._steps = own["rollouts"], own["steps"] if same else own["steps"] * self._share / own["share"]
            for name, rule in self._rules.items():
                if own["texts"].get(name) == self._texts[name]:
                    rule.load_state_dict(own["rules"][name])
        self._set = {}
        self._set_ranges()  # for envs that begin new episodes
        self._collector.load_state_dict(saved)
        self._set = {}  # native envs have gone back to the saved ones

    # What is the collector's own.

    @property
    def has_masks(self) -> bool:
        """See `Collector.has_masks`."""
        return self._collector.has_masks

    def new_rollout(self, num_steps: int) -> Any:
        """See `Collector.new_rollout`."""
        return self._collector.new_rollout(num_steps)

    def load_weights(self, weights: Weights) -> None:
        """See `Collector.load_weights`."""
        self._collector.load_weights(weights)

    def announce(self, weights: Weights) -> None:
        """See `Collector.announce`."""
        self._collector.announce(weights)

    def is_ready(self, seconds: float) -> bool:
        """See `Collector.is_ready`."""
        return self._collector.is_ready(seconds)

    def idle_seconds(self) -> float | None:
        """See `Collector.idle_seconds`."""
        return self._collector.idle_seconds()

    def prepare(self, experience: Any) -> None:
        """See `Collector.prepare`."""
        self._collector.prepare(experience)

    def seconds(self) -> dict[str, float]:
        """See `Collector.seconds`."""
        return self._collector.seconds()

    def threads(self) -> tuple[int, int] | None:
        """See `Collector.threads`."""
        return self._collector.threads()

    @property
    def warning(self) -> str:
        """See `Collector.warning`."""
        return self._collector.warning

    @property
    def advice(self) -> str:
        """See `Collector.advice`."""
        return self._collector.advice

    def request_stop(self) -> None:
        """See `Collector.request_stop`."""
        self._collector.request_stop()

    def close(self, envs: bool = True) -> None:
        """See `Collector.close`."""
        self._collector.close(envs)


def _of_actors(saved: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The curricula in the state of an asynchronous run, which a local one continues."""
    states = saved.get("actors") or [{"curriculum": own} for own in saved.get("curricula", ())]
    return [state["curriculum"] for state in states if "curriculum" in state]
