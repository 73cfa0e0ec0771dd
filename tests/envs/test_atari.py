"""Atari: each detail of the preprocessing on its own, and frame by frame beside Gymnasium's and ale-py's."""

import platform

import gymnasium
import numpy as np
import pytest
from gymnasium.error import ResetNeeded
from gymnasium.utils.env_checker import check_env

import hurtle
from hurtle.errors import ActionError, HurtleError, UnknownNameError

pytest.importorskip("ale_py", reason="needs hurtle[atari]")

from hurtle.envs.atari import Atari, make_atari, shrinker
from hurtle.vector.atari_vec import atari_vector

PLAIN = {"noop_max": 0, "episodic_life": False, "fire_reset": False, "clip_reward": False}
NOOP, FIRE = 0, 1


def frame_number(env):
    return env.unwrapped.ale.getEpisodeFrameNumber()


def assert_same_frames(ours, theirs):
    """Equal; but where OpenCV's compiler fuses multiply and add (not on x86_64), means of exactly n + ½ may round otherwise."""
    if platform.machine() in ("x86_64", "AMD64"):
        np.testing.assert_array_equal(ours, theirs)
    else:
        difference = np.abs(ours.astype(int) - theirs)
        assert difference.max() <= 1
        assert (difference > 0).mean() < 0.01


@pytest.mark.parametrize(("height", "size"), [(210, 84), (210, 64), (210, 160), (210, 7), (250, 84)])
def test_shrinking_is_the_mean_of_areas(height, size):
    one, other = np.random.default_rng(size).integers(0, 256, (2, height, 160), dtype=np.uint8)
    small = np.empty((size, size), np.uint8)
    shrinker(height, 160, size)(one, other, small)

    exact = np.maximum(one, other).astype(float).repeat(size, 0).reshape(size, height, 160).mean(1)
    exact = exact.repeat(size, 1).reshape(size, size, 160).mean(2)
    assert np.abs(small - exact).max() <= 0.5 + 1e-4

    cv2 = pytest.importorskip("cv2", reason="needs opencv-python-headless")
    assert_same_frames(small, cv2.resize(np.maximum(one, other), (size, size), interpolation=cv2.INTER_AREA))


@pytest.mark.parametrize("game", ["Breakout", pytest.param("Pong", marks=pytest.mark.slow)])
def test_frames_are_those_of_gymnasium(game):
    pytest.importorskip("cv2", reason="needs opencv-python-headless")
    peer = gymnasium.make(f"ALE/{game}-v5", frameskip=1, repeat_action_probability=0.25)
    peer = gymnasium.wrappers.FrameStackObservation(gymnasium.wrappers.AtariPreprocessing(peer), 4)
    env = make_atari(game, sticky_action_prob=0.25, **{**PLAIN, "noop_max": 30})
    rng = np.random.default_rng(0)
    assert_same_frames(env.reset(seed=3)[0], peer.reset(seed=3)[0])
    ended, after = 0, 0
    while after < 40 if game == "Breakout" else after < 500:  # of Breakout, to the end of a game and into the next
        after += ended > 0 or game != "Breakout"
        action = int(rng.integers(env.action_space.n))
        obs, reward, terminated, truncated, _ = env.step(action)
        expected, *outcome, _ = peer.step(action)
        assert [reward, terminated, truncated] == outcome
        if terminated:  # Gymnasium repeats an old frame here
            ended += 1
            obs, expected = env.reset()[0], peer.reset()[0]
        assert_same_frames(obs, expected)


@pytest.mark.slow
def test_passes_gymnasiums_checker():
    env = make_atari("Pong", num_stack=2)
    with pytest.warns(UserWarning, match="different from the unwrapped version"):
        check_env(env, skip_render_check=True)
    assert gymnasium.make(env.spec).observation_space == env.observation_space


def test_make_finds_games_by_name():
    env = hurtle.make("atari/space_invaders", num_stack=2, render_mode="rgb_array")
    assert isinstance(env, Atari)
    assert env.spec.id == "ALE/SpaceInvaders-v5"
    env.reset(seed=0)
    assert env.render().shape == (210, 160, 3)
    assert make_atari("ALE/Pong-v5", full_action_space=True).action_space.n == 18
    with pytest.raises(UnknownNameError, match=r"No Atari game 'pnog'. Did you mean atari/Pong"):
        hurtle.make("atari/pnog")


@pytest.mark.slow
def test_noop_max():
    env = make_atari("Breakout", **{**PLAIN, "noop_max": 30})
    frames = []
    for seed in range(7):
        env.reset(seed=seed)
        frames.append(frame_number(env))
    assert all(1 <= frame <= 30 for frame in frames)
    assert len(set(frames)) > 4
    env.reset(seed=5)
    assert frame_number(env) == frames[5]
    without = make_atari("Breakout", **PLAIN)
    without.reset(seed=5)
    assert frame_number(without) == 0


@pytest.mark.parametrize(
    ("frame_skip", "max_pool"),
    [
        (5, True),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in ((5, False), (1, True), (2, True), (1, False), (2, False))),
    ],
)
def test_frame_skip_and_max_pool(frame_skip, max_pool):
    env = make_atari("Breakout", frame_skip=frame_skip, max_pool=max_pool, num_stack=1, **PLAIN)
    raw = gymnasium.make("ALE/Breakout-v5", obs_type="grayscale", frameskip=1, repeat_action_probability=0.0)
    env.reset(seed=0)
    raw.reset(seed=0)
    shrink, pooled = shrinker(210, 160, 84), 0
    expected = np.empty((84, 84), np.uint8)
    for step in range(30):
        action = FIRE if step == 0 else 2 + step // 4 % 2
        obs, reward, *_ = env.step(action)
        outcomes = [raw.step(action) for _ in range(frame_skip)]
        assert reward == sum(outcome[1] for outcome in outcomes)
        last, before = outcomes[-1][0], outcomes[-2 if max_pool else -1][0] if frame_skip > 1 else outcomes[-1][0]
        pooled += (before > last).any()
        shrink(last, before, expected)
        np.testing.assert_array_equal(obs[0], expected)
        assert frame_number(env) == frame_number(raw) == frame_skip * (step + 1)
    assert (pooled > 0) == (max_pool and frame_skip > 1)


def test_episodic_life():
    env = make_atari("Breakout", **{**PLAIN, "episodic_life": True, "fire_reset": True})
    env.reset(seed=0)
    game, steps, lives, frames = 0.0, 0, [], 0
    rng = np.random.default_rng(1)
    while True:
        _, reward, terminated, truncated, info = env.step(rng.integers(4))
        game, steps = game + reward, steps + 1
        if not terminated:
            assert info == {}
            continue
        lives.append(info["lives"])
        if "game" in info:
            break
        assert frame_number(env) > frames
        frames = frame_number(env)
        first, _ = env.reset()
        assert frame_number(env) == frames + 8  # one step of doing nothing, one of FIRE: the game goes on
        assert env.unwrapped.ale.lives() == lives[-1]
        assert (first == first[0]).all()  # nothing of the last life is left in the stack
    assert lives == [4, 3, 2, 1, 0]
    assert not truncated
    assert info["game"] == {"r": game, "l": steps}
    assert game > 0
    env.reset()
    assert (env.unwrapped.ale.lives(), frame_number(env)) == (5, 4)


def lose_a_life(env):
    for _ in range(300):
        if env.step(NOOP)[2]:
            return
    raise AssertionError("no life was lost in 300 steps")


def test_a_seed_options_or_an_unfinished_episode_begin_a_new_game():
    env = make_atari("Breakout", noop_max=0)
    first, _ = env.reset(seed=0)
    lose_a_life(env)
    again, _ = env.reset(seed=0)
    assert env.unwrapped.ale.lives() == 5
    np.testing.assert_array_equal(first, again)
    lose_a_life(env)
    env.reset(options={"new": "game"})
    assert env.unwrapped.ale.lives() == 5
    lose_a_life(env)
    env.reset()
    env.step(NOOP)
    env.reset()
    assert env.unwrapped.ale.lives() == 5


def test_without_episodic_life_only_the_end_of_the_game_terminates():
    env = make_atari("Breakout", **{**PLAIN, "fire_reset": True})
    env.reset(seed=0)
    terminated, lives, steps = False, [], 0
    while not terminated:
        _, _, terminated, _, info = env.step(steps % 4)
        lives.append(env.unwrapped.ale.lives())
        steps += 1
    assert sorted(set(lives)) == [0, 1, 2, 3, 4, 5]
    assert info["lives"] == 0
    assert info["game"]["l"] == steps


@pytest.mark.slow
def test_fire_reset():
    env = make_atari("Breakout", noop_max=0)
    env.reset(seed=0)
    for _ in range(3):  # the ball is in play, at the next lives too
        lose_a_life(env)
        env.reset()
    idle = make_atari("Breakout", **{**PLAIN, "episodic_life": True})
    idle.reset(seed=0)
    assert not any(idle.step(NOOP)[2] for _ in range(300))
    freeway = make_atari("Freeway", noop_max=0)  # has no FIRE
    freeway.reset(seed=0)
    assert frame_number(freeway) == 0


def test_size_stack_and_scale():
    env, scaled = make_atari("Pong", size=42, num_stack=3), make_atari("Pong", size=42, num_stack=3, scale=True)
    obs, before = env.reset(seed=0)[0], scaled.reset(seed=0)[0]
    assert (obs.shape, obs.dtype, before.dtype) == ((3, 42, 42), np.uint8, np.float32)
    assert (obs == obs[0]).all()
    for action in (2, 3, 2, 2, 5):
        newer, scaled_obs = env.step(action)[0], scaled.step(action)[0]
        np.testing.assert_array_equal(newer[:-1], obs[1:])
        np.testing.assert_array_equal(scaled_obs, newer.astype(np.float32) / 255)
        assert scaled_obs in scaled.observation_space
        obs = newer
    assert (obs[2] != obs[1]).any()


def test_observations_are_the_callers_own():
    env = make_atari("Pong")
    first, _ = env.reset(seed=0)
    kept = first.copy()
    first[:] = 0
    second = env.step(2)[0]
    np.testing.assert_array_equal(second[:-1], kept[1:])


def test_clip_reward():
    raw, clipped = make_atari("SpaceInvaders", clip_reward=False), make_atari("SpaceInvaders")
    raw.reset(seed=0)
    clipped.reset(seed=0)
    pairs = [(raw.step(4 + step // 9 % 2)[1], clipped.step(4 + step // 9 % 2)[1]) for step in range(100)]  # shoot to and fro
    assert {r > 1 for r, _ in pairs} == {True, False}
    assert all(c == np.sign(r) for r, c in pairs)


@pytest.mark.slow
def test_sticky_action_prob():
    def play(env, seed):
        env.reset(seed=seed)
        return np.stack([env.step(2 + step % 2)[0][-1] for step in range(40)])

    half, none = (make_atari("Pong", sticky_action_prob=probability, noop_max=0) for probability in (0.5, 0.0))
    sticky, never = play(half, 0), play(none, 0)
    np.testing.assert_array_equal(sticky, play(half, 0))
    assert (sticky != play(half, 1)).any()
    np.testing.assert_array_equal(never, play(none, 1))
    assert (sticky != never).any()


def test_the_frame_limit_truncates():
    env = Atari(gymnasium.make("ALE/Breakout-v5", max_num_frames_per_episode=100), noop_max=0, fire_reset=False)
    env.reset(seed=0)
    flags = [env.step(NOOP)[2:] for _ in range(25)]
    assert [flag[:2] for flag in flags] == [(False, False)] * 24 + [(False, True)]
    assert flags[-1][2] == {"lives": 5, "game": {"r": 0.0, "l": 25}}
    env.reset()
    assert frame_number(env) == 0


def test_errors_teach():
    env = make_atari("Pong")
    with pytest.raises(ResetNeeded):
        env.step(0)
    env.reset(seed=0)
    for action in (-1, 6):
        with pytest.raises(ActionError, match=rf"Action {action} is not in Discrete\(6\)"):
            env.step(action)
    with pytest.raises(HurtleError, match=r'takes an env of ale-py, got .*CartPole.* Make one with make_atari\("Pong"\)'):
        Atari(gymnasium.make("CartPole-v1"))
    with pytest.raises(HurtleError, match="leave out continuous=True"):
        Atari(gymnasium.make("ALE/Pong-v5", continuous=True))
    with pytest.raises(HurtleError, match=r"size must be from 1 to 160 \(the screen is 210 × 160\), got 200"):
        make_atari("Pong", size=200)
    with pytest.raises(HurtleError, match="frame_skip must be at least 1, got 0"):
        make_atari("Pong", frame_skip=0)


def test_vector_plays_the_same_game():
    vec = atari_vector("Breakout", 2, num_threads=1, **PLAIN)
    env = make_atari("Breakout", **PLAIN)
    vec.reset(seed=0)
    env.reset(seed=0)
    for step in range(250):
        action = FIRE if step % 20 == 0 else 2 + step // 8 % 2
        obs, rewards, terminated, truncated, infos = vec.step(np.array([action, NOOP]))
        expected, reward, ended, _, info = env.step(action)
        assert (rewards[0], terminated[0], truncated[0]) == (reward, ended, False)
        if ended:
            assert infos["_final_obs"].tolist() == infos["_game"].tolist() == [True, False]
            assert {key: values[0] for key, values in infos["game"].items()} == info["game"]
            np.testing.assert_array_equal(infos["final_obs"][0, :-1], expected[:-1])
            break
        if step >= 3:  # theirs begins with black frames
            assert_same_frames(obs[0], expected)
    assert ended


def test_vector_ends_episodes_with_lives_and_games_with_the_last():
    vec = atari_vector("Breakout", 2, num_threads=1)
    obs, infos = vec.reset(seed=[4, 5])
    assert (obs.shape, infos["lives"].tolist()) == ((2, 4, 84, 84), [5, 5])
    rng, returns, games = np.random.default_rng(0), np.zeros(2), []
    episodes = np.zeros(2, int)
    while len(games) < 2:
        obs, rewards, terminated, truncated, infos = vec.step(rng.integers(0, 4, 2))
        assert set(np.unique(rewards)) <= {-1.0, 0.0, 1.0}
        returns += rewards
        ended = terminated | truncated
        assert ("episode" in infos) == ended.any()
        if ended.any():
            np.testing.assert_array_equal(infos["_episode"], ended)
            np.testing.assert_array_equal(infos["episode"]["r"][ended], returns[ended])
            returns[ended] = 0
            episodes[ended] += 1
            games += episodes[infos.get("_game", np.zeros(2, bool))].tolist()
            episodes[infos.get("_game", np.zeros(2, bool))] = 0
    assert games == [5, 5]  # lives per game
