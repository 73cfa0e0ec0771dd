"""Indices in env code: negative ones mean the same as in Python; none goes out of bounds, on any target."""

import json
import linecache

import numpy as np
import pytest
from sample_envs import Indexer, Late

import hurtle
from hurtle.collect.native_collector import NativeCollector
from hurtle.errors import EnvCodeError, EnvIndexError
from hurtle.native.env import EnvSpec
from hurtle.policies.build import PolicyConfig

# case of Indexer → (length, the author's line, what it indexes)
CASES = {
    0: (5, "found = state.items[state.index]", "state.items[state.index]"),
    1: (5, "state.items[state.index] = 50", "state.items[state.index]"),
    2: (4, "state.grid[state.index, 1] += 50", "state.grid[state.index, 1]"),
    3: (3, "state.grid[3, state.index] = 50", "state.grid[3, state.index]"),
    4: (3, "found = row[state.index]", "row[state.index]"),
    5: (3, "found = state.grid[1][state.index]", "state.grid[1][state.index]"),
    6: (7, "found = self.TABLE[state.index]", "self.TABLE[state.index]"),
    7: (4, "found = self.MOVES[state.index]", "self.MOVES[state.index]"),
    8: (5, "return items[k]", "items[k]"),
    9: (3, "found = 1 + action[state.index]", "action[state.index]"),
    10: (3, "found = state.items[1:4][state.index]", "state.items[1:4][state.index]"),
    13: (2, "obs[state.index, 2] = 9.0", "obs[state.index, 2]"),
    14: (3, "obs[1, state.index] = 9.0", "obs[1, state.index]"),
}
ACTIONS = np.array([[0, 1, 0], [1, 0, 1]])


@pytest.fixture(scope="module")
def compiled():
    return hurtle.make_vec(Indexer, num_envs=2, num_workers=1)


@pytest.fixture(scope="module")
def uncompiled():
    return hurtle.make_vec(Indexer, num_envs=2, debug=True)


def outcome(vec, case, index):
    """The result of one step that indexes there: reward, observation and State, or the error."""
    vec.reset(seed=0, options={"case": 99, "index": 0})
    vec.set_attr("case", case)
    vec.set_attr("index", index)
    obs, rewards, *_ = vec.step(ACTIONS)
    return rewards.copy(), obs.copy(), vec.states.copy()


def line_of(text):
    source = linecache.getlines(Indexer.step.__code__.co_filename)
    return 1 + next(n for n, line in enumerate(source) if line.strip().startswith(text))


@pytest.mark.parametrize("case", CASES)
def test_indices_inside_mean_what_they_mean_in_python(compiled, uncompiled, case):
    length = CASES[case][0]
    for index in range(-length, length):
        for got, expected in zip(outcome(compiled, case, index), outcome(uncompiled, case, index), strict=True):
            np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("beyond", [0, 1, 100_000, -1, -100_000])
def test_an_index_out_of_bounds_names_line_index_and_length(compiled, case, beyond):
    length, line, text = CASES[case]
    index = length + beyond if beyond >= 0 else -length + beyond
    with pytest.raises(EnvIndexError) as raised:
        outcome(compiled, case, index)
    message = str(raised.value)
    assert message.startswith(f"{Indexer.step.__code__.co_filename}:{line_of(line)}: Indexer.")
    assert f"indexes {text} out of bounds: index {index} on axis" in message
    assert f"length is {length}" in message
    assert line in message


@pytest.mark.parametrize("case", CASES)
def test_plain_python_raises_for_the_same_indices(uncompiled, case):
    length = CASES[case][0]
    for index in (length, -length - 1):
        with pytest.raises(IndexError):
            outcome(uncompiled, case, index)


def test_a_choice_from_nothing_is_out_of_bounds(compiled):
    rewards, *_ = outcome(compiled, 11, 4)
    assert rewards.tolist() == [5.0, 5.0]
    with pytest.raises(EnvIndexError, match=r"rng\.choice"):
        outcome(compiled, 11, 5)


def test_an_index_out_of_bounds_ends_a_loop(compiled):
    with pytest.raises(EnvIndexError, match="index 5 on axis 0, whose length is 5"):
        outcome(compiled, 12, 0)


@pytest.mark.parametrize("num_workers", [1, 2])
@pytest.mark.usefixtures("all_threads")
def test_play_and_several_threads_raise_it_too(num_workers):
    vec = hurtle.make_vec(Indexer, num_envs=4, num_workers=num_workers)
    vec.reset(seed=0)
    vec.play(10)
    vec.set_attr("index", [0, 0, 0, 99])
    with pytest.raises(EnvIndexError, match="index 99"):
        vec.play(10)
    with pytest.raises(EnvIndexError, match="index 99"):
        vec.step(np.zeros((4, 3), np.int64))
    vec.reset(seed=0, options={"index": 1})
    assert vec.step(np.zeros((4, 3), np.int64))[1].tolist() == [2.0] * 4


@pytest.mark.usefixtures("all_threads")
def test_the_native_collector_raises_it():
    vec = hurtle.make_vec(Indexer, num_envs=4)
    collector = NativeCollector(vec, PolicyConfig(hidden_sizes=(4,)), num_threads=2)
    rollout = collector.new_rollout(num_steps=4)
    collector.collect(rollout)
    vec.set_attr("index", [0, 0, 0, 99])
    with pytest.raises(EnvIndexError, match="index 99 on axis 0, whose length is 5"):
        collector.collect(rollout)
    collector.close()


@pytest.mark.parametrize("gear", ["native", "general", "device"])
def test_training_raises_it_in_every_gear(gear, tmp_path):
    settings = {"num_envs": 4, "num_steps": 16, "minibatch_size": 32, "hidden_sizes": (4,), "eval_episodes": 1}
    with pytest.raises(EnvIndexError, match="index 12 on axis 0, whose length is 12") as raised:
        hurtle.train(Late, gear=gear, total_steps=128, runs=str(tmp_path), progress="quiet", **settings)
    assert "state.seen[state.time] = 1\n" in str(raised.value)


def test_unsafe_leaves_the_checks_out_and_keeps_the_meaning(uncompiled):
    assert "OutOfBounds(site" not in generated(Indexer(unsafe=True))
    assert "OutOfBounds(site" in generated(Indexer())
    vec = hurtle.make_vec(Indexer, num_envs=2, unsafe=True)
    for case in CASES:
        for index in (0, -1):
            for got, expected in zip(outcome(vec, case, index), outcome(uncompiled, case, index), strict=True):
                np.testing.assert_array_equal(got, expected)


def generated(env):
    from hurtle.native.generate import generate

    return generate(EnvSpec.of(env), "cpu")[0]


def test_unsafe_is_for_native_envs():
    with pytest.raises(hurtle.HurtleError, match="unsafe"):
        hurtle.make_vec("CartPole-v1", num_envs=2, unsafe=True)
    with pytest.raises(hurtle.HurtleError, match="unsafe"):
        hurtle.make("CartPole-v1", unsafe=True)


def test_constants_and_own_lengths_are_not_checked_when_run():
    text = generated(Indexer())
    body = text[text.index("def env_reset") : text.index("def env_step")]
    assert "_at(k, i8(4)," in body  # the compiler removes the check: it knows that k < 4
    assert "state.grid[_at(state.index" not in body
    assert "obs[U64(0) * U64(3) + U64(0)]" in text


def test_a_constant_out_of_bounds_is_refused_when_compiled(write_module):
    source = """
from hurtle.native import Box, Discrete, Env, int32


class Off(Env):
    observation_space = Box(0.0, 1.0, (1,))
    action_space = Discrete(2)

    class State:
        items: int32[4]

    def reset(self, state, rng):
        pass

    def step(self, state, action, rng):
        if action == 5:
            state.items[INDEX] = 1
        return 0.0, False

    def observe(self, state, obs):
        obs[0] = 0.0
"""
    for index in (4, -5):
        with pytest.raises(EnvCodeError, match=r"Axis 0 of state\.items has length 4: the last index is 3"):
            hurtle.make_vec(write_module(source.replace("INDEX", str(index))).Off, num_envs=1)
    generated(write_module(source.replace("INDEX", "-4")).Off())


REFUSED = [
    ("p = pick(state); p[900] = 1", "returns the array state.items", "pass arrays as arguments"),
    ("p = (state.items, state.items); found = p[0][900]", "puts the array state.items into a tuple", "Tuples hold numbers"),
    ("put(state.items, 8)", "passes state.items as obs", "is called obs if, and only if, it is given obs"),
    ("pair(state)[state.k] = 1", "uses pair(state)[state.k]", "Give pair(state) a name first"),
]
HELPERS = """
from hurtle.native import Box, Discrete, Env, MultiDiscrete, int32


def pick(state):
    return state.items


def pair(state):
    state.k += 1
    return state.k, state.k + 10


def put(obs, k):
    obs[k] = 9


def fill(cells, obs):
    cells[3] = 1


class Sample(Env):
    observation_space = Box(-100.0, 100.0, (2, 3))
    action_space = MultiDiscrete([500, 5])

    class State:
        items: int32[4]
        k: int32

    def reset(self, state, rng):
        for i in range(4):
            state.items[i] = 10 * i

    def step(self, state, action, rng):
        found = 0
        if action[0] == 499:
            LINE
        elif action[0] == 498:
            OTHER
        elif action[0] == 497:
            LAST
        return float(found), False

    def observe(self, state, obs):
        obs[0, 0] = float(state.k)
"""


def sample(write_module, line, other="pass", last="pass", **replaced):
    """Does `line` if the first action is 499, `other` if it is 498 and `last` if it is 497."""
    source = HELPERS
    for place, lines in (("LINE", line), ("OTHER", other), ("LAST", last)):
        source = source.replace(place, lines.replace("; ", "\n            "))
    for old, new in replaced.items():
        source = source.replace(old, new)
    return write_module(source).Sample


@pytest.mark.parametrize(("line", "problem", "advice"), REFUSED)
def test_arrays_whose_length_would_be_lost_are_refused(write_module, line, problem, advice):
    with pytest.raises(EnvCodeError) as raised:
        hurtle.make_vec(sample(write_module, line), num_envs=1)
    assert problem in str(raised.value)
    assert advice in str(raised.value)


def test_observations_keep_their_name_in_helpers(write_module):
    for call, problem in (("fill(obs, obs)", "passes obs as cells"), ("other = obs", "gives obs another name")):
        with pytest.raises(EnvCodeError, match=problem):
            hurtle.make_vec(sample(write_module, "pass", **{"obs[0, 0] = float(state.k)": call}), num_envs=1)


def test_other_names_and_what_is_indexed(write_module):
    """Constants are checked through other names, and what is indexed is evaluated once; one env, compiled once, for all."""
    line = "found = pair(state)[action[1] - 1] + state.items[rng.integers(0, 2) :][0] + ((1, 2), (3, 4))[rng.integers(0, 2)][0]"
    env = sample(write_module, line, "a = action; found = a[1000]", "a = state.items; a[900000000] = 1")
    vec = hurtle.make_vec(env, num_envs=3)
    for action in (498, 497):
        vec.reset(seed=0)
        vec.step(np.array([[0, 0]] * 3))
        with pytest.raises(EnvIndexError, match="out of bounds: index"):
            vec.step(np.array([[0, 0], [action, 0], [0, 0]]))
    seen = []
    for played in (vec, hurtle.make_vec(env, num_envs=3, debug=True)):
        played.reset(seed=5)
        seen.append([played.step(np.array([[499, 1]] * 3))[1].tolist() + played.states["k"].tolist() for _ in range(8)])
    assert seen[0] == seen[1]
    assert seen[0][-1][-1] == 8


SIMULATED = """
import json
import numpy as np
import hurtle
from sample_envs import Indexer

vec = hurtle.make_vec(Indexer, 3, device="cuda")
report = {}
for case, index in [(1, 77), (1, -9), (2, 4), (3, 3), (12, 0), (14, 3)]:
    vec.reset(seed=0, options={"case": 99})
    states = vec.states
    states["case"], states["index"] = [99, case, 99], [0, index, 0]
    vec.load_states(states)
    obs = np.array(vec.step(np.zeros((3, 3), np.int64))[0])
    after = vec.states
    untouched = all(np.array_equal(after[name][[0, 2]], states[name][[0, 2]]) for name in states.dtype.names)
    guarded = (after["before"] == 77).all() and (after["after"] == 77).all()
    try:
        vec._batch.check_faults()
        said = ""
    except hurtle.HurtleError as error:
        said = f"{type(error).__name__}: {error}"
    vec._batch.check_faults()  # once is enough
    report[f"{case} {index}"] = [bool(untouched and guarded and (obs[[0, 2], 1] == 0).all()), said]
print(json.dumps(report))
"""


def test_on_the_gpu_nothing_leaves_its_array_and_the_first_fault_is_reported(run_simulated):
    report = json.loads(run_simulated(SIMULATED).stdout)
    assert len(report) == 6
    for which, (kept, said) in report.items():
        case, index = map(int, which.split())
        assert kept, which
        assert said.startswith("EnvIndexError: "), which
        assert f"index {5 if case == 12 else index} on axis" in said
