"""Options of Python envs drawn for each episode: as native envs draw them, in workers too; errors for envs that ignore them."""

import gymnasium
import numpy as np
import pytest
from ladder_envs import Deaf, Ladder, PythonLadder

import hurtle
from hurtle.errors import HurtleError, UnknownNameError
from hurtle.vector.drawn_options import DrawnOptions

RANGES = {"size": (2, 5), "push": (np.array([0.25, 0.5, 0.5]), 0.75)}


def made(env, **settings):
    vec = hurtle.make_vec(env, 3, drawn=("size", "push"), **settings)
    vec.set_ranges(RANGES)
    obs, _ = vec.reset(seed=11)
    return vec, obs[:, 1:].copy()


@pytest.mark.parametrize("backend", ["serial", "process"])
def test_python_envs_draw_what_native_ones_draw(backend):
    native, expected = made(Ladder)
    vec, obs = made(PythonLadder, backend=backend)
    with vec:
        assert (obs == expected).all()
        rng = np.random.default_rng(0)
        for _ in range(30):
            actions = rng.integers(0, 8, 3)
            (obs, *outcome, infos), (their_obs, *their_outcome, theirs) = vec.step(actions), native.step(actions)
            assert (obs[:, 1:] == their_obs[:, 1:]).all()
            assert all((a == b).all() for a, b in zip(outcome, their_outcome, strict=True))
            if "_episode" in theirs:
                ended = theirs["_episode"]
                assert (infos["_episode"] == ended).all()
                for name in ("r", "l", "size", "push"):
                    found, wanted = infos["episode"][name][ended], theirs["episode"][name][ended]
                    assert np.float32(found).tolist() == np.float32(wanted).tolist()


def test_values_are_reported_where_envs_reset_in_the_next_step():
    vec, obs = made(PythonLadder, backend="serial", autoreset_mode="NextStep")
    for _ in range(3):
        infos = vec.step(np.ones(3, int))[-1]
    assert infos["episode"]["size"].tolist() == obs[:, 0].tolist()
    assert infos["episode"]["r"].tolist() == (3 * obs[:, 0]).tolist()


def test_native_envs_in_python_back_ends_draw_too():
    _, expected = made(Ladder)
    vec, obs = made(Ladder, backend="serial")
    assert (obs == expected).all()
    for _ in range(3):
        infos = vec.step(np.ones(3, int))[-1]
    assert infos["episode"]["r"].tolist() == (3 * expected[:, 0]).tolist()
    assert infos["episode"]["size"].tolist() == expected[:, 0].tolist()


def test_attributes_are_set_before_the_reset_and_options_given_to_it_win():
    env = DrawnOptions(gymnasium.make("CartPole-v1"), ["length"])
    env.option_ranges = {"length": (0.25, 0.5)}
    lengths = []
    for _ in range(20):
        env.reset(seed=None if lengths else 0)
        lengths.append(env.unwrapped.length)
    assert 0.25 <= min(lengths) < 0.3
    assert 0.45 < max(lengths) < 0.5
    env.reset(options={"length": 0.7})
    assert env.unwrapped.length == 0.7


def test_an_env_that_ignores_an_option_is_an_error():
    vec = hurtle.make_vec(Deaf, 2, drawn=("sizes",), backend="serial")
    vec.set_ranges({"sizes": (1, 2)})
    with pytest.raises(HurtleError, match=r"Deaf has no option .sizes.*Did you mean size\?"):
        vec.reset(seed=0)
    env = DrawnOptions(Deaf(), ["size"])  # an attribute, which the env does not overwrite with an option
    env.option_ranges = {"size": (7, 7)}
    env.reset(seed=0)
    env = DrawnOptions(Deaf(), ["nothing"])
    env.option_ranges = {"nothing": (1, 1)}
    with pytest.raises(UnknownNameError, match="its reset"):
        env.reset(seed=0)


def test_pools_and_other_apis_are_refused():
    with hurtle.make_vec(PythonLadder, 4, batch_size=2, drawn=("size",), backend="serial") as vec:  # noqa: SIM117
        with pytest.raises(HurtleError, match="leave out the batch size"):
            vec.set_ranges({"size": (1, 2)})
    with pytest.raises(HurtleError, match="Options are drawn for Gymnasium and native envs"):
        hurtle.make_vec("mpe/simple_spread", 2, drawn=("size",), backend="serial")


def test_an_option_with_the_name_of_a_statistic_is_refused():
    with pytest.raises(HurtleError, match="The option 'l' cannot be drawn: episodes report a statistic of that name"):
        DrawnOptions(gymnasium.make("Pendulum-v1"), ["l"])
