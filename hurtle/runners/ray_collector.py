"""`RayCollector`: a collector on a cluster, for the thread that waits for it; to the asynchronous runner one like any other.

weights → object store → its Ray actor → block of bytes → views in a rollout. A lost actor is replaced: what it had not finished
is lost, and nothing else.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from hurtle.buffers.packed_rollout import Packing
from hurtle.buffers.rollout import Rollout
from hurtle.contracts import Collector, Episodes, Weights
from hurtle.errors import HurtleError
from hurtle.runners.ray_answers import cause_of, check_versions, checked, who
from hurtle.runners.ray_host import About, Header, Ready
from hurtle.vector.ray_cluster import ray

if TYPE_CHECKING:
    from hurtle.policies.policy import Policy
    from hurtle.runners.ray_squad import Squad

LOOK_SECONDS = 0.2
"""How often a thread that waits for a rollout looks for a stop."""
START_SECONDS = 300.0
"""What a collector that has a place is given to import what it needs and to make its envs."""
MOST_PAUSE = 30.0
"""Seconds between replacements of a collector that is lost again and again."""


class _Call(NamedTuple):
    """A rollout that was asked for."""

    answer: Any
    name: str
    begun: float


class RayCollector(Collector):
    """One collector of a squad.

    Rollouts are numbered from 1, whichever actor collects them: a number that was lost does not come again. With a free lag the
    next one is asked for before the last one has travelled.

    Args:
        squad: Knows the cluster.
        number: Its own.
        policy: Gives the shapes.

    Attributes:
        about: Where it is.
    """

    closes_midway = True

    def __init__(self, squad: Squad, number: int, policy: Policy):
        self._squad, self._number, self._policy = squad, number, policy
        share = squad.shares[number]
        self.num_rows = share.num_envs * squad.facts.num_agents
        self.runs_ahead = squad.is_free
        self.resumes_exactly = not squad.is_free and squad.facts.resumes_exactly
        self.is_away = True
        self.about: About | None = None
        self._host: Any = None
        self._coming: Any = None  # its next answer until it is ready
        self._since, self._not_before = 0.0, 0.0
        self._losses = 0  # since its last rollout
        self._all_losses = 0
        self._call: _Call | None = None
        self._begun = self._finished = 0
        self._stop = threading.Event()
        self._weights: Weights | None = None
        steps = torch.zeros(self.num_rows, dtype=torch.int64)
        self._state: dict[str, Any] = {"steps": 0, "actor": {"steps": steps, "state": []}}
        self._continues = False  # whether that state is to be continued from
        self._metrics: dict[str, float] = {}
        self._idle: float = 0.0
        self._idle_before: float = 0.0
        self._warning = ""

    @property
    def name(self) -> str:
        """Its number and place, for messages."""
        return who(self._number, self.about)

    @property
    def has_masks(self) -> bool:
        """See `Collector.has_masks`."""
        return self._squad.facts.has_masks

    @property
    def has_place(self) -> bool:
        """Whether it was placed, and is being made."""
        return self.is_away and self.about is not None

    @property
    def warning(self) -> str:
        """See `Collector.warning`."""
        return self._warning

    def new_rollout(self, num_steps: int) -> Rollout:
        """See `Collector.new_rollout`; of the learner's process, on the CPU."""
        self._num_steps = num_steps
        rollout = Rollout(self._policy, num_steps, self.num_rows, self.has_masks)
        self._squad.packings[id(rollout)], rollout.may_exchange = Packing(rollout), False
        return rollout

    def load_weights(self, weights: Weights) -> None:
        """See `Collector.load_weights`."""
        self._weights = weights

    def announce(self, weights: Weights) -> None:
        """See `Collector.announce`."""
        if self.runs_ahead:
            self._weights = weights

    def prepare(self, experience: Rollout) -> None:
        """See `Collector.prepare`; waits for all that have a place."""
        if self.is_away:
            self._squad.gather()

    # Coming and going.

    def is_ready(self, seconds: float) -> bool:
        """See `Collector.is_ready`; asks for a place, then for a collector there."""
        if not self.is_away:
            return True
        if (pause := self._not_before - time.monotonic()) > 0:
            time.sleep(min(pause, seconds))
            self._squad.check_patience(self._number)
            return False
        try:
            if self._coming is None:
                self._host = self._squad.first_host(self._number)
                self._coming = self._host.hello.remote(sys.path)
            if not ray.wait([self._coming], timeout=seconds)[0]:
                self._squad.check_patience(self._number)
                if self.about is not None and time.monotonic() - self._since > START_SECONDS:
                    self._lose(f"it took over {START_SECONDS:g} s to make its envs.")
                return False
            answer = ray.get(self._coming)
            if isinstance(answer, About):
                self._set_up(answer)
                return False
            ready: Ready = self._checked(answer)
        except ray.exceptions.RayTaskError as error:
            raise HurtleError(f"{self.name} failed.\n\n{error}") from error
        except ray.exceptions.RayError as error:
            self._lose(f"Ray says: {cause_of(error)}")
            return False
        self._warning, self._coming, self.is_away = ready.warning, None, False
        self._squad.joined(self._number)
        return True

    def _set_up(self, about: About) -> None:
        self.about, self._since = about, time.monotonic()
        check_versions(self._number, about)
        squad, share = self._squad, self._squad.shares[self._number]
        emulate, saved = squad.facts.own_actions is not None, self._state if self._continues else None
        self._coming = self._host.set_up.remote(squad.job(self._num_steps), self._number, share, emulate, saved)

    def _checked(self, answer: Any) -> Any:
        return checked(self.name, answer)

    def _lose(self, why: str) -> None:
        """Give up the actor; the next call of `is_ready` asks for another."""
        name = self.name
        self._squad.end(self._number)
        self._losses, self._all_losses = self._losses + 1, self._all_losses + 1
        if self._losses > 1:
            self._not_before = time.monotonic() + min(MOST_PAUSE, 0.25 * 2**self._losses)
        self._host = self._coming = self._call = self.about = None
        self._idle_before = self._idle
        self.is_away = True
        self._squad.left(self._number, f"{name} was lost: {why}")

    # Collecting.

    def collect(self, rollout: Rollout) -> Episodes | None:
        """See `Collector.collect`.

        Raises:
            HurtleError: An env failed, or the collector; names it, and ends with the traceback from there.
        """
        packing = self._squad.packings[id(rollout)]
        packing.take_back(rollout)
        try:
            call = self._call = self._call or self._ask()
            while not ray.wait([call.answer], timeout=LOOK_SECONDS, fetch_local=False)[0]:
                if self._stop.is_set():  # the call goes on: whoever collects next takes it
                    self._stop.clear()
                    return None
                if time.monotonic() - call.begun > self._squad.train.collector_timeout:
                    limit = self._squad.train.collector_timeout
                    self._lose(f"its rollout took over {limit:g} s (collector_timeout).")
                    return None
            self._call = self._ask() if self.runs_ahead else None
            header, block = self._checked(ray.get(call.answer, timeout=self._squad.train.collector_timeout))
        except ray.exceptions.RayTaskError as error:
            raise HurtleError(f"{self.name} failed.\n\n{error}") from error
        except ray.exceptions.RayError as error:
            self._lose(f"Ray says: {cause_of(error)}")
            return None
        return self._receive(header, packing, rollout, block)

    def _receive(self, header: Header, packing: Packing, rollout: Rollout, block: Any) -> Episodes:
        number = int(header.contents.ids[0].rpartition("-")[2])
        if number <= self._finished:
            raise HurtleError(f"{self.name} sent rollout {number} again, after {self._finished}.")
        self._finished, self._losses = number, 0
        packing.lend(rollout, header.contents, block)
        self._state, self._continues = {**header.state, "num_envs": self._squad.train.num_envs}, True
        self._metrics, self._idle = header.metrics, self._idle_before + header.idle
        self._squad.finished()
        return header.episodes

    def _ask(self) -> _Call:
        """Ask for the next rollout, with the newest weights."""
        assert self._weights is not None
        self._begun += 1
        name = f"{self._number}-{self._begun}"
        number, reference = self._squad.weights(self._weights)
        answer = self._host.collect.remote(name, number, [reference], not self.runs_ahead)
        return _Call(answer, name, time.monotonic())

    def request_stop(self) -> None:
        """Make `collect` return; what its actor is collecting is taken by the next call."""
        self._stop.set()

    def metrics(self) -> dict[str, float]:
        """The collector's own, whether it is here, and how often it was lost: added up, collectors and losses."""
        return {**self._metrics, "collectors": float(not self.is_away), "collectors_lost": float(self._all_losses)}

    def idle_seconds(self) -> float:
        """See `Collector.idle_seconds`; as its actor says."""
        return self._idle

    # Saving.

    def state_dict(self, with_envs: bool = True) -> dict[str, Any]:
        """See `Collector.state_dict`; without the envs it is what came with the last rollout."""
        if with_envs and self.resumes_exactly and not self.is_away:
            with contextlib.suppress(ray.exceptions.RayError):  # its thread will find out
                state = ray.get(self._host.state.remote(), timeout=self._squad.train.collector_timeout)
                return {**self._checked(state), "rollouts": self._begun}
        return {name: value for name, value in self._state.items() if name != "envs"}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """See `Collector.load_state_dict`."""
        self._state, self._continues = saved, True
        self._begun = self._finished = saved.get("rollouts", 0)  # some of which the learner has not seen yet

    def close(self, envs: bool = True) -> None:
        """See `Collector.close`; closes the whole squad."""
        self._squad.close()
