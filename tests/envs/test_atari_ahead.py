"""Games of Atari that another process prepares: the same ones, and nothing is left of the process."""

import contextlib
import os
import signal
from pathlib import Path

import gymnasium
import numpy as np
import pytest

import hurtle
from hurtle.errors import HurtleError
from hurtle.tracking.checkpoints import load_checkpoint, save_checkpoint

pytest.importorskip("ale_py", reason="needs hurtle[atari]")

import ale_py

from hurtle.envs.atari import make_atari
from hurtle.envs.atari_ahead import DEPENDENT, UNDERSTUDY


def ahead(game, **options):
    env = make_atari(game, **options)
    env.work_ahead()
    return env


def assert_alike(env, plain, rng, steps):
    for _ in range(steps):
        action = int(rng.integers(plain.action_space.n))
        (obs, *outcome), (expected, *expected_outcome) = env.step(action), plain.step(action)
        assert outcome == expected_outcome
        np.testing.assert_array_equal(obs, expected)
        if outcome[1] or outcome[2]:
            assert_begin_alike(env, plain)


def assert_begin_alike(env, plain, **how):
    np.testing.assert_array_equal(env.reset(**how)[0], plain.reset(**how)[0])


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize("game", ["Breakout", pytest.param("Freeway", marks=pytest.mark.slow)])  # with FIRE, and without
def test_prepared_games_are_those_that_a_reset_begins(game):
    env, plain, other, rng = ahead(game), make_atari(game), ahead(game, noop_max=3), np.random.default_rng(0)
    other.reset(seed=8)
    assert_begin_alike(env, plain, seed=3)
    for begun in range(3):
        assert_alike(env, plain, rng, 8)
        assert_begin_alike(env, plain)  # unfinished, so that a new game begins
        other.reset()
        assert env.unwrapped.ale.getEpisodeFrameNumber() == plain.unwrapped.ale.getEpisodeFrameNumber()
        if begun == 0:
            assert_begin_alike(env, plain, seed=5)
            assert_begin_alike(env, plain, options={"new": "game"})
    process = UNDERSTUDY._process
    assert alive(process)
    other.close()
    assert_begin_alike(env, plain)
    env.close()
    assert not alive(process)


def test_a_saved_state_knows_the_next_game():
    env, plain, copy, rng = ahead("Breakout"), make_atari("Breakout"), make_atari("Breakout"), np.random.default_rng(0)
    for one in (env, plain):
        one.reset(seed=1)
    assert_alike(env, plain, rng, 5)
    again = ahead("Breakout")
    again.reset(seed=2)
    for one in (copy, again):
        one.saved_state = env.saved_state
    for _ in range(2):
        starts = [one.reset()[0] for one in (plain, env, copy, again)]
        for start in starts[1:]:
            np.testing.assert_array_equal(start, starts[0])
    env.close()
    again.close()


@pytest.mark.parametrize(
    ("game", "options"), [("Qbert", {}), ("Pong", {"sticky_action_prob": 0.25}), ("Pong", {"noop_max": 0})]
)
def test_games_that_cannot_be_prepared_are_not(game, options):
    env = ahead(game, **options)
    env.reset(seed=0)
    env.reset()
    assert not UNDERSTUDY._process
    env.close()


def test_the_end_of_the_process_is_an_error():
    env = ahead("Pong")
    env.reset(seed=0)
    os.kill(UNDERSTUDY._process, signal.SIGKILL)
    os.waitpid(UNDERSTUDY._process, 0)
    with pytest.raises(HurtleError, match=r"The process that prepares Atari games \(pid \d+\) has ended"):
        again_and_again(env)
    env.close()


def again_and_again(env):
    for _ in range(3):  # the first game may have been ready
        env.reset()


def children_of(pids):
    """Processes that these have started."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has just ended
            parent = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
            found += [int(entry.name)] if parent in pids else []
    return found


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="needs /proc")
@pytest.mark.parametrize("lives", [1, pytest.param(9, marks=pytest.mark.slow)])
def test_a_vector_plays_like_its_envs_alone(lives, capsys, monkeypatch):
    monkeypatch.setattr("hurtle.vector.backend_choice.free_cores", lambda: 2)
    vec = hurtle.make_vec("atari/Breakout", 2, noop_max=2)
    assert capsys.readouterr().err == "hurtle: process with 2 workers, because Atari games take long to step\n"
    alone, rng = [make_atari("Breakout", noop_max=2) for _ in range(2)], np.random.default_rng(0)
    obs, _ = vec.reset(seed=4)
    np.testing.assert_array_equal(obs, [env.reset(seed=4 + i)[0] for i, env in enumerate(alone)])
    helpers = children_of(vec.worker_pids)
    assert len(helpers) == 2
    while lives:
        actions = rng.integers(0, 4, 2)
        obs, rewards, terminated, truncated, infos = vec.step(actions)
        for i, env in enumerate(alone):
            expected, *outcome, info = env.step(int(actions[i]))
            assert outcome == [rewards[i], terminated[i], truncated[i]]
            if terminated[i]:
                lives = max(lives - 1, 0)
                np.testing.assert_array_equal(infos["final_obs"][i], expected)
                expected = env.reset()[0]
                assert infos["final_info"]["lives"][i] == info["lives"]
                assert infos["final_info"].get("_game", np.zeros(2))[i] == ("game" in info)
            np.testing.assert_array_equal(obs[i], expected)
    np.testing.assert_array_equal(vec.reset()[0], [env.reset()[0] for env in alone])
    vec.close()
    vec.close()
    assert not any(alive(pid) for pid in helpers)


@pytest.mark.parametrize(
    ("backend", "mode"), [("serial", "NEXT_STEP"), pytest.param("process", "SAME_STEP", marks=pytest.mark.slow)]
)
def test_a_vector_resumes_exactly(backend, mode, tmp_path):
    options = {"backend": backend, "autoreset_mode": mode, "episodic_life": False, "noop_max": 2, "check": False}
    vec, rng, ended = hurtle.make_vec("atari/Breakout", 2, **options), np.random.default_rng(0), 0
    vec.reset(seed=0)
    while not ended:  # with NEXT_STEP, the next step of the env that has ended is a reset
        ended = vec.step(rng.integers(0, 4, 2))[2].any()
    save_checkpoint(tmp_path / "step-1.pt", {"vec": vec.state_dict()})
    other = hurtle.make_vec("atari/Breakout", 2, **options)
    other.load_state_dict(load_checkpoint(tmp_path / "step-1.pt")["vec"])
    for _ in range(20):
        actions = rng.integers(0, 4, 2)
        for one, expected in zip(other.step(actions)[:4], vec.step(actions)[:4], strict=True):
            np.testing.assert_array_equal(one, expected)
    found, expected = other.state_dict(), vec.state_dict()
    for name in ("obs", "over", "returns", "lengths", "reset_next"):
        np.testing.assert_array_equal(found[name], expected[name])
    with (
        hurtle.make_vec("atari/Breakout", 3, **options) as larger,
        pytest.raises(HurtleError, match="this vector has 3"),
    ):
        larger.load_state_dict(found)
    vec.close()
    other.close()


def test_a_vector_of_sticky_games_has_no_state():
    with hurtle.make_vec("atari/Pong", 1, backend="serial", sticky_action_prob=0.25, check=False) as vec:
        vec.reset(seed=0)
        assert not vec.resumes_exactly
        with pytest.raises(HurtleError, match="no state that can be saved: only Atari games without sticky actions"):
            vec.state_dict()


@pytest.mark.slow
def test_every_game_that_can_be_prepared_begins_the_same():
    gymnasium.register_envs(ale_py)
    for name in [name for name in gymnasium.registry if name.startswith("ALE/")]:
        if gymnasium.spec(name).kwargs["game"] in DEPENDENT:
            continue
        env, plain, rng = ahead(name), make_atari(name), np.random.default_rng(0)
        assert_begin_alike(env, plain, seed=1)
        for _ in range(3):
            assert_alike(env, plain, rng, int(rng.integers(10, 60)))
            assert_begin_alike(env, plain)
        env.close()
