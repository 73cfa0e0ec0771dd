"""`AsyncCollector`: collectors in threads of their own ("actors"), which collect while the learner learns.

The thread of a collector on another machine (ray_collector.py) waits for it, and is otherwise like any other.
weights → mailbox → actors → full slots → one rollout for the learner. The lag says how far the actors may run ahead.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

import torch

from hurtle.buffers.rollout import Rollout
from hurtle.contracts import Collector, Episodes, Weights
from hurtle.errors import HurtleError
from hurtle.policies.policy import Policy
from hurtle.tracking.timing import Timer

FREE_SLOTS = 2
"""Rollouts of each actor that may wait for the learner when the lag is free."""
CLOSE_SECONDS = 2.0
"""How long `close` waits for actors that are in the middle of a step."""
SWITCH_SECONDS = 2e-4
"""How long one thread may keep Python from the others: with the usual 5 ms, actors wait for the learner many times a step."""
LOOK_SECONDS = 0.5
"""How often the learner looks for a stop while it waits: one that a signal handler asks for may come without waking it."""
IDLE = 0.1
"""A share of idle time that is worth a remark."""


@dataclass(eq=False)
class _Slot:
    """Memory of one actor's rollout, which circulates between the actor and the learner."""

    actor: _Actor
    rollout: Rollout
    by: _Actor  # which one filled it: another one only while the lag is free and the owner is away
    episodes: Episodes = field(default_factory=Episodes)
    order: int = 0  # among all that were filled


@dataclass(eq=False)
class _Actor:
    """A collector and its thread."""

    collector: Collector
    first_row: int
    device: torch.device  # where it acts
    free: deque[_Slot] = field(default_factory=deque)
    full: deque[_Slot] = field(default_factory=deque)
    begun: int = 0  # rollouts
    is_collecting: bool = False
    waited: float = 0.0  # seconds
    thread: threading.Thread | None = None

    def has_ended(self, seconds: float) -> bool:
        """Whether the thread ends within these seconds."""
        if self.thread is not None:
            self.thread.join(seconds)
        return self.thread is None or not self.thread.is_alive()


class AsyncCollector(Collector):
    """Several collectors as one, each in a thread.

    With a lag, update k learns from rollout k of every actor, which was collected with the weights of update k − lag: results
    do not depend on who is faster. With a free lag, actors use the newest weights, and updates the oldest rollouts.

    Args:
        collectors: One per actor, each with a policy and envs of its own; all start rows at the sum of those before.
        policy: The learner's, which gives the shapes.
        lag: Updates that weights may be behind, or None: free.
        timer: Records where the learner's thread spends its time.

    Raises:
        HurtleError: The lag is free, and actors have different numbers of rows.
    """

    def __init__(self, collectors: Sequence[Collector], policy: Policy, lag: int | None, timer: Timer | None = None):
        edges = [0, *accumulate(collector.num_rows for collector in collectors)]
        self._device = next(policy.parameters()).device
        self._actors = [_Actor(collector, first, self._device) for collector, first in zip(collectors, edges, strict=False)]
        self.num_rows = edges[-1]
        self.resumes_exactly = all(collector.resumes_exactly for collector in collectors)
        self.policy, self.lag, self.timer = policy, lag, timer or Timer()
        if lag is None and len({collector.num_rows for collector in collectors}) > 1:
            raise HurtleError("lag='free' needs actors with as many envs each: make num_envs a multiple of num_actors.")
        self._changed = threading.Condition()  # guards everything below
        self._weights: dict[int, Weights] = {}  # by the number of rollouts taken when they came
        self._newest = 0
        self._taken = self._filled = 0  # rollouts
        self._joined: tuple[int, ...] = ()  # the versions of those that were taken last
        self._error: BaseException | None = None
        self._stopping = self._paused = self._closing = False
        self._began, self._waited = time.perf_counter(), 0.0
        self._switch_seconds = 0.0  # as it was before

    @property
    def has_masks(self) -> bool:
        """Whether the envs report legal actions."""
        return self._actors[0].collector.has_masks

    def new_rollout(self, num_steps: int) -> Rollout:
        """See `Collector.new_rollout`; makes the actors' slots too."""
        for actor in self._actors:
            count = FREE_SLOTS - actor.collector.runs_ahead if self.lag is None else self.lag + 1
            actor.free = deque(_Slot(actor, actor.collector.new_rollout(num_steps), actor) for _ in range(count))
            actor.device = actor.free[0].rollout.device
        return Rollout(self.policy, num_steps, self.num_rows, self.has_masks, str(self._device))

    def prepare(self, experience: Rollout) -> None:
        """See `Collector.prepare`."""
        for actor in self._actors:
            actor.collector.prepare(actor.free[0].rollout if actor.free else actor.full[0].rollout)

    def load_weights(self, weights: Weights) -> None:
        """Put a copy of the weights into the mailbox."""
        buffers = tuple(part.clone() for part in weights.buffers)
        copied = replace(weights, flat=weights.flat.clone(), buffers=buffers, policy=None)
        _wait_for(self._device)
        with self._changed:
            self._weights[self._taken], self._newest = copied, weights.version
            for old in [taken for taken in self._weights if taken < self._taken - (self.lag or 0)]:
                del self._weights[old]
            self._changed.notify_all()
        for actor in self._actors:
            actor.collector.announce(copied)

    # What the actors' threads do.

    def _run(self, actor: _Actor) -> None:
        try:
            with _own_stream(actor.device):
                while not self._closing:
                    if not actor.collector.is_ready(LOOK_SECONDS):
                        continue
                    if (slot := self._next(actor)) is None:
                        break
                    episodes = actor.collector.collect(slot.rollout)
                    _wait_for(actor.device)
                    self._put(actor, slot, episodes)
        except BaseException as error:
            with self._changed:
                self._error, actor.is_collecting = self._error or error, False
                self._changed.notify_all()

    def _next(self, actor: _Actor) -> _Slot | None:
        """Wait until this actor may collect, with the right weights; None when it has to end."""
        began = time.perf_counter()
        with self._changed:
            self._changed.wait_for(lambda: self._closing or self._may_begin(actor))
            if self._closing:
                return None
            actor.waited += time.perf_counter() - began
            weights, slot = self._weights[self._wanted(actor)], self._free_slots(actor).popleft()
            actor.begun, actor.is_collecting = actor.begun + 1, True
        actor.collector.load_weights(weights)
        return slot

    def _wanted(self, actor: _Actor) -> int:
        """Which weights this actor collects with next: a key of `_weights`."""
        return max(self._weights, default=0) if self.lag is None else max(0, actor.begun - self.lag)

    def _may_begin(self, actor: _Actor) -> bool:
        ready = bool(self._free_slots(actor)) and self._wanted(actor) in self._weights
        return ready and not actor.collector.is_away and not self._paused and self._error is None

    def _free_slots(self, actor: _Actor) -> deque[_Slot]:
        """Where this actor finds a free slot: its own ones or, with a free lag, those of one that is away."""
        if actor.free or self.lag is not None:
            return actor.free
        lent = (other.free for other in self._actors if other.free and other.collector.is_away)
        return next(lent, actor.free)

    def _put(self, actor: _Actor, slot: _Slot, episodes: Episodes | None) -> None:
        """Hand over a rollout; None if it was cut short."""
        with self._changed:
            actor.is_collecting = False
            if episodes is None:
                actor.begun -= 1
                slot.actor.free.appendleft(slot)
            else:
                self._filled += 1
                slot.episodes, slot.order, slot.by = episodes, self._filled, actor
                actor.full.append(slot)
            idle = actor.collector.idle_seconds()
            actor.waited = actor.waited if idle is None else idle
            self._changed.notify_all()

    # What the learner's thread does.

    def collect(self, experience: Rollout) -> Episodes | None:
        """Take the next rollouts from the actors; see `Collector.collect`.

        Raises:
            Exception: Whatever an actor raised.
        """
        self._start()
        began = time.perf_counter()
        with self.timer("wait"), self._changed:
            self._paused = False
            self._changed.notify_all()
            while not self._changed.wait_for(lambda: self._error or self._stopping or self._is_ready(), LOOK_SECONDS):
                pass
            self._waited += time.perf_counter() - began
            if self._error is not None:
                raise self._error
            if self._stopping:
                self._stopping, self._paused = False, True
                return None
            slots = self._take()
        with self.timer("copy"):
            alone = len(slots) == 1 and slots[0].rollout.may_exchange
            if alone and self._device.type == slots[0].actor.device.type == "cpu":
                experience.exchange(slots[0].rollout)
            else:
                experience.join([slot.rollout for slot in slots], [slot.by.first_row for slot in slots])
                _wait_for(self._device)
        with self._changed:
            for slot in slots:
                slot.actor.free.append(slot)
            self._taken += 1
            self._changed.notify_all()
        return Episodes.join([slot.episodes for slot in slots])

    def _start(self) -> None:
        if self._actors[0].thread is None:
            self._began = time.perf_counter()
            self._switch_seconds = sys.getswitchinterval()
            sys.setswitchinterval(min(SWITCH_SECONDS, self._switch_seconds))
            for number, actor in enumerate(self._actors):
                actor.thread = threading.Thread(target=self._run, args=(actor,), name=f"hurtle actor {number}", daemon=True)
                actor.thread.start()

    def _is_ready(self) -> bool:
        if self.lag is None:
            return sum(len(actor.full) for actor in self._actors) >= len(self._actors)
        return all(actor.full for actor in self._actors)

    def _take(self) -> list[_Slot]:
        """One slot of each actor, or, if the lag is free, as many of those that were filled first."""
        if self.lag is None:
            waiting = sorted((slot for actor in self._actors for slot in actor.full), key=lambda slot: slot.order)
            slots = waiting[: len(self._actors)]
        else:
            slots = [actor.full[0] for actor in self._actors]
        for slot in slots:
            slot.by.full.remove(slot)
        self._joined = tuple(slot.rollout.version for slot in slots)
        return slots

    def request_stop(self) -> None:
        """Make `collect` return None, and the actors wait."""
        with self._changed:
            self._stopping = self._paused = True
            for actor in self._actors:
                if actor.is_collecting:
                    actor.collector.request_stop()
            self._changed.notify_all()

    def pending(self, wait: bool = False) -> Episodes:
        """See `Collector.pending`."""
        return Episodes.join([actor.collector.pending(wait) for actor in self._actors])

    def metrics(self) -> dict[str, float]:
        """The actors' own, the lag of the last rollout, rollouts that wait, and which part of the time who waited."""
        found: dict[str, float] = {}
        for actor in self._actors:
            for name, value in actor.collector.metrics().items():
                found[name] = found.get(name, 0.0) + value
        lags = [self._newest - version for version in self._joined] or [0]
        waiting = sum(len(actor.full) for actor in self._actors)
        found |= {"lag": sum(lags) / len(lags), "lag_max": float(max(lags)), "queue": float(waiting)}
        actors, learner = self._idle()
        return {**found, "idle/actors": actors, "idle/learner": learner}

    def _idle(self) -> tuple[float, float]:
        """The part of the time that actors have waited for weights or a free slot, and the learner for rollouts."""
        spent = max(time.perf_counter() - self._began, 1e-9)
        return min(1.0, sum(actor.waited for actor in self._actors) / len(self._actors) / spent), min(1.0, self._waited / spent)

    @property
    def advice(self) -> str:
        """See `Collector.advice`."""
        actors, learner = self._idle()
        if self.lag == 0:
            return f"lag 0: actors and learner take turns; actors wait {actors:.0%} of the time, the learner {learner:.0%}"
        if max(actors, learner) < IDLE:
            return f"balanced: actors wait {actors:.0%} of the time, the learner {learner:.0%}"
        if actors > learner:
            change = "fewer actors, or cheaper updates" if len(self._actors) > 1 else "cheaper updates"
            return f"learner-bound: actors wait {actors:.0%} of the time; {change} (larger minibatches, fewer passes)"
        return f"actor-bound: the learner waits {learner:.0%} of the time; more actors or workers, or more learning per step"

    def threads(self) -> tuple[int, int] | None:
        """See `Collector.threads`; of all actors."""
        found = [each for actor in self._actors if (each := actor.collector.threads()) is not None]
        return (sum(used for used, _ in found), sum(most for _, most in found)) if found else None

    @property
    def warning(self) -> str:
        """See `Collector.warning`."""
        return self._actors[0].collector.warning

    # Saving.

    def state_dict(self, with_envs: bool = True) -> dict[str, Any]:
        """See `Collector.state_dict`: the actors' states, and the rollouts that the learner has not seen.

        Waits for rollouts that are being collected, if that makes it exact. A local run can continue from it too, in new
        episodes.
        """
        was_paused = self._paused
        exact = with_envs and self.resumes_exactly and self._settle()
        states = [actor.collector.state_dict(exact) for actor in self._actors]
        drawn = torch.cat([state["actor"]["steps"] for state in states])
        saved = {"steps": max(state["steps"] for state in states), "actor": {"steps": drawn, "state": []}}
        saved |= {"num_envs": self.num_rows}
        if exact:
            slots = [[_saved(slot) for slot in actor.full] for actor in self._actors]
            saved |= {"actors": states, "lag": self.lag, "slots": slots}
        elif curricula := [state["curriculum"] for state in states if "curriculum" in state]:  # no matter of the envs' states
            saved["curricula"] = curricula
        with self._changed:
            self._paused = was_paused
            self._changed.notify_all()
        return saved

    def _settle(self) -> bool:
        """Wait until no actor collects or may begin; False if one failed."""
        with self._changed:
            self._paused |= self.lag is None  # otherwise they stop by themselves, at the same place each time
            self._changed.wait_for(
                lambda: (
                    self._error
                    or not any(actor.is_collecting or (actor.thread and self._may_begin(actor)) for actor in self._actors)
                )
            )
            return self._error is None

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """See `Collector.load_state_dict`; exact with as many actors and the same lag, or from a local run with one actor."""
        states, waiting = saved.get("actors") or [saved], saved.get("slots", ())
        fits = len(states) == len(self._actors) and saved.get("lag", self.lag) == self.lag and "envs" in states[0]
        fits = fits and all(len(slots) <= len(actor.free) for actor, slots in zip(self._actors, waiting, strict=False))
        fits = fits and all(  # num_steps may have changed
            old["rollout"]["rewards"].shape == actor.free[0].rollout.rewards.shape
            for actor, slots in zip(self._actors, waiting, strict=False)
            for old in slots
        )
        if not fits:
            begin_anew = {"steps": saved["steps"], "actor": saved["actor"], "num_envs": saved.get("num_envs", self.num_rows)}
            kept = saved.get("curricula") or [state["curriculum"] for state in states if "curriculum" in state]
            begun = [{"curriculum": kept[k % len(kept)]} if kept else {} for k in range(len(self._actors))]
            states = [begin_anew | own for own in begun]
        for actor, state in zip(self._actors, states, strict=True):
            actor.collector.load_state_dict(state)
        for actor, slots in zip(self._actors, waiting if fits else (), strict=False):
            for old in slots:
                slot = actor.free.popleft()
                slot.rollout.load_state_dict(old["rollout"])
                slot.episodes, slot.order, slot.by = Episodes(**old["episodes"]), old["order"], actor
                actor.full.append(slot)
                actor.begun, self._filled = actor.begun + 1, max(self._filled, slot.order)

    def close(self, envs: bool = True) -> None:
        """See `Collector.close`; the envs of an actor that does not return from a step in time are left to it."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        until = time.monotonic() + CLOSE_SECONDS
        for actor in self._actors:
            if actor.is_collecting:
                actor.collector.request_stop()
        for number, actor in enumerate(self._actors):
            is_stepping = not actor.has_ended(max(0.0, until - time.monotonic()))
            if is_stepping and not (envs and actor.collector.closes_midway):
                print(f"hurtle: actor {number} is still in a step; its envs are left open.", file=sys.stderr, flush=True)
                continue
            actor.collector.close(envs)
            actor.has_ended(CLOSE_SECONDS)
        if self._switch_seconds:
            sys.setswitchinterval(self._switch_seconds)


@contextmanager
def _own_stream(device: torch.device) -> Iterator[None]:
    """A CUDA stream of this thread's own, so that actors and learner share a GPU; nothing on the CPU."""
    if device.type != "cuda":
        yield
        return
    with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device)):
        yield


def _wait_for(device: torch.device) -> None:
    """Wait for what this thread has launched, since another one will read it."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def _saved(slot: _Slot) -> dict[str, Any]:
    episodes = {name: dict(value) if name in ("metrics", "levels") else value for name, value in vars(slot.episodes).items()}
    return {"rollout": slot.rollout.state_dict(), "episodes": episodes, "order": slot.order}
