"""Atari: each detail of the preprocessing on its own, and frame by frame beside Gymnasium's and ale-py's."""

import pickle
import platform

import gymnasium
import numpy as np
import pytest
from gymnasium.error import ResetNeeded
from gymnasium.utils.env_checker import check_env

import hurtle
from hurtle.errors import ActionError, HurtleError, UnknownNameError

pytest.importorskip("ale_py", reason="needs hurtle[atari]")

from hurtle.envs.atari import Atari, game_id, make_atari
from hurtle.envs.atari_frames import Frames, drawer

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


def shrunk(one, other, size):
    """The maximum of two gray screens, resized."""
    frame = np.empty((size, size, 1), np.uint8)
    drawer(*one.shape, size)(np.maximum(one, other)[None], np.ones(len(one), np.bool_), frame, np.empty_like(frame)[None])
    return frame[..., 0]


@pytest.mark.parametrize(("height", "size"), [(210, 84), (210, 64), (210, 160), (210, 7), (250, 84)])
def test_shrinking_is_the_mean_of_areas(height, size):
    one, other = np.random.default_rng(size).integers(0, 256, (2, height, 160), dtype=np.uint8)
    small = shrunk(one, other, size)

    exact = np.maximum(one, other).astype(float).repeat(size, 0).reshape(size, height, 160).mean(1)
    exact = exact.repeat(size, 1).reshape(size, size, 160).mean(2)
    assert np.abs(small - exact).max() <= 0.5 + 1e-4

    cv2 = pytest.importorskip("cv2", reason="needs opencv-python-headless")
    assert_same_frames(small, cv2.resize(np.maximum(one, other), (size, size), interpolation=cv2.INTER_AREA))


class Screen:
    """An emulator that shows what it is told to."""

    def __init__(self, height):
        self.colours = np.random.default_rng(7).integers(0, 256, (256, 3), dtype=np.uint8)
        self.screen = np.zeros((height, 160), np.uint8)

    def getScreenDims(self):
        return self.screen.shape

    def getScreen(self, into):
        into[...] = self.screen

    def getScreenRGB(self):
        return self.colours[self.screen]


def test_frames_are_redrawn_where_a_screen_changed():
    rng, emulator = np.random.default_rng(0), Screen(250)
    frames, stack, before = Frames(emulator, 84, grayscale=False), np.zeros((3, 84, 84, 3), np.uint8), []
    for step in range(60):
        shown = []
        for _ in range(1 + step % 3):  # the maximum is that of all seen
            top, left = rng.integers(0, 250), rng.integers(0, 160)  # at first in a few colours, later in more of them
            emulator.screen[top : top + 9, left : left + 3] = rng.integers(0, 2 + 4 * step, (1, 1))
            frames.see()
            shown.append(emulator.colours[emulator.screen])
        frames.draw(stack)
        pooled = np.max(shown, 0)
        before.append(np.stack([shrunk(plane, plane, 84) for plane in np.moveaxis(pooled, 2, 0)], 2))
        np.testing.assert_array_equal(stack[-len(before) :], before[-3:])


def gymnasium_game(game, noop_max=30, **options):
    """The game with Gymnasium's wrappers."""
    pytest.importorskip("cv2", reason="needs opencv-python-headless")
    peer = gymnasium.make(f"ALE/{game}-v5", frameskip=1, repeat_action_probability=0.25, full_action_space=False)
    peer = gymnasium.wrappers.AtariPreprocessing(peer, noop_max=noop_max, **options)
    return gymnasium.wrappers.FrameStackObservation(peer, 4)


def assert_plays_like_gymnasium(game, steps, ends=0, **options):
    """So many steps, and on until so many games have ended, are those of Gymnasium's wrappers."""
    names = {"frame_skip": "frame_skip", "screen_size": "size", "grayscale_obs": "grayscale", "noop_max": "noop_max"}
    own = {**PLAIN, "noop_max": 30, **{names[name]: value for name, value in options.items()}}
    peer, env = gymnasium_game(game, **options), make_atari(game, sticky_action_prob=0.25, **own)
    rng = np.random.default_rng(0)
    assert_same_frames(env.reset(seed=3)[0], peer.reset(seed=3)[0])
    assert env.observation_space == peer.observation_space
    ended = 0
    while steps > 0 or ended < ends:
        steps -= 1
        action = int(rng.integers(env.action_space.n))
        obs, reward, terminated, truncated, _ = env.step(action)
        expected, *outcome, _ = peer.step(action)
        assert [reward, terminated, truncated] == outcome
        if terminated or truncated:  # Gymnasium repeats an old frame here
            ended += 1
            obs, expected = env.reset()[0], peer.reset()[0]
        assert_same_frames(obs, expected)


@pytest.mark.parametrize(
    ("game", "options"),
    [
        ("Breakout", {}),
        ("Carnival", {"noop_max": 5}),  # its screen has 214 rows
        ("Pooyan", {"grayscale_obs": False, "noop_max": 5}),  # 220
        ("JourneyEscape", {"screen_size": 61, "frame_skip": 3, "noop_max": 5}),  # 230
    ],
)
def test_frames_are_those_of_gymnasium(game, options):
    assert_plays_like_gymnasium(game, 120 if options else 40, ends=not options, **options)


@pytest.mark.slow
@pytest.mark.parametrize(
    "game", ["Breakout", "Pong", "BeamRider", "Seaquest", "Carnival", "Pooyan", "KeystoneKapers", "DoubleDunk"]
)
def test_thousands_of_frames_are_those_of_gymnasium(game):
    assert_plays_like_gymnasium(game, 3000, ends=1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{"grayscale_obs": False}, {"screen_size": 96}, {"frame_skip": 2}, {"noop_max": 0}], ids=str
)
def test_thousands_of_frames_with_other_options(options):
    assert_plays_like_gymnasium("SpaceInvaders", 1500, **options)


def games():
    ale_py = pytest.importorskip("ale_py")
    gymnasium.register_envs(ale_py)
    return [name[4:-3] for name in gymnasium.registry if name.startswith("ALE/") and name.endswith("-v5")]


def test_every_game_of_ale_py_has_a_name():
    assert len(games()) >= 104
    assert {game_id(game.upper()) for game in games()} == {f"ALE/{game}-v5" for game in games()}


@pytest.mark.slow
def test_every_game_plays():
    heights = {}
    for game in games():
        env = make_atari(game, noop_max=0)
        obs, _ = env.reset(seed=0)
        height = env.unwrapped.ale.getScreenDims()[0]
        heights.setdefault(height, []).append(game)
        for step in range(12):
            obs = env.step(step % env.action_space.n)[0]
        last = env.unwrapped.ale.getScreenGrayscale()
        assert np.abs(obs[-1].astype(int) - shrunk(last, last, 84)).mean() < 60  # of the same scene
        assert obs.std() > 0
        env.close()
    assert {210, 214, 220, 230, 250} <= heights.keys()


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
    pooled = 0
    for step in range(30):
        action = FIRE if step == 0 else 2 + step // 4 % 2
        obs, reward, *_ = env.step(action)
        outcomes = [raw.step(action) for _ in range(frame_skip)]
        assert reward == sum(outcome[1] for outcome in outcomes)
        last, before = outcomes[-1][0], outcomes[-2 if max_pool else -1][0] if frame_skip > 1 else outcomes[-1][0]
        pooled += (before > last).any()
        np.testing.assert_array_equal(obs[0], shrunk(last, before, 84))
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
    env, scaled = make_atari("Pong", size=64, num_stack=3), make_atari("Pong", size=64, num_stack=3, scale=True)
    obs, before = env.reset(seed=0)[0], scaled.reset(seed=0)[0]
    assert (obs.shape, obs.dtype, before.dtype) == ((3, 64, 64), np.uint8, np.float32)
    assert (obs == obs[0]).all()
    for action in (2, 3, 2, 2, 5):
        newer, scaled_obs = env.step(action)[0], scaled.step(action)[0]
        np.testing.assert_array_equal(newer[:-1], obs[1:])
        np.testing.assert_array_equal(scaled_obs, newer.astype(np.float32) / 255)
        assert scaled_obs in scaled.observation_space
        obs = newer
    assert (obs[2] != obs[1]).any()


def test_observations_go_where_they_are_told_to():
    env, alone, memory = make_atari("Pong"), make_atari("Pong"), np.zeros(4 * 84 * 84, np.uint8)
    assert env.observe_into(memory)
    first, _ = env.reset(seed=0)
    np.testing.assert_array_equal(first, alone.reset(seed=0)[0])
    second = env.step(2)[0]
    assert second is first
    np.testing.assert_array_equal(memory.reshape(4, 84, 84), alone.step(2)[0])
    assert not make_atari("Pong", scale=True).observe_into(memory)


@pytest.mark.parametrize("game", ["Breakout", pytest.param("DoubleDunk", marks=pytest.mark.slow)])
def test_a_saved_state_continues_exactly(game):
    env, rng = make_atari(game), np.random.default_rng(0)

    def play(env, action):
        obs, *outcome = env.step(action)
        return (env.reset()[0] if outcome[1] or outcome[2] else obs), *outcome

    env.reset(seed=0)
    for _ in range(20):
        play(env, int(rng.integers(env.action_space.n)))
    copy = make_atari(game)
    copy.saved_state = pickle.loads(pickle.dumps(env.saved_state))
    games, steps = 0, 0
    while games < 1 or steps < 260:
        action = int(rng.integers(env.action_space.n))
        (obs, *outcome), (expected, *expected_outcome) = play(copy, action), play(env, action)
        assert outcome == expected_outcome
        np.testing.assert_array_equal(obs, expected)
        games, steps = games + ("game" in outcome[-1]), steps + 1


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
    for value in (0, "4", (2, 5)):
        with pytest.raises(HurtleError, match=r"frame_skip must be an int of at least 1, got ."):
            make_atari("Pong", frame_skip=value)
    with pytest.raises(HurtleError, match=r"sticky_action_prob must be from 0 to 1, got 25"):
        make_atari("Pong", sticky_action_prob=25)
    with pytest.raises(UnknownNameError, match=r"Atari games have no option 'frameskip'. Did you mean frame_skip\?"):
        make_atari("Pong", frameskip=2)
    with pytest.raises(UnknownNameError, match=r"no option 'stack'. .*num_stack"):
        hurtle.make_vec("atari/Pong", 2, backend="process", stack=2)
