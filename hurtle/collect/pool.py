"""`PoolCollector`: asynchronous pools, whose envs come back in any order and at their own pace.

recv → the envs' last steps are completed → policy → send → what it said is written down. Every env writes a segment of T steps;
a rollout is the first N segments that are full. Fast envs fill several, slow ones carry theirs over: no step is lost.
"""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hurtle.buffers.rollout import EpisodeStats, Rollout
from hurtle.collect.inference import Actor
from hurtle.collect.rewards import RewardRule
from hurtle.collect.rows import VecRows, merge_stats
from hurtle.native.threads import free_cores
from hurtle.tracking.timing import Timer
from hurtle.vector.vec_env import VecEnv

POLICY_FIELDS = ("obs", "actions", "masks", "log_probs", "values", "final_values")
"""Written where the policy is …"""
HOST_FIELDS = ("rewards", "terminated", "truncated", "starts", "valid")
"""… and by the host, in memory of its own where that is a GPU; copied when a rollout is handed over."""


class _Steps(NamedTuple):
    """The steps that a batch of rows begins."""

    places: Tensor  # in the segments, flat
    seen: Tensor
    mask: Tensor | None
    starts: Tensor
    full: np.ndarray  # which of the rows had filled their segments …
    filled: np.ndarray  # … and those segments


class PoolCollector:
    """Fills rollouts with segments of whichever envs are ready.

    The steps of a segment may stem from two versions of the policy, when an update fell into it; each has the log-prob of the
    policy that took it.

    With worker processes this is double buffering: while the policy acts for one batch, the envs of the others are stepped. A
    batch is sent as soon as its actions are known; log-probs, values and memory are not waited for.

    Args:
        vec: A pool: a `VecEnv` with `batch_size < num_envs`.
        actor: The policy, acting for the pool's rows.
        rewards: What becomes of rewards before they are learned from.
        seed: Env i gets seed + i.
        timer: Where the time goes.

    Attributes:
        stop_requested: Set it, for instance in a signal handler, to end `collect` at the next batch.
    """

    def __init__(self, vec: VecEnv, actor: Actor, rewards: RewardRule, seed: int = 0, timer: Timer | None = None):
        self.rows, self.vec, self.actor, self.rewards = VecRows(vec), vec, actor, rewards
        self.timer = timer or Timer()
        self.stop_requested = False
        self._seed = seed
        count = self.rows.num_rows
        self._num_segments = 2 * count + vec.batch_size * self.rows.num_agents  # one under way per row, N full, one batch more
        self._segments: Rollout | None = None
        self._host: dict[str, np.ndarray] = {}  # the fields of the segments that the host writes
        self._raw = np.zeros(0)  # [T, segments, …]: what the policy's normalizer learns from
        self._segment = np.arange(count)  # which one each row fills
        self._time = np.zeros(count, np.int64)  # how far it is
        self._free = deque(range(count, self._num_segments))
        self._full: deque[int] = deque()
        self._row_of = np.arange(self._num_segments)
        self._acted = np.zeros(count, np.bool_)  # whose action is under way
        self._counts = np.ones(count, np.bool_)  # whose action counts: not absent, not a reset
        self._starts = np.ones(count, np.bool_)
        self._resetting = np.zeros(count, np.bool_)
        self._held: tuple[Any, ...] | None = None  # the first batch, received to learn whether there are masks
        self._steps = np.zeros(self.rows.num_envs, np.int64)  # of each env, in this run

    @property
    def steps(self) -> int:
        """Steps of an env, on average."""
        return int(self._steps.mean())

    @property
    def has_masks(self) -> bool:
        """Whether the env tells which actions are legal."""
        if self._segments is not None:
            return self._segments.masks is not None
        if self._held is None:
            obs, infos = self.vec.reset(seed=self._seed)
            nothing = self.rows.actions(np.zeros(self.vec.batch_size * self.rows.num_agents, np.bool_))
            self._held = (obs, nothing, nothing, nothing, infos)
        return self.rows.mask(self._held[-1]) is not None

    def collect(self, rollout: Rollout) -> EpisodeStats | None:
        """Fill the rollout with the next segments to be ready; the episodes that ended, or None if asked to stop."""
        if self._segments is None:
            self._begin(rollout)
        episodes: list[EpisodeStats] = []
        while len(self._full) < rollout.num_rows:
            if self.stop_requested:
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
                values = values.clone()  # a network's may be a view of what it saw, which is the env's memory
                for_env = self.rows.actions(self.actor.env_actions())
            with self.timer("env"):
                self.vec.send(for_env, env_ids)
            with self.timer("copy"):
                self._write(steps, actions, log_probs, values)
        with self.timer("copy"):
            self._hand_over(rollout)
        return merge_stats(episodes)

    def _begin(self, rollout: Rollout) -> None:
        policy = self.actor.policy
        has_masks = self.has_masks  # receives the first batch, if nobody has
        self._segments = Rollout(policy, rollout.num_steps, self._num_segments, has_masks, str(rollout.device))
        self._host = {name: self.actor.staging.host_array(getattr(self._segments, name)) for name in HOST_FIELDS}
        if policy.normalizer is not None:
            assert self._held is not None
            obs = self.rows.flat(self._held[0])
            self._raw = np.zeros((rollout.num_steps, self._num_segments, *obs.shape[1:]), obs.dtype)

    def _complete(self, rows: np.ndarray, env_ids: np.ndarray, batch: tuple[Any, ...]) -> list[EpisodeStats]:
        """Write down what the actions of these rows, if they took one, led to."""
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
        stats = self.rows.episodes(infos, rewards, ended, None)
        cut = (truncated & ~terminated).nonzero()[0]
        if cut.size:
            # with NEXT_STEP, the observation of now is the final one
            final = obs[cut] if self.rows.next_step else self.rows.final_obs(infos, cut, obs)
            self.rows.check_finite("final observation", final, self._steps, rows[cut])
            segments.final_values.flatten()[self._places(rows[cut])] = self.actor.values(final, self.actor.state_of(rows[cut]))
        self._time[rows[done]] += 1
        self._begin_episodes(rows, self.rows.over(infos, ended, counts), ended)
        return [] if stats is None else [stats]

    def _begin_episodes(self, rows: np.ndarray, over: np.ndarray, ended: np.ndarray) -> None:
        """Note who of these rows begins an episode with the coming step; see `GeneralCollector`."""
        acted, acting, starts, resetting = (part[rows] for part in (self._acted, self._counts, self._starts, self._resetting))
        waiting = starts & ~acting
        for row in rows[over & ~acting & ~starts & ~resetting]:  # gone without a flag, and the env is over
            segment = int(self._segment[row])
            last = self._host["valid"][: self._time[row], segment].nonzero()[0][-1:]
            self._host["terminated"][last, segment] = True
        began = (resetting | waiting | (ended & ~over)) if self.rows.next_step else (ended | waiting | over)
        self._starts[rows] = began | ~acted
        self._resetting[rows] = over & self.rows.next_step

    def _begin_steps(self, rows: np.ndarray, batch: tuple[Any, ...]) -> _Steps:
        """Begin the next step of these rows, in a new segment where the old one is full.

        What the env told is written down now: once actions are sent, its arrays may change.
        """
        segments, actor = self._segments, self.actor
        assert segments is not None
        obs, infos = self.rows.flat(batch[0]), batch[-1]
        full = (self._time[rows] == segments.num_steps).nonzero()[0]
        filled = self._segment[rows[full]]
        for row in rows[full]:
            segment = self._free.popleft()
            self._segment[row], self._row_of[segment], self._time[row] = segment, row, 0
        present = self.rows.present(infos)
        self._counts[rows] = ~self._resetting[rows] if present is None else present & ~self._resetting[rows]
        self._acted[rows] = True
        at = self._time[rows], self._segment[rows]
        self._host["starts"][at], self._host["valid"][at] = self._starts[rows], self._counts[rows]
        if actor.policy.normalizer is not None:
            self._raw[at] = obs
        places, seen = self._places(rows), actor.see(obs)
        segments.obs.flatten(0, 1)[places] = seen
        mask: Tensor | None = None
        if segments.masks is not None and (legal := self.rows.mask(infos)) is not None:
            segments.masks.flatten(0, 1)[places] = mask = actor.staging.to_device("mask", legal)
        first = rows[self._time[rows] == 0]
        if segments.initial_state and first.size:
            begun = actor.staging.to_device("segments begun", self._segment[first])
            for part, memory in zip(segments.initial_state, actor.state_of(first), strict=True):
                part[begun] = memory
        return _Steps(places, seen, mask, actor.staging.to_device("starts", self._starts[rows]), full, filled)

    def _write(self, steps: _Steps, actions: Tensor, log_probs: Tensor, values: Tensor) -> None:
        """Write down what the policy said; the envs are under way already."""
        segments, staging = self._segments, self.actor.staging
        assert segments is not None
        for name, written in (("actions", actions), ("log_probs", log_probs), ("values", values)):
            field = getattr(segments, name)
            field.flatten(0, 1)[steps.places] = written.to(field)
        if steps.full.size:
            filled = staging.to_device("segments filled", steps.filled)
            segments.last_values[filled] = values[staging.to_device("rows full", steps.full)]
            self._full.extend(steps.filled.tolist())

    def _places(self, rows: np.ndarray) -> Tensor:
        """Where these rows' steps are in the segments: flat indices, on the device."""
        return self.actor.staging.to_device("places", self._time[rows] * self._num_segments + self._segment[rows])

    def _hand_over(self, rollout: Rollout) -> None:
        """Copy the segments that were full first into the rollout."""
        segments = self._segments
        assert segments is not None
        chosen = [self._full.popleft() for _ in range(rollout.num_rows)]
        staging = self.actor.staging
        index = staging.to_device("chosen", np.array(chosen))
        for name in POLICY_FIELDS:
            if (field := getattr(segments, name)) is not None:
                getattr(rollout, name).copy_(field[:, index])
        for name in HOST_FIELDS:
            getattr(rollout, name).copy_(staging.to_device(f"all {name}", self._host[name][:, chosen]))
        rollout.last_values.copy_(segments.last_values[index])
        for part, memory in zip(rollout.initial_state, segments.initial_state, strict=True):
            part.copy_(memory[index])
        segments.final_values.index_fill_(1, index, 0.0)  # for whoever fills them next
        valid = self._host["valid"][:, chosen]
        rollout.all_valid, rollout.advantages_for = bool(valid.all()), None
        self.rewards.apply(rollout, self._row_of[chosen])
        if self.actor.policy.normalizer is not None:
            self.actor.policy.normalizer.update(self._raw[:, chosen], valid)
        self._free.extend(chosen)

    def state_dict(self) -> dict[str, Any]:
        """The random streams and statistics; envs of a pool are under way and cannot be saved."""
        return {"actor": self.actor.state_dict(), "rewards": self.rewards.state_dict(), "steps": int(self._steps.max())}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Go on with the saved streams and statistics, in new episodes with seeds that this run has not used."""
        self.actor.load_state_dict(saved["actor"], with_state=False)
        self.rewards.load_state_dict(saved["rewards"])
        self._steps[:] = saved["steps"]
        self._seed, self._held = self._seed + (saved["steps"] + 1) * self.rows.num_envs, None

    def close(self) -> None:
        """Close the vector."""
        self.vec.close()


def double_buffered_batch(num_envs: int, num_workers: int | None, backend: str, device: torch.device | str) -> int | None:
    """The `batch_size` with which a pool keeps a GPU and worker processes busy at once; None where a pool would not help.

    With half of the envs per batch, the workers step one half while the policy acts for the other. That takes workers with at
    least two envs each: a worker whose only env waits for its action has nothing to do in the meantime. The pool must be in
    the order "ready", the default: "fair" would take the envs of the same workers each time, and let the others wait.

    Args:
        num_envs: Of the vector.
        num_workers: As `make_vec` takes it; None: as many as it would start.
        backend: As `make_vec` takes it; only "process" has workers for certain.
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
