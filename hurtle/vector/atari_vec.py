"""Atari games on the threads of ale-py's vector env, with the options of `Atari` and the infos of our vector envs.

actions → ale-py's threads → new arrays. Its random numbers differ from those of `Atari`: the same seed gives another game.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv, VectorWrapper

from hurtle.envs.atari import game_id


def atari_vector(
    game: str,
    num_envs: int,
    *,
    num_threads: int = 0,
    sticky_action_prob: float = 0.0,
    full_action_space: bool = False,
    noop_max: int = 30,
    frame_skip: int = 4,
    max_pool: bool = True,
    episodic_life: bool = True,
    fire_reset: bool = True,
    size: int = 84,
    clip_reward: bool = True,
    num_stack: int = 4,
) -> VectorEnv:
    """A vector of Atari games with preprocessing, on ale-py's threads; SAME_STEP autoreset.

    Infos are those of our other vector envs: `episode`, `final_obs`, and `game` (score `r`, steps `l`) when a game is over.
    Three things differ from a vector of `Atari` envs. The next life of a game starts without FIRE, which the policy must learn
    to press (or pass `episodic_life=False`). Episodes start with a stack of black frames. Random numbers are ale-py's.

    Args:
        game: "Pong", or an id such as "ALE/Pong-v5".
        num_envs: Number of games; game i gets `seed + i`.
        num_threads: Number of threads; 0 uses the number of games or cores, whichever is smaller.
        sticky_action_prob: Probability, in each frame, that the emulator repeats the previous action.
        full_action_space: Use all 18 actions instead of those that matter in the game.
        noop_max: Start a game with a random number of no-op frames, at most this many.
        frame_skip: Number of frames that each action is repeated for.
        max_pool: Take the maximum of the last two frames at each pixel.
        episodic_life: Losing a life terminates the episode; the game continues with the next life until it is over.
        fire_reset: Start each game with FIRE if it has that action.
        size: Height and width of the frames.
        clip_reward: Rewards are -1, 0 or 1.
        num_stack: Frames in an observation.

    Example:
        >>> vec = atari_vector("Pong", num_envs=2)
        >>> obs, infos = vec.reset(seed=0)
        >>> obs.shape
        (2, 4, 84, 84)
    """
    spec = gymnasium.spec(game_id(game))
    from ale_py.vector_env import AtariVectorEnv

    vec = AtariVectorEnv(
        spec.kwargs["game"],
        num_envs,
        num_threads=num_threads,
        repeat_action_probability=sticky_action_prob,
        full_action_space=full_action_space,
        autoreset_mode=AutoresetMode.SAME_STEP,
        img_height=size,
        img_width=size,
        stack_num=num_stack,
        frameskip=frame_skip,
        maxpool=max_pool,
        noop_max=noop_max,
        life_loss_info=episodic_life,  # ale-py's own episodic_life would start a new game at every lost life
        reward_clipping=False,  # clipped here, to keep the score of a game
        use_fire_reset=fire_reset,
    )
    return _WithEpisodes(vec, clip_reward)


class _WithEpisodes(VectorWrapper):
    """Adds clipped float rewards and the statistics of episodes and games."""

    def __init__(self, vec: VectorEnv, clip_reward: bool):
        super().__init__(vec)
        self._clip = clip_reward
        self._episode = {"r": np.zeros(vec.num_envs), "l": np.zeros(vec.num_envs, np.int64)}
        self._game = {"r": np.zeros(vec.num_envs), "l": np.zeros(vec.num_envs, np.int64)}
        self._frames = np.zeros(vec.num_envs, np.int32)  # frames of the current game

    def reset(
        self, *, seed: int | Sequence[int] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Start new games; game i gets `seed + i`, or the i-th of several seeds."""
        several = seed is not None and not isinstance(seed, int | np.integer)
        obs, infos = self.env.reset(seed=np.asarray(seed) if several else seed, options=options)  # type: ignore[arg-type]
        chosen = (options or {}).get("reset_mask", slice(None))
        for statistic in (*self._episode.values(), *self._game.values()):
            statistic[chosen] = 0
        self._frames = infos["episode_frame_number"]
        return obs, {"lives": infos["lives"]}

    def step(self, actions: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        """Step every game; games that ended are already in their next episode."""
        obs, scores, terminated, truncated, raw = self.env.step(np.asarray(actions))
        rewards = np.sign(scores).astype(np.float64) if self._clip else scores.astype(np.float64)
        for statistics, gained in ((self._episode, rewards), (self._game, scores)):
            statistics["r"] += gained
            statistics["l"] += 1
        infos: dict[str, Any] = {"lives": raw["lives"]}
        ended = terminated | truncated
        if ended.any():
            over = ended & (raw["episode_frame_number"] < self._frames)  # a new game has started, not just the next life
            final_info = {"episode": _taken(self._episode, ended), "_episode": ended}
            if over.any():
                final_info |= {"game": _taken(self._game, over), "_game": over}
            infos |= {**final_info, "final_obs": raw["final_obs"], "_final_obs": ended}
            infos |= {"final_info": final_info, "_final_info": ended}
        self._frames = raw["episode_frame_number"]
        return obs, rewards, terminated, truncated, infos


def _taken(statistics: dict[str, np.ndarray], rows: np.ndarray) -> dict[str, np.ndarray]:
    """A copy of the statistics; resets these rows."""
    taken = {name: array.copy() for name, array in statistics.items()}
    for array in statistics.values():
        array[rows] = 0
    return taken
