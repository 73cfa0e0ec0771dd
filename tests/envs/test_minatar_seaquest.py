"""Seaquest behaves as in the `minatar` package.

What enters the water in a recorded step is found out beforehand by rehearsing that step in the package, and is there
already in the state that Hurtle gets. So every step can be compared, and what enters is compared on its own.
"""

import copy
import itertools
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

import hurtle
from hurtle.envs.seaquest import Seaquest

pytest.importorskip("minatar")

from tests.envs.minatar_parity import (
    Arrays,
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

LEFT, UP, RIGHT, DOWN, FIRE = 1, 2, 3, 4, 5
PLAYER, PLAYER_BACK, FISH, SUBMARINE, OXYGEN_GAUGE, DIVER_GAUGE, DIVER = 0, 1, 5, 6, 7, 8, 9
X, Y, DIRECTION, MOVE_TIMER, GUN_TIMER = range(5)
CAPACITIES = {"enemies": (30, 5), "divers": (2, 4), "bullets": (2, 3), "torpedoes": (14, 3)}
LAST_LEVEL = 19


def encode(game) -> dict:
    """The package's lists as our tables, fish before submarines; and what arrives in the next step (all 0: nothing)."""
    lists = {
        "enemies": [[*fish, -1] for fish in game.e_fish] + game.e_subs,
        "divers": game.divers,
        "bullets": game.f_bullets,
        "torpedoes": game.e_bullets,
    }
    tables = {name: table_of(entities, CAPACITIES[name]) for name, entities in lists.items()}
    assert game.e_spawn_speed == 20 - game.ramp_index
    assert game.move_speed == max(2, 5 - game.ramp_index // 2)
    return {
        "divers_on_board": game.diver_count,
        "oxygen": game.oxygen,
        "player_x": game.sub_x,
        "player_y": game.sub_y,
        "player_direction": 1 if game.sub_or else -1,
        "at_surface": game.surface,
        "fire_timer": game.shot_timer,
        "level": game.ramp_index,
        "spawn_timer": game.e_spawn_timer,
        "diver_timer": game.d_spawn_timer,
        **tables,
        **{f"num_{name}": len(entities) for name, entities in lists.items()},
        **rehearse_arrivals(game),
    }


def table_of(entities: list, shape: tuple[int, int]) -> np.ndarray:
    table = np.zeros(shape, int)
    for row, (x, y, to_the_right, *timers) in enumerate(entities):
        table[row] = x, y, 1 if to_the_right else -1, *timers  # an IndexError: our table is too small
    return table


def rehearse_arrivals(game) -> dict[str, np.ndarray]:
    """Take one step with the player out of the way and nothing about to leave, note what is new, and take it back."""
    arrivals = {"arriving_enemy": np.zeros(5, int), "arriving_diver": np.zeros(4, int)}
    if game.e_spawn_timer == 0 or game.d_spawn_timer == 0:
        variables = copy.deepcopy({name: value for name, value in vars(game).items() if name != "random"})
        random_numbers = game.random.get_state()
        game.sub_y, game.surface, game.f_bullets, game.terminal = 0, True, [], False
        for swimmer in game.e_fish + game.e_subs + game.divers:
            swimmer[3] = 9
        fish, submarines, divers = len(game.e_fish), len(game.e_subs), len(game.divers)
        game.act(0)
        new_enemies = [[*each, -2] for each in game.e_fish[fish:]] + game.e_subs[submarines:]
        for name, new in (("arriving_enemy", new_enemies), ("arriving_diver", game.divers[divers:])):
            if new:
                arrivals[name] = table_of(new, (1, len(arrivals[name])))[0]
                arrivals[name][MOVE_TIMER:] += 1  # as it was before this step's countdown
        vars(game).update(variables)
        game.random.set_state(random_numbers)
    return arrivals


def settle_arrivals(recorded: Transitions) -> Transitions:
    """Put what arrives in each step into the state before it, so that nothing is left to chance."""
    before = {name: values.copy() for name, values in recorded.before.items()}
    for enemies, number in zip(before["enemies"][::2], before["num_enemies"][::2], strict=True):
        order = np.argsort(enemies[:number, GUN_TIMER] < 0, stable=True)  # the package does not tell which kind is older
        enemies[:number] = enemies[order]
    for table, number, timer, interval in (
        ("enemies", "num_enemies", "spawn_timer", 20 - before["level"]),
        ("divers", "num_divers", "diver_timer", np.full(len(recorded), 30)),
    ):
        arriving = before.pop("arriving_enemy" if table == "enemies" else "arriving_diver")
        due = before[timer] == 0
        before[timer][due] = interval[due]
        rows = np.flatnonzero(due & arriving.any(axis=1))
        before[table][rows, before[number][rows]] = arriving[rows]
        before[number][rows] += 1
    after = {name: values for name, values in recorded.after.items() if not name.startswith("arriving")}
    return replace(recorded, before=before, after=after)


def normalise(states: Arrays) -> Arrays:
    """Our states as `encode` would write them: fish before submarines, rows that are not in use cleared."""
    states = {name: values.astype(int) for name, values in states.items()}
    for name, (capacity, _) in CAPACITIES.items():
        unused = np.arange(capacity) >= states[f"num_{name}"][:, None]
        states[name][unused] = 0
        if name == "enemies":
            kind = np.where(unused, 2, states[name][:, :, GUN_TIMER] >= 0)
            order = np.argsort(kind, axis=1, stable=True)
            states[name] = np.take_along_axis(states[name], order[:, :, None], axis=1)
    return states


def patrol(observations: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Shoots at what is in its row, goes for divers, comes up with a full crew or little air; careless now and then."""
    count, columns = len(observations), np.arange(10)
    y, x = np.divmod(observations[..., PLAYER].reshape(count, -1).argmax(axis=1), 10)
    to_the_right = observations[..., PLAYER_BACK].any(axis=1).argmax(axis=1) < x
    row = observations[np.arange(count), y][:, :, [FISH, SUBMARINE]].any(axis=2)
    on_the_right = (row & (columns > x[:, None])).any(axis=1)
    on_the_left = (row & (columns < x[:, None])).any(axis=1)
    ahead = np.where(to_the_right, on_the_right, on_the_left)
    behind = np.where(to_the_right, on_the_left, on_the_right)
    diver = observations[..., DIVER].reshape(count, -1)
    diver_y, diver_x = np.divmod(diver.argmax(axis=1), 10)
    air = observations[:, 9, :, OXYGEN_GAUGE].sum(axis=1)
    crew = observations[:, 9, :, DIVER_GAUGE].sum(axis=1)

    actions = rng.choice([0, LEFT, RIGHT, FIRE], size=count)
    chase = np.where(diver_y < y, UP, np.where(diver_y > y, DOWN, np.where(diver_x < x, LEFT, RIGHT)))
    actions = np.where(diver.any(axis=1), chase, actions)
    actions = np.where(behind, np.where(to_the_right, LEFT, RIGHT), actions)
    actions = np.where(ahead, FIRE, actions)
    actions = np.where((crew == 6) | ((air < 3) & (crew > 0)), UP, actions)
    actions = np.where(y == 0, DOWN, actions)
    careless = rng.random(count) < 0.05
    return np.where(careless, rng.integers(6, size=count), actions)


def linger(observations: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Lets the water fill up, and goes just below the surface now and then."""
    below = observations[:, 1:, :, PLAYER].any(axis=(1, 2))
    actions = np.where(below, UP, np.where(rng.random(len(below)) < 0.1, DOWN, rng.choice([0, LEFT, RIGHT])))
    return np.where(rng.random(len(below)) < 0.02, FIRE, actions)


def stay(observations: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    return np.zeros(len(observations), int)


def mid_game(game, rng: np.random.Generator) -> None:
    """Any level, crew, depth and supply of air, after a while at the surface in which the water filled up."""
    set_level(game, int(rng.integers(LAST_LEVEL + 1)))
    game.e_spawn_timer = int(rng.integers(game.e_spawn_speed))
    game.d_spawn_timer = int(rng.integers(30))
    for _ in range(rng.integers(50)):
        game.act(0)
    set_level(game, min(LAST_LEVEL, game.ramp_index + int(rng.integers(4))))
    game.sub_x, game.sub_or = int(rng.integers(1, 9)), bool(rng.integers(2))
    game.sub_y, game.surface = int(rng.choice([1, 1, 2, 3, 4, 5, 6, 7, 8])), False
    game.diver_count = int(rng.integers(-2, 7))
    game.oxygen = int(rng.choice([rng.integers(4), 30, 150]))


def crowded_water(game, rng: np.random.Generator) -> None:
    """The highest level, at the surface; coming up is safe for ever since a full crew went ashore."""
    set_level(game, LAST_LEVEL)
    for _ in range(40):
        game.act(0)
    game.diver_count = -1


def record_salvos(reference: Reference, steps: int) -> Transitions:
    """In crowded water, bullets strike wherever there is more than one enemy in a cell, and at others now and then."""
    game, rng, parts = reference.variables, np.random.default_rng(1), []
    reference.environment.reset()
    crowded_water(game, rng)
    for _ in range(steps):
        cells = Counter((x, y) for x, y, *_ in game.e_fish + game.e_subs)
        shared = [cell for cell in cells if cells[cell] > 1]
        targets = [cell for cell in shared or (cells if rng.random() < 0.1 else []) if 0 < cell[0] < 9]
        if not targets:
            reference.environment.act(0)
            continue
        from_the_left = bool(rng.integers(2))
        game.f_bullets = [[x - 1 if from_the_left else x + 1, y, from_the_left] for x, y in targets[:2]]
        state = reference.snapshot()
        parts.append(reference.record(stay, 1, prepare=lambda _, __, state=state: reference.restore(state)))
    return join(*parts)


def last_place(game, rng: np.random.Generator) -> None:
    """Two divers meet where the player is, which has room for one or none."""
    game.sub_y, game.surface, game.diver_count, game.d_spawn_timer = 4, False, int(rng.integers(5, 7)), 20
    game.divers = [[5, 4, to_the_right, int(rng.integers(6))] for to_the_right in rng.permutation([True, False]).tolist()]


def sinking_shot(game, rng: np.random.Generator) -> None:
    """A submarine is about to move, to fire and to run into a bullet."""
    to_the_right, x, y = bool(rng.integers(2)), int(rng.integers(3, 7)), int(rng.integers(2, 9))
    ahead = 1 if to_the_right else -1
    game.e_subs = [[x, y, to_the_right, 0, 0]]
    game.f_bullets = [[x + 2 * ahead, y, not to_the_right]]


def set_level(game, level: int) -> None:
    game.ramp_index, game.e_spawn_speed, game.move_speed = level, 20 - level, max(2, 5 - level // 2)
    game.e_spawn_timer = min(game.e_spawn_timer, game.e_spawn_speed)


def foreseeable(seed: int, **options: object) -> Reference:
    """A reference whose sticky-action draws, which a rehearsal does not make, have random numbers of their own."""
    reference = Reference("seaquest", encode, seed, **options)
    reference.environment.random = np.random.RandomState(seed)
    return reference


@pytest.fixture(scope="module", params=short_and_long(0.5))
def length(request) -> float:
    return request.param


@pytest.fixture(scope="module")
def recorded(length) -> Transitions:
    reference, rng = foreseeable(seed=0), np.random.default_rng(2)
    return settle_arrivals(
        join(
            reference.record(uniform_policy, round(2_000 * length)),
            reference.record(uniform_policy, round(6_000 * length), prepare=mid_game),
            reference.record(patrol, round(4_000 * length)),
            reference.record(patrol, round(7_000 * length), prepare=mid_game),
            reference.record(linger, round(2_000 * length), prepare=crowded_water),
            record_salvos(reference, 1_500),
            *(reference.record(stay, 1, prepare=lambda game, _: last_place(game, rng)) for _ in range(20)),
            *(reference.record(stay, 1, prepare=lambda game, _: sinking_shot(game, rng)) for _ in range(20)),
        )
    )


def test_transitions(recorded):
    assert_same(replay("seaquest", recorded), recorded, normalise)


@pytest.mark.slow
def test_transitions_without_difficulty_ramping():
    reference = foreseeable(seed=1, difficulty_ramping=False)
    recorded = settle_arrivals(reference.record(patrol, 3_000, prepare=mid_game))
    came_up = recorded.after["at_surface"] & ~recorded.before["at_surface"]
    assert came_up.sum() >= 5
    assert_same(replay("seaquest", recorded, difficulty_ramping=False), recorded, normalise)


def test_recording_covers_the_rules(recorded):
    before, after, ended = recorded.before, recorded.after, recorded.terminated
    crew, crew_after = before["divers_on_board"], after["divers_on_board"]
    came_up = after["at_surface"] & ~before["at_surface"]
    shots = (recorded.actions == FIRE) & (before["fire_timer"] == 0)
    in_use = np.arange(30) < before["num_enemies"][:, None]
    x, y, timer, gun = (np.where(in_use, before["enemies"][:, :, column], 99) for column in (X, Y, MOVE_TIMER, GUN_TIMER))
    bullet = before["bullets"][:, 0]
    struck = (x == (bullet[:, X] + bullet[:, DIRECTION])[:, None]) & (y == bullet[:, Y, None])
    struck &= (before["num_bullets"] > 0)[:, None]
    met = [
        (before["divers"][:, i, X] == after["player_x"])
        & (before["divers"][:, i, Y] == after["player_y"])
        & (before["num_divers"] > i)
        for i in range(2)
    ]
    events = {
        "hit": recorded.rewards == 1,
        "two hits": recorded.rewards == 2,
        "hit at once": shots & (recorded.rewards > 0),
        "bullet strikes before the enemy moves": (struck & (timer == 0)).any(axis=1),
        "enemy runs into bullet": (recorded.rewards > 0) & ~came_up & ~shots & ~struck.any(axis=1),
        "bullet strikes one of two fish": (struck & (gun == -1)).sum(axis=1) == 2,
        "bullet strikes one of two submarines": ((struck & (gun >= 0)).sum(axis=1) == 2) & (struck.sum(axis=1) == 2),
        "bullet strikes fish, not submarine": (struck & (gun == -1)).any(axis=1) & (struck & (gun >= 0)).any(axis=1),
        "two bullets": before["num_bullets"] == 2,
        "submarine fires": ((gun == 0) & ~struck).any(axis=1),
        "submarine fires while it is sunk": (gun == 0).any(axis=1) & (recorded.rewards > 0) & ~struck.any(axis=1),
        "bullet strikes fish behind older submarine": (
            (struck & (gun >= 0)).any(axis=1)
            & (struck & (gun == -1)).any(axis=1)
            & ((struck & (gun >= 0)).argmax(axis=1) < (struck & (gun == -1)).argmax(axis=1))
        ),
        "submarine fires and moves": ((gun == 0) & (timer == 0) & ~struck).any(axis=1),
        "enemy leaves": (after["num_enemies"] < before["num_enemies"]) & (recorded.rewards == 0),
        "crowd": before["num_enemies"] >= 15,
        "torpedoes": before["num_torpedoes"] >= 4,
        "diver": crew_after > crew,
        "no room for a diver": (met[0] | met[1]) & (crew == 6) & ~came_up,
        "room for one of two divers": met[0] & met[1] & (crew == 5),
        "air": came_up & (crew > 0) & (crew < 6),
        "full crew": came_up & (crew == 6) & (recorded.rewards > 0),
        "air in debt": came_up & (crew < 0),
        "level 1 to 2": came_up & (before["level"] == 1),
        "last level": came_up & (before["level"] == LAST_LEVEL),
        "out of air": ended & (before["oxygen"] == 0) & (after["player_y"] > 0),
        "air too late": ended & (before["oxygen"] == 0) & came_up,
        "came up without a diver": ended & (after["player_y"] == 0) & (crew == 0),
        "rammed or torpedoed": ended & (before["oxygen"] > 0) & (after["player_y"] > 0),
    }
    for name, happened in events.items():
        assert happened.sum() >= 5, name


@pytest.mark.parametrize(
    ("level", "samples"),
    [(0, 2_000), (13, 2_000), *(pytest.param(n, 6_000, marks=pytest.mark.slow) for n in (0, 5, 13, LAST_LEVEL))],
)
def test_arrivals(level, samples):
    """Enemies and divers come equally often at each place, in each direction and of each kind, with the same timers."""
    reference = Reference("seaquest", encode, seed=2 + level)
    game = reference.variables
    set_level(game, level)
    game.e_spawn_timer = game.d_spawn_timer = 0
    game.e_fish = [[4, 3, True, 9], [5, 6, False, 9]]
    game.e_subs = [[4, 2, True, 9, 9], [5, 7, False, 9, 9]]  # row 2 to 7: not against the direction of those
    state = reference.snapshot()
    before = encode(game)
    del before["arriving_enemy"], before["arriving_diver"]

    theirs: Counter = Counter()
    for _ in range(samples):
        reference.restore(state)
        game.act(0)
        after = encode(game)
        theirs[after["enemies"].tobytes(), after["num_enemies"]] += 1
        theirs[after["divers"].tobytes(), after["num_divers"]] += 1
    assert len(theirs) == (8 * 2 - 4) * 2 + 1 + 8 * 2

    unknown = np.zeros(samples, int)
    copies = {name: np.array([value] * samples) for name, value in before.items()}
    after = normalise(replay("seaquest", Transitions(copies, unknown, unknown, unknown, unknown, {})).after)
    ours: Counter = Counter()
    for table in ("enemies", "divers"):
        ours.update((rows.tobytes(), number) for rows, number in zip(after[table], after[f"num_{table}"], strict=True))
    assert set(ours) == set(theirs)
    assert_same_frequencies(ours, theirs)
    assert (after["spawn_timer"] == game.e_spawn_timer).all()
    assert (after["diver_timer"] == game.d_spawn_timer).all()


def test_start():
    reference = Reference("seaquest", encode, seed=6)
    vec = hurtle.make_vec("seaquest", num_envs=50, sticky_action_prob=0.0)
    obs, _ = vec.reset(seed=0)
    states = normalise({name: np.array(vec.states[name]) for name in vec.states.dtype.names})
    for i in range(50):
        reference.environment.reset()
        expected = encode(reference.variables)
        del expected["arriving_enemy"], expected["arriving_diver"]
        np.testing.assert_array_equal(obs[i], reference.observation())
        for name, value in expected.items():
            np.testing.assert_array_equal(states[name][i], value, name)
    vec.close()


def test_tables_are_large_enough():
    """Nothing but submarines, never two ways in one row, none shot, while the level rises as fast as it can."""

    class WorstCase:
        rows = itertools.cycle(range(2, 9))

        def random(self):
            return 0.5

        def integers(self, low, high=None):
            return next(self.rows) if high == 9 else {2: 1, 3: 0}[low]

    env, rng = Seaquest(), WorstCase()
    most = dict.fromkeys(CAPACITIES, 0)
    for first_dive in range(20, 80, 4):
        kinds = Seaquest.State.__annotations__
        state = SimpleNamespace(**{n: np.zeros(k.shape, k.scalar) if k.shape else 0 for n, k in kinds.items()})
        env.reset(state, rng)
        state.divers_on_board = -1
        for frame in range(200):
            diving = frame >= first_dive and state.level < LAST_LEVEL
            reward, terminated = env.step(state, (UP if state.player_y else DOWN) if diving else 0, rng)
            assert reward == 0.0
            assert not terminated
            most = {name: max(most[name], getattr(state, f"num_{name}")) for name in most}
    assert most == {"enemies": 29, "divers": 2, "bullets": 0, "torpedoes": 8}  # a frame has one or two more in between


@pytest.mark.slow
def test_sticky_actions(recorded):
    assert_sticky(Reference("seaquest", encode, seed=7), recorded, normalise)


@pytest.mark.parametrize(
    ("policy", "episodes", "horizon", "sticky"),
    [(uniform_policy, 200, 1_000, 0.0), (patrol, 40, 300, 0.0), pytest.param(patrol, 200, 1_000, 0.1, marks=pytest.mark.slow)],
)
def test_play(policy, episodes, horizon, sticky):
    reference = Reference("seaquest", encode, seed=8, sticky_action_prob=sticky)
    assert_same_play(reference, policy, episodes, horizon, num_envs=10 * episodes)
