"""`GeneralCollector`: any vector env × any torch policy, all envs in lockstep.

observations → policy → actions → env step → rollout, T times. Knows nothing of losses. It defines what every field of a rollout
means; the other collectors are compared with it. Asynchronous pools have a collector of their own, see pool_collector.py.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from gymnasium.vector import VectorEnv
from torch import Tensor

from hurtle.buffers.rollout import OUTCOMES, Finals, Rollout
from hurtle.collect.inference import Actor
from hurtle.collect.rows import VecRows, episode_starts, is_finite, unused_seeds
from hurtle.contracts import Collector, Episodes, ListedEpisodes, Weights
from hurtle.tracking.timing import Timer

_Final = tuple[int, np.ndarray, np.ndarray, tuple[Tensor, ...]]
"""The ends of truncated episodes: their step, rows, final observations and memory."""


class GeneralCollector(Collector):
    """Fills rollouts from a vector whose envs all step together.

    Args:
        vec: Any `gymnasium.vector.VectorEnv`, with SAME_STEP or NEXT_STEP autoreset.
        actor: The policy, acting for the vector's rows.
        seed: Env i gets seed + i; or one seed per env.
        timer: Records where the time goes.
    """

    def __init__(self, vec: VectorEnv, actor: Actor, seed: int | np.ndarray = 0, timer: Timer | None = None):
        self.rows, self.actor = VecRows(vec), actor
        self.vec: Any = vec
        actor.name_of = self.rows.name_of
        self.num_rows = self.rows.num_rows
        self.resumes_exactly = getattr(vec, "resumes_exactly", hasattr(vec, "state_dict"))
        self.closes_midway = getattr(vec, "steps_elsewhere", False)
        self.timer = timer or Timer()
        self.steps = 0  # per env
        self._version, self._stopping = 0, False
        self._seed = seed
        self._obs: np.ndarray | None = None  # what to act on next; None before the first reset
        self._mask: np.ndarray | None = None
        self._present: np.ndarray | None = None
        self._checks_later = actor.staging.shares_memory  # otherwise rollouts are on a device
        self._none = np.zeros(self.num_rows, np.bool_)
        self._starts = np.ones(self.num_rows, np.bool_)  # rows whose next step starts an episode
        self._resetting = np.zeros(self.num_rows, np.bool_)  # NEXT_STEP: rows whose next step is a reset

    @property
    def has_masks(self) -> bool:
        """Whether the env reports legal actions."""
        self._begin()
        return self._mask is not None

    def new_rollout(self, num_steps: int) -> Rollout:
        """A rollout that `collect` can fill."""
        return Rollout(self.actor.policy, num_steps, self.num_rows, self.has_masks, str(self.actor.device))

    def load_weights(self, weights: Weights) -> None:
        """See `Collector.load_weights`."""
        self.actor.load_weights(weights)
        self._version = weights.version

    def request_stop(self) -> None:
        """Make `collect` stop at the next step."""
        self._stopping = True

    def collect(self, rollout: Rollout) -> Episodes | None:
        """Fill the rollout with the next `num_steps` steps of every env; see `Collector.collect`.

        Raises:
            NonFiniteError: An observation, a reward or a policy output was not finite in this rollout.
        """
        self._begin()
        host = {name: self.actor.staging.host_array(getattr(rollout, name)) for name in OUTCOMES}
        rollout.all_valid, rollout.version = True, self._version
        host["valid"][:], host["starts"][:], host["terminated"][:], host["truncated"][:] = True, False, False, False
        for part, now in zip(rollout.initial_state, self.actor.state, strict=True):
            part.copy_(now)
        first, finals = self.steps, list[_Final]()
        episodes = list[ListedEpisodes]()
        with self.timer("copy"):
            try:
                for t in range(rollout.num_steps):
                    if self._stopping:
                        self._stopping = False
                        return None
                    if (ended := self._step(rollout, host, t, finals)) is not None:
                        episodes.append(ended)
            except Exception:
                self._check_finite(rollout, host, finals, first)  # a likely cause
                raise
            self._check_finite(rollout, host, finals, first)
            self._finish(rollout, host, finals)
        return Episodes.listed(episodes)

    def _step(self, rollout: Rollout, host: dict[str, np.ndarray], t: int, finals: list[_Final]) -> ListedEpisodes | None:
        """One step of every env; returns the episodes that ended."""
        rows, actor, timer = self.rows, self.actor, self.timer
        assert self._obs is not None
        if self._starts is not self._none:
            host["starts"][t] = self._starts
        timer.switch("inference")
        for_env = rows.actions(actor.act_step(rollout, t, self._obs, self._mask, self._starts))
        timer.switch("env")
        obs, rewards, terminated, truncated, infos = self.vec.step(for_env)
        timer.switch("copy")
        self.steps += 1
        if not self._checks_later:
            rows.check_finite("reward", rows.flat(rewards), self.steps)
        acting = self._acting()
        if not infos and rows.infos_tell and acting is None:  # what most steps of small envs are
            host["rewards"][t], self._starts = rows.flat(rewards), self._none
            self._receive(obs, infos)
            return None
        rewards, terminated, truncated = rows.flat(rewards), rows.flat(terminated), rows.flat(truncated)
        if acting is not None:  # the others did nothing
            rewards, terminated, truncated = rewards * acting, terminated & acting, truncated & acting
            host["valid"][t] = acting
            rollout.all_valid &= bool(acting.all())
        host["rewards"][t], host["terminated"][t], host["truncated"][t] = rewards, terminated, truncated
        ended = terminated | truncated
        if (episodes := rows.ended_episodes(infos, rewards, ended, acting)) is not None:
            cut = (truncated & ~terminated).nonzero()[0]
            if cut.size:
                final = rows.final_obs(infos, cut, rows.flat(obs))
                if not self._checks_later:
                    rows.check_finite("final observation", final, self.steps, cut)
                finals.append((t, cut, final, actor.state_of(cut)))
        if acting is None:
            self._starts = ended
        else:
            self._begin_episodes(host, t, rows.over(infos, ended, acting), ended, acting)
        self._receive(obs, infos)
        return episodes

    def _begin(self) -> None:
        if self._obs is None:
            obs, infos = self.vec.reset(seed=self._seed)
            self._receive(obs, infos)
            self.rows.check_finite("observation", self.rows.flat(obs), self.steps)

    def _receive(self, obs: Any, infos: dict[str, Any]) -> None:
        self._obs = now = self.rows.flat(obs)
        self._mask, self._present = (self.rows.mask(infos), self.rows.present(infos)) if infos else (None, None)
        if not self._checks_later:
            self.rows.check_finite("observation", now, self.steps)

    def _check_finite(self, rollout: Rollout, host: dict[str, np.ndarray], finals: list[_Final], first: int) -> None:
        """Check all steps since step `first` at once: one by one it would take as long as a small policy."""
        if not self._checks_later or self._obs is None:
            return
        count, check = self.steps - first, self.rows.check_finite
        obs, rewards = rollout.obs[:count].numpy(), host["rewards"][:count]
        if all(is_finite(array) for array in (obs, rewards, *(final for _, _, final, _ in finals), self._obs)):
            return
        for t in range(count):  # in the order in which they came
            check("observation", obs[t], first + t)
            check("reward", rewards[t], first + t + 1)
            for _, cut, final, _ in (found for found in finals if found[0] == t):
                check("final observation", final, first + t + 1, cut)
        check("observation", self._obs, self.steps)

    def _acting(self) -> np.ndarray | None:
        """The rows for which the next step counts; None: all."""
        if not self.rows.next_step:
            return self._present
        return ~self._resetting if self._present is None else self._present & ~self._resetting

    def _begin_episodes(
        self, host: dict[str, np.ndarray], t: int, over: np.ndarray, ended: np.ndarray, acting: np.ndarray
    ) -> None:
        """Record which rows start an episode with the next step."""
        found = episode_starts(self._starts, self._resetting, acting, ended, over, self.rows.next_step)
        for row in found.left.nonzero()[0]:
            host["terminated"][host["valid"][:t, row].nonzero()[0][-1:], row] = True
        self._starts, self._resetting = found.starts, found.resetting

    def _finish(self, rollout: Rollout, host: dict[str, np.ndarray], finals: list[_Final]) -> None:
        """Copy what followed the last step, and everything still on the host, to the rollout."""
        assert self._obs is not None
        staging = self.actor.staging
        rollout.last_obs.copy_(staging.to_device("obs", self._obs, rollout.obs.dtype))
        rollout.last_starts.copy_(staging.to_device("starts", self._starts))
        for part, now in zip(rollout.last_state, self.actor.state, strict=True):
            part.copy_(now)
        rollout.finals = rollout.new_finals(0, self.actor.policy)
        if finals:
            rollout.finals = Finals(
                staging.to_device("final steps", np.concatenate([np.full(len(rows), t) for t, rows, _, _ in finals])),
                staging.to_device("final rows", np.concatenate([rows for _, rows, _, _ in finals])),
                staging.to_device("final obs", np.concatenate([obs for _, _, obs, _ in finals]), rollout.obs.dtype),
                tuple(torch.cat(parts) for parts in zip(*(memory for *_, memory in finals), strict=True)),
            )
        if not staging.shares_memory:
            for name, array in host.items():
                getattr(rollout, name).copy_(staging.to_device(f"all {name}", array))
        rollout.done = self.actor.bootstrap(rollout)

    def state_dict(self, with_envs: bool = True) -> dict[str, Any]:
        """See `Collector.state_dict`."""
        saved = {"actor": self.actor.state_dict(), "steps": self.steps}
        if with_envs and self.resumes_exactly:
            self._begin()
            saved |= {"envs": self.vec.state_dict(), "starts": self._starts.copy(), "resetting": self._resetting.copy()}
        return saved

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """See `Collector.load_state_dict`."""
        self.steps = saved["steps"]
        exact = "envs" in saved and self.resumes_exactly
        self.actor.load_state_dict(saved["actor"], with_state=exact)
        if not exact:
            self._seed, self._obs = self._seed + unused_seeds(saved, self.rows.num_envs), None
            self._starts[:], self._resetting[:] = True, False
            return
        obs, infos = self.vec.reset(seed=self._seed)
        self.vec.load_state_dict(saved["envs"])
        self._receive(obs, infos)  # views of the arrays just loaded
        self._starts, self._resetting = saved["starts"], saved["resetting"]

    def close(self, envs: bool = True) -> None:
        """See `Collector.close`."""
        if envs:
            self.vec.close()
