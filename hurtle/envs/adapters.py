"""Makes Gymnasium envs of packages whose own are not, or not quite: Crafter, Craftax, Procgen, Meta-World, Retro, NetHack.

"procgen/coinrun" → the package, imported lazily → a Gymnasium env that is seeded by `reset` and says how an episode ended.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import cache, partial
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from hurtle.envs.extras import load_module
from hurtle.errors import HurtleError, UnknownNameError, did_you_mean

CRAFTAX = ("Symbolic", "Pixels", "Classic-Symbolic", "Classic-Pixels")


class Crafter(gymnasium.Env):
    """Crafter: survive in a small Minecraft. Infos have the `achievements` of an episode in its last step.

    Unlike Crafter's own, episodes repeat with their seed.

    Args:
        render_mode: "rgb_array" or None.
        **options: Arguments of `crafter.Env`: `size`, `view`, `area`, `length`, `reward`.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 15}

    def __init__(self, render_mode: str | None = None, **options: Any):
        import crafter

        self.render_mode = render_mode
        self.env = crafter.Env(**options)
        _keep_order(self.env._world)
        shape = self.env.observation_space.shape
        self.observation_space = spaces.Box(0, 255, tuple(int(size) for size in shape), np.uint8)
        self.action_space = spaces.Discrete(self.env.action_space.n)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if seed is not None:  # a world is made from the seed and the number of the episode
            self.env._seed, self.env._episode = int(self.np_random.integers(2**31 - 1)), 0
        return self.env.reset(), {}

    def step(self, action):
        obs, reward, done, info = self.env.step(int(action))
        died = info["discount"] == 0
        ending = {"achievements": dict(info["achievements"])} if done else {}
        return obs, float(reward), bool(done and died), bool(done and not died), ending

    def render(self):
        return self.env.render((512, 512))


class _OrderedSet(dict):
    def add(self, item):
        self[item] = None

    def remove(self, item):
        del self[item]


def _keep_order(world: Any) -> None:
    """Make a world of Crafter go through the objects of a chunk in the order of their arrival, not of their addresses."""

    class World(type(world)):
        def reset(self, seed=None):
            super().reset(seed)
            self._chunks = defaultdict(_OrderedSet)

    world.__class__ = World


class Craftax(gymnasium.Env):
    """Craftax, a Crafter with the depth of NetHack in JAX. Infos have the achievements in the last step of an episode.

    Each step is a call of JAX for one env.
    """

    metadata = {"render_modes": []}

    def __init__(self, name: str, render_mode: str | None = None):
        import jax

        if render_mode is not None:
            raise HurtleError(
                f"Craftax has no render modes; craftax/Pixels shows pictures as observations. Got {render_mode!r}."
            )
        self._jax, self.env = jax, _craftax(name)
        self._params = self.env.default_params
        box = self.env.observation_space(self._params)
        self.observation_space = spaces.Box(box.low, box.high, box.shape, np.dtype(box.dtype))
        self.action_space = spaces.Discrete(int(self.env.action_space(self._params).n))
        self._split = jax.random.split

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._key, key = self._split(self._jax.random.key(int(self.np_random.integers(2**31 - 1))))
        obs, self._state = self.env.reset(key, self._params)
        return np.asarray(obs), {}

    def step(self, action):
        self._key, key = self._split(self._key)
        obs, self._state, reward, done, info = self.env.step(key, self._state, int(action), self._params)
        if not done:
            return np.asarray(obs), float(reward), False, False, {}
        late = int(self._state.timestep) >= self._params.max_timesteps and float(self._state.player_health) > 0
        ending = {name: float(value) for name, value in info.items() if np.ndim(value) == 0 and name != "discount"}
        return np.asarray(obs), float(reward), not late, late, ending


@cache
def _craftax(name: str) -> Any:
    """One for all envs of a process: it has no state, and is compiled for each instance."""
    from craftax.craftax_env import make_craftax_env_from_name

    return make_craftax_env_from_name(f"Craftax-{name}-v1", auto_reset=False)


class Procgen(gymnasium.Env):
    """A game of Procgen, 64 × 64 RGB.

    Procgen shows the next level in the step that ends an episode, so the last observation is the one before. It does not
    tell time limits from ends: all ends are `terminated`. Infos have the `level_seed` of a new level.

    Args:
        game: "coinrun" and so on.
        render_mode: "rgb_array" or None.
        **options: Procgen's options: `num_levels`, `start_level`, `distribution_mode`, …
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 15}
    observation_space = spaces.Box(0, 255, (64, 64, 3), np.uint8)
    action_space = spaces.Discrete(15)

    def __init__(self, game: str, render_mode: str | None = None, **options: Any):
        self.render_mode = render_mode
        self._game, self._options = game, options
        self._env: Any = None

    def reset(self, *, seed=None, options=None):
        from procgen import ProcgenGym3Env

        super().reset(seed=seed)
        if self._env is None or seed is not None:  # seeds are arguments of the constructor, which takes milliseconds
            self.close()
            rand_seed = int(self.np_random.integers(2**31 - 1))
            self._env = ProcgenGym3Env(1, self._game, rand_seed=rand_seed, num_threads=0, **self._options)
        elif not self._is_new:
            self._env.act(np.array([-1]))  # gives the level up
        self._obs, self._is_new = self._env.observe()[1]["rgb"][0].copy(), True
        return self._obs, {"level_seed": int(self._env.get_info()[0]["level_seed"])}

    def step(self, action):
        self._env.act(np.array([action]))
        reward, obs, first = self._env.observe()
        self._is_new = bool(first[0])
        if not self._is_new:
            self._obs = obs["rgb"][0].copy()
        return self._obs, float(reward[0]), self._is_new, False, {}

    def render(self):
        return self._obs

    def close(self):
        if self._env is not None:
            self._env.close()
            self._env = None


class MetaWorld(gymnasium.Wrapper):
    """A task of Meta-World: `reset` seeds the choice of the goal, and the goal in the observation is not bounded to zero.

    Its 50 goals are drawn in the constructor, from `seed`; all envs have the same by default.
    """

    def __init__(self, env: gymnasium.Env):
        super().__init__(env)
        self.observation_space = spaces.Box(-np.inf, np.inf, env.observation_space.shape, np.float64)

    def reset(self, *, seed=None, options=None):
        if seed is not None:  # the package draws a goal before it hands the seed on
            self.unwrapped.np_random = np.random.default_rng(seed)
        return self.env.reset(seed=seed, options=options)


class NetHackSeeds(gymnasium.Wrapper):
    """A NetHack env whose games are seeded by `reset`, which NLE leaves to another method."""

    def __init__(self, env: gymnasium.Env):
        super().__init__(env)
        self._seeds = np.random.default_rng()

    def reset(self, *, seed=None, options=None):
        if seed is not None:
            self._seeds = np.random.default_rng(seed)
        core, disp = (int(number) for number in self._seeds.integers(2**31 - 1, size=2))
        self.unwrapped.seed(core, disp, False)  # of the next game only
        return self.env.reset(seed=seed, options=options)


def _make_metaworld(task: str, seed: int = 0, **parameters: Any) -> gymnasium.Env:
    import metaworld  # noqa: F401 (registers)

    return MetaWorld(gymnasium.make("Meta-World/MT1", env_name=task, seed=seed, disable_env_checker=True, **parameters))


def _make_retro(game: str, render_mode: str | None = "rgb_array", **parameters: Any) -> gymnasium.Env:
    import stable_retro

    return stable_retro.make(game, render_mode=render_mode, **parameters)  # without a mode it opens a window


def _procgen_games() -> Iterable[str]:
    from procgen.env import ENV_NAMES

    return ENV_NAMES


def _metaworld_tasks() -> Iterable[str]:
    import metaworld

    return metaworld.ALL_V3_ENVIRONMENTS


def _retro_games() -> Iterable[str]:
    import stable_retro

    return stable_retro.data.list_games()


ADAPTERS: dict[str, tuple[str, Callable[..., Any], Callable[[], Iterable[str]] | None]] = {
    "crafter": ("crafter", Crafter, None),
    "craftax": ("craftax", Craftax, lambda: CRAFTAX),
    "metaworld": ("metaworld", _make_metaworld, _metaworld_tasks),
    "procgen": ("procgen", Procgen, _procgen_games),
    "retro": ("stable_retro", _make_retro, _retro_games),
}
"""Family → the module it needs, what makes its envs, and the names of its tasks (None: the family is one env)."""


def find_adapter(name: str) -> Callable[..., Any]:
    """What makes an env such as "crafter" or "procgen/coinrun".

    Raises:
        HurtleError: The package is not installed, or has no such task.
    """
    family, _, task = name.partition("/")
    module, make, tasks = ADAPTERS[family]
    load_module(module, name)
    if tasks is None and not task:
        return make
    known = [] if tasks is None else list(tasks())
    if task not in known:
        names = [f"{family}/{other}" for other in known] or [family]
        raise UnknownNameError(f"No environment {name!r}. {did_you_mean(name, names)}")
    return partial(make, task)
