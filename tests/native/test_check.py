"""`native.check` and the probe before compiling: bad env code is caught early, at the author's line."""

import inspect
import math
from pathlib import Path

import pytest

import hurtle
from hurtle.errors import EnvCodeError
from hurtle.native import Box, Discrete, Env, check, check_env, float32, int8, uint8
from hurtle.native.build import build
from hurtle.native.env import EnvSpec


class Good(Env):
    """A counter."""

    observation_space = Box(-1.0, 1.0, (2,))
    action_space = Discrete(2)
    max_steps = 10

    class State:
        x: float32
        n: int8

    def reset(self, state, rng):
        state.x = 0.0

    def step(self, state, action, rng):
        state.x += 0.01
        return 1.0, False

    def observe(self, state, obs):
        obs[0] = state.x


class WritesOutOfBounds(Good):
    def observe(self, state, obs):
        i = state.n + 2
        obs[i] = state.x


class WritesFloatsToBytes(Good):
    observation_space = Box(0, 255, (2,), uint8)

    def observe(self, state, obs):
        obs[0] = state.x


class Overflows(Good):
    def step(self, state, action, rng):
        state.n = state.n + 100
        return 1.0, False


class ReturnsOneValue(Good):
    def step(self, state, action, rng):
        return state.x


class ForgetsToReturn(Good):
    def step(self, state, action, rng):
        if state.n > 3:
            return 1.0, False


class WritesNan(Good):
    def observe(self, state, obs):
        obs[0] = math.sqrt(abs(state.x)) / (state.x - state.x)


class LeavesTheSpace(Good):
    def step(self, state, action, rng):
        state.x += 0.5
        return 1.0, False


class MixesIntAndFloat(Good):
    def step(self, state, action, rng):
        state.x = 2 * state.x
        return 1.0, False


class SlipsOutOfBounds(Good):
    """Correct in the first steps, wrong later: only a longer check finds it."""

    def step(self, state, action, rng):
        state.n += 1
        return 1.0, state.n > 30

    max_steps = 50

    def observe(self, state, obs):
        i = state.n // 15
        obs[i] = 0.5


class Talks(Good):
    def step(self, state, action, rng):
        print("stepping", state.x, self.max_steps)
        assert action < 2, "only two actions"
        return 1.0, False


def line_of(cls, text):
    lines, first = inspect.getsourcelines(cls)
    return first + next(k for k, line in enumerate(lines) if text in line)


@pytest.mark.parametrize(
    ("cls", "text", "message"),
    [
        (WritesOutOfBounds, "obs[i] = state.x", "out of bounds"),
        (WritesFloatsToBytes, "obs[0] = state.x", "obs holds uint8; got the float"),
        (Overflows, "state.n = state.n + 100", "state.n holds int8, -128 to 127; got 200"),
    ],
)
def test_the_first_build_points_at_the_authors_line(cls, text, message, monkeypatch, tmp_path):
    with pytest.raises(EnvCodeError, match=message) as caught:
        hurtle.make_vec(cls, 2)
    assert f"{__file__}:{line_of(cls, text)}" in str(caught.value)
    assert text in str(caught.value)


@pytest.mark.parametrize("cls", [ReturnsOneValue, ForgetsToReturn])
def test_a_step_that_does_not_return_reward_and_terminated(cls):
    with pytest.raises(EnvCodeError, match="must return two values, a number and a bool: return reward, terminated"):
        hurtle.make_vec(cls, 2)


@pytest.fixture
def uncompiled(monkeypatch):
    """What uncompiled play finds needs no other target beside it, which would be compiled just for this."""
    monkeypatch.setattr(check_env, "CpuBatch", lambda *_, **__: None)
    monkeypatch.setattr(check_env, "_compare", lambda *_: None)


@pytest.mark.usefixtures("uncompiled")
def test_check_finds_nan():
    with pytest.raises(EnvCodeError, match=r"observe wrote (nan|inf) to obs\[0\]"):
        check(WritesNan)


@pytest.mark.usefixtures("uncompiled")
def test_check_finds_observations_outside_the_space():
    with pytest.raises(EnvCodeError, match=r"wrote 1\.5 to obs\[0\].*\[-1\.0, 1\.0\]"):
        check(LeavesTheSpace)


@pytest.mark.usefixtures("uncompiled")
def test_check_finds_what_a_short_look_misses():
    with pytest.raises(EnvCodeError, match="out of bounds") as caught:
        check(SlipsOutOfBounds)
    assert f":{line_of(SlipsOutOfBounds, 'obs[i] = 0.5')}:" in str(caught.value)


def test_check_warns_of_float64_at_the_authors_line():
    report = check(MixesIntAndFloat, num_steps=20)
    assert len(report.warnings) == 1
    assert f":{line_of(MixesIntAndFloat, '2 * state.x')}:" in report.warnings[0]
    assert "write 2.0 instead of 2" in report.warnings[0]


def test_the_warnings_are_found_once_and_kept_with_the_compiled_code(monkeypatch):
    expected = check(MixesIntAndFloat, num_steps=20).warnings
    kept = Path(build(EnvSpec.of(MixesIntAndFloat), "cpu").functions.__file__).with_suffix(".wide")
    monkeypatch.setattr(check_env, "_wide_operations", lambda program, batch: [])
    assert check(MixesIntAndFloat, num_steps=20).warnings == expected
    text = kept.read_text()
    for damaged in ("[", text.replace("[", "[0, ", 1)):  # half a file; of another version of Numba
        kept.write_text(damaged)
        assert check(MixesIntAndFloat, num_steps=20).warnings == []
    kept.write_text(text)


def test_a_good_env_passes_with_a_readable_report():
    text = str(check(Good, num_steps=60))
    assert text.startswith("Good: 5 checks passed, 0 warnings")
    assert "the cpu target agrees with plain Python" in text


def test_check_notices_a_target_that_disagrees(monkeypatch):
    from hurtle.native import batch

    real = batch.CpuBatch.step_with

    def wrong(self, actions):
        real(self, actions)
        self.arrays.obs[0, 0] += 0.25

    monkeypatch.setattr(batch.CpuBatch, "step_with", wrong)
    with pytest.raises(EnvCodeError, match=r"the cpu target disagrees with plain Python on obs\[0, 0\]"):
        check(Good)


@pytest.mark.parametrize("debug", [True, pytest.param(False, marks=pytest.mark.slow)])  # test_rewrite has a compiled one
def test_prints_show_in_debug_mode_only(debug, capsys):
    env = hurtle.make(Talks, debug=debug)
    env.reset(seed=0)
    env.step(1)
    out = capsys.readouterr().out
    assert out == ("stepping 0.0 10\n" if debug else "")


class Infinite(Good):
    def step(self, state, action, rng):
        return 1.0 / (state.x - state.x), False


@pytest.mark.usefixtures("uncompiled")
def test_check_finds_rewards_that_are_no_numbers():
    with pytest.raises(EnvCodeError, match=r"step gave the reward inf \(env 0\)"):
        check(Infinite)


class TakesARoot(Good):
    def observe(self, state, obs):
        obs[0] = math.sqrt(state.x - 1.0)


def test_errors_inside_math_functions_name_the_right_line():
    with pytest.raises(EnvCodeError, match="math domain error") as caught:
        hurtle.make_vec(TakesARoot, 2)
    assert f":{line_of(TakesARoot, 'math.sqrt')}:" in str(caught.value)
