"""`hurtle.emulate` on single-agent envs: spaces, memory, checks, hooks, switches, kinds of env."""

import copy
import pickle
import sys
import warnings

import gymnasium
import numpy as np
import pytest
from emulation_envs import Quest
from gymnasium import spaces
from gymnasium.error import ResetNeeded
from gymnasium.utils.env_checker import check_env as gymnasium_check_env
from gymnasium.utils.env_checker import data_equivalence

from hurtle.emulation.emulated_env import EmulatedEnv
from hurtle.emulation.hooks import PRINTED_LINES, PrintLog, featurized_space
from hurtle.emulation.start_checks import check_env, check_seeding
from hurtle.emulation.wrap import emulate
from hurtle.errors import ActionError, EmulationError, HurtleError


class Scripted(gymnasium.Env):
    """Returns what it is told to, step by step."""

    observation_space = spaces.Box(-1, 1, (3,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, *steps, first=(0, 0, 0), info=None):
        self.first, self.info, self.steps = np.array(first, np.float32), {} if info is None else info, list(steps)
        self.zeros = np.zeros(3, np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.first, self.info

    def step(self, action):
        return self.steps.pop(0) if self.steps else (self.zeros, 1.0, False, False, {})


def test_a_nested_observation_becomes_one_flat_array_and_back():
    env = emulate(Quest())
    assert isinstance(env, EmulatedEnv)
    assert env.unwrapped is env.env
    obs, info = env.reset(seed=3)
    assert env.observation_space.contains(obs)
    assert (obs.dtype, obs.shape, info) == (np.uint8, (env.layout.nbytes,), {})
    for step in range(1, 6):
        assert data_equivalence(env.layout.reader(obs)(), env.env.seen)
        views = env.unflatten(obs)
        assert views["inventory"]["gold"] == step
        assert np.array_equal(views["pose"][0], env.env.seen["pose"][0])
        assert np.shares_memory(views["map"], obs)
        obs, reward, terminated, truncated, info = env.step([0, 0, 0])
        assert (reward, terminated, truncated, info) == (step, step == 5, False, {"steps": step})


def test_flat_actions_reach_the_env_in_their_structure():
    env = emulate(Quest())
    assert env.action_space == spaces.MultiDiscrete([5, 3, 2])
    env.reset(seed=0)
    env.step(np.array([4, 2, 1]))
    (action,) = env.env.actions
    assert env.env.action_space.contains(action)
    assert (action["move"], action["use"].tolist()) == (2, [2, 1])


def test_a_flat_env_keeps_its_spaces_and_its_numbers():
    env, plain = emulate(gymnasium.make("CartPole-v1")), gymnasium.make("CartPole-v1")
    assert env.observation_space == plain.observation_space
    assert env.action_space == plain.action_space
    obs, _ = env.reset(seed=5)
    expected, _ = plain.reset(seed=5)
    for action in (0, 1, 1, 0, 1, 1):
        assert np.array_equal(obs, expected)
        obs, *outcome = env.step(action)
        expected, *expected_outcome = plain.step(action)
        assert outcome == expected_outcome


def test_unbound_observations_are_new_arrays_and_bound_ones_one_view():
    env = emulate(Quest())
    first, _ = env.reset(seed=0)
    second, *_ = env.step([0, 0, 0])
    assert not np.shares_memory(first, second)

    batch = env.layout.memory(4)
    env.bind(batch[2])
    obs, _ = env.reset(seed=0)
    again, *_ = env.step([0, 0, 0])
    assert obs is again
    assert np.shares_memory(obs, batch)
    assert np.array_equal(batch[2], second)
    assert not batch[[0, 1, 3]].any()

    env.bind(None)
    obs, *_ = env.step([0, 0, 0])
    assert not np.shares_memory(obs, batch)


def test_step_before_reset_is_refused():
    for check in (True, False):
        with pytest.raises(ResetNeeded):
            emulate(Quest(), check=check).step([0, 0, 0])


# Checks: the first reset and three steps, then never again.


def spoiled(**changes):
    def spoil(observation):
        return {**observation, **changes}

    return spoil


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (
            lambda obs: {**obs, "inventory": {**obs["inventory"], "items": np.zeros(3, np.float32)}},
            'observation["inventory"]["items"]: expected int64 of shape (4,), got float32 of shape (3,)',
        ),
        (spoiled(map=np.zeros((3, 2), np.uint8)), 'observation["map"]: expected uint8 of shape (3, 3)'),
        (spoiled(hint="far too long"), 'observation["hint"]'),
        (lambda obs: {key: value for key, value in obs.items() if key != "pose"}, 'missing "pose"'),
        (spoiled(pose=(np.array([0, 2], np.float32), np.zeros(3, np.int8))), 'observation["pose"][0]'),
    ],
)
def test_a_wrong_observation_is_named_by_its_leaf(spoil, message):
    with pytest.raises(EmulationError) as caught:
        emulate(Quest(spoil)).reset(seed=0)
    assert message in str(caught.value)


def test_only_the_first_steps_are_checked():
    env = Quest()
    emulated = emulate(env)
    emulated.reset(seed=0)
    for _ in range(3):
        emulated.step([0, 0, 0])
    env.spoil = spoiled(pose=(np.array([0, 2], np.float32), np.zeros(3, np.int8)))  # out of bounds
    obs, *_ = emulated.step([0, 0, 0])
    assert emulated.unflatten(obs)["pose"][0][1] == 2
    unchecked = emulate(env, check=False)
    unchecked.reset(seed=0)


@pytest.mark.parametrize(
    ("step", "message"),
    [
        ((np.ones(2), False, False, {}), "reward: expected a number, got float64 of shape (2,)."),
        ((None, False, False, {}), "reward: expected a number, got NoneType None."),
        ((float("nan"), False, False, {}), "reward: expected a number, got NaN."),
        ((1.0, 2, False, {}), "terminated: expected a bool, got int 2. Return bool(terminated)."),
        ((1.0, False, "no", {}), "truncated: expected a bool, got str 'no'. Return bool(truncated)."),
        ((1.0, False, False, []), "info: expected a dict, got list []."),
    ],
)
def test_a_wrong_outcome_is_named(step, message):
    env = emulate(Scripted((np.zeros(3, np.float32), *step)))
    env.reset(seed=0)
    with pytest.raises(EmulationError) as caught:
        env.step(0)
    assert str(caught.value) == message


def test_numpy_numbers_and_flags_are_fine():
    env = emulate(Scripted((np.zeros(3, np.float32), np.float32(2), np.bool_(False), np.bool_(True), {})))
    env.reset(seed=0)
    assert env.step(0)[1:4] == (2, False, True)


def test_an_action_outside_the_space_is_refused_at_start_up():
    env = emulate(Scripted())
    env.reset(seed=0)
    with pytest.raises(ActionError, match=r"expected one of Discrete\(2\), got 7"):
        env.step(7)


def test_mixed_actions_are_refused_by_name_unless_switched_off():
    class Mixed(Scripted):
        action_space = spaces.Dict(fire=spaces.Discrete(2), steer=spaces.Box(-1, 1, (2,)))

    with pytest.raises(EmulationError, match=r'action\["fire"\].*action\["steer"\]'):
        emulate(Mixed())
    env = emulate(Mixed(), actions=False)
    assert env.action_space == Mixed.action_space
    env.reset(seed=0)
    env.step({"fire": np.int64(1), "steer": np.zeros(2, np.float32)})


# Hooks and switches.


def test_featurize_runs_before_flattening_and_its_space_is_found():
    env = emulate(Quest(), featurize=lambda obs: {"mean": obs["map"].mean(), "pose": obs["pose"][0] * 2})
    assert [leaf.path for leaf in env.layout.leaves] == ['observation["mean"]', 'observation["pose"]']
    obs, _ = env.reset(seed=0)
    views = env.unflatten(obs)
    assert views["mean"] == env.env.seen["map"].mean()
    assert np.array_equal(views["pose"], env.env.seen["pose"][0] * 2)


def test_featurize_may_declare_its_space():
    def image(observation):
        return observation["map"] / np.float32(255)

    image.space = spaces.Box(0, 1, (3, 3), np.float32)
    env = emulate(Quest(), featurize=image)
    assert env.observation_space == image.space
    obs, _ = env.reset(seed=0)
    assert np.array_equal(obs, env.env.seen["map"] / np.float32(255))


@pytest.mark.parametrize(
    ("value", "space"),
    [
        (np.zeros((2, 3), np.float32), spaces.Box(-np.inf, np.inf, (2, 3), np.float32)),
        (np.zeros(2, np.int16), spaces.Box(-(2**15), 2**15 - 1, (2,), np.int16)),
        (np.array([True]), spaces.Box(0, 1, (1,), np.uint8)),
        (
            (1.0, {"a": 2}),
            spaces.Tuple(
                [spaces.Box(-np.inf, np.inf, (), np.float64), spaces.Dict(a=spaces.Box(-(2**63), 2**63 - 1, (), np.int64))]
            ),
        ),
    ],
)
def test_the_space_of_a_featurizer(value, space):
    assert featurized_space(lambda obs: value, Quest.observation_space) == space


def test_featurizers_that_cannot_be_used_say_why():
    with pytest.raises(EmulationError, match=r"featurize .*\['name'\] returned str 'x'"):
        emulate(Quest(), featurize=lambda obs: {"name": "x"})

    def broken(observation):
        return observation["nothing"]

    with pytest.raises(EmulationError, match=r"featurize \(broken\) failed on a sample.*KeyError.*broken\.space = "):
        emulate(Quest(), featurize=broken)
    varying = emulate(Quest(), featurize=lambda obs: np.zeros(1 + (obs["inventory"]["gold"] == 1)))
    with pytest.raises(EmulationError, match=r"observation: expected float64 of shape \(1,\), got float64 of shape \(2,\)"):
        varying.reset(seed=0)


def test_shape_reward_gets_what_the_env_knows_and_keeps_the_reward():
    def shaped(reward, observation, action, info):
        return reward * 10 + observation["inventory"]["gold"] + action["move"] + info["steps"]

    env = emulate(Quest(), shape_reward=shaped)
    env.reset(seed=0)
    for step in range(1, 6):  # checked and unchecked steps
        _, reward, *_, info = env.step([4, 0, 0])
        assert reward == 10 * step + (1 + step) + 2 + step
        assert info == {"steps": step, "raw_reward": step}


def test_prints_are_captured_and_bounded(capsys):
    env = emulate(Quest(), capture_prints=True)
    env.reset(seed=0)
    env.reset()
    assert capsys.readouterr().out == ""
    assert env.prints == ["quest begins", "quest begins"]
    emulate(Quest()).reset(seed=0)
    assert capsys.readouterr().out == "quest begins\n"

    log = PrintLog()
    for i in range(2 * PRINTED_LINES):
        print("line", i, file=log)
    print("open", end="", file=log)
    assert len(log.lines) == PRINTED_LINES + 1
    assert log.lines[-2:] == [f"line {2 * PRINTED_LINES - 1}", "open"]


def test_observations_can_be_left_alone():
    env = emulate(Quest(), observations=False)
    assert env.observation_space == Quest.observation_space
    assert env.layout is None
    obs, _ = env.reset(seed=0)
    assert obs is env.env.seen
    assert env.unflatten(obs) is obs


def test_maxima_reach_the_layout():
    class Words(Scripted):
        observation_space = spaces.Sequence(spaces.Discrete(5))

        def reset(self, *, seed=None, options=None):
            return (1, 2, 3), {}

    with pytest.raises(EmulationError, match="max_length"):
        emulate(Words())
    env = emulate(Words(), max_length=4)
    obs, _ = env.reset(seed=0)
    views = env.unflatten(obs)
    assert (views["values"].tolist(), views["length"]) == ([1, 2, 3, 0], 3)


# Kinds of env.


def test_makers_classes_and_emulated_envs_are_taken():
    assert isinstance(emulate(lambda: Quest()).env, Quest)
    assert isinstance(emulate(Quest).env, Quest)
    env = emulate(Quest())
    assert emulate(env) is env


@pytest.mark.parametrize(
    ("thing", "message"),
    [
        (3, "got int 3"),
        ("CartPole-v1", r"hurtle\.emulate\(hurtle\.make\('CartPole-v1'\)\)"),
        (lambda: gymnasium.make_vec("CartPole-v1", 2), "got CartPoleVectorEnv"),
    ],
)
def test_other_things_are_refused(thing, message):
    with pytest.raises(HurtleError, match=message):
        emulate(thing)


def test_an_old_gym_env_needs_the_extra(monkeypatch):
    class OldEnv:
        """An env with the interface of Gym 0.21."""

        observation_space, action_space = Scripted.observation_space, Scripted.action_space

        def reset(self):
            return np.zeros(3, np.float32)

        def step(self, action):
            return self.reset(), 1.0, True, {}

    monkeypatch.setitem(sys.modules, "gym", None)
    with pytest.raises(HurtleError, match=r"OldEnv .* pip install \"hurtle\[gym\]\""):
        emulate(OldEnv())


OLD_ENVS = """
try:
    import gym
except ImportError:  # what shimmy needs of it
    import sys, types, gymnasium
    gym, wrappers = types.ModuleType("gym"), types.ModuleType("gym.wrappers")
    gym.Env, gym.Space, gym.spaces, gym.wrappers = object, gymnasium.Space, gymnasium.spaces, wrappers
    sys.modules.update({"gym": gym, "gym.wrappers": wrappers})
import numpy as np
from hurtle.emulation.wrap import emulate

class Gym21(gym.Env):
    observation_space = gym.spaces.Dict({"a": gym.spaces.Box(-1, 1, (3,), np.float32), "b": gym.spaces.Discrete(4)})
    action_space = gym.spaces.Discrete(2)
    render_mode = None

    def seed(self, seed=None):
        self.rng = np.random.default_rng(seed)

    def observe(self):
        return {"a": self.rng.uniform(-1, 1, 3).astype(np.float32), "b": 2}

    def reset(self):
        return self.observe()

    def step(self, action):
        return self.observe(), 1.0, True, {"TimeLimit.truncated": bool(action)}

class Gym26(Gym21):
    def reset(self, *, seed=None, options=None):
        if seed is not None:
            self.seed(seed)
        return self.observe(), {}

    def step(self, action):
        return self.observe(), 1.0, False, bool(action), {}

for old in (Gym21, Gym26):
    env = emulate(old())
    first, again = env.reset(seed=1)[0], env.reset(seed=1)[0]
    print(env.unflatten(first)["b"], np.array_equal(first, again), env.step(1)[1:4], env.step(0)[1:4])
"""


def test_old_gym_envs_work_through_shimmy(run_python):
    pytest.importorskip("shimmy", reason='needs pip install "hurtle[gym]"')
    assert run_python(OLD_ENVS).stdout.splitlines() == [
        "2 True (1.0, False, True) (1.0, True, False)",
        "2 True (1.0, False, True) (1.0, False, False)",
    ]


def test_emulation_imports_no_extra(run_python):
    code = "import sys, hurtle.emulation.wrap; print([m for m in ('torch', 'pettingzoo', 'numba', 'gym') if m in sys.modules])"
    assert run_python(code).stdout == "[]\n"


# As a Gymnasium env.


@pytest.mark.filterwarnings("ignore:.*The environment .* is different from the unwrapped version.*")
@pytest.mark.filterwarnings("ignore:.*Box observation space.*")
@pytest.mark.parametrize("make", [Quest, lambda: gymnasium.make("CartPole-v1"), lambda: gymnasium.make("Blackjack-v1")])
def test_gymnasium_accepts_the_emulated_env(make):
    gymnasium_check_env(emulate(make), skip_render_check=True)


def test_attributes_of_the_env_are_reached():
    env = emulate(Quest())
    env.reset(seed=0)
    assert env.get_wrapper_attr("steps") == 0
    assert env.np_random is env.env.np_random


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda env: pickle.loads(pickle.dumps(env))], ids=["deepcopy", "pickle"])
def test_copies_go_on_alike_in_memory_of_their_own(clone):
    env = emulate(Quest(), capture_prints=True)
    env.reset(seed=0)
    twin = clone(env)
    for _ in range(4):
        obs, *outcome = env.step([1, 2, 0])
        twin_obs, *twin_outcome = twin.step([1, 2, 0])
        assert np.array_equal(obs, twin_obs)
        assert outcome == twin_outcome
    env.bind(env.layout.memory())
    assert not np.shares_memory(env.step([0, 0, 0])[0], clone(env).step([0, 0, 0])[0])


# The start-up check.


def test_check_env_accepts_sound_envs():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_env(Quest())
        check_env(gymnasium.make("CartPole-v1"))
        check_env(emulate(Quest(), featurize=lambda obs: obs["map"]))


def test_check_env_leaves_the_env_usable():
    env, plain = Quest(), Quest()
    env.action_space.seed(0)
    expected = env.action_space.sample()
    env.action_space.seed(0)
    check_env(env)
    assert data_equivalence(env.action_space.sample(), expected)
    assert data_equivalence(env.reset(seed=1)[0], plain.reset(seed=1)[0])


def test_check_env_finds_what_goes_wrong_later():
    calls = iter(range(100))
    env = Quest(lambda obs: obs if next(calls) < 8 else {**obs, "map": obs["map"][:2]})
    with pytest.raises(EmulationError, match=r'observation\["map"\]: expected uint8 of shape \(3, 3\)'):
        check_env(env)


def test_unseeded_randomness_is_reported_by_leaf():
    rng = np.random.default_rng()
    unseeded = Quest(lambda obs: {**obs, "pose": (rng.uniform(-1, 1, 2).astype(np.float32), obs["pose"][1])})
    with pytest.warns(UserWarning, match=r'different first observations: observation\["pose"\]\[0\] differs'):
        check_seeding(emulate(unseeded))
    with pytest.warns(UserWarning, match="observation differs"):
        check_seeding(emulate(unseeded, observations=False))
