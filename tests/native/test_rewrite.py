"""The rewriter: what each construct means, compiled and uncompiled, and the errors for all others."""

import enum
import math
from pathlib import Path

import numpy as np
import pytest

import hurtle
from hurtle.errors import EnvCodeError
from hurtle.native import Box, Discrete, Env, bool_, float32, int8, int32, int64, uint8
from hurtle.native.env import EnvSpec
from hurtle.native.generate import generate
from hurtle.native.rewrite import rewrite


class Side(enum.IntEnum):
    LEFT = 3
    RIGHT = 8


class Sizes:
    depth = 6
    ratio = 0.1


LIMIT = 40
TENTH = 0.1
PAIR = (5, 7)
MOVES = np.array([[-1, 0], [1, 2]], np.int8)
WEIGHTS = np.array([0.1, 0.2, 0.3])


def scaled(value, factor):
    """A plain function of the module."""
    if value > 100.0:
        return 100.0
    return twice(value) * factor


def twice(value):
    return value + value


def bump(state, by):
    state.small += by
    return state.small


class Basis(Env):
    """The base of a derived env: parameters, State, methods."""

    observation_space = Box(-1e9, 1e9, (1,))
    action_space = Discrete(4)

    gain: float = 0.1
    size: int = 4
    flip: bool = True

    class State:
        floats: float32[40]
        ints: int64[60]
        small: uint8
        tiny: int8
        grid: uint8[2, 3]
        signs: int8[4]
        flags: bool_[2]
        on: bool_
        x: float32
        length: float32 = 0.7

    def reset(self, state, rng):
        state.x = 0.3
        state.small = 3
        state.tiny = -5
        state.on = True
        for y in range(2):
            for x in range(3):
                state.grid[y, x] = 10 * y + x
        for k in range(4):
            state.signs[k] = -k
        state.flags[1] = True

    def step(self, state, action, rng):
        self.fill(state, action)
        return 0.0, False

    def fill(self, state, action):
        state.ints[0] = -1  # overridden below

    def constant(self):
        return 1

    def shared(self):
        return self.constant() * 10

    def observe(self, state, obs):
        obs[0] = state.x


class Features(Basis):
    """One line per feature; the test below says what each slot must hold."""

    size: int = 5
    TABLE = np.array([3, 250, 7], np.uint8)
    YES_NO = np.array([True, False])
    CURVE = np.linspace(0.0, 1.0, 11)

    @property
    def area(self):
        return self.size * self.size

    @property
    def half_gain(self):
        return self.gain / 2

    def constant(self):
        return 2

    def pair(self, a, b):
        """Two values at once."""
        return a - b, a + b

    def fill(self, state, action):
        """Docstrings are not statements."""
        f, n = state.floats, state.ints
        # Floats are float32, wherever they come from.
        f[0] = state.x + 0.1 - 0.4
        f[1] = state.x * self.gain
        f[2] = state.x * TENTH * Sizes.ratio
        f[3] = state.x * self.half_gain
        f[4] = state.x * WEIGHTS[1]
        f[5] = self.CURVE[3] * state.x
        f[6] = state.length * 3.0
        f[7] = math.sin(state.x) + math.cos(state.x)
        f[8] = np.sin(state.x) + np.cos(state.x)
        f[9] = np.sqrt(state.x) + np.exp(state.x) + np.log(state.x) + np.tanh(state.x)
        f[10] = np.arctan2(state.x, 2.0)
        f[11] = np.clip(state.x * 10.0, -1.0, 1.0) + np.minimum(state.x, 0.1) + np.maximum(state.x, 0.5) + np.abs(-state.x)
        f[12] = float(state.small) / 7.0
        f[13] = scaled(state.x, 3.0)
        f[14] = scaled(1000.0, 3.0)
        f[15] = state.x**2
        f[16] = math.pi * state.x
        f[17] = min(max(state.x, -0.1), 0.1)
        f[18] = state.x if state.on else -state.x
        low, high = self.pair(state.x, 0.1)
        f[19] = low * high
        f[20] = float32(state.small) * 0.1
        f[21] = abs(-state.x)
        f[22] = math.inf
        f[23] = math.hypot(state.x, 0.4)
        f[24] = 1.0 / 3.0
        f[25] = float(state.x > 0.1)
        total = 0.0
        for _ in range(10):
            total += 0.1
        f[26] = total

        # Ints are 64-bit, whatever they are stored in.
        n[0] = self.area
        n[1] = Side.RIGHT - Side.LEFT
        n[2] = LIMIT + PAIR[1]
        n[3] = Sizes.depth
        n[4] = state.small - 5
        n[5] = 1 if state.small - 5 < 0 else 0
        n[6] = state.small * 1000000007
        n[7] = state.grid[0, 1] - state.grid[1, 2]
        grid = state.grid
        n[8] = grid[0, 1] - grid[1, 2]
        n[9] = 1 if grid[0, 1] - grid[1, 2] < 0 else 0
        n[10] = self.TABLE[0] - self.TABLE[1]
        n[11] = self.TABLE[1] * self.TABLE[1]
        n[12] = MOVES[0, 0] * state.grid[1, 1]
        n[13] = state.tiny // 2
        n[14] = state.tiny % 3
        n[15] = int(-2.7)
        n[16] = math.floor(-2.5) + math.ceil(2.1)
        n[17] = int(state.on) + int(state.flags[1]) * 10
        n[18] = 1 if self.flip and state.flags[1] and not state.flags[0] else 0
        n[19] = 1 if self.YES_NO[0] and not self.YES_NO[1] else 0
        n[20] = len(state.grid) * 100 + len(self.TABLE)
        n[21] = self.shared()
        n[22] = bump(state, 4)
        n[23] = state.small
        state.small -= 4
        n[24] = round(2.5) * 10 + round(3.5)
        n[25] = (1 << 40) >> 3
        n[26] = (state.small | 4) & 6 ^ 1
        n[27] = 1 if -1 < state.tiny + 5 < 1 else 0
        n[28] = state.signs[1] - state.signs[3]
        n[29] = ~state.small
        count: int = 0
        while True:
            count += 1
            if count == 3:
                continue
            if count > 6:
                break
        n[30] = count
        n[31] = 1 if action in (1, 3) else 0
        n[32] = int8(3) * 2
        n[33] = min(state.small, state.tiny) - max(state.grid[1, 0], 3)
        n[34] = 1 if math.isnan(state.x) or math.isinf(f[22]) else 0
        n[35] = grid.shape[1]
        n[36] = abs(state.tiny)
        n[37] = 7 if bool(state.small) else 8
        n[38] = self.size
        state.grid[0, 2] = 2
        state.grid[0, 2] += 5
        state.grid[0, 2] -= 1
        n[39] = state.grid[0, 2]
        n[40] = 0
        for k in range(5, 0, -2):
            n[40] = n[40] * 10 + k


THIRD = np.float32(0.3)


def f32(value):
    return np.float32(value)


EXPECTED_FLOATS = {
    0: THIRD + f32(0.1) - f32(0.4),
    1: THIRD * f32(0.1),
    2: THIRD * f32(0.1) * f32(0.1),
    3: THIRD * f32(0.05),
    4: THIRD * f32(0.2),
    5: f32(0.3) * THIRD,
    6: f32(0.7) * f32(3.0),
    11: f32(1.0) + f32(0.1) + f32(0.5) + THIRD,
    12: f32(3.0) / f32(7.0),
    13: (THIRD + THIRD) * f32(3.0),
    14: f32(100.0),
    15: THIRD * THIRD,
    16: f32(math.pi) * THIRD,
    17: f32(0.1),
    18: THIRD,
    19: (THIRD - f32(0.1)) * (THIRD + f32(0.1)),
    20: f32(3.0) * f32(0.1),
    21: THIRD,
    22: f32(np.inf),
    24: f32(1.0) / f32(3.0),
    25: f32(1.0),
    26: np.add.accumulate(np.full(10, 0.1, np.float32))[-1],
}
CLOSE_FLOATS = {
    7: math.sin(THIRD) + math.cos(THIRD),
    8: math.sin(THIRD) + math.cos(THIRD),
    9: math.sqrt(THIRD) + math.exp(THIRD) + math.log(THIRD) + math.tanh(THIRD),
    10: math.atan2(THIRD, 2.0),
    23: 0.5,
}
EXPECTED_INTS = {
    0: 25,
    1: 5,
    2: 47,
    3: 6,
    4: -2,
    5: 1,
    6: 3000000021,
    7: -11,
    8: -11,
    9: 1,
    10: -247,
    11: 62500,
    12: -11,
    13: -3,
    14: 1,
    15: -2,
    16: 0,
    17: 11,
    18: 1,
    19: 1,
    20: 203,
    21: 20,
    22: 7,
    23: 7,
    24: 24,
    25: 2**37,
    26: 7,
    27: 1,
    28: 2,
    29: -4,
    30: 7,
    31: 1,
    32: 6,
    33: -15,
    34: 1,
    35: 3,
    36: 5,
    37: 7,
    38: 5,
    39: 6,
    40: 531,
}


@pytest.fixture(scope="module", params=["compiled", "uncompiled"])
def slots(request):
    """What `Features.fill` leaves in `state.floats` and `state.ints`."""
    vec = hurtle.make_vec(Features, 1, debug=request.param == "uncompiled")
    vec.reset(seed=0)
    vec.step(np.array([3]))
    return vec.states["floats"][0].copy(), vec.states["ints"][0].copy()


@pytest.mark.parametrize("slot", EXPECTED_FLOATS)
def test_float(slots, slot):
    assert slots[0][slot] == EXPECTED_FLOATS[slot]


@pytest.mark.parametrize("slot", CLOSE_FLOATS)
def test_math_function(slots, slot):
    assert slots[0][slot] == pytest.approx(CLOSE_FLOATS[slot], rel=3e-7)


@pytest.mark.parametrize("slot", EXPECTED_INTS)
def test_int(slots, slot):
    assert slots[1][slot] == EXPECTED_INTS[slot]


def test_parameters_are_constants_of_the_generated_module():
    text, _, _ = generate(EnvSpec.of(Features(gain=0.625)), "cpu")
    assert "f4(0.625)" in text
    assert "self.gain" not in text


# Integers that reach code other than through a field or its elements -------------------------------------------------


def difference(items, i, j):
    return items[i] - items[j]


class Detours(Env):
    """Small unsigned integers subtracted indirectly; each difference is negative."""

    observation_space = Box(-1e9, 1e9, (6,))
    action_space = Discrete(2)
    LOW = np.array([1, 2], np.uint8)
    HIGH = np.array([8, 9], np.uint8)

    class State:
        items: uint8[2]
        grid: uint8[2, 2]
        out: int64[6]
        time: int32

    def reset(self, state, rng):
        state.items[0] = 1
        state.items[1] = 9
        state.grid[1, 0] = 1
        state.grid[1, 1] = 9

    def step(self, state, action, rng):
        state.time += 1
        assert state.time < 20, "too late"
        if state.time == 10:
            print("step", state.time)
        first, second = state.items, state.grid
        if first[0] - first[1] < 0:
            state.out[0] = 1
        if second[1, 0] - second[1, 1] < 0:
            state.out[1] = 1
        if difference(state.items, 0, 1) < 0:
            state.out[2] = 1
        row = state.grid[1]
        if row[0] - row[1] < 0:
            state.out[3] = 1
        if rng.choice(self.LOW) - rng.choice(self.HIGH) < 0:
            state.out[4] = 1
        if self.gap(state.items) < 0:
            state.out[5] = 1
        return 0.0, False

    def gap(self, items):
        return items[0] - items[1]

    def observe(self, state, obs):
        for k in range(6):
            obs[k] = float(state.out[k])


DETOURS = ["tuple assignment", "tuple assignment, two dimensions", "function argument", "row", "rng.choice", "method argument"]


@pytest.fixture(scope="module", params=["compiled", "uncompiled"])
def detours(request):
    vec = hurtle.make_vec(Detours, 1, debug=request.param == "uncompiled")
    vec.reset(seed=0)
    return vec.step(np.array([0]))[0][0].copy()


@pytest.mark.parametrize("slot", range(6), ids=DETOURS)
def test_small_unsigned_ints_do_not_wrap(detours, slot):
    assert detours[slot] == 1.0


class Corners(Env):
    """Two-dimensional observations."""

    observation_space = Box(0.0, 100.0, (2, 3))
    action_space = Discrete(2)

    class State:
        time: int32

    def reset(self, state, rng):
        state.time = 0

    def step(self, state, action, rng):
        state.time += 1
        return 0.0, False


class CountsFromTheEnd(Corners):
    def observe(self, state, obs):
        obs[0, -1] = 1.0
        obs[-1, -2] = 2.0


class AsksForShape(Corners):
    def observe(self, state, obs):
        obs[0, 0] = float(obs.shape[0])
        obs[1, 0] = float(len(obs))


@pytest.mark.parametrize("env", [CountsFromTheEnd, pytest.param(AsksForShape, marks=pytest.mark.slow)])
def test_observation_indices_mean_the_same_everywhere(env):
    """If compiled code cannot preserve their meaning, the engine must reject them."""
    try:
        expected = hurtle.make_vec(env, 1, debug=True).reset(seed=0)[0]
        got = hurtle.make_vec(env, 1).reset(seed=0)[0]
    except EnvCodeError:
        return
    np.testing.assert_array_equal(got, expected)


# assert, print, obs that need not be zeroed ---------------------------------------------------------------------


def test_assert_and_print_run_only_uncompiled(capfd):
    compiled, debug = hurtle.make_vec(Detours, 1), hurtle.make_vec(Detours, 1, debug=True)
    capfd.readouterr()
    for vec in (compiled, debug):
        vec.reset(seed=0)
        for _ in range(19):
            vec.step(np.array([0]))
        assert capfd.readouterr().out == ("" if vec is compiled else "step 10\n")
    compiled.step(np.array([0]))
    assert compiled.states["time"][0] == 20
    with pytest.raises(AssertionError, match="too late"):
        debug.step(np.array([0]))


def test_observe_that_writes_everything_is_recognised():
    assert rewrite(EnvSpec.of(Basis), "cpu").writes_whole_obs
    assert not rewrite(EnvSpec.of(corners_seen_after(0)), "cpu").writes_whole_obs


def corners_seen_after(column):
    class Partly(Corners):
        def observe(self, state, obs):
            if state.time > column:
                obs[0, 0] = 1.0

    return Partly


def test_closures_are_constants():
    text, _, _ = generate(EnvSpec.of(corners_seen_after(77)), "cpu")
    assert "i8(env.time) > 77" in text or "i8(state.time) > 77" in text


# Errors --------------------------------------------------------------------------------------------------------------

HEAD = '''
import math
import numpy as np
from hurtle.native import Box, Discrete, Env, float32, int32, uint8

NAMES = {"a": 1}
WORD = "left"

def helper(value, factor=2.0):
    return value * factor

def stranger(s):
    return s.x

class Sample(Env):
    """An env with one bad line."""

    observation_space = Box(-1.0, 1.0, (4,))
    action_space = Discrete(2)
    gain: float = 0.1

    class State:
        x: float32
        speed: float32
        grid: uint8[3, 3]

    def reset(self, state, rng):
        state.x = rng.uniform(-1.0, 1.0)

    def observe(self, state, obs):
        obs[0] = state.x
'''
STEP = """
    def step(self, state, action, rng):
        state.speed = 1.0
        {line}
        return 1.0, False
"""
UNCOMPILABLE = "which cannot be compiled"
BAD_LINES = [
    ("x = [i for i in range(3)]", "a list comprehension", UNCOMPILABLE),
    ("x = [1, 2]", "a list", UNCOMPILABLE),
    ("x = {'a': 1}", "a dict", UNCOMPILABLE),
    ("x = {1, 2}", "a set", UNCOMPILABLE),
    ("x = f'{action}'", "an f-string", UNCOMPILABLE),
    ("x = lambda: 1", "a lambda", UNCOMPILABLE),
    ("x = sum(i for i in range(3))", "", UNCOMPILABLE),
    ("x = (y := 3)", "an assignment expression", UNCOMPILABLE),
    ("raise ValueError", "raise", UNCOMPILABLE),
    ("import cmath", "an import inside a method", UNCOMPILABLE),
    ("del action", "del", UNCOMPILABLE),
    ("x = print(action)", "print", ""),
    ("x = open(action)", "calls open", "Known are math.*, abs, bool, float, int, len, max, min, range, round, bool_, int8, "),
    (
        "x = sorted(action)",
        "calls sorted",
        "np.abs, np.arctan2, np.clip, np.cos, np.exp, np.log, np.maximum, np.minimum, np.sin, ",
    ),
    (
        "x = hash(action)",
        "calls hash",
        "rng.uniform, your own functions, self.method(…); and, uncompiled only, breakpoint and ",
    ),
    ("x = np.zeros(3)", "calls np.zeros", "cannot be compiled"),
    ("x = np.where(state.x > 0.0, 1.0, 2.0)", "calls np.where", ""),
    ("x = np.linalg.norm(state.grid)", "calls np.linalg.norm", ""),
    ("x = helper(value=1.0)", "uses keyword arguments", "by position"),
    ("x = helper(1.0)", "gives helper 1 arguments", "It takes"),
    ("x = rng.uniform(low=0.0, high=1.0)", "uses keyword arguments", "by position"),
    ("x = rng.gauss(0.0, 1.0)", "calls rng.gauss", "Here it is rng.normal(mean, std). There are rng.choice, rng.integers, "),
    ("x = rng.randint(0, 5)", "calls rng.randint", "Here it is rng.integers(low, high), which never gives high."),
    ("x = rng.poisson(1.0)", "calls rng.poisson", "Known: choice, integers, normal, random, shuffle, uniform."),
    ("x = rng.unifrom(0.0, 1.0)", "calls rng.unifrom", "Did you mean uniform?"),
    ("x = rng.random(3)", "gives rng.random 1 arguments", "It takes 0"),
    ("x = rng.integers(1, 2, 3)", "gives rng.integers 3 arguments", "It takes 2"),
    ("state.sped = 2.0", "State has no such field", "Did you mean speed?"),
    ("x = state.grit[0, 0]", "State has no such field", "Did you mean grid?"),
    ("self.gain = 1.0", "assigns to self.gain", "parameters are constants"),
    ("self.gain += 1.0", "assigns to self.gain", "parameters are constants"),
    ("x = self.gian", "uses self.gian, which does not exist", "Did you mean gain?"),
    ("x = undefined + 1", "'undefined', which is not defined", ""),
    ("x = NAMES", "uses NAMES, a dict", "numbers"),
    ("x = WORD", "uses WORD, a str", "numbers"),
    ("x = 'left'", "uses the constant 'left'", "only numbers"),
    ("x = None", "uses the constant None", "only numbers"),
    ("state.grid[0, :] = 1", "assigns to a slice", "loop"),
    ("state.grid = 1", "assigns to the array state.grid", "loop"),
    ("x = super().step(state, action, rng)", "super()", ""),
    ("x = self.reset.__name__", "", ""),
    ("x = stranger(state)", "reads .x of 's'", "Only State fields"),
    ("x = state.grid.sum()", "calls state.grid.sum", ""),
    ("x = action.item()", "calls .item() of 'action'", "Only rng has methods"),
    ("x = helper", "uses helper, a function", "numbers"),
    ("f4 = 1.0", "reserved name 'f4'", "another name"),
    ("y: float", "declares a variable without a value", "Assign"),
    ("x = math.sine(1.0)", "uses math.sine, which does not exist", "Did you mean"),
    ("x = self", "passes self around", "self.method"),
]
BAD_BLOCKS = [
    ("try:\n            x = 1\n        except ValueError:\n            x = 2", "try/except", UNCOMPILABLE),
    ("with open('x') as x:\n            pass", "a with block", UNCOMPILABLE),
    ("def inner():\n            pass", "a function inside a method", UNCOMPILABLE),
    ("match action:\n            case 1:\n                pass", "match", UNCOMPILABLE),
    ("for row in state.grid:\n            pass", "loops over something that is not range(…)", "Loop over range(n)"),
    ("for k in range(3):\n            pass\n        else:\n            pass", "uses for … else", "flag"),
]


def line_of(module, text):
    """The number of the first line of a written module that contains the text."""
    lines = Path(module.__file__).read_text().split("\n")
    return next(number for number, line in enumerate(lines, 1) if text in line)


def error_of(env):
    with pytest.raises(EnvCodeError) as caught:
        hurtle.make_vec(env, 1)
    return str(caught.value)


@pytest.mark.parametrize(
    ("line", "problem", "advice"), BAD_LINES + BAD_BLOCKS, ids=[bad[0].split("\n")[0] for bad in BAD_LINES + BAD_BLOCKS]
)
def test_error_names_line_problem_and_advice(write_module, line, problem, advice):
    module = write_module(HEAD + STEP.format(line=line))
    message = error_of(module.Sample)
    shown = line.split("\n")[0]
    blamed = {"x = stranger(state)": "return s.x", "f4 = 1.0": "def step"}.get(line, shown)
    assert message.startswith(f"{module.__file__}:{line_of(module, blamed)}: "), message
    assert blamed in message.split("\n")[1]
    assert problem in message
    assert advice in message


def test_debug_refuses_the_same_code(write_module):
    module = write_module(HEAD + STEP.format(line="x = [1, 2]"))
    with pytest.raises(EnvCodeError, match="a list"):
        hurtle.make_vec(module.Sample, 1, debug=True)


RETURNS = [
    ("pass", "returns nothing", "def step"),
    ("return 1.0", "returns one value", "return 1.0"),
    ("return", "returns 0 values", "return"),
    ("return 1.0, False, False", "returns 3 values", "return 1.0, False, False"),
    ("return 1.0, False, False, {}", "returns 4 values", "return 1.0, False, False, {}"),
]


@pytest.mark.parametrize(("ending", "problem", "blamed"), RETURNS)
def test_step_must_return_reward_and_terminated(write_module, ending, problem, blamed):
    module = write_module(HEAD + f"\n    def step(self, state, action, rng):\n        state.x = 1.0\n        {ending}\n")
    message = error_of(module.Sample)
    lines = Path(module.__file__).read_text().split("\n")
    number = max(n for n, line in enumerate(lines, 1) if line.strip().startswith(blamed))
    assert message.startswith(f"{module.__file__}:{number}: Sample.step {problem}")
    assert "return reward, terminated" in message


def test_step_of_several_agents_must_return_over(write_module):
    source = HEAD + (
        "\n    num_agents = 2\n\n    def step(self, state, action, reward, terminated, rng):\n        return 1.0, False\n"
    )
    source = source.replace("obs[0] = state.x", "obs[0, 0] = state.x")
    message = error_of(write_module(source).Sample)
    assert "step of an env with several agents must return whether the episode is over" in message


OBSERVES = [
    ("obs[4] = 1.0", "uses obs[4]", "Axis 0 of obs has length 4: the last index is 3"),
    ("obs[0, 0] = 1.0", "uses obs[0, 0]", "in full: obs[i]"),
    ("obs[0:2] = 1.0", "uses obs[0:2]", "in full: obs[i]"),
    ("obs[:] = 1.0", "uses obs[:]", "in full: obs[i]"),
]


@pytest.mark.parametrize(("line", "problem", "advice"), OBSERVES)
def test_observations_are_indexed_in_full(write_module, line, problem, advice):
    module = write_module((HEAD + STEP.format(line="pass")).replace("obs[0] = state.x", line))
    message = error_of(module.Sample)
    assert message.startswith(f"{module.__file__}:{line_of(module, line)}: Sample.observe ")
    assert problem in message
    assert advice in message


def test_observations_of_two_dimensions_are_indexed_in_full(write_module):
    source = (HEAD + STEP.format(line="pass")).replace("(4,)", "(2, 3)")
    message = error_of(write_module(source).Sample)
    assert "uses obs[0]" in message
    assert "of shape (2, 3), in full: obs[i, j]" in message
    message = error_of(write_module(source.replace("obs[0] =", "obs[1, 3] =")).Sample)
    assert "Axis 1 of obs has length 3: the last index is 2" in message


def test_source_that_is_not_in_a_file_is_explained():
    names = {}
    exec(HEAD + STEP.format(line="pass"), names)
    with pytest.raises(EnvCodeError, match=r"not available; put Sample into a file"):
        hurtle.make_vec(names["Sample"], 1)


# Errors that only the compiler finds ---------------------------------------------------------------------------------

UNLIKELY = "if state.x > 1000.0:"
TWO_TYPES = f"value = 1.0\n        {UNLIKELY}\n            value = (1.0, 2.0)\n        state.x = value"
PAIR_INTO_NUMBER = f"{UNLIKELY}\n            state.x = (1.0, 2.0)"
IN_A_HELPER = f"{UNLIKELY}\n            state.x = self.broken(state)"
BROKEN = """
    def broken(self, state):
        number = 1.0
        return number[0]
"""


def blamed_line(message, module):
    """The line of a written module that a message begins with."""
    assert message.startswith(f"{module.__file__}:"), message
    return int(message.removeprefix(f"{module.__file__}:").split(":")[0])


@pytest.mark.parametrize(
    ("lines", "blamed"),
    [(PAIR_INTO_NUMBER, "state.x = (1.0, 2.0)"), (IN_A_HELPER, "return number[0]")],
    ids=["pair into number", "in a helper"],
)
def test_numba_errors_name_the_authors_line(write_module, lines, blamed):
    module = write_module(HEAD + STEP.format(line=lines) + BROKEN)
    message = error_of(module.Sample)
    assert blamed_line(message, module) == line_of(module, blamed), message
    assert "Sample cannot be compiled for the cpu target: " in message
    assert "debug=True" in message


@pytest.mark.slow
def test_numba_errors_name_the_authors_line_wherever_the_cache_is(write_module, tmp_path, monkeypatch):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.setattr("hurtle.native.build.cache_folder", lambda: elsewhere)
    module = write_module(HEAD + STEP.format(line=TWO_TYPES))
    message = error_of(module.Sample)
    assert "Cannot unify float32 and" in message
    clash = line_of(module, "value = (1.0, 2.0)")
    assert blamed_line(message, module) in (clash, clash + 1)


RUN_TIME_MISTAKES = [
    ("state.grid[0, 0] = 300  # bad", "0 to 255; got 300"),
    ("state.grid[0, int(state.x) + 3] = 1  # bad", "out of bounds"),
    ("state.x = 1.0 / float(action - action) + math.sqrt(-1.0)  # bad", "math domain error"),
    ("state.grid[1, 1] = state.x  # bad", "got the float"),
]


@pytest.mark.parametrize(("line", "problem"), RUN_TIME_MISTAKES)
@pytest.mark.filterwarnings("ignore:divide by zero")
def test_mistakes_at_run_time_name_the_authors_line(write_module, line, problem):
    module = write_module(HEAD + STEP.format(line=line))
    message = error_of(module.Sample)
    assert f"{module.__file__}:{line_of(module, '# bad')}: Sample.step " in message
    assert problem in message


def test_mistakes_in_a_helper_name_it_as_the_author_does(write_module):
    helper = "\n    def fill(self, state):\n        state.grid[5, 5] = 1  # bad\n"
    module = write_module(HEAD + STEP.format(line="self.fill(state)") + helper)
    assert f"{module.__file__}:{line_of(module, '# bad')}: Sample.fill " in error_of(module.Sample)


@pytest.mark.parametrize(("expression", "value"), [("math.trunc(-1.9)", -1.0), ("int8(100) + 100", 200.0)])
def test_integer_expressions_work_uncompiled_too(write_module, expression, value):
    source = HEAD.replace("import Box", "import int8, Box").replace("-1.0, 1.0, (4,)", "-1000.0, 1000.0, (4,)")
    module = write_module(source + STEP.format(line=f"state.x = float({expression})"))
    env = hurtle.make(module.Sample, debug=True)
    env.reset(seed=0)
    assert env.step(0)[0][0] == value
