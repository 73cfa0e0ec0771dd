"""Asterix behaves as in the `minatar` package."""

import numpy as np
import pytest

import hurtle

pytest.importorskip("minatar")

from minatar_parity import (
    Arrays,
    Reference,
    Transitions,
    assert_same,
    assert_same_outcomes,
    assert_same_play,
    assert_sticky,
    join,
    replay,
    short_and_long,
    uniform_policy,
)

NOOP, LEFT, UP, RIGHT, DOWN = range(5)
PLAYER, ENEMY, TRAIL, GOLD = range(4)

ROWS, COLUMNS = np.divmod(np.arange(100), 10)  # cells in reading order
DISTANCES = abs(ROWS[:, None] - ROWS) + abs(COLUMNS[:, None] - COLUMNS)
NEIGHBOURS = np.stack(  # where the actions no-op, left, up, right and down lead from each cell
    [10 * (ROWS + dy).clip(1, 8) + (COLUMNS + dx).clip(0, 9) for dy, dx in ((0, 0), (0, -1), (-1, 0), (0, 1), (1, 0))],
    axis=1,
)


def encode(game) -> dict:
    lanes = [entity or [0, 0, None, False] for entity in game.entities]  # x, row, moves to the right, is gold
    return {
        "player_x": int(game.player_x),
        "player_y": int(game.player_y),
        "lane_x": [lane[0] for lane in lanes],
        "lane_direction": [0 if lane[2] is None else 1 if lane[2] else -1 for lane in lanes],
        "lane_gold": [bool(lane[3]) for lane in lanes],
        "spawn_timer": int(game.spawn_timer),
        "move_timer": int(game.move_timer),
        "level": int(game.ramp_index),
        "level_timer": int(game.ramp_timer) + 2,
    }


def clear_empty_lanes(states: Arrays) -> Arrays:
    taken = states["lane_direction"] != 0
    return {**states, "lane_x": states["lane_x"] * taken, "lane_gold": states["lane_gold"] & taken}


def chase_gold(observations: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Steps towards the nearest gold without stepping next to an enemy, and at random now and then."""
    n = len(observations)
    player = observations[..., PLAYER].reshape(n, -1).argmax(axis=1)
    gold = observations[..., GOLD].reshape(n, -1)
    enemy = np.pad(observations[..., ENEMY], ((0, 0), (0, 0), (1, 1)))
    danger = (enemy[..., :-2] | enemy[..., 1:-1] | enemy[..., 2:]).reshape(n, -1)
    cells = NEIGHBOURS[player]  # [n, 5]
    distance = np.where(gold[:, None], DISTANCES[cells], 20).min(axis=2)
    actions = (distance + 100 * danger[np.arange(n)[:, None], cells]).argmin(axis=1)
    careless = rng.random(n) < 0.1
    return np.where(careless, rng.integers(6, size=n), actions)


def later_level(game, rng: np.random.Generator) -> None:
    """The variables as they are some way into a long episode."""
    level = int(rng.integers(10))
    game.ramp_index, game.spawn_speed, game.move_speed = level, 10 - level, 5 - level // 2
    game.spawn_timer, game.move_timer = int(rng.integers(10 - level)), int(rng.integers(5 - level // 2))
    game.ramp_timer = 100 if level == 9 else int(rng.integers(-1, 101))
    game.player_x, game.player_y = int(rng.integers(10)), int(rng.integers(1, 9))


@pytest.fixture(scope="module", params=short_and_long(0.33))
def length(request) -> float:
    return request.param


@pytest.fixture(scope="module")
def recorded(length) -> Transitions:
    """Play without the steps in which something arrives."""
    reference = Reference("asterix", encode, seed=0)
    everything = join(
        reference.record(uniform_policy, round(3_000 * length)),
        reference.record(chase_gold, round(3_000 * length)),
        reference.record(chase_gold, round(8_000 * length), prepare=later_level),
    )
    return everything[~arrival(everything)]


def arrival(recorded: Transitions) -> np.ndarray:
    """The steps in which something arrives: it is due, and there is a free lane."""
    return (recorded.before["spawn_timer"] == 0) & (recorded.before["lane_direction"] == 0).any(axis=1)


def test_start():
    reference = Reference("asterix", encode, seed=6)
    theirs = encode(reference.variables)
    vec = hurtle.make_vec("asterix", num_envs=8, sticky_action_prob=0.0)
    obs, _ = vec.reset(seed=0)
    for name, value in theirs.items():
        assert vec.states[name].tolist() == [value] * 8, name
    assert (np.asarray(obs) == reference.observation()).all()
    vec.close()


def test_transitions(recorded, length):
    assert len(recorded) > 8_000 * length
    assert_same(replay("asterix", recorded), recorded, clear_empty_lanes)


@pytest.mark.slow
def test_transitions_without_ramping():
    reference = Reference("asterix", encode, seed=1, difficulty_ramping=False)
    recorded = reference.record(uniform_policy, 3_000)
    recorded = recorded[~arrival(recorded)]
    assert set(recorded.after["level"]) == {0}
    assert_same(replay("asterix", recorded, difficulty_ramping=False), recorded, clear_empty_lanes)


def test_recording_covers_the_rules(recorded):
    before, after = recorded.before, recorded.after
    moved = before["move_timer"] == 0
    count_before = (before["lane_direction"] != 0).sum(axis=1)
    count_after = (after["lane_direction"] != 0).sum(axis=1)
    events = {
        "gold": recorded.rewards == 1,
        "gold, all moving": (recorded.rewards == 1) & moved,
        "caught": recorded.terminated,
        "caught, all moving": recorded.terminated & moved,
        "left the screen": moved & (recorded.rewards == 0) & (count_after < count_before),
        "next level": after["level"] > before["level"],
        "at the upper border": (before["player_y"] == 1) & (recorded.actions == UP),
        "at the lower border": (before["player_y"] == 8) & (recorded.actions == DOWN),
        "at the left border": (before["player_x"] == 0) & (recorded.actions == LEFT),
        "at the right border": (before["player_x"] == 9) & (recorded.actions == RIGHT),
    }
    for name, happened in events.items():
        assert happened.sum() >= 5, name
    assert set(before["level"]) >= set(range(9))  # at the last level, something arrives in every step


@pytest.mark.parametrize(
    ("taken", "player_x", "action", "move_timer"),
    [
        ("", 5, NOOP, 1),  # eight free lanes
        ("0 3 4 7", 5, NOOP, 0),  # half of them, and the arrival moves at once
        ("0 1 2 3 5 6 7", 0, NOOP, 1),  # the player waits where things come from on the left ...
        ("0 1 2 3 5 6 7", 9, NOOP, 1),  # ... and on the right
        ("0 1 2 3 5 6 7", 0, NOOP, 0),  # caught by what arrives and moves on
        ("0 1 2 3 5 6 7", 1, NOOP, 0),  # runs into what arrives and moves
        ("0 1 2 3 5 6 7", 0, RIGHT, 1),  # walks off in time
        ("0 1 2 3 4 5 6 7", 5, NOOP, 1),  # no room
    ],
)
def test_arrivals(taken, player_x, action, move_timer):
    reference = Reference("asterix", encode, seed=2)
    game = reference.variables
    for lane in map(int, taken.split()):
        game.entities[lane] = [3, lane + 1, lane % 2 == 0, lane % 3 == 0]
    game.player_x, game.spawn_timer, game.move_timer = player_x, 0, move_timer
    assert_same_outcomes(reference, reference.snapshot(), action, samples=3_000)


def test_arrivals_leave_the_rest_alone(length):
    """The timers, the player and the lanes that were taken, in steps in which something arrives."""
    reference = Reference("asterix", encode, seed=3)
    recorded = reference.record(chase_gold, round(10_000 * length), prepare=later_level)
    recorded = recorded[arrival(recorded) & ~recorded.terminated & (recorded.rewards == 0)]
    ours = replay("asterix", recorded)
    both = ~ours.terminated & (ours.rewards == 0)
    assert both.sum() > 1_000 * length
    assert set(recorded.before["level"]) == set(range(10))
    ours, recorded = ours[both], recorded[both]
    taken = recorded.before["lane_direction"] != 0
    for name, values in recorded.after.items():
        if not name.startswith("lane_"):
            np.testing.assert_array_equal(ours.after[name], values, name)
    mine, theirs = clear_empty_lanes(ours.after), clear_empty_lanes(recorded.after)
    for name in ("lane_x", "lane_direction", "lane_gold"):
        np.testing.assert_array_equal(mine[name][taken], theirs[name][taken], name)
    np.testing.assert_array_equal(
        (mine["lane_direction"] != 0).sum(axis=1), (theirs["lane_direction"] != 0).sum(axis=1), "number of arrivals"
    )


@pytest.mark.slow  # breakout has it too
def test_sticky_actions(recorded):
    assert_sticky(Reference("asterix", encode, seed=4), recorded, clear_empty_lanes)


@pytest.mark.parametrize(
    ("policy", "episodes", "horizon", "num_envs", "sticky"),
    [
        (uniform_policy, 300, 1_000, 500, 0.0),
        (chase_gold, 60, 300, 200, 0.0),
        pytest.param(chase_gold, 300, 1_000, 500, 0.1, marks=pytest.mark.slow),
    ],
)
def test_play(policy, episodes, horizon, num_envs, sticky):
    reference = Reference("asterix", encode, seed=5, sticky_action_prob=sticky)
    assert_same_play(reference, policy, episodes, horizon, num_envs)
