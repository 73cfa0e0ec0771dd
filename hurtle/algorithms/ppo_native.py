"""PPO with compiled epochs: the same minibatches, loss and optimizers as in torch, many minibatches per call.

rollout → order of steps → `NativeUpdate.learn` → METRICS. PPO itself is in ppo.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hurtle.algorithms.algorithm import LearnerSetup
from hurtle.algorithms.native_judge import NativeJudge
from hurtle.algorithms.native_update import NativeUpdate, Order, Plan, Planner
from hurtle.algorithms.ppo import METRICS, PPO, Annealed, Epochs, MinibatchOrder, anneal, correct_advantages, use_vtrace
from hurtle.algorithms.ppo_config import PPOConfig
from hurtle.buffers.rollout import Rollout
from hurtle.contracts import Metrics, Weights
from hurtle.kernels.ranks import Ranks
from hurtle.policies.policy import Policy


class NativePPO(PPO):
    """PPO whose epochs are compiled.

    Raises:
        UnsupportedError: The kernels do not support this policy or optimizer.
    """

    def __init__(self, policy: Policy, config: PPOConfig, setup: LearnerSetup | None = None):
        setup = setup or LearnerSetup()
        epochs = NativeEpochs(policy, config, setup.num_threads, setup.ranks)
        super().__init__(policy, config, setup, epochs=epochs)
        self.native, self._judge = epochs.native, NativeJudge(epochs.native)

    def correct(self, rollout: Rollout) -> None:
        """See `PPO.correct`."""
        log_probs, _ = self._judge(rollout, torch.arange(rollout.num_rows))
        use_vtrace(rollout, log_probs.view_as(rollout.log_probs) - rollout.log_probs, self.config)

    @property
    def planner(self) -> Planner | None:
        """See `Learner.planner`; itself, unless an update depends on more than its rollout and its order."""
        depends = self.config.target_kl is not None or self.config.vtrace or self.order.by_segments
        return None if depends or self.ranks.several else self

    def plan(self, rollout: Rollout, progresses: Sequence[float]) -> Plan:
        """See `Planner.plan`."""
        config, settings = self.config, [anneal(self.config, progress) for progress in progresses]
        self._before = self.order.generator.get_state()
        order = _order_of_steps(rollout, self.order, len(progresses) * config.num_epochs)
        rates, clips = [now.learning_rate for now in settings], [now.clip_range for now in settings]
        return Plan(order, rates, clips, {"clips": True, "clips_values": config.clip_values})

    def explained(self, rollout: Rollout) -> float:
        """See `NativeUpdate.explained`."""
        return self.native.explained(rollout)

    def planned(self, plan: Plan, rollout: Rollout, results: np.ndarray, explained: np.ndarray) -> list[Metrics]:
        """See `Planner.planned`."""
        self.updates += len(results)
        if len(results) < len(plan.learning_rates):  # as if the others had not been planned
            self.order.generator.set_state(self._before)
            _order_of_steps(rollout, self.order, len(results) * self.config.num_epochs)
        parts = zip(results.mean(1).tolist(), explained.tolist(), plan.learning_rates, plan.clip_ranges, strict=False)
        names = (*METRICS, "explained_variance", "learning_rate", "clip_range")
        return [dict(zip(names, (*losses, *others), strict=True)) for losses, *others in parts]


class NativeEpochs(Epochs):
    """Epochs in compiled code, for policies on the CPU."""

    def __init__(self, policy: Policy, config: PPOConfig, num_threads: int | None = None, ranks: Ranks | None = None):
        self.policy, self.config = policy, config
        self.native = NativeUpdate(policy, config, num_threads, ranks)

    def run(self, rollout: Rollout, order: MinibatchOrder, now: Annealed, count: int) -> Tensor:
        """See `Epochs.run`; several epochs run in one call unless each needs its own random draws."""
        config = self.config
        self.native.set_learning_rate(now.learning_rate)
        together = 1 if config.vtrace or order.by_segments else count
        seen: list[Tensor] = []
        for _ in range(0, count, together):
            if config.vtrace:
                correct_advantages(self.policy, rollout, config, None)
            if order.by_segments:
                drawn = order.epoch(rollout, now.priority_beta)
                steps = order_of_segments(rollout, drawn, self.policy.is_recurrent, keeps_empty=order.ranks.several)
            else:
                steps = _order_of_steps(rollout, order, together)
            if len(steps.steps) or order.ranks.several:  # otherwise only steps of absent agents
                found = self.native.learn(
                    rollout, steps, clips=True, clips_values=config.clip_values, clip_range=now.clip_range
                )
                seen.append(torch.from_numpy(found))
        return torch.cat(seen) if seen else torch.zeros(0, len(METRICS))

    def weights(self, version: int) -> Weights:
        """See `Learner.weights`."""
        return self.native.weights(version)

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's moments."""
        return self.native.state_dict()

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Continue with saved moments."""
        self.native.load_state_dict(saved)

    def threads(self) -> tuple[int, int]:
        """See `Learner.threads`."""
        return self.native.threads()

    def close(self) -> None:
        """Stop the helper threads."""
        self.native.close()


def _order_of_steps(rollout: Rollout, order: MinibatchOrder, epochs: int) -> Order:
    """The steps of several epochs, each as `MinibatchOrder.epoch` draws it."""
    valid, config, size = None if rollout.all_valid else rollout.valid_steps(), order.config, rollout.num_valid
    drawn = torch.empty((epochs, size), dtype=torch.int64)
    for epoch in range(epochs):
        if config.shuffle:
            torch.randperm(size, generator=order.generator, out=drawn[epoch])
        else:
            torch.arange(size, out=drawn[epoch])
    steps = drawn.flatten() if valid is None else valid[drawn.flatten()]
    count = max(1, -(-size // config.minibatch_size))
    if order.ranks.several:
        return Order(steps, _minibatch_sizes(size, order.ranks.most(count), epochs, True))
    return Order(steps, _minibatch_sizes(size, count, epochs))


@lru_cache(maxsize=8)
def _minibatch_sizes(size: int, count: int, epochs: int, keeps_empty: bool = False) -> np.ndarray:
    """The number of steps in each minibatch, as `tensor_split` divides them."""
    each, larger = divmod(size, count)
    sizes = np.tile(np.repeat([each + 1, each], [larger, count - larger]), epochs)
    sizes = sizes if keeps_empty else sizes[sizes > 0]
    sizes.setflags(write=False)
    return sizes


def order_of_segments(
    rollout: Rollout, drawn: Iterable[tuple[Tensor, Tensor | None]], is_recurrent: bool, keeps_empty: bool = False
) -> Order:
    """Minibatches of whole segments, each given by its rows and their weights; without those that have no valid steps."""
    valid = rollout.valid.flatten()
    times = torch.arange(rollout.num_steps).unsqueeze(1) * rollout.num_rows
    steps, importance, segments = [], [], []
    for rows, weights in drawn:
        every = (times + rows).flatten()
        kept = valid[every]
        if not keeps_empty and not kept.any():
            continue
        steps.append(every[kept])
        segments.append(rows)
        if weights is not None:
            importance.append(weights.float() if is_recurrent else weights.repeat(rollout.num_steps)[kept].float())
    if not steps:
        return Order(torch.zeros(0, dtype=torch.int64), np.zeros(0, np.int64))
    order = Order(torch.cat(steps), _lengths(steps), torch.cat(importance) if importance else None)
    return order._replace(segments=torch.cat(segments), segment_sizes=_lengths(segments)) if is_recurrent else order


def _lengths(parts: list[Tensor]) -> np.ndarray:
    return np.array([len(part) for part in parts])
