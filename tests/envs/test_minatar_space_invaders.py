"""Space Invaders behaves as in the `minatar` package."""

import numpy as np
import pytest

import hurtle

pytest.importorskip("minatar")

from tests.envs.minatar_parity import (
    Arrays,
    Reference,
    Transitions,
    assert_same,
    assert_same_play,
    assert_sticky,
    join,
    replay,
    short_and_long,
    uniform_policy,
)

LEFT, RIGHT, FIRE = 1, 3, 5
CANNON, ALIEN, BOMB = 0, 1, 5
WAVE_COLUMNS = 6
MAX_BULLETS = 2


def encode(game) -> dict:
    """The package's maps in our fields; the first alien row and column that are left stand for the wave's."""
    aliens = np.argwhere(game.alien_map)
    wave_y, wave_x = aliens.min(axis=0)
    bullets = np.argwhere(game.f_bullet_map)[::-1].tolist()
    bombs = np.argwhere(game.e_bullet_map).tolist()
    assert len(bullets) <= MAX_BULLETS
    assert len(bombs) <= 1
    assert game.enemy_move_interval == 12 - game.ramp_index
    bullets += [[-1, 0]] * (MAX_BULLETS - len(bullets))
    bomb_y, bomb_x = bombs[0] if bombs else (10, 0)
    return {
        "aliens": sum(1 << int((y - wave_y) * WAVE_COLUMNS + x - wave_x) for y, x in aliens),
        "wave_x": int(wave_x),
        "wave_y": int(wave_y),
        "wave_direction": int(game.alien_dir),
        "march_interval": int(game.enemy_move_interval),
        "march_timer": int(game.alien_move_timer),
        "bomb_timer": int(game.alien_shot_timer),
        "fire_timer": int(game.shot_timer),
        "cannon_x": int(game.pos),
        "bullet_x": [x for _, x in bullets],
        "bullet_y": [y for y, _ in bullets],
        "bomb_x": bomb_x,
        "bomb_y": bomb_y,
    }


def normalise(states: Arrays) -> Arrays:
    """Our states as `encode` would write them: wave without empty borders, lowest bullet first, no leftover numbers."""
    columns = states["aliens"][:, None] >> np.arange(WAVE_COLUMNS) & 0b000001_000001_000001_000001
    rows = states["aliens"][:, None] >> np.arange(0, 4 * WAVE_COLUMNS, WAVE_COLUMNS) & 0b111111
    left, top = (columns != 0).argmax(axis=1), (rows != 0).argmax(axis=1)
    gone = states["bullet_y"] < 0
    order = np.argsort(-states["bullet_y"], axis=1)
    return {
        **states,
        "aliens": states["aliens"] >> (top * WAVE_COLUMNS + left),
        "wave_x": states["wave_x"] + left,
        "wave_y": states["wave_y"] + top,
        "bullet_x": np.take_along_axis(np.where(gone, 0, states["bullet_x"]), order, axis=1),
        "bullet_y": np.take_along_axis(states["bullet_y"], order, axis=1),
        "bomb_x": np.where(states["bomb_y"] < 10, states["bomb_x"], 0),
    }


def hunt(observations: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Steps out of a bomb's way, else goes below the nearest alien and fires; careless now and then."""
    columns = np.arange(10)
    cannon = observations[:, 9, :, CANNON].argmax(axis=1)
    distance = np.abs(columns - cannon[:, None]) + 100 * ~observations[..., ALIEN].any(axis=1)
    target = distance.argmin(axis=1)
    actions = np.where(target < cannon, LEFT, np.where(target > cannon, RIGHT, FIRE))
    bombed = observations[np.arange(len(cannon)), :, cannon, BOMB].any(axis=1)
    actions = np.where(bombed, np.where(cannon < 5, RIGHT, LEFT), actions)
    careless = rng.random(len(actions)) < 0.1
    return np.where(careless, rng.integers(6, size=len(actions)), actions)


def late_wave(game, rng: np.random.Generator) -> None:
    """Waves that have lost many aliens, have come down far, or are fast."""
    game.alien_map *= rng.random((10, 10)) < rng.choice([0.05, 0.3, 0.9])
    game.alien_map[rng.integers(4), rng.integers(2, 8)] = 1
    room = 9 - int(np.argwhere(game.alien_map)[:, 0].max())
    game.alien_map = np.roll(game.alien_map, rng.integers(room + 1), axis=0)
    game.alien_dir = int(rng.choice([-1, 1]))
    game.ramp_index = int(rng.integers(7))
    game.enemy_move_interval = 12 - game.ramp_index
    game.alien_move_timer = int(rng.integers(game.enemy_move_interval))
    game.alien_shot_timer = int(rng.integers(10))
    game.pos = int(rng.integers(10))


def last_shot(game, rng: np.random.Generator) -> None:
    """A bullet just below the last alien; sometimes both move at once."""
    late_wave(game, rng)
    y, x = rng.integers(3), rng.integers(1, 9)
    game.alien_map[:] = 0
    game.alien_map[y, x] = 1
    game.f_bullet_map[y + 1, x] = 1
    game.ramp_index = int(rng.choice([game.ramp_index, 6]))
    game.enemy_move_interval = 12 - game.ramp_index
    game.alien_move_timer = int(rng.integers(2))


@pytest.fixture(scope="module", params=short_and_long(0.3))
def length(request) -> float:
    return request.param


@pytest.fixture(scope="module")
def recorded(length) -> Transitions:
    reference = Reference("space_invaders", encode, seed=0)
    return join(
        reference.record(uniform_policy, round(3_000 * length)),
        reference.record(hunt, round(4_000 * length)),
        reference.record(uniform_policy, round(4_000 * length), prepare=late_wave),
        reference.record(hunt, round(5_000 * length), prepare=late_wave),
        reference.record(uniform_policy, round(4_000 * length), prepare=last_shot),
    )


def test_transitions(recorded):
    assert_same(replay("space_invaders", recorded), recorded, normalise)


@pytest.mark.slow
def test_transitions_without_difficulty_ramping():
    reference = Reference("space_invaders", encode, seed=1, difficulty_ramping=False)
    recorded = reference.record(uniform_policy, 3_000, prepare=last_shot)
    alive = ~recorded.terminated
    assert (recorded.before["march_interval"] == recorded.after["march_interval"])[alive].all()
    assert_same(replay("space_invaders", recorded, difficulty_ramping=False), recorded, normalise)


def test_recording_covers_the_rules(recorded):
    before, after, ended = recorded.before, recorded.after, recorded.terminated
    moves = before["march_timer"] == 0
    turned = before["wave_direction"] != after["wave_direction"]
    aliens, aliens_after = np.bitwise_count(before["aliens"]), np.bitwise_count(after["aliens"])
    fires = (recorded.actions == FIRE) & (before["fire_timer"] == 0)
    next_x = np.clip(before["cannon_x"] + (recorded.actions == RIGHT) - (recorded.actions == LEFT), 0, 9)
    bombed = (before["bomb_y"] == 8) & (before["bomb_x"] == next_x)
    events = {
        "hit": recorded.rewards == 1,
        "hit in the frame in which the aliens move": (recorded.rewards == 1) & moves,
        "two bullets": (before["bullet_y"] >= 0).all(axis=1),
        "bullet lost": (before["bullet_y"] == 0).any(axis=1) & (recorded.rewards == 0),
        "cannon cools down": (recorded.actions == FIRE) & (before["fire_timer"] > 0),
        "fired below an alien": fires & (recorded.rewards > 0),
        "march": moves & ~turned,
        "march down": moves & turned,
        "few aliens march faster": moves & (aliens < before["march_interval"]),
        "new wave": aliens_after > aliens,
        "new wave at the highest speed": (aliens_after > aliens) & (before["march_interval"] == 6),
        "bomb": before["bomb_timer"] == 0,
        "bomb and move": (before["bomb_timer"] == 0) & moves,
        "bomb from an alien that is hit": (before["bomb_timer"] == 0) & (recorded.rewards > 0),
        "bombed": ended & bombed,
        "landed": ended & ~bombed & turned,
        "rammed": ended & ~bombed & ~turned,
    }
    for name, happened in events.items():
        assert happened.sum() >= 5, name


def test_bomb_comes_from_the_nearest_column():
    """Every set of columns and every place of the cannon; two columns can be equally near."""
    reference = Reference("space_invaders", encode, seed=2)
    parts = []
    for columns in range(1, 1 << WAVE_COLUMNS):
        for cannon in range(10):

            def aim(game, rng, columns=columns, cannon=cannon):
                game.alien_map[:, 2:8] *= columns >> np.arange(WAVE_COLUMNS) & 1
                game.pos, game.alien_shot_timer = cannon, 0

            parts.append(reference.record(uniform_policy, 1, prepare=aim))
    recorded = join(*parts)
    assert len(np.unique(recorded.after["bomb_x"])) == WAVE_COLUMNS
    assert_same(replay("space_invaders", recorded), recorded, normalise)


def test_start():
    reference = Reference("space_invaders", encode, seed=2)
    vec = hurtle.make_vec("space_invaders", num_envs=50, sticky_action_prob=0.0)
    obs, _ = vec.reset(seed=0)
    states = normalise({name: np.array(vec.states[name]) for name in vec.states.dtype.names})
    for i in range(50):
        reference.environment.reset()
        np.testing.assert_array_equal(obs[i], reference.observation())
        for name, value in encode(reference.variables).items():
            np.testing.assert_array_equal(states[name][i], value, name)
    vec.close()


@pytest.mark.slow
def test_sticky_actions(recorded):
    assert_sticky(Reference("space_invaders", encode, seed=3), recorded, normalise)


@pytest.mark.parametrize(
    ("policy", "episodes", "horizon", "sticky"),
    [(uniform_policy, 100, 500, 0.0), (hunt, 40, 300, 0.0), pytest.param(hunt, 200, 500, 0.1, marks=pytest.mark.slow)],
)
def test_play(policy, episodes, horizon, sticky):
    reference = Reference("space_invaders", encode, seed=4, sticky_action_prob=sticky)
    assert_same_play(reference, policy, episodes, horizon, num_envs=10 * episodes)
