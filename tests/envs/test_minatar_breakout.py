"""Breakout behaves as in the `minatar` package."""

from collections import Counter

import numpy as np
import pytest

import hurtle

pytest.importorskip("minatar")

from minatar_parity import (
    Reference,
    Transitions,
    assert_same,
    assert_same_frequencies,
    assert_same_play,
    assert_sticky,
    join,
    replay,
    short_and_long,
    uniform_policy,
)

LEFT, RIGHT = 1, 3
PADDLE, BALL = 0, 1
DIRECTIONS = ((-1, -1), (1, -1), (1, 1), (-1, 1))  # the package's ball_dir as (dx, dy)


def encode(game) -> dict:
    dx, dy = DIRECTIONS[game.ball_dir]
    return {
        "bricks": sum(1 << int(i) for i in np.flatnonzero(game.brick_map[1:4])),
        "ball_x": int(game.ball_x),
        "ball_y": int(game.ball_y),
        "ball_dx": dx,
        "ball_dy": dy,
        "trail_x": int(game.last_x),
        "trail_y": int(game.last_y),
        "paddle_x": int(game.pos),
        "in_wall": bool(game.strike),
    }


def follow_ball(observations: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Keeps the paddle below the ball, with a random move now and then for variety."""
    paddle = observations[:, 9, :, PADDLE].argmax(axis=1)
    ball = observations[..., BALL].any(axis=1).argmax(axis=1)
    actions = np.where(ball < paddle, LEFT, np.where(ball > paddle, RIGHT, 0))
    careless = rng.random(len(actions)) < 0.15
    return np.where(careless, rng.integers(6, size=len(actions)), actions)


def thin_out_wall(game, rng: np.random.Generator) -> None:
    """Walls with many holes or hardly any brick left."""
    game.brick_map[1:4] *= rng.random((3, 10)) < rng.choice([0.05, 0.3, 0.7])


@pytest.fixture(scope="module", params=short_and_long(0.3))
def length(request) -> float:
    return request.param


@pytest.fixture(scope="module")
def recorded(length) -> Transitions:
    reference = Reference("breakout", encode, seed=0)
    return join(
        reference.record(uniform_policy, round(3_000 * length)),
        reference.record(follow_ball, round(4_000 * length)),
        reference.record(follow_ball, round(6_000 * length), prepare=thin_out_wall),
    )


def test_transitions(recorded):
    assert_same(replay("breakout", recorded), recorded)


def test_recording_covers_the_rules(recorded):
    before, after, alive = recorded.before, recorded.after, ~recorded.terminated
    bottom = (before["ball_y"] == 8) & (before["ball_dy"] == 1)
    turned = before["ball_dx"] != after["ball_dx"]
    inside = (before["ball_x"] > 0) & (before["ball_x"] < 9)
    events = {
        "brick": recorded.rewards == 1,
        "through bricks": before["in_wall"] & after["in_wall"],
        "ceiling": (before["ball_y"] == 0) & (before["ball_dy"] == -1),
        "side": turned & ~inside,
        "paddle": bottom & alive & ~turned & inside,
        "paddle edge": bottom & alive & turned & inside,
        "paddle in the corner": bottom & alive & ~inside,
        "missed": recorded.terminated,
        "new wall": (before["bricks"] == 0) & (after["bricks"] != 0),
        "new wall, ball missed": (before["bricks"] == 0) & (after["bricks"] != 0) & recorded.terminated,
    }
    for name, happened in events.items():
        assert happened.sum() >= 5, name


def test_start():
    reference = Reference("breakout", encode, seed=1)
    theirs: Counter = Counter()
    for _ in range(2_000):
        reference.environment.reset()
        theirs[(*reference.encode(reference.variables).values(), reference.observation().tobytes())] += 1

    vec = hurtle.make_vec("breakout", num_envs=2_000)
    obs, _ = vec.reset(seed=2)
    fields = [vec.states[name].tolist() for name in encode(reference.variables)]
    ours = Counter((*state, frame.tobytes()) for *state, frame in zip(*fields, np.asarray(obs), strict=True))
    vec.close()
    assert set(ours) == set(theirs)
    assert_same_frequencies(ours, theirs)


def test_sticky_actions(recorded):
    assert_sticky(Reference("breakout", encode, seed=3), recorded[::7], debug=True)


@pytest.mark.parametrize("policy", [uniform_policy, follow_ball])
def test_play(policy):
    reference = Reference("breakout", encode, seed=4, sticky_action_prob=0.1)
    assert_same_play(reference, policy, episodes=500, horizon=1_000, num_envs=2_000)
