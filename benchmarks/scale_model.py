"""What a cluster of collectors carries: a model with few constants that are measured, and a simulation of its queues.

constants, machines → rate, first bottleneck, price of a billion steps. Used by scale.py; knows nothing of Ray.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

WAITING = 2
"""Rollouts of a collector that may wait for the learner: one in its slot, and one that it ran ahead with."""


@dataclass(frozen=True)
class Constants:
    """What was measured on one machine.

    Attributes:
        step_overhead: Seconds per step of an env, besides the env's own: the policy and the collector.
        rollout_overhead: Seconds per rollout in which its collector does nothing else: calls and copies.
        take_seconds: Seconds of the learner's process per rollout: calls, threads, unpickling.
        copy_rate: Bytes per second at which rollouts are joined.
        contention: The slope of a collector's time with the share of the machine's cores that are in use.
    """

    step_overhead: float
    rollout_overhead: float
    take_seconds: float
    copy_rate: float
    contention: float = 0.0


@dataclass(frozen=True)
class Workload:
    """What is collected: `num_envs` envs per collector, one after the other, for `num_steps` steps."""

    env_seconds: float
    num_envs: int
    num_steps: int
    step_bytes: float
    weight_bytes: float = 0.0

    @property
    def steps(self) -> int:
        """Steps of one rollout."""
        return self.num_envs * self.num_steps


@dataclass(frozen=True)
class Machines:
    """What is paid for.

    Attributes:
        cores: Of each machine, one collector on each.
        network: Bytes per second in and out of each machine, the learner's too.
        price: Dollars per hour of a machine.
        learner_price: Dollars per hour of the learner's machine.
        learner_rate: Steps per second that its updates take.
    """

    cores: int
    network: float
    price: float
    learner_price: float
    learner_rate: float


def collector_seconds(found: Constants, work: Workload, load: float = 0.0) -> float:
    """The time of one rollout where nobody waits; `load` is the share of the cores in use."""
    stepping = work.steps * (work.env_seconds + found.step_overhead)
    return stepping * (1 + found.contention * load) + found.rollout_overhead


def taking_seconds(found: Constants, work: Workload) -> float:
    """The learner's process per rollout."""
    return found.take_seconds + work.steps * work.step_bytes / found.copy_rate


def limits(found: Constants, work: Workload, machines: Machines, count: int) -> dict[str, float]:
    """Steps per second that each part of a cluster of `count` machines allows."""
    collectors = count * machines.cores
    return {
        "envs": collectors * work.steps / collector_seconds(found, work, 1.0),
        "taking rollouts": work.steps / taking_seconds(found, work),
        "learning": machines.learner_rate,
        "network, rollouts": machines.network / work.step_bytes,
    }


def weights_seconds(work: Workload, machines: Machines, count: int) -> float:
    """How old weights are when all machines have them: each fetches a version once, at worst all from the learner's.

    This delays nobody, since collectors go on with those that they have; it is lag.
    """
    return count * work.weight_bytes / machines.network


def predict(found: Constants, work: Workload, machines: Machines, count: int) -> tuple[float, str, float]:
    """Steps per second of a cluster, its first bottleneck, and dollars for a billion steps."""
    allowed = limits(found, work, machines, count)
    first = min(allowed, key=lambda name: allowed[name])
    hourly = count * machines.price + machines.learner_price
    return allowed[first], first, 1e9 / allowed[first] / 3600 * hourly


def fit(times: Sequence[tuple[int, int, float, float]]) -> tuple[float, float]:
    """Overheads per step and per rollout, by least squares with neither below zero.

    Args:
        times: Of several sizes: steps per rollout, rollouts, seconds of an env's step, seconds in all.

    Example:
        >>> per_step, per_rollout = fit([(100, 10, 0.001, 1.3), (400, 10, 0.001, 4.6)])
        >>> round(per_step, 6), round(per_rollout, 6)
        (0.0001, 0.02)
    """
    table = np.array([(steps, 1.0) for steps, *_ in times])
    rest = np.array([seconds / rollouts - steps * env for steps, rollouts, env, seconds in times])
    weight = 1 / np.array([seconds / rollouts for _, rollouts, _, seconds in times])  # relative errors
    solved, *_ = np.linalg.lstsq(table * weight[:, None], rest * weight, rcond=None)
    if solved[1] < 0:
        return max(0.0, float((rest * table[:, 0] * weight**2).sum() / (table[:, 0] ** 2 * weight**2).sum())), 0.0
    return max(0.0, float(solved[0])), float(solved[1])


@dataclass(frozen=True)
class Simulated:
    """What a simulation found."""

    rate: float  # rollouts per second
    lag: float  # mean number of updates between weights that acted and those that learned
    idle_learner: float
    idle_collectors: float


def simulate(
    collectors: int,
    rollout_seconds: float,
    take_seconds: float,
    update_seconds: float = 0.0,
    weights_seconds: float = 0.0,
    updates: int = 200,
    spread: float = 0.05,
    link_seconds: float = 0.0,
    seed: int = 0,
) -> Simulated:
    """Collectors, the network and the learner as queues, event by event; the lag is free.

    A collector works on a rollout, then on the next one unless `WAITING` of its own wait. A finished rollout passes the
    learner's link, which carries one after the other; the learner takes those that came first, as many as there are
    collectors, and updates. New weights arrive everywhere after `weights_seconds`.

    Args:
        collectors: How many.
        rollout_seconds: Of one rollout.
        take_seconds: The learner's time per rollout.
        update_seconds: The learner's time per update.
        weights_seconds: From an update until its weights are everywhere.
        updates: How long to go on; the first quarter does not count.
        spread: Standard deviation of a rollout's time, relative; they are log-normal.
        link_seconds: A rollout's time on the learner's link.
        seed: Of the times.
    """
    dice, order = random.Random(seed), itertools.count()
    events: list[tuple[float, int, str, int, int]] = []  # when, number, what, collector or version, version
    version, held, arrived = 0, [0] * collectors, list[tuple[int, int]]()
    blocked: dict[int, float] = {}
    link_free = now = began = 0.0
    busy_until, learning, waited = 0.0, False, 0.0
    idle, lags, done, counted_from = 0.0, list[int](), 0, max(1, updates // 4)

    def start(collector: int, at: float, with_version: int) -> None:
        seconds = rollout_seconds * dice.lognormvariate(-spread * spread / 2, spread)
        heapq.heappush(events, (at + seconds, next(order), "finished", collector, with_version))

    for collector in range(collectors):
        start(collector, 0.0, 0)
    known, learner_since = 0, 0.0
    while done < updates:
        now, _, what, who, acted = heapq.heappop(events)
        if what == "finished":
            link_free = max(now, link_free) + link_seconds
            heapq.heappush(events, (link_free, next(order), "arrived", who, acted))
            held[who] += 1
            if held[who] < WAITING:
                start(who, now, known)
            else:
                blocked[who] = now
        elif what == "arrived":
            arrived.append((who, acted))
        elif what == "weights":
            known = max(known, who)
        else:  # the learner has updated
            learning, version, done, learner_since = False, version + 1, done + 1, now
            heapq.heappush(events, (now + weights_seconds, next(order), "weights", version, 0))
            if done == counted_from:
                began, idle, waited = now, 0.0, 0.0
                lags.clear()
        if not learning and len(arrived) >= collectors:
            taken, arrived = arrived[:collectors], arrived[collectors:]
            learning, idle = True, idle + now - learner_since
            busy_until = now + collectors * take_seconds + update_seconds
            heapq.heappush(events, (busy_until, next(order), "updated", 0, 0))
            lags += [version - acted for _, acted in taken]
            for collector, _ in taken:
                held[collector] -= 1
                if collector in blocked:
                    since = blocked.pop(collector)
                    waited += now - max(since, began)
                    start(collector, now, known)
    span = max(now - began, 1e-12)
    rate = (done - counted_from) * collectors / span
    return Simulated(rate, sum(lags) / max(1, len(lags)), min(1.0, idle / span), min(1.0, waited / span / collectors))
