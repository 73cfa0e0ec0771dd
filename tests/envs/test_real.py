"""Envs of other packages, for real: through `make`, through `emulate` beside the env itself, and through every back end."""

import sys
from dataclasses import dataclass

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

import hurtle
from hurtle.envs import packages
from hurtle.errors import HurtleError, UnknownNameError


class Walker(gymnasium.Env):
    """Laid out like a task of DeepMind's control suite: a tree of float64 arrays, some of them empty of axes."""

    observation_space = spaces.Dict(
        {
            "position": spaces.Box(-np.inf, np.inf, (3,)),
            "touch": spaces.Dict(
                {
                    "heel": spaces.Box(0.0, np.inf, (), np.float64),
                    "toes": spaces.Tuple((spaces.Box(0.0, np.inf, (2, 2), np.float64), spaces.MultiBinary(3))),
                }
            ),
            "height": spaces.Box(-np.inf, np.inf, (1,), np.float64),
        }
    )
    action_space = spaces.Box(-1.0, 1.0, (2,), np.float64)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return self._observation(), {}

    def step(self, action):
        self.steps += 1
        return self._observation(), float(action.sum()), self.steps == 7, False, {}

    def _observation(self):
        rng = self.np_random
        toes = (rng.random((2, 2)), rng.integers(0, 2, 3, np.int8))
        touch = {"heel": np.array(rng.random()), "toes": toes}
        return {"position": rng.normal(size=3).astype(np.float32), "touch": touch, "height": rng.normal(size=1)}


@dataclass
class Case:
    """One env: what it needs, and what its flat observation and action look like."""

    env: object
    module: str
    extra: str
    flat: tuple
    dtype: type
    actions: spaces.Space

    def make(self):
        pytest.importorskip(self.module, reason=f"needs hurtle[{self.extra}]")
        return hurtle.make(self.env)


def box(*shape, dtype=np.float32):
    return spaces.Box(-1.0, 1.0, shape, dtype)


# The image and direction of MiniGrid and its mission as text: 8 + 147 bytes, 256 characters, a length, and padding.
SINGLE = [
    Case("ALE/Pong-v5", "ale_py", "atari", (210, 160, 3), np.uint8, spaces.Discrete(6)),
    Case("atari/Breakout", "ale_py", "atari", (4, 84, 84), np.uint8, spaces.Discrete(4)),
    Case("HalfCheetah-v5", "mujoco", "mujoco", (17,), np.float64, box(6)),
    Case("Pendulum-v1", "gymnasium", "", (3,), np.float32, spaces.Box(-2.0, 2.0, (1,))),
    Case("MiniGrid-Empty-5x5-v0", "minigrid", "minigrid", (416,), np.uint8, spaces.Discrete(7)),
    Case(Walker, "gymnasium", "", (72,), np.uint8, box(2, dtype=np.float64)),
]
AGENTS = [
    Case(
        "pettingzoo/butterfly/knights_archers_zombies_v11", "pygame", "pettingzoo", (4, 27, 5), np.float64, spaces.Discrete(6)
    ),
    Case("pettingzoo/sisl/pursuit_v5", "scipy", "pettingzoo", (8, 7, 7, 3), np.float32, spaces.Discrete(5)),
    Case("pettingzoo/mpe/simple_spread_v3", "mpe2", "pettingzoo", (3, 18), np.float32, spaces.Discrete(5)),
    Case("pettingzoo/mpe/simple_speaker_listener_v4", "mpe2", "pettingzoo", (2, 11), np.float32, spaces.Discrete(5)),
    Case("pettingzoo/classic/tictactoe_v3", "pygame", "pettingzoo", (2, 27), np.int8, spaces.Discrete(9)),
]


def name_of(case):
    return case.env if isinstance(case.env, str) else case.env.__name__


backends = pytest.mark.parametrize("backend", ["serial", "process"])
IN_PROCESSES = ("MiniGrid-Empty-5x5-v0", "pettingzoo/mpe/simple_spread_v3")
SLOW_TO_START = ("ALE/Pong-v5", "pettingzoo/sisl/pursuit_v5")
SLOW_TO_PLAY = ("atari/Breakout",)


def each_of(cases):
    """Those that take long to start are for slow tests: others of their packages start sooner."""
    marks = {True: [pytest.mark.slow], False: []}
    found = [pytest.param(case, id=name_of(case), marks=marks[name_of(case) in SLOW_TO_START]) for case in cases]
    return pytest.mark.parametrize("case", found)


def beside_each_backend(cases):
    """Most envs in this process, and in worker processes a few of them, the others as slow tests."""
    found = []
    for case in cases:
        for backend in ("serial", "process"):
            is_slow = (
                name_of(case) in SLOW_TO_START + SLOW_TO_PLAY if backend == "serial" else name_of(case) not in IN_PROCESSES
            )
            found.append(pytest.param(case, backend, id=f"{name_of(case)}-{backend}", marks=[pytest.mark.slow] * is_slow))
    return pytest.mark.parametrize(("case", "backend"), found)


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # MuJoCo leaves a log file behind


def assert_same(one, other):
    """Two observations of the same structure, equal in every leaf, and of the same dtypes."""
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        one, other = list(one.values()), [other[key] for key in one]
    if isinstance(one, list | tuple):
        assert len(one) == len(other)
        for part, other_part in zip(one, other, strict=True):
            assert_same(part, other_part)
    elif isinstance(one, str):
        assert one == other
    else:
        np.testing.assert_array_equal(one, other)
        assert np.asarray(one).dtype == np.asarray(other).dtype


def row(tree, index):
    """What env `index` of a vector sees."""
    if isinstance(tree, dict):
        return {key: row(part, index) for key, part in tree.items()}
    if isinstance(tree, tuple) and not isinstance(tree[index], str):
        return tuple(row(part, index) for part in tree)
    return tree[index]


@each_of(SINGLE)
def test_emulated_beside_the_env_itself(case):
    env, flat = case.make(), hurtle.emulate(case.make())
    assert (flat.observation_space.shape, flat.observation_space.dtype) == (case.flat, case.dtype)
    assert flat.action_space == case.actions
    flat.action_space.seed(0)
    memory = flat.layout.memory()
    flat.bind(memory)
    read = flat.layout.reader(memory)
    flat.reset(seed=5)
    assert_same(env.reset(seed=5)[0], read())
    for _ in range(12):
        action = flat.action_space.sample()
        expected, *outcome, _ = env.step(flat.action_layout.decode(action))
        obs, *flat_outcome, _ = flat.step(action)
        assert outcome == flat_outcome
        assert obs in flat.observation_space
        assert_same(expected, read())
        if outcome[1] or outcome[2]:
            flat.reset()
            assert_same(env.reset()[0], read())


def parallel(env):
    """A PettingZoo env whose agents act at once."""
    from pettingzoo.utils.conversions import turn_based_aec_to_parallel

    return turn_based_aec_to_parallel(env) if hasattr(env, "agent_iter") else env


def choose(rng, info):
    """A random legal action."""
    mask = info.get("action_mask")
    return int(rng.integers(info["n"]) if mask is None else rng.choice(np.flatnonzero(mask)))


@each_of(AGENTS)
def test_agents_emulated_beside_the_env_itself(case):
    env, flat = parallel(case.make()), hurtle.emulate(case.make())
    assert sorted(env.possible_agents) == sorted(flat.possible_agents)
    first = flat.possible_agents[0]
    assert ((len(flat.possible_agents), *flat.observation_space(first).shape), flat.action_space(first)) == (
        case.flat,
        case.actions,
    )
    rng = np.random.default_rng(0)
    expected, _ = env.reset(seed=5)
    observations, infos = flat.reset(seed=5)
    ended = 0
    for _ in range(25):
        assert {agent for agent, info in infos.items() if info["agent_mask"]} == set(env.agents)
        for agent in flat.possible_agents:
            assert observations[agent].dtype == case.dtype
            own = expected.get(agent, np.zeros(0))
            if not isinstance(own, dict):  # padded at the end, and all zeros for agents who are not there
                seen = observations[agent][tuple(slice(size) for size in own.shape)]
                np.testing.assert_array_equal(seen, own)
                assert np.count_nonzero(observations[agent]) == np.count_nonzero(own)
            else:
                assert_same(own, flat.layout.unflatten(observations[agent]))
        actions = {agent: choose(rng, {**info, "n": case.actions.n}) for agent, info in infos.items()}
        expected, rewards, terminated, truncated, _ = env.step({agent: actions[agent] for agent in env.agents})
        observations, flat_rewards, *_, infos = flat.step(actions)
        for agent in flat.possible_agents:
            assert flat_rewards[agent] == rewards.get(agent, 0.0)
            if terminated.get(agent) or truncated.get(agent):
                assert infos[agent]["terminated"] == terminated[agent]
        if not env.agents:
            assert flat.agents == []
            ended += 1
            expected, _ = env.reset(seed=6)
            observations, infos = flat.reset(seed=6)
    assert ended >= ("tictactoe" in case.env)


@beside_each_backend(SINGLE)
def test_vectors_play_as_single_envs_do(case, backend):
    singles = [case.make() for _ in range(2)]
    expected = [env.reset(seed=7 + index)[0] for index, env in enumerate(singles)]
    vec = hurtle.make_vec(case.env, num_envs=2, backend=backend, num_workers=1 if backend == "process" else None)
    try:
        vec.action_space.seed(0)
        obs, _ = vec.reset(seed=7)
        for _ in range(30):
            for index in range(2):
                assert_same(expected[index], row(obs, index))
            actions = vec.action_space.sample()
            obs, rewards, terminated, truncated, infos = vec.step(actions)
            for index, env in enumerate(singles):
                expected[index], *outcome, _ = env.step(actions[index])
                assert [rewards[index], terminated[index], truncated[index]] == outcome
                if outcome[1] or outcome[2]:
                    assert infos["_final_obs"][index]
                    assert_same(expected[index], row(infos["final_obs"], index))
                    expected[index], _ = env.reset()
    finally:
        vec.close()


@beside_each_backend(AGENTS)
def test_vectors_of_agents_play_as_single_envs_do(case, backend):
    singles = [hurtle.emulate(case.make()) for _ in range(2)]
    vec = hurtle.make_vec(case.env, num_envs=2, backend=backend, emulate=True, num_workers=1 if backend == "process" else None)
    try:
        assert vec.num_agents == case.flat[0]
        rng = np.random.default_rng(0)
        obs, infos = vec.reset(seed=7)
        told = [env.reset(seed=7 + index) for index, env in enumerate(singles)]
        for _ in range(20):
            assert (obs.shape, obs.dtype) == ((2, *case.flat), case.dtype)
            mask = infos["action_mask"] if "action_mask" in infos else np.ones((2, case.flat[0], case.actions.n), bool)
            actions = np.zeros((2, case.flat[0]), np.int64)
            for index, env in enumerate(singles):
                seen, known = told[index]
                present = [known[agent]["agent_mask"] for agent in env.possible_agents]
                np.testing.assert_array_equal(infos["agent_mask"][index], present)
                np.testing.assert_array_equal(obs[index][present], np.stack(list(seen.values()))[present])
                for slot in np.flatnonzero(present):
                    actions[index, slot] = rng.choice(np.flatnonzero(mask[index, slot]))
            obs, rewards, _, _, infos = vec.step(actions)
            for index, env in enumerate(singles):
                seen, gained, *_, known = env.step(dict(zip(env.possible_agents, actions[index], strict=True)))
                np.testing.assert_array_equal(rewards[index], list(gained.values()))
                told[index] = (seen, known) if env.agents else env.reset()
    finally:
        vec.close()


@backends
def test_envs_that_only_this_process_has_registered(backend):
    gymnasium.register("hurtle-test/Walker-v0", entry_point=Walker, max_episode_steps=3)
    try:
        vec = hurtle.make_vec("hurtle-test/Walker-v0", num_envs=2, backend=backend)
        try:
            vec.reset(seed=0)
            truncated = [vec.step(np.zeros((2, 2)))[3].tolist() for _ in range(4)]
        finally:
            vec.close()
    finally:
        del gymnasium.registry["hurtle-test/Walker-v0"]
    assert truncated == [[False, False], [False, False], [True, True], [False, False]]


@pytest.mark.parametrize(
    ("name", "module", "message"),
    [
        ("ALE/Pong-v5", "ale_py", r'ALE/Pong-v5 needs ale-py: pip install "hurtle\[atari\]"'),
        ("atari/Pong", "ale_py", r'needs ale-py: pip install "hurtle\[atari\]"'),
        ("MiniGrid-Empty-5x5-v0", "minigrid", r'MiniGrid-Empty-5x5-v0 needs minigrid: pip install "hurtle\[minigrid\]"'),
        ("BabyAI-GoToRedBall-v0", "minigrid", r'pip install "hurtle\[minigrid\]"'),
        ("HalfCheetah-v5", "mujoco", r'HalfCheetah-v5 needs mujoco: pip install "hurtle\[mujoco\]"'),
        ("pettingzoo/sisl/pursuit_v5", "pettingzoo", r'pettingzoo/sisl/pursuit_v5 needs pettingzoo: pip install "hurtle\[pett'),
        ("pettingzoo/mpe/simple_v3", "mpe2", r'pettingzoo/mpe/simple_v3 needs mpe2: pip install "hurtle\[pettingzoo\]"'),
    ],
)
def test_a_missing_package_is_named_with_its_extra(name, module, message, monkeypatch):
    for loaded in [*sys.modules]:
        if loaded == module or loaded.startswith((f"{module}.", "gymnasium.envs.mujoco")):
            monkeypatch.delitem(sys.modules, loaded)

    class Missing:
        def find_spec(self, fullname, path=None, target=None):
            if fullname == module:
                raise ModuleNotFoundError(f"No module named {module!r}", name=module)

    monkeypatch.setattr(sys, "meta_path", [Missing(), *sys.meta_path])
    if name.startswith("pettingzoo/mpe"):
        pytest.importorskip("pettingzoo", reason="needs hurtle[pettingzoo]")
    with pytest.raises(HurtleError, match=message):
        hurtle.make(name)


def test_a_missing_part_of_pettingzoo_is_named(monkeypatch):
    pytest.importorskip("pettingzoo", reason="needs hurtle[pettingzoo]")

    def fail(name):
        def make(**parameters):
            raise RuntimeError("cannot import") from ModuleNotFoundError("no", name=name)

        return make

    monkeypatch.setattr(packages, "_find_pettingzoo", lambda name: fail("pymunk"))
    with pytest.raises(HurtleError, match=r'pistonball_v6 needs pymunk: pip install "hurtle\[pettingzoo\]"'):
        hurtle.make("pettingzoo/butterfly/pistonball_v6")
    monkeypatch.setattr(packages, "_find_pettingzoo", lambda name: fail("chess"))
    with pytest.raises(HurtleError, match=r'chess_v6 needs chess: pip install "pettingzoo\[classic\]"'):
        hurtle.make("pettingzoo/classic/chess_v6")


@pytest.mark.parametrize(
    ("name", "module", "message"),
    [
        ("ALE/Pnog-v5", "ale_py", r"No environment 'ALE/Pnog-v5'\. Did you mean ALE/Pong-v5"),
        ("MiniGrid-Empty-5x5-v9", "minigrid", r"No environment 'MiniGrid-Empty-5x5-v9'\. Did you mean MiniGrid-Empty-5x5-v0"),
        ("nowhere/Game-v0", "gymnasium", "No environment 'nowhere/Game-v0'.*Namespace nowhere not found"),
        ("pettingzoo/butterfly/pistonball_v5", "pettingzoo", "Did you mean pettingzoo/butterfly/pistonball_v6"),
        ("pettingzoo/mpe/simple_spred_v3", "mpe2", "Did you mean pettingzoo/mpe/simple_spread_v3"),
    ],
)
def test_unknown_names_are_suggested(name, module, message):
    pytest.importorskip(module, reason=f"needs {module}")
    with pytest.raises(UnknownNameError, match=message):
        hurtle.make(name)


def test_parameters_and_render_modes_reach_the_env():
    pytest.importorskip("mpe2", reason="needs hurtle[pettingzoo]")
    env = hurtle.make("pettingzoo/mpe/simple_spread_v3", N=5, max_cycles=2, render_mode="rgb_array")
    assert len(env.possible_agents) == 5
    env.reset(seed=0)
    assert env.render().ndim == 3
    for _ in range(2):
        env.step(dict.fromkeys(env.agents, 0))
    assert env.agents == []
