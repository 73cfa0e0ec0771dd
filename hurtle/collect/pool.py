"""`PoolCollector`: asynchronous pools, whose envs come back in any order and at their own pace.

recv → the envs' last steps are completed → policy → their next steps begin → send. Every env writes a segment of T steps;
a rollout is the first N segments that are full. Fast envs fill several, slow ones carry theirs over: no step is lost.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import torch

from hurtle.buffers.rollout import EpisodeStats, Rollout
from hurtle.collect.inference import Actor
from hurtle.collect.rewards import RewardRule
from hurtle.collect.rows import VecRows, merge_stats
from hurtle.tracking.timing import Timer
from hurtle.vector.vec_env import VecEnv

STEP_FIELDS = (
    *("obs", "actions", "masks", "log_probs", "values", "rewards", "terminated", "truncated"),
    *("final_values", "starts", "valid"),
)


class PoolCollector:
    """Fills rollouts with segments of whichever envs are ready.

    The steps of a segment may stem from two versions of the policy, when an update fell into it; each has the log-prob of the
    policy that took it.

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
            with self.timer("inference"):
                actions = self._act(rows, batch)
            with self.timer("env"):
                self.vec.send(self.rows.actions(actions), env_ids)
        with self.timer("copy"):
            self._hand_over(rollout)
        return merge_stats(episodes)

    def _begin(self, rollout: Rollout) -> None:
        policy = self.actor.policy
        has_masks = self.has_masks  # receives the first batch, if nobody has
        self._segments = Rollout(policy, rollout.num_steps, self._num_segments, has_masks, str(rollout.device))
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
        at = (torch.from_numpy(self._time[rows[done]]), torch.from_numpy(self._segment[rows[done]]))
        for name, values in (("rewards", rewards * counts), ("terminated", terminated), ("truncated", truncated)):
            field = getattr(segments, name)
            field[at] = torch.from_numpy(values[done]).to(field)
        segments.final_values[at] = 0.0
        ended = terminated | truncated
        stats = self.rows.episodes(infos, rewards, ended, None)
        cut = (truncated & ~terminated).nonzero()[0]
        if cut.size:
            # with NEXT_STEP, the observation of now is the final one
            final = obs[cut] if self.rows.next_step else self.rows.final_obs(infos, cut, obs)
            self.rows.check_finite("final observation", final, self._steps, rows[cut])
            where = (torch.from_numpy(self._time[rows[cut]]), torch.from_numpy(self._segment[rows[cut]]))
            segments.final_values[where] = self.actor.values(final, self.actor.state_of(rows[cut])).to(segments.device)
        self._time[rows[done]] += 1
        self._begin_episodes(rows, self.rows.over(infos, ended, counts), ended)
        return [] if stats is None else [stats]

    def _begin_episodes(self, rows: np.ndarray, over: np.ndarray, ended: np.ndarray) -> None:
        """Note who of these rows begins an episode with the coming step; see `GeneralCollector`."""
        segments = self._segments
        assert segments is not None
        acted, acting, starts, resetting = (part[rows] for part in (self._acted, self._counts, self._starts, self._resetting))
        waiting = starts & ~acting
        for row in rows[over & ~acting & ~starts & ~resetting]:  # gone without a flag, and the env is over
            segment = int(self._segment[row])
            last = segments.valid[: self._time[row], segment].nonzero()[-1:, 0]
            segments.terminated[last, segment] = True
        began = (resetting | waiting | (ended & ~over)) if self.rows.next_step else (ended | waiting | over)
        self._starts[rows] = began | ~acted
        self._resetting[rows] = over & self.rows.next_step

    def _act(self, rows: np.ndarray, batch: tuple[Any, ...]) -> np.ndarray:
        """Begin the next step of these rows, in a new segment where the old one is full; returns the env's actions."""
        segments, actor = self._segments, self.actor
        assert segments is not None
        obs, infos = self.rows.flat(batch[0]), batch[-1]
        seen, device = actor.see(obs), segments.device
        mask = None if segments.masks is None else torch.from_numpy(self.rows.mask(infos)).to(device)
        starts = torch.from_numpy(self._starts[rows]).to(device)
        full = (self._time[rows] == segments.num_steps).nonzero()[0]
        old = self._segment[rows[full]]
        for row in rows[full]:
            segment = self._free.popleft()
            self._segment[row], self._row_of[segment], self._time[row] = segment, row, 0
        first = rows[self._time[rows] == 0]
        for part, memory in zip(segments.initial_state, actor.state_of(first), strict=True):
            part[torch.from_numpy(self._segment[first])] = memory
        actions, log_probs, values = actor.act(seen, mask, starts, rows)
        segments.last_values[torch.from_numpy(old)] = values[torch.from_numpy(full)]
        self._full.extend(old.tolist())
        present = self.rows.present(infos)
        self._counts[rows] = ~self._resetting[rows] if present is None else present & ~self._resetting[rows]
        self._acted[rows] = True
        time, segment = self._time[rows], self._segment[rows]
        at = (torch.from_numpy(time), torch.from_numpy(segment))
        for name, written in (("obs", seen), ("actions", actions), ("log_probs", log_probs), ("values", values)):
            field = getattr(segments, name)
            field[at] = written.to(field)
        segments.starts[at], segments.valid[at] = starts, torch.from_numpy(self._counts[rows]).to(device)
        if segments.masks is not None and mask is not None:
            segments.masks[at] = mask
        if actor.policy.normalizer is not None:
            self._raw[time, segment] = obs
        return actor.env_actions(actions)

    def _hand_over(self, rollout: Rollout) -> None:
        """Copy the segments that were full first into the rollout."""
        segments = self._segments
        assert segments is not None
        chosen = [self._full.popleft() for _ in range(rollout.num_rows)]
        index = torch.tensor(chosen, device=segments.device)
        for name in STEP_FIELDS:
            if (field := getattr(segments, name)) is not None:
                getattr(rollout, name).copy_(field[:, index])
        rollout.last_values.copy_(segments.last_values[index])
        for part, memory in zip(rollout.initial_state, segments.initial_state, strict=True):
            part.copy_(memory[index])
        rollout.all_valid, rollout.advantages_for = bool(rollout.valid.all()), None
        self.rewards.apply(rollout, self._row_of[chosen])
        if self.actor.policy.normalizer is not None:
            self.actor.policy.normalizer.update(self._raw[:, chosen], rollout.valid)
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
