"""Compile-time constants keep their meaning in compiled code; those that would not are rejected."""

import functools

import numpy as np
import pytest

import hurtle
from hurtle.errors import EnvCodeError, EnvDefinitionError, HurtleError
from hurtle.native import Box, Discrete, Env, float32, inf, int8, uint8


def times_ten(function):
    @functools.wraps(function)
    def wrapped(*arguments):
        return 10.0 * function(*arguments)

    return wrapped


@times_ten
def decorated(x):
    return x


double = lambda x: 2.0 * x  # noqa: E731


class Base(Env):
    """Shows three numbers."""

    observation_space = Box(-inf, inf, (3,))
    action_space = Discrete(2)
    max_steps = 5

    class State:
        x: float32
        u: uint8[2, 2]
        t: int8
        option: int8 = 3

    def reset(self, state, rng):
        state.u[0, 0] = 1
        state.u[0, 1] = 2

    def step(self, state, action, rng):
        state.t += 1
        return 0.0, False

    def observe(self, state, obs):
        obs[0] = state.x


class NegativePower(Base):
    low: int = -2

    def observe(self, state, obs):
        obs[0] = float(self.low**2)


class TablesFromProperties(Base):
    """And a row that is chosen while it runs."""

    observation_space = Box(-inf, inf, (4,))

    @property
    def first(self):
        return np.array([1.0, 2.0])

    @property
    def second(self):
        return np.array([3.0, inf])

    @property
    def third(self):
        return np.array([5.0, 6.0])

    def observe(self, state, obs):
        obs[0], obs[1], obs[2] = self.first[0], self.second[0], self.third[0]
        row = state.u[0] if state.t >= 0 else state.u[1]
        obs[3] = float(row[0] - row[1])


class WritesSomeOfObs(Base):
    def observe(self, state, obs):
        state.u[1, 1] = 7
        obs[0] = 5.0
        obs[1] = 6.0
        obs[state.t % 3] = 9.0


class AddsToObs(Base):
    def observe(self, state, obs):
        obs[0] = 1.0
        obs[1] = 2.0
        obs[2] += 3.0


def first_obs(env, steps=2, **settings):
    vec = hurtle.make_vec(env, 1, **settings)
    vec.reset(seed=0)
    for _ in range(steps):
        obs, *_ = vec.step(np.zeros(1, np.int64))
    return obs[0].tolist()


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        pytest.param(NegativePower, [4.0, 0.0, 0.0], marks=pytest.mark.slow),
        (TablesFromProperties, [1.0, 3.0, 5.0, -1.0]),
        (WritesSomeOfObs, [5.0, 6.0, 9.0]),
        pytest.param(AddsToObs, [1.0, 2.0, 3.0], marks=pytest.mark.slow),
    ],
)
def test_compiled_code_means_what_the_source_says(env, expected):
    assert first_obs(env) == first_obs(env, debug=True) == expected


def with_step(step):
    return type("Variant", (Base,), {"step": step})


def uses_decorator(self, state, action, rng):
    return decorated(state.x), False


def uses_lambda(self, state, action, rng):
    return double(state.x), False


def rebinds_state(self, state, action, rng):
    state = 1.0
    return state, False


def swaps(self, state, action, rng):
    return state.t > 3, state.x


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (uses_decorator, "has a decorator"),
        (uses_lambda, "no plain function"),
        (rebinds_state, "assigns to its argument 'state'"),
        (swaps, "must return two values, a number and a bool: return reward, terminated"),
    ],
)
def test_what_would_change_its_meaning_is_refused(step, message):
    with pytest.raises(EnvCodeError, match=message):
        hurtle.make_vec(with_step(step), 1)


@pytest.mark.parametrize("value", [2.7, 300, None, "a", float("nan")])
def test_options_that_do_not_fit_are_refused(value):
    vec = hurtle.make_vec(Base, 2, debug=True)
    with pytest.raises(EnvDefinitionError, match=r"Option 'option' of Base holds int8"):
        vec.reset(options={"option": value})
    with pytest.raises(Exception, match="reset"):  # a failed reset does not count
        vec.step(np.zeros(2, np.int64))


@pytest.mark.parametrize("seed", [-1, 1.5, True, "a"])
def test_seeds_are_ints_of_at_least_zero(seed):
    with pytest.raises(HurtleError, match=r"A seed is an int of at least 0|seed has"):
        hurtle.make_vec(Base, 2, debug=True).reset(seed=seed)


def test_large_seeds_are_fine():
    for seed in (2**63, 2**64 - 1, 2**70):
        hurtle.make_vec(WritesSomeOfObs, 2).reset(seed=seed)


def test_parameters_must_be_numbers_with_names_of_their_own():
    for body in ({"mode": "easy"}, {"seed": 3}):
        cls = type("Odd", (Base,), {**body, "__annotations__": {name: type(v) for name, v in body.items()}})
        with pytest.raises(EnvDefinitionError, match="which makes it a parameter"):
            hurtle.make_vec(cls, 1)
    with pytest.raises(EnvDefinitionError, match=r"must be a tuple of names: metrics = \('x',\)"):
        hurtle.make_vec(type("Odd", (Base,), {"metrics": "x"}), 1)


def test_rows_longer_than_shared_memory_are_not_staged():
    from hurtle.native.env import EnvSpec
    from hurtle.native.generate import staged_rows

    class Picture(Base):
        observation_space = Box(0, 255, (84, 84, 4), uint8)

    assert staged_rows(EnvSpec.of(Picture)) == 0
    assert staged_rows(EnvSpec.of(Base)) > 0
