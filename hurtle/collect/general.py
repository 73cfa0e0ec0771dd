"""`GeneralCollector`: any vector env × any torch policy, all envs in step.

observations → policy → actions → env step → rollout, T times; then V of what came after. Knows nothing of losses.
Asynchronous pools have a collector of their own, see pool.py.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from gymnasium.vector import VectorEnv
from torch import Tensor

from hurtle.buffers.rollout import EpisodeStats, Rollout
from hurtle.collect.inference import Actor
from hurtle.collect.rewards import RewardRule
from hurtle.collect.rows import VecRows, merge_stats
from hurtle.tracking.timing import Timer

OUTCOMES = ("rewards", "terminated", "truncated", "final_values", "valid", "starts")


class GeneralCollector:
    """Fills rollouts from a vector whose envs all step together.

    Args:
        vec: Any `gymnasium.vector.VectorEnv`, with SAME_STEP or NEXT_STEP autoreset.
        actor: The policy, acting for the vector's rows; its normalizer, if any, learns from each rollout afterwards.
        rewards: What becomes of rewards before they are learned from.
        seed: Env i gets seed + i.
        timer: Where the time goes.

    Attributes:
        stop_requested: Set it, for instance in a signal handler, to end `collect` at the next step.
    """

    def __init__(
        self, vec: VectorEnv, actor: Actor, rewards: RewardRule | None = None, seed: int = 0, timer: Timer | None = None
    ):
        self.rows, self.actor, self.rewards = VecRows(vec), actor, rewards or RewardRule()
        self.vec: Any = vec
        self.timer = timer or Timer()
        self.steps = 0  # of each env
        self.stop_requested = False
        self._seed = seed
        self._obs: np.ndarray | None = None  # what to act on next; None before the first reset
        self._mask: np.ndarray | None = None
        self._present: np.ndarray | None = None
        self._starts = np.ones(self.rows.num_rows, np.bool_)  # who begins an episode with the coming step
        self._resetting = np.zeros(self.rows.num_rows, np.bool_)  # NEXT_STEP: for whom the coming step is a reset
        self._raw = np.zeros(0)  # [T, N, …]: what the policy's normalizer learns from

    @property
    def has_masks(self) -> bool:
        """Whether the env tells which actions are legal."""
        self._begin()
        return self._mask is not None

    def new_rollout(self, num_steps: int) -> Rollout:
        """A rollout that `collect` can fill."""
        return Rollout(self.actor.policy, num_steps, self.rows.num_rows, self.has_masks, str(self.actor.device))

    def collect(self, rollout: Rollout) -> EpisodeStats | None:
        """Fill the rollout with the next `num_steps` steps of every env; the episodes that ended, or None if asked to stop."""
        self._begin()
        rows, actor, timer = self.rows, self.actor, self.timer
        host = {name: actor.staging.host_array(getattr(rollout, name)) for name in OUTCOMES}
        episodes: list[EpisodeStats] = []
        cut_off: list[tuple[int, np.ndarray, np.ndarray, tuple[Tensor, ...]]] = []  # truncated: step, rows, final obs, memory
        rollout.all_valid, rollout.advantages_for = True, None
        for part, now in zip(rollout.initial_state, actor.state, strict=True):
            part.copy_(now)
        for t in range(rollout.num_steps):
            if self.stop_requested:
                return None
            with timer("copy"):
                mask = self._store(rollout, host, t)
                acting = self._acting()
                host["valid"][t] = True if acting is None else acting
                rollout.all_valid &= acting is None or bool(acting.all())
            with timer("inference"):
                actions, rollout.log_probs[t], rollout.values[t] = actor.act(rollout.obs[t], mask, rollout.starts[t])
                rollout.actions[t] = actions
                for_env = rows.actions(actor.env_actions())
            with timer("env"):
                obs, rewards, terminated, truncated, infos = self.vec.step(for_env)
            with timer("copy"):
                self.steps += 1
                rewards, terminated, truncated = rows.flat(rewards), rows.flat(terminated), rows.flat(truncated)
                rows.check_finite("reward", rewards, self.steps)
                if acting is not None:  # nothing happened to the others
                    rewards, terminated, truncated = rewards * acting, terminated & acting, truncated & acting
                host["rewards"][t], host["terminated"][t], host["truncated"][t] = rewards, terminated, truncated
                ended = terminated | truncated
                if (stats := rows.episodes(infos, rewards, ended, acting)) is not None:
                    episodes.append(stats)
                    cut = (truncated & ~terminated).nonzero()[0]
                    if cut.size and not rows.next_step:
                        final = rows.final_obs(infos, cut, rows.flat(obs))
                        rows.check_finite("final observation", final, self.steps, cut)
                        cut_off.append((t, cut, final, actor.state_of(cut)))
                self._begin_episodes(host, t, rows.over(infos, ended, acting), ended, acting)
                self._receive(obs, infos)
        with timer("inference"):
            self._bootstrap(rollout, host, cut_off)
        with timer("copy"):
            self._finish(rollout, host)
        return merge_stats(episodes)

    def _begin(self) -> None:
        if self._obs is None:
            self._receive(*self.vec.reset(seed=self._seed))

    def _receive(self, obs: Any, infos: dict[str, Any]) -> None:
        self._obs = self.rows.flat(obs)
        self._mask, self._present = self.rows.mask(infos), self.rows.present(infos)
        self.rows.check_finite("observation", self._obs, self.steps)

    def _store(self, rollout: Rollout, host: dict[str, np.ndarray], t: int) -> Tensor | None:
        """Write down what the policy is about to see; returns the mask of legal actions, if there is one."""
        assert self._obs is not None
        if self.actor.policy.normalizer is not None:
            if self._raw.shape != (rollout.num_steps, *self._obs.shape):
                self._raw = np.zeros((rollout.num_steps, *self._obs.shape), self._obs.dtype)
            self._raw[t] = self._obs
        rollout.obs[t] = self.actor.see(self._obs)
        host["starts"][t] = self._starts
        staging = self.actor.staging
        if not staging.shares_memory:
            rollout.starts[t] = staging.to_device("starts", self._starts)
        if rollout.masks is None:
            return None
        rollout.masks[t] = True if self._mask is None else staging.to_device("mask", self._mask)
        return rollout.masks[t]

    def _acting(self) -> np.ndarray | None:
        """The rows for which the coming step counts; None: all."""
        if not self.rows.next_step:
            return self._present
        return ~self._resetting if self._present is None else self._present & ~self._resetting

    def _begin_episodes(
        self, host: dict[str, np.ndarray], t: int, over: np.ndarray, ended: np.ndarray, acting: np.ndarray | None
    ) -> None:
        """Note who begins an episode with the coming step; an absent agent's first step may be further off."""
        waiting = np.zeros_like(ended)
        if acting is not None:
            waiting = self._starts & ~acting
            for row in (over & ~acting & ~self._starts & ~self._resetting).nonzero()[0]:
                # It went away without a flag, and the env is over before it came back: its last step was its episode's.
                last = host["valid"][:t, row].nonzero()[0][-1:]
                host["terminated"][last, row] = True
        if self.rows.next_step:
            self._starts, self._resetting = self._resetting | waiting | (ended & ~over), over
        else:
            self._starts = ended | waiting | over

    def _bootstrap(self, rollout: Rollout, host: dict[str, np.ndarray], cut_off: list[Any]) -> None:
        """V of what came after: of the next observation of each row, and of the final ones of truncated episodes."""
        assert self._obs is not None
        last = self.actor.values(self._obs, None, self._starts)
        rollout.last_values.copy_(last)
        host["final_values"][:] = 0.0
        if self.rows.next_step:  # the observation after a truncation is the final one, and the policy has seen it
            values = torch.cat([rollout.values[1:], last[None].to(rollout.device)]).cpu().numpy()
            cut = host["truncated"] & ~host["terminated"]
            host["final_values"][cut] = values[cut]
        elif cut_off:
            times = np.concatenate([np.full(len(cut), t) for t, cut, _, _ in cut_off])
            rows = np.concatenate([cut for _, cut, _, _ in cut_off])
            final = np.concatenate([obs for _, _, obs, _ in cut_off])
            state = tuple(torch.cat(parts) for parts in zip(*(memory for *_, memory in cut_off), strict=True))
            host["final_values"][times, rows] = self.actor.values(final, state).cpu().numpy()

    def _finish(self, rollout: Rollout, host: dict[str, np.ndarray]) -> None:
        staging = self.actor.staging
        if not staging.shares_memory:
            for name, array in host.items():
                getattr(rollout, name).copy_(staging.to_device(f"all {name}", array))
        self.rewards.apply(rollout)
        if self.actor.policy.normalizer is not None:
            self.actor.policy.normalizer.update(self._raw, host["valid"])

    def state_dict(self) -> dict[str, Any]:
        """What exact resuming needs; with the envs' states, where the vector can tell them."""
        self._begin()
        saved = {"actor": self.actor.state_dict(), "rewards": self.rewards.state_dict(), "steps": self.steps}
        if hasattr(self.vec, "state_dict"):
            saved |= {"envs": self.vec.state_dict(), "starts": self._starts.copy(), "resetting": self._resetting.copy()}
        return saved

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Go on from there; envs whose state was not saved begin new episodes, with seeds that this run has not used."""
        self.steps = saved["steps"]
        self.rewards.load_state_dict(saved["rewards"])
        exact = "envs" in saved and hasattr(self.vec, "load_state_dict")
        self.actor.load_state_dict(saved["actor"], with_state=exact)
        if not exact:
            self._seed, self._obs = self._seed + (self.steps + 1) * self.rows.num_envs, None
            self._starts[:], self._resetting[:] = True, False
            return
        obs, infos = self.vec.reset(seed=self._seed)
        self.vec.load_state_dict(saved["envs"])
        self._receive(obs, infos)  # views of the arrays that were loaded just now
        self._starts, self._resetting = saved["starts"], saved["resetting"]

    def close(self) -> None:
        """Close the vector."""
        self.vec.close()
