"""`PoolCollector`: asynchronous pools, whose envs return in any order and at their own pace.

recv → complete the envs' last steps → policy → send → store what it chose. Every env fills a segment of T steps; a rollout is
the first N full segments. Fast envs fill several, slow ones carry theirs over: no step is lost.
"""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hurtle.buffers.rollout import ACTING_FIELDS, OUTCOMES, Finals, Rollout
from hurtle.collect.inference import Actor
from hurtle.collect.rows import VecRows, episode_starts, unused_seeds
from hurtle.contracts import Collector, Episodes, ListedEpisodes, Weights
from hurtle.native.threads import free_cores
from hurtle.tracking.timing import Timer
from hurtle.vector.vec_env import VecEnv

LAST_FIELDS = ("last_obs", "last_starts")
"""Fields of the observation after a segment."""


class _Steps(NamedTuple):
    """The steps that a batch of rows starts."""

    places: Tensor  # flat indices into the segments
    seen: Tensor
    mask: Tensor | None
    starts: Tensor
    filled: np.ndarray  # segments that these rows have filled


class PoolCollector(Collector):
    """Fills rollouts with segments from whichever envs are ready.

    The steps of a segment may come from two versions of the policy, if an update fell in between; each has the log-prob of the
    policy that took it.

    With worker processes this is double buffering: while the policy acts for one batch, those of the other step. A batch is
    sent as soon as its actions are known, without waiting for log-probs, values and memory.

    Args:
        vec: A pool: a `VecEnv` with `batch_size < num_envs`.
        actor: The policy, acting for the pool's rows.
        seed: Env i gets seed + i.
        timer: Records where the time goes.
    """

    resumes_exactly = False

    def __init__(self, vec: VecEnv, actor: Actor, seed: int = 0, timer: Timer | None = None):
        self.rows, self.vec, self.actor = VecRows(vec), vec, actor
        actor.name_of = self.rows.name_of
        self.num_rows = self.rows.num_rows
        self.closes_midway = getattr(vec, "steps_elsewhere", False)
        self.timer = timer or Timer()
        self._version, self._stopping = 0, False
        self._seed = seed
        count = self.rows.num_rows
        self._num_segments = 2 * count + vec.batch_size * self.rows.num_agents  # one per row, N full, one more batch
        self._segments: Rollout | None = None
        self._host: dict[str, np.ndarray] = {}  # the fields of the segments that the host writes
        self._versions = np.zeros(self._num_segments, np.int64)  # of the weights that began each segment
        self._finals: dict[int, list[tuple[int, np.ndarray, tuple[Tensor, ...]]]] = {}  # by segment: step, observation, memory
        self._segment = np.arange(count)  # which segment each row fills
        self._time = np.zeros(count, np.int64)  # next step in that segment
        self._free = deque(range(count, self._num_segments))
        self._full: deque[int] = deque()
        self._row_of = np.arange(self._num_segments)
        self._acted = np.zeros(count, np.bool_)  # rows whose action was sent
        self._counts = np.ones(count, np.bool_)  # rows whose action counts: not absent, not resetting
        self._starts = np.ones(count, np.bool_)
        self._resetting = np.zeros(count, np.bool_)
        self._held: tuple[Any, ...] | None = None  # the first batch, received to find out whether there are masks
        self._steps = np.zeros(self.rows.num_envs, np.int64)  # per env, in this run

    @property
    def steps(self) -> int:
        """Average steps per env."""
        return int(self._steps.mean())

    @property
    def has_masks(self) -> bool:
        """Whether the env reports legal actions."""
        if self._segments is not None:
            return self._segments.masks is not None
        if self._held is None:
            obs, infos = self.vec.reset(seed=self._seed)
            nothing = self.rows.actions(np.zeros(self.vec.batch_size * self.rows.num_agents, np.bool_))
            self._held = (obs, nothing, nothing, nothing, infos)
        return self.rows.mask(self._held[-1]) is not None

    def new_rollout(self, num_steps: int) -> Rollout:
        """A rollout that `collect` can fill."""
        return Rollout(self.actor.policy, num_steps, self.num_rows, self.has_masks, str(self.actor.device))

    def load_weights(self, weights: Weights) -> None:
        """See `Collector.load_weights`; segments in progress continue with the new weights."""
        self.actor.load_weights(weights)
        self._version = weights.version

    def request_stop(self) -> None:
        """Make `collect` stop at the next batch."""
        self._stopping = True

    def collect(self, rollout: Rollout) -> Episodes | None:
        """Fill the rollout with the next segments to be completed; see `Collector.collect`."""
        if self._segments is None:
            self._begin(rollout)
        episodes: list[ListedEpisodes] = []
        while len(self._full) < rollout.num_rows:
            if self._stopping:
                self._stopping = False
                return None
            with self.timer("env"):
                batch = self._held or self.vec.recv()
                self._held = None
            env_ids = batch[-1]["env_id"].copy()
            rows = (env_ids[:, None] * self.rows.num_agents + np.arange(self.rows.num_agents)).reshape(-1)
            with self.timer("copy"):
                episodes += self._complete(rows, env_ids, batch)
                steps = self._begin_steps(rows, batch)
            with self.timer("inference"):
                actions, log_probs, values = self.actor.act(steps.seen, steps.mask, steps.starts, rows)
                values = values.clone()  # these may be a view of the network's input, which is the env's memory
                for_env = self.rows.actions(self.actor.env_actions())
            with self.timer("env"):
                self.vec.send(for_env, env_ids)
            with self.timer("copy"):
                self._write(steps, actions, log_probs, values)
        with self.timer("copy"):
            self._hand_over(rollout)
        return Episodes.listed(episodes)

    def _begin(self, rollout: Rollout) -> None:
        policy = self.actor.policy
        self._versions[:] = self._version
        has_masks = self.has_masks  # receives the first batch, unless already done
        self._segments = Rollout(policy, rollout.num_steps, self._num_segments, has_masks, str(rollout.device))
        self._host = {name: self.actor.staging.host_array(getattr(self._segments, name)) for name in OUTCOMES}

    def _complete(self, rows: np.ndarray, env_ids: np.ndarray, batch: tuple[Any, ...]) -> list[ListedEpisodes]:
        """Store the outcomes of the actions of these rows, if they took any."""
        segments = self._segments
        assert segments is not None
        obs, rewards, terminated, truncated, infos = batch
        obs, rewards, terminated, truncated = (self.rows.flat(part) for part in (obs, rewards, terminated, truncated))
        acted = self._acted[rows]
        self._steps[env_ids] += acted[:: self.rows.num_agents]
        self.rows.check_finite("observation", obs, self._steps, rows)
        self.rows.check_finite("reward", rewards, self._steps, rows)
        counts = self._counts[rows] & acted
        terminated, truncated = terminated & counts, truncated & counts
        done = acted.nonzero()[0]
        at = self._time[rows[done]], self._segment[rows[done]]
        for name, values in (("rewards", rewards * counts), ("terminated", terminated), ("truncated", truncated)):
            self._host[name][at] = values[done]
        ended = terminated | truncated
        just_ended = self.rows.ended_episodes(infos, rewards, ended, None)
        cut = (truncated & ~terminated).nonzero()[0]
        if cut.size:
            final = self.rows.final_obs(infos, cut, obs)
            self.rows.check_finite("final observation", final, self._steps, rows[cut])
            memory = self.actor.state_of(rows[cut])
            for k, row in enumerate(rows[cut]):
                kept = (int(self._time[row]), final[k], tuple(part[k] for part in memory))
                self._finals.setdefault(int(self._segment[row]), []).append(kept)
        self._time[rows[done]] += 1
        self._begin_episodes(rows, self.rows.over(infos, ended, counts), ended)
        return [] if just_ended is None else [just_ended]

    def _begin_episodes(self, rows: np.ndarray, over: np.ndarray, ended: np.ndarray) -> None:
        """Record which of these rows start an episode with their next step."""
        acted, acting, starts, resetting = (part[rows] for part in (self._acted, self._counts, self._starts, self._resetting))
        found = episode_starts(starts, resetting, acting, ended, over, self.rows.next_step)
        for row in rows[found.left]:
            segment = int(self._segment[row])
            last = self._host["valid"][: self._time[row], segment].nonzero()[0][-1:]
            self._host["terminated"][last, segment] = True
        self._starts[rows], self._resetting[rows] = found.starts | ~acted, found.resetting

    def _begin_steps(self, rows: np.ndarray, batch: tuple[Any, ...]) -> _Steps:
        """Start the next step of these rows, in a new segment where the old one is full.

        What the env reported is stored now: once actions are sent, its arrays may be overwritten.
        """
        segments, actor = self._segments, self.actor
        assert segments is not None
        obs, infos = self.rows.flat(batch[0]), batch[-1]
        full = (self._time[rows] == segments.num_steps).nonzero()[0]
        filled = self._segment[rows[full]]
        if full.size:
            self._end_segments(rows[full], filled, obs[full])
        for row in rows[full]:
            segment = self._free.popleft()
            self._versions[segment] = self._version
            self._segment[row], self._row_of[segment], self._time[row] = segment, row, 0
        present = self.rows.present(infos)
        self._counts[rows] = ~self._resetting[rows] if present is None else present & ~self._resetting[rows]
        self._acted[rows] = True
        at = self._time[rows], self._segment[rows]
        self._host["starts"][at], self._host["valid"][at] = self._starts[rows], self._counts[rows]
        places = self._places(rows)
        segments.obs.flatten(0, 1)[places] = seen = actor.staging.to_device("obs", obs, segments.obs.dtype)
        if actor.policy.normalizer is not None:
            segments.inputs.flatten(0, 1)[places] = seen = actor.policy.normalizer.normalize(seen)
        mask: Tensor | None = None
        if segments.masks is not None and (legal := self.rows.mask(infos)) is not None:
            segments.masks.flatten(0, 1)[places] = mask = actor.staging.to_device("mask", legal)
        first = rows[self._time[rows] == 0]
        if segments.initial_state and first.size:
            begun = actor.staging.to_device("segments begun", self._segment[first])
            for part, memory in zip(segments.initial_state, actor.state_of(first), strict=True):
                part[begun] = memory
        return _Steps(places, seen, mask, actor.staging.to_device("starts", self._starts[rows]), filled)

    def _end_segments(self, rows: np.ndarray, filled: np.ndarray, obs: np.ndarray) -> None:
        """Store what follows full segments."""
        segments, staging = self._segments, self.actor.staging
        assert segments is not None
        at = staging.to_device("segments filled", filled)
        segments.last_obs[at] = staging.to_device("obs after", obs, segments.obs.dtype)
        segments.last_starts[at] = staging.to_device("starts after", self._starts[rows])
        for part, memory in zip(segments.last_state, self.actor.state_of(rows), strict=True):
            part[at] = memory

    def _write(self, steps: _Steps, actions: Tensor, log_probs: Tensor, values: Tensor) -> None:
        """Store what the policy chose; the envs are already stepping."""
        segments = self._segments
        assert segments is not None
        for name, written in (("actions", actions), ("log_probs", log_probs), ("values", values)):
            field = getattr(segments, name)
            field.flatten(0, 1)[steps.places] = written.to(field)
        self._full.extend(steps.filled.tolist())

    def _places(self, rows: np.ndarray) -> Tensor:
        """Flat indices of these rows' steps in the segments, on the device."""
        return self.actor.staging.to_device("places", self._time[rows] * self._num_segments + self._segment[rows])

    def _hand_over(self, rollout: Rollout) -> None:
        """Copy the segments that filled up first into the rollout."""
        segments = self._segments
        assert segments is not None
        chosen = [self._full.popleft() for _ in range(rollout.num_rows)]
        staging = self.actor.staging
        index = staging.to_device("chosen", np.array(chosen))
        for name in ACTING_FIELDS:
            if (field := getattr(segments, name)) is not None and (name != "inputs" or field is not segments.obs):
                getattr(rollout, name).copy_(field[:, index])
        for name in OUTCOMES:
            getattr(rollout, name).copy_(staging.to_device(f"all {name}", self._host[name][:, chosen]))
        for name in LAST_FIELDS:
            getattr(rollout, name).copy_(getattr(segments, name)[index])
        for name in ("initial_state", "last_state"):
            for part, memory in zip(getattr(rollout, name), getattr(segments, name), strict=True):
                part.copy_(memory[index])
        self._hand_over_finals(rollout, chosen)
        rollout.all_valid, rollout.done = bool(self._host["valid"][:, chosen].all()), self.actor.bootstrap(rollout)
        rollout.columns, rollout.version = self._row_of[chosen], int(self._versions[chosen].min())
        self._free.extend(chosen)

    def _hand_over_finals(self, rollout: Rollout, chosen: list[int]) -> None:
        """The final observations of these segments' truncated episodes."""
        kept = [(t, n, obs, memory) for n, segment in enumerate(chosen) for t, obs, memory in self._finals.pop(segment, [])]
        rollout.finals = rollout.new_finals(0, self.actor.policy)
        if kept:
            staging = self.actor.staging
            rollout.finals = Finals(
                staging.to_device("final steps", np.array([t for t, *_ in kept])),
                staging.to_device("final rows", np.array([column for _, column, *_ in kept])),
                staging.to_device("final obs", np.stack([obs for _, _, obs, _ in kept]), rollout.obs.dtype),
                tuple(torch.stack(parts) for parts in zip(*(memory for *_, memory in kept), strict=True)),
            )

    def state_dict(self, with_envs: bool = True) -> dict[str, Any]:
        """The random streams; the envs of a pool are stepping and cannot be saved."""
        return {"actor": self.actor.state_dict(), "steps": int(self._steps.max())}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Continue the saved random streams, in new episodes with unused seeds."""
        self.actor.load_state_dict(saved["actor"], with_state=False)
        self._steps[:] = saved["steps"]
        self._seed, self._held = self._seed + unused_seeds(saved, self.rows.num_envs), None

    def close(self, envs: bool = True) -> None:
        """See `Collector.close`."""
        if envs:
            self.vec.close()


def double_buffered_batch(num_envs: int, num_workers: int | None, backend: str, device: torch.device | str) -> int | None:
    """The `batch_size` that keeps a GPU and worker processes busy at once; None if a pool would not help.

    With half of the envs per batch, the workers step one half while the policy acts for the other. This needs workers with at
    least two envs each: a worker whose only env waits for its action is idle. The pool's order must be "ready", the default:
    "fair" would take the envs of the same workers each time, and leave the others idle.

    Args:
        num_envs: Envs of the vector.
        num_workers: As `make_vec` takes it; None: as many as it would start.
        backend: As `make_vec` takes it; only "process" is sure to have workers.
        device: Where the policy is.

    Example:
        >>> double_buffered_batch(64, 8, "process", "cuda")
        32
        >>> double_buffered_batch(64, 8, "process", "cpu") is None
        True
    """
    if torch.device(device).type != "cuda" or backend != "process":
        return None
    workers = num_workers or min(num_envs, free_cores())
    return num_envs // 2 if num_envs % 2 == 0 and num_envs >= 2 * workers else None
