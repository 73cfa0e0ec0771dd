"""Env outputs are checked even after the start-up checks: invalid data must not pass as data."""

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

import hurtle
from hurtle.emulation.outcome_checks import CHECKED_STEPS
from hurtle.emulation.start_checks import RANDOM_STEPS
from hurtle.errors import EmulationError, EnvFailedError

BAD_STEP = 2 * (CHECKED_STEPS + RANDOM_STEPS)  # beyond everything that is checked at start-up

GOOD = {
    "obs": {"vector": np.zeros(3, np.float32), "count": 1},
    "reward": 0.0,
    "terminated": False,
    "truncated": False,
    "info": {},
}


class Turning(gymnasium.Env):
    """Returns what it should, except for one part of one step."""

    observation_space = spaces.Dict(count=spaces.Discrete(5), vector=spaces.Box(-1, 1, (3,)))
    action_space = spaces.Discrete(2)

    def __init__(self, part, value):
        self.bad, self.steps = {part: value}, 0

    def reset(self, *, seed=None, options=None):
        return GOOD["obs"], {}

    def step(self, action):
        self.steps += 1
        return tuple({**GOOD, **(self.bad if self.steps == BAD_STEP else {})}.values())


def vector(value):
    return ("obs", {"count": 1, "vector": value})


WRONG = [
    (*vector(None), r'observation\["vector"\]: expected float32 of shape \(3,\), got NoneType'),
    (*vector([0.0, None, 0.0]), r'observation\["vector"\]: expected float32 of shape \(3,\), got list'),
    (*vector(np.full(3, 1j)), r'observation\["vector"\]: expected float32 of shape \(3,\), got complex128 of shape \(3,\)'),
    (
        *vector(np.zeros(1, np.float32)),
        r'observation\["vector"\]: expected float32 of shape \(3,\), got .* \(1,\)',
    ),
    (*vector("abc"), r'observation\["vector"\]: expected float32 of shape \(3,\), got str'),
    ("obs", {"count": 1.5, "vector": np.zeros(3)}, r'observation\["count"\]: expected an integer from 0 to 4, got float 1.5'),
    ("obs", {"count": None, "vector": np.zeros(3)}, r'observation\["count"\]: expected an integer from 0 to 4, got NoneType'),
    ("obs", None, r'observation: expected a dict with the keys "count", "vector", got NoneType'),
    ("reward", None, r"reward: expected a number, got NoneType None"),
    ("reward", 1j, r"reward: expected a number, got complex 1j"),
    ("reward", np.complex128(1j), r"reward: expected a number, got complex128"),
    ("terminated", None, r"terminated: expected a bool, got NoneType None\. Return bool\(terminated\)"),
    ("truncated", "no", r"truncated: expected a bool, got str 'no'"),
    ("info", None, r"info: expected a dict, got NoneType None"),
]


@pytest.mark.parametrize("emulate", [False, True])
@pytest.mark.parametrize(("part", "value", "message"), WRONG)
def test_every_step_is_looked_at(part, value, message, emulate):
    vec = hurtle.make_vec(lambda: Turning(part, value), num_envs=3, backend="serial", emulate=emulate)
    vec.reset(seed=5)
    for _ in range(BAD_STEP - 1):
        vec.step(np.zeros(3, int))
    where = rf"Env 0 raised EmulationError in step\(\) \(last seeded with 5\), {BAD_STEP} steps after its last reset: "
    with pytest.raises(EnvFailedError, match=where + f"({message})") as error:
        vec.step(np.zeros(3, int))
    assert isinstance(error.value.__cause__, EmulationError)


@pytest.mark.parametrize(
    ("part", "value"),
    [
        vector(np.full(3, 0.5)),  # float64
        vector([0.5, 0.5, 0.5]),
        ("obs", {"count": np.int32(2), "vector": np.zeros(3, np.float32)}),
        ("obs", {"count": np.array(2), "vector": np.zeros(3, np.float32)}),
        ("reward", np.float16(1)),
        ("reward", np.array(1.0)),
        ("terminated", np.False_),
        ("terminated", 0),
    ],
)
def test_what_fits_passes(part, value):
    vec = hurtle.make_vec(lambda: Turning(part, value), num_envs=1, backend="serial")
    vec.reset(seed=5)
    for _ in range(BAD_STEP):
        obs, rewards, *_ = vec.step(np.zeros(1, int))
    if part == "obs":
        assert obs["vector"].tolist() == [np.asarray(value["vector"]).tolist()]
        assert obs["count"].tolist() == [value["count"]]
    elif part == "reward":
        assert rewards.tolist() == [1.0]


def test_the_step_is_counted_from_the_reset_in_a_pool():
    vec = hurtle.make_vec(lambda: Turning("reward", None), num_envs=2, batch_size=1, backend="serial", check=False)
    vec.async_reset(seed=5)

    def play():
        for turn in range(3 * BAD_STEP):
            *_, infos = vec.recv()
            if infos["env_id"][0] == 0 and turn == 6:
                vec.reset_env(0)
            vec.send(np.zeros(1, int))

    with pytest.raises(EnvFailedError, match=rf"last seeded with 5\), {BAD_STEP - 3} steps after its last reset"):
        play()


def test_infos_of_resets():
    class Silent(Turning):
        resets = 0

        def reset(self, *, seed=None, options=None):
            self.resets += 1
            return GOOD["obs"], None if self.resets == 3 else {}

    vec = hurtle.make_vec(lambda: Silent("reward", 0), num_envs=1, backend="serial", check=False)
    vec.reset(seed=5)
    vec.reset()
    with pytest.raises(EnvFailedError, match=r"in reset\(\) \(last seeded with 5\): info: expected a dict, got NoneType None"):
        vec.reset()


@pytest.mark.parametrize(("part", "value", "message"), [entry for entry in WRONG if entry[0] != "obs"])
def test_agents_are_looked_at_too(part, value, message):
    pettingzoo = pytest.importorskip("pettingzoo", reason='needs "hurtle[pettingzoo]"')

    class Pair(pettingzoo.ParallelEnv):
        metadata = {"name": "pair"}
        possible_agents = ["one", "two"]

        def __init__(self):
            self.inner = Turning(part, value)

        def observation_space(self, agent):
            return Turning.observation_space

        def action_space(self, agent):
            return Turning.action_space

        def reset(self, seed=None, options=None):
            self.agents = self.possible_agents[:]
            return dict.fromkeys(self.agents, GOOD["obs"]), {agent: {} for agent in self.agents}

        def step(self, actions):
            bad, good = self.inner.step(0), GOOD.values()
            return tuple({"one": right, "two": wrong} for right, wrong in zip(good, bad, strict=True))

    vec = hurtle.make_vec(Pair, num_envs=1, backend="serial")
    vec.reset(seed=0)
    for _ in range(BAD_STEP - 1):
        vec.step(np.zeros((1, 2), int))
    with pytest.raises(EnvFailedError, match=message.replace(":", r'\["two"\]:', 1)):
        vec.step(np.zeros((1, 2), int))
