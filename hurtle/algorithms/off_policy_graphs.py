"""`StepGraphs`: gradient steps of an off-policy learner as CUDA graphs.

count → graphs of 1, 2, 4 … steps, sampling and target networks included → metrics, read back without synchronizing.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from hurtle.kernels.cuda_graphs import Graphs, Readback

MOST_STEPS = 32
"""Gradient steps in one CUDA graph."""


class StepGraphs:
    """Gradient steps on a device: several per CUDA graph, sampling included; metrics come back without waiting.

    On the CPU it runs the same steps one by one, for tests.

    Args:
        learner: Takes the steps.
        graphs: Captures them.
    """

    def __init__(self, learner: Any, graphs: Graphs):
        self.learner, self.graphs = learner, graphs
        self.beta = torch.ones((), device=graphs.device)
        self.metrics = torch.zeros((*learner.axes, len(learner.METRICS)), device=graphs.device)
        self.readback = Readback(graphs.device)
        self._captured: dict[tuple[int, int], Any] = {}  # by number of steps, and phase of the first

    @property
    def has_captured(self) -> bool:
        """Whether it has taken steps: graphs keep the addresses of what they step."""
        return bool(self._captured)

    def run(self, count: int, beta: float) -> dict[str, float]:
        """Take `count` gradient steps."""
        learner, config = self.learner, self.learner.config
        self.beta.fill_(beta)
        while count:
            before, every = learner.gradient_steps, config.target_every
            size = min(count, MOST_STEPS, every - before % every if every > 1 else count)
            size = 1 << (size.bit_length() - 1)  # few different graphs
            phase = before % learner.period
            if (size, phase) not in self._captured:
                self._captured[size, phase] = self.graphs.wrap(partial(self._take, size, phase), "learn")
            self._captured[size, phase]()
            learner.gradient_steps = before + size
            count -= size
            if every > 1 and learner.gradient_steps % every == 0:
                learner.move_targets()
        self.readback.send(self.metrics)
        return self.pending()

    def _take(self, count: int, phase: int) -> None:
        learner, seen = self.learner, []
        for step in range(phase, phase + count):
            learner.gradient_steps = step  # only its phase matters, which a graph repeats
            drawn = learner.draw(self.beta)
            errors, numbers = learner.gradient_step(learner.prepared(drawn))
            if learner.config.priority_alpha:
                learner.replay.update_priorities(drawn.ids, errors * (drawn.weights > 0))
            seen.append(numbers)
            if learner.config.target_every == 1:
                learner.move_targets()
        self.metrics.copy_(learner.mean_metrics(seen))

    def pending(self, wait: bool = False) -> dict[str, float]:
        """The newest metrics that have arrived."""
        arrived = self.readback.arrived(wait)
        return self.learner.checked(arrived[-1].tolist()) if arrived else {}
