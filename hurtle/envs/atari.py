"""Atari games with the preprocessing of the literature, as one wrapper instead of a stack of nine.

action → a few frames of the emulator → the screens of the last two → a small frame → a stack of frames, in a vector's memory.
Drives the emulator directly, so that the screens of skipped frames are not read. Knows nothing of vector envs.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any, NamedTuple

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.error import ResetNeeded
from gymnasium.utils import RecordConstructorArgs

from hurtle.envs.atari_ahead import DEPENDENT, UNDERSTUDY, Game, do_nothing, restore
from hurtle.envs.atari_frames import Frames
from hurtle.envs.extras import load_package_of
from hurtle.errors import ActionError, HurtleError, UnknownNameError, did_you_mean

_NOOP = 0
_FIRE = 1


class _Next(NamedTuple):
    """The game that another process prepares."""

    order: int
    random: dict[str, Any]  # state of the env's random numbers, before the one of this game was drawn


class Atari(gymnasium.Wrapper, RecordConstructorArgs):
    """A preprocessed Atari game: uint8 frames `[num_stack, size, size]`, oldest first; of RGB frames the last axis is colour.

    Frames are bitwise those of Gymnasium's AtariPreprocessing. `info` is empty except in the step that ends an episode: it
    then has `lives` and, when the whole game is over, `game`: the unclipped score `r` and the number of steps `l`.

    Args:
        env: An env of ale-py, such as `gymnasium.make("ALE/Pong-v5")`; its own frame skip is not used.
        noop_max: Start a game with a random number of no-op frames, 1 to `noop_max`; 0 for none.
        frame_skip: Number of frames that each action is repeated for.
        max_pool: Take the maximum of the last two frames at each pixel; many games draw objects only every other frame.
        episodic_life: Losing a life terminates the episode; the game continues with the next life until it is over.
        fire_reset: Start each episode with FIRE in games that have it; many do not start without it.
        size: Height and width of the resized frame.
        grayscale: Gray frames; else RGB, `[num_stack, size, size, 3]`.
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
        grayscale: bool = True,
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
            grayscale=grayscale,
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
            if not isinstance(value, int | np.integer) or value < least:
                raise HurtleError(f"{name} must be an int of at least {least}, got {value!r}.")
        if not isinstance(size, int | np.integer) or not 1 <= size <= min(height, width):
            raise HurtleError(f"size must be from 1 to {min(height, width)} (the screen is {height} × {width}), got {size!r}.")
        self.noop_max = noop_max
        self.frame_skip = frame_skip
        self.episodic_life = episodic_life
        self.clip_reward = clip_reward
        self.scale = scale
        self._frames = Frames(self._game.ale, size, grayscale)
        shape = (num_stack, *self._frames.shape)
        self.observation_space = spaces.Box(0.0, 1.0, shape, np.float32) if scale else spaces.Box(0, 255, shape, np.uint8)
        self._fires = fire_reset and "FIRE" in [action.name for action in self._game.ale.getMinimalActionSet()]
        self._pools = max_pool and frame_skip > 1
        self._codes = [action.value for action in self._game._action_set]
        self._stack = np.zeros(shape, np.uint8)
        self._is_bound = False
        self._sticks = self._game.ale.getFloat("repeat_action_probability") > 0
        self._next: _Next | None = None  # the next game, while this one is played
        self._works_ahead = False
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
            self._begin_game(seed, options)
        if self._fires:
            self._hold(_FIRE)
            if ale.game_over():  # so rare that this game may start without FIRE
                ale.reset_game()
                self._order_game(ale.cloneState(include_rng=True).serialize())
                self._score, self._steps = 0.0, 0
        self._running, self._goes_on, self._lives = True, False, ale.lives()
        self._frames.see()
        self._frames.draw(self._stack)
        self._stack[:-1] = self._stack[-1]
        return self._observation(), {}

    def _begin_game(self, seed: int | None, options: dict[str, Any] | None) -> None:
        ale, upcoming = self._game.ale, self._next
        if upcoming is not None and seed is None and not options:
            start = UNDERSTUDY.start(upcoming.order)
            self._next = None
            restore(ale, start)
            do_nothing(ale, 1)  # the state is without a screen
            self._order_game(start)
        else:
            self._drop_order()
            self.env.reset(seed=seed, options=options)
            do_nothing(ale, self._game.np_random.integers(1, self.noop_max + 1) if self.noop_max else 0)
            self._order_game(ale.cloneState(include_rng=True).serialize())
        self._score, self._steps = 0.0, 0

    def work_ahead(self) -> None:
        """Have games prepared by another process while others are played, where that makes no difference but to the time."""
        own = self._game
        if self._works_ahead or self._sticks or not self.noop_max or own._game in DEPENDENT:
            return
        UNDERSTUDY.join(self._rom, own.ale)
        self._works_ahead = True

    @property
    def _rom(self) -> Game:
        return Game(self._game._game, self._game._game_mode, self._game._game_difficulty)

    def _order_game(self, state: bytes) -> None:
        """Have the game after this one prepared, of which this is the emulator's state."""
        self._drop_order()
        if not self._works_ahead:
            return
        random = self._game.np_random.bit_generator.state
        noops = int(self._game.np_random.integers(1, self.noop_max + 1))
        self._next = _Next(UNDERSTUDY.order(self._rom, state, noops - 1), random)

    def _drop_order(self) -> None:
        if self._next is not None:
            UNDERSTUDY.drop(self._next.order)
            self._game.np_random.bit_generator.state = self._next.random
            self._next = None

    def close(self) -> None:
        """Close the emulator."""
        if self._works_ahead:
            self._drop_order()
            UNDERSTUDY.leave()
            self._works_ahead = False
        super().close()

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Repeat the action for `frame_skip` frames, or until the episode ends.

        Raises:
            ActionError: The action is not in the action space.
        """
        if not self._running:
            raise ResetNeeded("The episode is over (or has not begun): call reset() before step().")
        if not 0 <= action < len(self._codes):
            raise ActionError(f"Action {action!r} is not in {self.action_space}.")
        ale, frames, last = self._game.ale, self._frames, self.frame_skip - 1
        code, reward, lives = self._codes[action], 0, self._lives
        for frame in range(self.frame_skip):
            reward += ale.act(code)
            over = ale.game_over()
            lost = self.episodic_life and 0 < ale.lives() < lives  # at 0 lives, some games continue for a few frames
            if over or lost:
                break
            if frame == last - 1 and self._pools:
                frames.see()
        frames.see()
        frames.draw(self._stack)
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

    def observe_into(self, memory: np.ndarray) -> bool:
        """Write observations into this memory from now on, and return the same view of it each time.

        Args:
            memory: uint8 [bytes of an observation].

        Returns:
            Whether that is possible; scaled observations are always new arrays.
        """
        if not self.scale:
            bound = memory.reshape(self._stack.shape)
            bound[...] = self._stack
            self._stack, self._is_bound = bound, True
        return self._is_bound

    @property
    def resumes_exactly(self) -> bool:
        """Whether `saved_state` is all: the action that sticks, if actions do, is not part of the emulator's state."""
        return not self._sticks

    @property
    def saved_state(self) -> dict[str, Any]:
        """Everything needed to continue, as numbers, bytes and arrays; assign it to another env of the same game."""
        return {
            "emulator": self._game.ale.cloneState(include_rng=True).serialize(),
            "random": self._game.np_random.bit_generator.state if self._next is None else self._next.random,
            "stack": self._stack.copy(),
            "episode": (self._running, self._goes_on, self._lives, self._score, self._steps),
        }

    @saved_state.setter
    def saved_state(self, state: dict[str, Any]) -> None:
        self._drop_order()
        restore(self._game.ale, state["emulator"])
        self._game.np_random.bit_generator.state = state["random"]
        self._stack[...] = state["stack"]
        self._running, self._goes_on, self._lives, self._score, self._steps = state["episode"]
        self._order_game(state["emulator"])

    def _hold(self, code: int) -> None:
        for _ in range(self.frame_skip):
            self._score += self._game.ale.act(code)

    def _observation(self) -> np.ndarray:
        if self.scale:
            return self._stack.astype(np.float32) / np.float32(255)
        return self._stack if self._is_bound else self._stack.copy()


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
    check_options(options)
    if not 0 <= sticky_action_prob <= 1:
        raise HurtleError(f"sticky_action_prob must be from 0 to 1, got {sticky_action_prob!r}.")
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


def check_options(options: Iterable[str]) -> None:
    """Refuse names that are not options of `make_atari` or `Atari`.

    Raises:
        UnknownNameError: The message suggests the closest option.
    """
    known = [*inspect.signature(make_atari).parameters, *inspect.signature(Atari.__init__).parameters]
    known = [name for name in known if name not in ("self", "env", "game", "options")]
    for name in options:
        if name not in known:
            raise UnknownNameError(f"Atari games have no option {name!r}. {did_you_mean(name, known)}")


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
