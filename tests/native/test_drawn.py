"""Drawn options: what is drawn, when, from which stream; the same on all targets, and nothing of it without them."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from ladder_envs import Ladder
from sample_envs import Walk

import hurtle
from hurtle.envs.registry import native_class
from hurtle.errors import EnvDefinitionError, HurtleError, UnknownNameError
from hurtle.native.drawn import draw, drawing
from hurtle.native.env import EnvSpec
from hurtle.native.generate import generate
from hurtle.native.rng import OPTION_STREAM, stream_state

RANGES = {"size": (2, 5), "push": (0.25, 0.75)}


def ladders(num_envs=8, ranges=RANGES, env=Ladder, **settings):
    vec = hurtle.make_vec(env, num_envs, drawn=tuple(ranges), **settings)
    vec.set_ranges(ranges)
    vec.reset(seed=11)
    return vec


def play(vec, num_steps, seed=0):
    """The options after each step, [steps, envs], and which envs' episodes ended with it."""
    rng = np.random.default_rng(seed)
    states, ended = [], []
    for _ in range(num_steps):
        _, _, terminated, truncated, _ = vec.step(rng.integers(0, 8, vec.num_envs))
        states.append(vec.states[["size", "push"]].copy())
        ended.append(terminated | truncated)
    return np.array(states), np.array(ended)


def test_draws_are_even_and_in_range():
    count = 20_000
    vec = ladders(count)
    size, push = vec.states["size"], vec.states["push"]
    assert np.abs(np.bincount(size, minlength=6)[2:] - count / 4).max() < 5 * np.sqrt(count / 4 * 3 / 4)
    assert push.min() >= 0.25
    assert push.max() < 0.75
    assert np.abs(np.histogram(push, 10, (0.25, 0.75))[0] - count / 10).max() < 5 * np.sqrt(count / 10 * 9 / 10)
    assert abs(np.corrcoef(size, push)[0, 1]) < 0.03  # each option has numbers of its own
    before = push.copy()
    play(vec, 3)
    assert abs(np.corrcoef(before, vec.states["push"])[0, 1]) < 0.03  # and so has each episode


def test_an_episode_keeps_its_values_and_the_next_one_draws_the_next_number():
    vec = ladders(6)
    states, ended = play(vec, 40)
    drawn = np.zeros(6, int)
    for t in range(40):
        drawn += ended[t]
        for i in range(6):
            stream = stream_state(11 + i, OPTION_STREAM)
            expected = draw(stream, 2 * drawn[i], 2, 5, True), draw(stream, 2 * drawn[i] + 1, 0.25, 0.75, False)
            assert states[t, i].item() == expected
    assert drawn.min() > 10


@pytest.mark.parametrize("settings", [{"debug": True}, {"num_workers": 2}, {"autoreset_mode": "NextStep"}], ids=str)
def test_targets_threads_and_autoreset_modes_draw_the_same(settings):
    states, ended = play(ladders(), 12)
    others, their_ends = play(ladders(**settings), 12)
    if "autoreset_mode" not in settings:
        assert (others == states).all()
        assert (their_ends == ended).all()
    else:  # the first episode of each env, then the values of the second
        for i in range(8):
            last = ended[:, i].argmax()
            assert (others[:last, i] == states[:last, i]).all()
            assert others[last + 1, i] == states[last, i]


def test_new_ranges_wait_for_the_next_episode():
    vec = ladders(4, {"size": (2, 2), "push": (0.5, 0.5)})
    vec.set_ranges({"size": (7, 7), "push": (np.array([0.1, 0.2, 0.3, 0.4]), 0.4)})
    for t in range(3):
        assert (vec.states["size"] == 2).all(), t
        _, rewards, *_, infos = vec.step(np.ones(4, int))
        assert (rewards == 2.0).all()
    assert infos["episode"]["size"].tolist() == [2, 2, 2, 2]  # what the ended episodes were played with
    assert infos["episode"]["r"].tolist() == [6, 6, 6, 6]
    assert (vec.states["size"] == 7).all()
    assert (vec.states["push"] >= np.float32([0.1, 0.2, 0.3, 0.4])).all()


def test_draws_leave_the_streams_of_the_dynamics_alone():
    drawn, plain = ladders(5, {"size": (4, 4), "push": (1, 1)}), hurtle.make_vec(Ladder, 5)
    plain.reset(seed=11, options={"size": 4})
    for _ in range(10):
        found, expected = drawn.step(np.ones(5, int)), plain.step(np.ones(5, int))
        for k in range(4):
            assert (found[k] == expected[k]).all()


def test_before_there_are_ranges_options_keep_their_values():
    vec = hurtle.make_vec(Ladder, 3, drawn=("size", "push"))
    vec.reset(seed=0, options={"size": np.array([1, 2, 3])})
    play(vec, 5)
    assert vec.states["size"].tolist() == [1, 2, 3]


@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_without_drawn_options_the_generated_code_is_as_it_was(target):
    for name in ("cartpole", "breakout", "snake"):
        env = native_class(name)()
        text = generate(EnvSpec.of(env), target)[0]
        assert generate(EnvSpec.of(drawing(env, ())), target)[0] == text
        assert "_draw_seed" not in text
        assert "_ranged" not in text


def test_the_gpu_draws_the_same(tmp_path):
    """In Numba's simulator, which needs a process of its own."""
    states, _ = play(ladders(3), 7)
    program = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
import quick_simulator
import hurtle, numpy as np
from ladder_envs import Ladder
vec = hurtle.make_vec(Ladder, 3, drawn=("size", "push"), device="cuda")
vec.set_ranges({RANGES})
vec.reset(seed=11)
rng = np.random.default_rng(0)
for _ in range(7):
    vec.step(rng.integers(0, 8, 3))
    records = vec.batch.records()
    print(records["size"].tolist(), records["push"].tolist())
"""
    environment = {**os.environ, "NUMBA_ENABLE_CUDASIM": "1"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    expected = [f"{step['size'].tolist()} {step['push'].tolist()}" for step in states]
    assert done.stdout.splitlines() == expected


@pytest.mark.parametrize(
    ("env", "name", "error", "text"),
    [
        (Ladder, "sise", UnknownNameError, "Did you mean size?"),
        ("cartpole", "length", UnknownNameError, "It has no options at all"),
        ("pendulum", "length", UnknownNameError, "'length' is a parameter.*`length: float32 = 1.0`"),
        (Walk, "visits", UnknownNameError, "Known: gain, goal"),
    ],
)
def test_only_options_can_be_drawn(env, name, error, text):
    with pytest.raises(error, match=text):
        hurtle.make_vec(env, 2, drawn=(name,))


@pytest.mark.parametrize(
    ("ranges", "error", "text"),
    [
        ({"size": (1, 2)}, HurtleError, "draws the options .*'size', 'push'.*got ranges of .*'size'"),
        ({"size": (3, 2), "push": (0, 1)}, HurtleError, "'size' begins above its end: 3 to 2"),
        ({"size": (3, 300), "push": (0, 1)}, EnvDefinitionError, "'size' of Ladder holds int8, got 300"),
        ({"size": (1.5, 3), "push": (0, 1)}, EnvDefinitionError, "holds int8, got 1.5"),
    ],
)
def test_ranges_must_fit(ranges, error, text):
    vec = hurtle.make_vec(Ladder, 2, drawn=("size", "push"))
    with pytest.raises(error, match=text):
        vec.set_ranges(ranges)


def test_a_vector_without_drawn_options_says_so():
    with pytest.raises(HurtleError, match="draws the options \\[\\]"):
        hurtle.make_vec(Ladder, 2).set_ranges({"size": (1, 2)})


def test_a_pool_gives_each_env_its_range():
    vec = hurtle.make_vec(Ladder, 4, batch_size=2, drawn=("size", "push"))
    vec.set_ranges({"size": (np.array([1, 2, 3, 4]), np.array([1, 2, 3, 4])), "push": (1, 1)})
    vec.reset(seed=0)
    vec.recv()
    assert [int(size) for size in vec.get_attr("size")] == [1, 2, 3, 4]
