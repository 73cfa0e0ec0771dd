"""Envs of other packages by short name: a smoke test of each that is installed, and how we adapt them, with small fakes."""

import re
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

import hurtle
from hurtle.envs import extras
from hurtle.envs.adapters import ADAPTERS, Crafter, MetaWorld, NetHackSeeds, Procgen, _keep_order, find_adapter
from hurtle.envs.extras import ALSO, EXTRAS, FAMILIES, Family
from hurtle.errors import HurtleError, UnknownNameError

ENVS = [  # name, module that must be there, shape and dtype of one flat observation
    ("LunarLander-v3", "Box2D", (8,), np.float32),
    ("crafter", "crafter", (64, 64, 3), np.uint8),
    ("craftax/Classic-Symbolic", "craftax", (1345,), np.float32),
    ("dm_control/cheetah-run", "dm_control", (17,), np.float64),
    ("highway/parking", "highway_env", (18,), np.float64),
    ("lbf/8x8-2p-3f", "lbforaging", (15,), np.float32),
    ("metaworld/reach-v3", "metaworld", (39,), np.float64),
    ("minigrid/Empty-5x5", "minigrid", (416,), np.uint8),
    ("minihack/Room-5x5", "minihack", (9176,), np.uint8),
    ("mpe/simple_spread", "mpe2", (18,), np.float32),
    ("nle/Score", "nle", (149952,), np.uint8),
    ("pettingzoo/atari/pong", "multi_agent_ale_py", (210, 160, 3), np.uint8),
    ("classic/connect_four", "rlcard", (91,), np.int8),
    ("procgen/coinrun", "procgen", (64, 64, 3), np.uint8),
    ("retro/Airstriker-Genesis-v0", "stable_retro", (224, 320, 3), np.uint8),
    ("robotics/FetchReach", "gymnasium_robotics", (16,), np.float64),
    ("rware/tiny-2ag", "rware", (71,), np.float32),
    ("sisl/multiwalker", "Box2D", (31,), np.float32),
    ("vizdoom/Basic", "vizdoom", (230408,), np.uint8),
]


def import_or_skip(module, name):
    family = FAMILIES.get(name.partition("/")[0])
    try:
        pytest.importorskip(module, reason=f"{name} needs {module}")
    except ImportError as error:
        pytest.skip(f"{name}: {error}")
    if family is not None and extras.wrong_mujoco(family, name):
        pytest.skip(str(extras.wrong_mujoco(family, name)))


def played(name, **options):
    """What two envs show: bytes of each flat observation and the rewards, over an episode's beginning."""
    vec = hurtle.make_vec(name, num_envs=2, emulate=True, **options)
    shown = []
    try:
        vec.action_space.seed(0)
        obs, infos = vec.reset(seed=3)
        for _ in range(25):
            actions = vec.action_space.sample()
            if "action_mask" in infos:
                actions = infos["action_mask"].argmax(-1)
            obs, rewards, terminated, truncated, infos = vec.step(actions)
            shown.append((obs.tobytes(), rewards.tolist(), terminated.tolist(), truncated.tolist()))
    finally:
        vec.close()
        vec.close()
    return obs.shape, obs.dtype, shown


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "module", "shape", "dtype"), ENVS, ids=[name for name, *_ in ENVS])
def test_installed_packages_play_in_processes_and_repeat(name, module, shape, dtype, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # MuJoCo leaves a log file behind
    import_or_skip(module, name)
    flat = hurtle.emulate(hurtle.make(name))
    space = flat.observation_space
    if callable(space):
        space = space(flat.possible_agents[0])
    flat.close()
    assert (space.shape, space.dtype) == (shape, dtype)
    one = played(name, backend="process", num_workers=2)
    assert one[0][0] == 2
    assert one[0][-len(shape) :] == shape
    assert one[1] == dtype
    assert played(name, backend="process", num_workers=2) == one


def test_every_package_has_an_extra_that_pyproject_defines():
    defined = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    modules = {module for family in FAMILIES.values() for module in (family.module, family.also) if module}
    modules |= {module for module, *_ in ADAPTERS.values()}
    assert {module.partition(".")[0] for module in modules} <= EXTRAS.keys()
    assert {re.fullmatch(r"hurtle\[(\w+)\]", extra)[1] for extra in EXTRAS.values()} <= defined.keys()


@pytest.fixture
def without(monkeypatch):
    """Makes packages seem not to be installed."""

    def remove(package):
        for loaded in [*sys.modules]:
            if loaded == package or loaded.startswith(f"{package}."):
                monkeypatch.delitem(sys.modules, loaded)

        def find_spec(fullname, path=None, target=None):
            if fullname == package:
                raise ModuleNotFoundError(f"No module named {package!r}", name=package)

        monkeypatch.setattr(sys, "meta_path", [SimpleNamespace(find_spec=find_spec), *sys.meta_path])

    return remove


@pytest.mark.parametrize("name", [*ADAPTERS, *FAMILIES])
def test_missing_packages_are_named(name, without):
    module = ADAPTERS[name][0] if name in ADAPTERS else FAMILIES[name].module.partition(".")[0]
    without(module)
    full = name if name == "crafter" else f"{name}/any"
    with pytest.raises(
        HurtleError, match=rf"^{full} needs {module.replace('_', '-')}: pip install \"{re.escape(EXTRAS[module])}\""
    ):
        hurtle.make(full)
    for prefix in FAMILIES[name].prefixes if name in FAMILIES else ():
        if f"{prefix}Some-v0" not in gymnasium.registry:
            with pytest.raises(HurtleError, match=re.escape(EXTRAS[module])):
                hurtle.make(f"{prefix}Some-v0")


def test_what_no_extra_can_install_is_said(without):
    without("procgen")
    with pytest.raises(HurtleError, match=re.escape(ALSO["procgen"])):
        hurtle.make_vec("procgen/maze", num_envs=2)


class Count(gymnasium.Env):
    """Shows a number that its seed decides."""

    observation_space = spaces.Box(0, 2**31, (1,), np.int64)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.np_random.integers(2**31, size=1), {}

    def step(self, action):
        return np.zeros(1, np.int64), 0.0, True, False, {}


@pytest.fixture
def family(monkeypatch):
    """A family "box" of two versions of one env, and an env of somebody else whose id begins alike."""
    monkeypatch.setitem(FAMILIES, "box", Family(__name__, ("BoxOf-",)))
    names = ["BoxOf-Two-v0", "BoxOf-Two-v10", "BoxOf-Two-v9", "BoxOf-One-v1"]
    for name in names:
        gymnasium.register(name, entry_point=Count)
    yield
    for name in names:
        del gymnasium.registry[name]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("box/Two", "BoxOf-Two-v10"),
        ("box/Two-v9", "BoxOf-Two-v9"),
        ("box/BoxOf-One", "BoxOf-One-v1"),
        ("box/BoxOf-Two-v0", "BoxOf-Two-v0"),
    ],
)
@pytest.mark.usefixtures("family")
@pytest.mark.filterwarnings("ignore:.*out of date")
def test_short_names_leave_out_prefix_and_version(name, expected):
    assert hurtle.make(name).spec.id == expected


@pytest.mark.usefixtures("family")
def test_unknown_tasks_of_a_family_are_suggested():
    with pytest.raises(UnknownNameError, match=r"No environment 'box/Tow'\. Did you mean box/Two"):
        hurtle.make("box/Tow")
    with pytest.raises(UnknownNameError, match=r"No environment 'box/memory'\. Known: box/BoxOf-One"):
        hurtle.make("box/memory")  # a native env has this name


def test_ids_that_only_look_like_those_of_a_package_belong_to_who_registered_them(without):
    without("highway_env")
    gymnasium.register("parking-mine-v0", entry_point=Count)
    try:
        assert isinstance(hurtle.make("parking-mine-v0").unwrapped, Count)
    finally:
        del gymnasium.registry["parking-mine-v0"]


def test_a_mujoco_that_is_too_new_is_named(monkeypatch):
    monkeypatch.setitem(FAMILIES, "box", Family(__name__, ("BoxOf-",), mujoco="3.3"))
    monkeypatch.setitem(EXTRAS, __name__, "hurtle[box]")

    class Old(Count):
        def __init__(self):
            raise AttributeError("MjModel has no flex")

    gymnasium.register("BoxOf-Old-v0", entry_point=Old)
    try:
        monkeypatch.setattr(extras.importlib.metadata, "version", lambda name: "3.17.0")
        with pytest.raises(
            HurtleError, match=r'does not run with MuJoCo 3\.17\.0, only up to 3\.3: pip install "hurtle\[box\]"'
        ):
            hurtle.make("box/Old")
        monkeypatch.setattr(extras.importlib.metadata, "version", lambda name: "3.3.7")
        with pytest.raises(AttributeError, match="no flex"):
            hurtle.make("box/Old")
    finally:
        del gymnasium.registry["BoxOf-Old-v0"]


def test_games_of_an_adapter_are_suggested(monkeypatch):
    monkeypatch.setitem(sys.modules, "procgen", SimpleNamespace())
    monkeypatch.setitem(ADAPTERS, "procgen", ("procgen", Procgen, lambda: ["coinrun", "maze"]))
    monkeypatch.setitem(sys.modules, "crafter", SimpleNamespace())
    assert find_adapter("procgen/maze").args == ("maze",)
    with pytest.raises(UnknownNameError, match=r"No environment 'procgen/coinrnu'\. Did you mean procgen/coinrun"):
        hurtle.make("procgen/coinrnu")
    with pytest.raises(UnknownNameError, match=r"No environment 'crafter/easy'\. Did you mean crafter"):
        hurtle.make("crafter/easy")


def test_folders_of_pettingzoo_stand_for_themselves():
    pytest.importorskip("mpe2", reason="needs hurtle[pettingzoo]")
    for name in ("mpe/simple_spread", "pettingzoo/mpe/simple_spread", "mpe/simple_spread_v3"):
        env = hurtle.make(name)
        assert env.metadata["name"] == "simple_spread_v3"
        env.close()
    with pytest.raises(UnknownNameError, match="Did you mean pettingzoo/mpe/simple_spread_v3"):
        hurtle.make("mpe/simple_spred_v3")


def test_agents_in_tuples_play_as_a_pettingzoo_env():
    pytest.importorskip("pettingzoo", reason="needs hurtle[pettingzoo]")
    from hurtle.envs.tuple_agents import TupleAgents

    class Pair(gymnasium.Env):
        observation_space = spaces.Tuple((spaces.Box(0, 99, (2,)), spaces.Box(0, 99, (1,))))
        action_space = spaces.Tuple((spaces.Discrete(3), spaces.Discrete(2)))

        def reset(self, *, seed=None, options=None):
            self.steps = 0
            return self.seen(), {}

        def step(self, actions):
            self.steps += 1
            return self.seen(), [float(actions[0]), -float(actions[1])], self.steps == 3, False, {"steps": self.steps}

        def seen(self):
            return np.full(2, self.steps, np.float32), np.full(1, self.steps, np.float32)

    env = TupleAgents(Pair())
    assert env.action_space("agent_1") == spaces.Discrete(2)
    vec = hurtle.make_vec(lambda: TupleAgents(Pair()), num_envs=2, backend="serial", copy=True)
    try:
        vec.reset(seed=0)
        outcomes = [vec.step(np.array([[2, 1], [0, 0]])) for _ in range(3)]
        assert [outcome[2].tolist() for outcome in outcomes] == [[[False] * 2] * 2] * 2 + [[[True] * 2] * 2]
        assert outcomes[0][1].tolist() == [[2.0, -1.0], [0.0, 0.0]]
    finally:
        vec.close()
    with pytest.raises(HurtleError, match="Tuple of as many observations as actions, got Box"):
        TupleAgents(Count())


def test_foraging_is_seeded_by_reset_alone():
    pytest.importorskip("pettingzoo", reason="needs hurtle[pettingzoo]")
    from hurtle.envs.tuple_agents import Foraging

    class Field(gymnasium.Env):
        observation_space = spaces.Tuple((spaces.Discrete(9),))
        action_space = spaces.Tuple((spaces.Discrete(2),))
        players = (SimpleNamespace(position=None),)

        def reset(self, *, seed=None, options=None):
            self.players[0].position = 3 if self.players[0].position is None else 4
            return (self.players[0].position,), {}

    env = Foraging(Field())
    assert [env.reset(seed=0)[0] for _ in range(2)] == [{"agent_0": 3}] * 2


def test_nethack_games_are_seeded_by_reset():
    class Game(Count):
        """Like NLE: seeds are given by another method, for the next game; without them a game is random."""

        def seed(self, core, disp, reseed):
            self.seeds = core, disp, reseed

        def reset(self, *, seed=None, options=None):
            super().reset(seed=seed)
            core, disp, reseed = self.seeds
            assert not reseed
            return np.array([core ^ disp]), {}

    env, other = NetHackSeeds(Game()), NetHackSeeds(Game())
    games = [env.reset(seed=seed)[0][0] for seed in (1, None, None)]
    assert len(set(games)) == 3
    assert [other.reset(seed=seed)[0][0] for seed in (1, None, None)] == games
    assert other.reset(seed=1)[0][0] == games[0]
    assert other.reset(seed=2)[0][0] != games[0]


def test_metaworld_draws_its_goal_from_the_seed_and_shows_it():
    class Early(gymnasium.Wrapper):
        """Like Meta-World: draws before it hands the seed on."""

        def reset(self, *, seed=None, options=None):
            goal = self.np_random.integers(2**31, size=1)
            self.env.reset(seed=seed, options=options)
            return goal, {}

    class Bounded(Count):
        observation_space = spaces.Box(0, 0, (1,), np.float64)

    env = MetaWorld(Early(Bounded()))
    goals = [env.reset(seed=seed)[0][0] for seed in (1, 1, 2)]
    assert goals[0] == goals[1] != goals[2]
    assert env.observation_space.contains(np.array([1e9]))


class Levels:
    """Stands in for gym3's Procgen: levels of three steps; -1 gives a level up. Shows the level and the step."""

    made = []

    def __init__(self, num, game, *, rand_seed, num_threads, num_levels=0):
        assert (num, num_threads) == (1, 0)
        self.rng = np.random.default_rng(rand_seed)
        self.made.append((game, num_levels))
        self.begin()

    def begin(self):
        self.level, self.at, self.reward, self.first = int(self.rng.integers(200)), 0, 0.0, True

    def act(self, actions):
        self.at, self.first, self.reward = self.at + 1, False, float(actions[0])
        if actions[0] == -1 or self.at == 3:
            reward = self.reward
            self.begin()
            self.reward = reward

    def observe(self):
        obs = np.zeros((1, 64, 64, 3), np.uint8)
        obs[0, 0, 0, :2] = self.level, self.at
        return np.array([self.reward]), {"rgb": obs}, np.array([self.first])

    def get_info(self):
        return [{"level_seed": self.level}]

    def close(self):
        pass


def test_procgen_keeps_the_last_observation_of_a_level_and_repeats_with_its_seed(monkeypatch):
    monkeypatch.setitem(sys.modules, "procgen", SimpleNamespace(ProcgenGym3Env=Levels))

    def seen(obs):
        return obs[0, 0, :2].tolist()

    def levels(env, seed):
        obs, info = env.reset(seed=seed)
        first = seen(obs)
        assert first == [info["level_seed"], 0]
        steps = [env.step(2) for _ in range(3)]
        assert [seen(step[0]) for step in steps] == [[first[0], 1], [first[0], 2], [first[0], 2]]
        assert [step[1:4] for step in steps] == [(2.0, False, False), (2.0, False, False), (2.0, True, False)]
        second = seen(env.reset()[0])
        env.step(0)
        third = seen(env.reset()[0])  # gives the second level up
        return [first, second, third, seen(env.reset()[0])]

    env = Procgen("maze", num_levels=5)
    played = levels(env, 4)
    assert played[2] == played[3]  # there was nothing to give up
    assert len({level for level, _ in played}) == 3
    assert levels(env, 4) == played
    assert levels(Procgen("maze"), 5) != played
    assert Levels.made[0] == ("maze", 5)
    env.close()
    env.close()


def test_crafter_is_seeded_and_tells_death_from_the_time_limit(monkeypatch):
    class World:
        def reset(self, seed=None):
            self._chunks = None

    class Crafting:
        """Stands in for crafter.Env: dies in the third step of odd episodes; else time is up."""

        observation_space = SimpleNamespace(shape=(np.int64(64), np.int64(64), 3))
        action_space = SimpleNamespace(n=17)

        def __init__(self):
            self._seed, self._episode, self._world = 0, 0, World()

        def reset(self):
            self._episode, self.steps = self._episode + 1, 0
            self._world.reset()
            return np.full((64, 64, 3), hash((self._seed, self._episode)) % 256, np.uint8)

        def step(self, action):
            self.steps += 1
            done = self.steps == 3
            info = {"discount": 1.0 - (done and self._episode % 2), "achievements": {"wood": 1}, "semantic": 0}
            return np.zeros((64, 64, 3), np.uint8), np.float64(0.1), np.bool_(done), info

    monkeypatch.setitem(sys.modules, "crafter", SimpleNamespace(Env=Crafting))
    env = hurtle.make("crafter")
    assert isinstance(env, Crafter)
    first = env.reset(seed=3)[0]
    outcomes = [env.step(0)[1:] for _ in range(3)]
    assert outcomes[0] == (0.1, False, False, {})
    assert outcomes[2] == (0.1, True, False, {"achievements": {"wood": 1}})
    assert not np.array_equal(env.reset()[0], first)
    assert [env.step(0)[2:4] for _ in range(3)][2] == (False, True)
    assert np.array_equal(env.reset(seed=3)[0], first)


def test_crafters_objects_keep_the_order_of_their_arrival():
    class World:
        def reset(self, seed=None):
            self._chunks = {}

    world = World()
    _keep_order(world)
    world.reset(seed=1)
    things = [object() for _ in range(100)]
    for thing in things:
        world._chunks["here"].add(thing)
    world._chunks["here"].remove(things[0])
    assert list(world._chunks["here"]) == things[1:]
