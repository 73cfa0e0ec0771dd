"""Atari games with the preprocessing of the literature, as one wrapper instead of a stack of nine.

action → a few frames of the emulator → the last two, pooled and resized by one compiled loop → a stack of frames.
Drives the emulator directly, so that skipped frames are never rendered. Knows nothing of vector envs; needs `hurtle[atari]`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.error import ResetNeeded
from gymnasium.utils import RecordConstructorArgs
from numba import njit

from hurtle.envs.extras import load_package_of
from hurtle.errors import ActionError, HurtleError, UnknownNameError, did_you_mean

_NOOP = 0
_FIRE = 1


class Atari(gymnasium.Wrapper, RecordConstructorArgs):
    """A preprocessed Atari game: uint8 frames `[num_stack, size, size]`, oldest first.

    Frames are bitwise those of Gymnasium's AtariPreprocessing. `info` is empty except in the step that ends an episode: it
    then has `lives` and, when the whole game is over, `game`: the unclipped score `r` and the number of steps `l`.

    Args:
        env: An env of ale-py, such as `gymnasium.make("ALE/Pong-v5")`; its own frame skip is not used.
        noop_max: Start a game with a random number of no-op frames, 1 to `noop_max`; 0 for none.
        frame_skip: Number of frames that each action is repeated for.
        max_pool: Take the maximum of the last two frames at each pixel; many games draw objects only every other frame.
        episodic_life: Losing a life terminates the episode; the game continues with the next life until it is over.
        fire_reset: Start each episode with FIRE in games that have it; many do not start without it.
        size: Height and width of the resized grayscale frame.
        clip_reward: Clip rewards to -1, 0 or 1.
        num_stack: Number of frames in an observation; an episode starts with copies of its first frame.
        scale: Return float32 observations from 0 to 1, at four times the memory, instead of uint8.

    Example:
        >>> env = make_atari("Pong")
        >>> obs, info = env.reset(seed=0)
        >>> obs.shape, obs.dtype
        ((4, 84, 84), dtype('uint8'))
    """

    def __init__(
        self,
        env: gymnasium.Env,
        *,
        noop_max: int = 30,
        frame_skip: int = 4,
        max_pool: bool = True,
        episodic_life: bool = True,
        fire_reset: bool = True,
        size: int = 84,
        clip_reward: bool = True,
        num_stack: int = 4,
        scale: bool = False,
    ):
        RecordConstructorArgs.__init__(  # lets gymnasium.make(env.spec) make the same env
            self,
            noop_max=noop_max,
            frame_skip=frame_skip,
            max_pool=max_pool,
            episodic_life=episodic_life,
            fire_reset=fire_reset,
            size=size,
            clip_reward=clip_reward,
            num_stack=num_stack,
            scale=scale,
        )
        gymnasium.Wrapper.__init__(self, env)
        self._game: Any = env.unwrapped
        if not hasattr(self._game, "ale"):
            raise HurtleError(f'Atari takes an env of ale-py, got {env}. Make one with make_atari("Pong").')
        if not isinstance(self._game.action_space, spaces.Discrete):
            raise HurtleError(f"Atari needs discrete actions, got {self._game.action_space}; leave out continuous=True.")
        height, width = self._game.ale.getScreenDims()
        for name, value, least in (("noop_max", noop_max, 0), ("frame_skip", frame_skip, 1), ("num_stack", num_stack, 1)):
            if value < least:
                raise HurtleError(f"{name} must be at least {least}, got {value}.")
        if not 1 <= size <= min(height, width):
            raise HurtleError(f"size must be from 1 to {min(height, width)} (the screen is {height} × {width}), got {size}.")
        self.noop_max = noop_max
        self.frame_skip = frame_skip
        self.episodic_life = episodic_life
        self.clip_reward = clip_reward
        self.scale = scale
        self.observation_space = (
            spaces.Box(0.0, 1.0, (num_stack, size, size), np.float32)
            if scale
            else spaces.Box(0, 255, (num_stack, size, size), np.uint8)
        )
        self._fires = fire_reset and "FIRE" in [action.name for action in self._game.ale.getMinimalActionSet()]
        self._pools = max_pool and frame_skip > 1
        self._codes = [action.value for action in self._game._action_set]
        self._screens = np.zeros((2, height, width), np.uint8)
        self._stack = np.zeros((num_stack, size, size), np.uint8)
        self._shrink = shrinker(height, width, size)
        self._running = False
        self._goes_on = False  # a life was lost, and the game continues
        self._lives = 0
        self._score = 0.0
        self._steps = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict[str, Any]]:
        """Start an episode: with the next life if one was lost, else (or with a seed or options) with a new game."""
        ale = self._game.ale
        new_game = seed is not None or bool(options) or not self._goes_on
        if not new_game:
            self._hold(_NOOP)
            new_game = ale.game_over()
        if new_game:
            self.env.reset(seed=seed, options=options)
            self._score, self._steps = 0.0, 0
            for _ in range(self._game.np_random.integers(1, self.noop_max + 1) if self.noop_max else 0):
                ale.act(_NOOP)
                if ale.game_over():
                    ale.reset_game()
        if self._fires:
            self._hold(_FIRE)
            if ale.game_over():  # so rare that this game may start without FIRE
                ale.reset_game()
                self._score, self._steps = 0.0, 0
        self._running, self._goes_on, self._lives = True, False, ale.lives()
        ale.getScreenGrayscale(self._screens[0])
        self._shrink(self._screens[0], self._screens[0], self._stack[-1])
        self._stack[:-1] = self._stack[-1]
        return self._observation(), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Repeat the action for `frame_skip` frames, or until the episode ends.

        Raises:
            ActionError: The action is not in the action space.
        """
        if not self._running:
            raise ResetNeeded("The episode is over (or has not begun): call reset() before step().")
        if not 0 <= action < len(self._codes):
            raise ActionError(f"Action {action!r} is not in {self.action_space}.")
        ale, screens, last = self._game.ale, self._screens, self.frame_skip - 1
        code, reward, lives, pools = self._codes[action], 0, self._lives, False
        for frame in range(self.frame_skip):
            reward += ale.act(code)
            over = ale.game_over()
            lost = self.episodic_life and 0 < ale.lives() < lives  # at 0 lives, some games continue for a few frames
            if over or lost:
                break
            if frame == last - 1 and self._pools:
                ale.getScreenGrayscale(screens[1])
                pools = True
        ale.getScreenGrayscale(screens[0])
        self._stack[:-1] = self._stack[1:]
        self._shrink(screens[0], screens[1] if pools else screens[0], self._stack[-1])
        self._score += reward
        self._steps += 1
        self._lives = ale.lives()
        truncated = over and ale.game_truncated()
        terminated = lost or (over and ale.game_over(with_truncation=False))
        info: dict[str, Any] = {}
        if terminated or truncated:
            self._running, self._goes_on = False, not over
            info["lives"] = self._lives
            if over:
                info["game"] = {"r": self._score, "l": self._steps}
        clipped = (reward > 0) - (reward < 0) if self.clip_reward else reward
        return self._observation(), float(clipped), terminated, truncated, info

    def _hold(self, code: int) -> None:
        for _ in range(self.frame_skip):
            self._score += self._game.ale.act(code)

    def _observation(self) -> np.ndarray:
        return self._stack.astype(np.float32) / np.float32(255) if self.scale else self._stack.copy()


def make_atari(
    game: str,
    *,
    sticky_action_prob: float = 0.0,
    full_action_space: bool = False,
    render_mode: str | None = None,
    **options: Any,
) -> Atari:
    """Make an Atari game with its preprocessing; `hurtle.make("atari/Pong")` does the same.

    Args:
        game: "Pong", "SpaceInvaders", "space_invaders", or an id such as "ALE/Pong-v5".
        sticky_action_prob: Probability, in each frame, that the emulator repeats the previous action. Machado et al. (2018)
            recommend 0.25; most published PPO and DQN curves use 0.
        full_action_space: Use all 18 actions instead of those that matter in the game.
        render_mode: "rgb_array", "human" or None.
        **options: Options of `Atari`, such as `episodic_life=False`.

    Example:
        >>> make_atari("Breakout", num_stack=1).observation_space.shape
        (1, 84, 84)
    """
    env = gymnasium.make(
        game_id(game),
        obs_type="grayscale",
        frameskip=1,
        repeat_action_probability=sticky_action_prob,
        full_action_space=full_action_space,
        render_mode=render_mode,
        disable_env_checker=True,  # it would check frames that are not used
    )
    return Atari(env, **options)


def game_id(game: str) -> str:
    """The Gymnasium id of a game.

    Example:
        >>> game_id("space_invaders")
        'ALE/SpaceInvaders-v5'
    """
    load_package_of(game if game.startswith("ALE/") else f"ALE/{game}")
    if game in gymnasium.registry:
        return game
    known = {name[4:-3].lower(): name for name in gymnasium.registry if name.startswith("ALE/") and name.endswith("-v5")}
    found = known.get(game.replace("_", "").lower())
    if found is None:
        near = did_you_mean(f"atari/{game.capitalize()}", [f"atari/{name[4:-3]}" for name in known.values()])
        raise UnknownNameError(f"No Atari game {game!r}. {near}")
    return found


def shrinker(height: int, width: int, size: int) -> Callable[[np.ndarray, np.ndarray, np.ndarray], None]:
    """A function that resizes the maximum of two grayscale frames `[height, width]` into a third, `[size, size]`.

    A new pixel is the mean of the area that it covers, summed in float32 in the order of OpenCV's INTER_AREA, so that
    rounding is the same.
    """
    row_first, row_weights = _areas(height, size)
    column_first, column_weights = _areas(width, size)
    loop = _compiled(len(row_weights), len(column_weights))
    line, mean = np.empty(width, np.float32), np.empty(size, np.float32)

    def shrink(one: np.ndarray, other: np.ndarray, small: np.ndarray) -> None:
        loop(one, other, small, row_first, row_weights, column_first, column_weights, line, mean)

    return shrink


@cache
def _compiled(row_taps: int, column_taps: int) -> Callable[..., None]:
    """The loop for these numbers of old rows and columns per new pixel; as constants they make it three times faster."""

    @njit(nogil=True, error_model="numpy", cache=True)
    def loop(one, other, small, row_first, row_weights, column_first, column_weights, line, mean):
        for y in range(small.shape[0]):
            mean[:] = 0.0
            for i in range(row_taps):
                row, weight = row_first[y] + i, row_weights[i, y]
                for x in range(line.size):
                    line[x] = max(one[row, x], other[row, x])
                for x in range(mean.size):
                    total = np.float32(0.0)
                    for j in range(column_taps):
                        total += line[column_first[x] + j] * column_weights[j, x]
                    mean[x] += weight * total
            for x in range(mean.size):
                small[y, x] = np.uint8(np.rint(mean[x]))

    return loop


def _areas(length: int, size: int) -> tuple[np.ndarray, np.ndarray]:
    """For each of `size` new pixels, the first old pixel that it covers, and the weights from there on, [taps, size].

    In units in which the frame is `length * size` long, an old pixel has length `size` and a new one `length`.
    """
    begin = np.arange(size) * length
    end = begin + length
    taps = int((-(-end // size) - begin // size).max())
    first = np.minimum(begin // size, length - taps)
    old = first + np.arange(taps)[:, None]
    overlap = np.minimum(end, (old + 1) * size) - np.maximum(begin, old * size)
    return first.astype(np.uint32), (overlap.clip(0) / length).astype(np.float32)  # gathers are fast with 32-bit indices
