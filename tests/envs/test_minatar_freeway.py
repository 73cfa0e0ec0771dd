"""Freeway behaves as in the `minatar` package."""

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

UP, DOWN = 2, 4
START = 9
LANES = 8
SPEEDS = {-5, -4, -3, -2, -1, 1, 2, 3, 4, 5}


def encode(game) -> dict:
    x, _, timer, speed = zip(*game.cars, strict=True)
    return {
        "frames_left": int(game.terminate_timer) + 1,
        "chicken_y": int(game.pos),
        "step_timer": int(game.move_timer),
        "car_x": [int(value) for value in x],
        "car_speed": [int(value) for value in speed],
        "car_timer": [int(value) for value in timer],
    }


def mostly_up(observations: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    n = len(observations)
    return np.where(rng.random(n) < 0.9, UP, rng.integers(6, size=n))


def rush_hour(game, rng: np.random.Generator) -> None:
    """Cars and chicken anywhere, and an episode that ends soon."""
    for car in game.cars:
        car[0], car[2] = int(rng.integers(10)), int(rng.integers(abs(car[3]) + 1))
    game.pos, game.move_timer = int(rng.integers(1, 10)), int(rng.integers(4))
    game.terminate_timer = int(rng.integers(60))


@pytest.fixture(scope="module", params=short_and_long(0.4))
def length(request) -> float:
    return request.param


@pytest.fixture(scope="module")
def played(length) -> Transitions:
    reference = Reference("freeway", encode, seed=0)
    return join(
        reference.record(uniform_policy, round(4_000 * length)),
        reference.record(mostly_up, round(6_000 * length)),
        reference.record(uniform_policy, round(4_000 * length), prepare=rush_hour),
        reference.record(mostly_up, round(6_000 * length), prepare=rush_hour),
    )


@pytest.fixture(scope="module")
def recorded(played) -> Transitions:
    """Play without the steps in which new speeds are drawn."""
    return played[played.rewards == 0]


def test_transitions(recorded, length):
    assert len(recorded) > 15_000 * length
    assert_same(replay("freeway", recorded), recorded)


def test_recording_covers_the_rules(recorded):
    before, after = recorded.before, recorded.after
    ready = before["step_timer"] == 0
    row = (before["chicken_y"] - (ready & (recorded.actions == UP)) + (ready & (recorded.actions == DOWN))).clip(0, 9)
    car = np.where(row < START, before["car_x"][np.arange(len(recorded)), row.clip(1, LANES) - 1], -1)
    back = (row < START) & (after["chicken_y"] == START)
    events = {
        "step up": after["chicken_y"] == before["chicken_y"] - 1,
        "step down": after["chicken_y"] == before["chicken_y"] + 1,
        "at the lower border": ready & (before["chicken_y"] == START) & (recorded.actions == DOWN),
        "too early": ~ready & (recorded.actions == UP),
        "walked into a car": back & (car == 4),
        "hit by a car": back & (car != 4),
        "car re-enters on the left": ((before["car_x"] == 9) & (after["car_x"] == 0)).any(axis=1),
        "car re-enters on the right": ((before["car_x"] == 0) & (after["car_x"] == 9)).any(axis=1),
        "end": recorded.terminated,
    }
    for name, happened in events.items():
        assert happened.sum() >= 5, name
    assert set(before["car_speed"].flat) == SPEEDS


def test_crossings(played, length):
    """After a crossing, all but the speeds is certain, and the speeds are equally likely."""
    crossed = played[(played.rewards == 1) & ~played.terminated]
    assert len(crossed) > 100 * length
    ours = replay("freeway", crossed)
    for name in ("frames_left", "chicken_y", "step_timer", "car_x"):
        np.testing.assert_array_equal(ours.after[name], crossed.after[name], name)
    for after in (ours.after, crossed.after):
        np.testing.assert_array_equal(after["car_timer"], abs(after["car_speed"]) - 1, "car_timer")
    np.testing.assert_array_equal(ours.rewards, crossed.rewards)
    np.testing.assert_array_equal(ours.terminated, crossed.terminated)
    np.testing.assert_array_equal(ours.observations[..., :2], crossed.observations[..., :2])  # chicken and cars

    many = replay("freeway", crossed[np.zeros(4_000, int)])
    assert_same_frequencies(Counter(many.after["car_speed"].flat), Counter(crossed.after["car_speed"].flat))
    assert_same_frequencies(Counter(many.after["car_speed"].flat), Counter(dict.fromkeys(SPEEDS, 1_000_000)))


def test_crossing_in_the_last_frame():
    reference = Reference("freeway", encode, seed=1)
    reference.variables.pos, reference.variables.move_timer, reference.variables.terminate_timer = 1, 0, 0
    before = {name: np.array([value]) for name, value in encode(reference.variables).items()}
    reward, terminated = reference.environment.act(UP)
    unknown = np.zeros(1)
    ours = replay("freeway", Transitions(before, np.array([UP]), unknown, unknown, unknown, {}))
    assert (ours.rewards[0], ours.terminated[0]) == (reward, terminated) == (1, True)


def test_start():
    reference = Reference("freeway", encode, seed=2)
    starts = []
    for _ in range(1_000):
        reference.environment.reset()
        starts.append(encode(reference.variables))
    theirs = {name: np.array([start[name] for start in starts]) for name in starts[0]}

    vec = hurtle.make_vec("freeway", num_envs=4_000, sticky_action_prob=0.0)
    obs, _ = vec.reset(seed=3)
    ours = {name: np.array(vec.states[name]) for name in theirs}
    shown = np.asarray(obs)[..., :2].reshape(4_000, -1)
    vec.close()
    for name in ("frames_left", "chicken_y", "step_timer", "car_x"):
        assert np.unique(ours[name], axis=0).tolist() == np.unique(theirs[name], axis=0).tolist(), name
    for start in (ours, theirs):
        np.testing.assert_array_equal(start["car_timer"], abs(start["car_speed"]), "car_timer")
    for lane in range(LANES):
        assert_same_frequencies(Counter(ours["car_speed"][:, lane]), Counter(theirs["car_speed"][:, lane]))
    assert (shown == reference.observation()[..., :2].reshape(-1)).all()

    pairs = Counter(zip(ours["car_speed"][:, :-1].flat, ours["car_speed"][:, 1:].flat, strict=True))
    assert_same_frequencies(pairs, Counter({(a, b): 1_000_000 for a in SPEEDS for b in SPEEDS}))


@pytest.mark.slow  # breakout has it too
def test_sticky_actions(recorded):
    assert_sticky(Reference("freeway", encode, seed=4), recorded)


@pytest.mark.parametrize(
    ("episodes", "horizon", "num_envs", "sticky"),
    [(40, 400, 400, 0.0), pytest.param(60, 3_000, 500, 0.1, marks=pytest.mark.slow)],
)
def test_play(episodes, horizon, num_envs, sticky):
    reference = Reference("freeway", encode, seed=5, sticky_action_prob=sticky)
    assert_same_play(reference, mostly_up, episodes, horizon, num_envs)
