"""Snake against a plain re-implementation over lists and sets, its invariants, and the rules case by case."""

from dataclasses import dataclass

import numpy as np
import pytest

import hurtle
from hurtle.envs.snake import EMPTY, FOOD, Snake
from hurtle.errors import EnvDefinitionError

UP, RIGHT, DOWN, LEFT = (-1, 0), (0, 1), (1, 0), (0, -1)
HEADINGS = [UP, RIGHT, DOWN, LEFT]
TURN_LEFT, STRAIGHT, TURN_RIGHT = 0, 1, 2

PARAMETERS = [
    {},
    {"num_agents": 8, "height": 9, "width": 13, "num_food": 20, "reward_food": 0.5, "reward_death": -3.0},
    {"num_agents": 2, "height": 5, "width": 5, "num_food": 2, "vision": 6, "start_length": 2, "max_length": 6},
    # More than fits: hardly ever room for all snakes and all food.
    {"num_agents": 6, "height": 4, "width": 5, "num_food": 12, "start_length": 4, "max_length": 4, "respawn_delay": 1},
]


# The plain version ---------------------------------------------------------------------------------------------------


@dataclass
class PlainSnake:
    """A living snake: its cells from head to tail, where it is heading, and the length it is growing to."""

    cells: list[tuple[int, int]]
    heading: tuple[int, int]
    full_length: int


@dataclass
class Board:
    """One env's situation; `snakes[a]` is None while slot a is absent."""

    snakes: list[PlainSnake | None]
    food: set[tuple[int, int]]
    delays: list[int]


def read_board(env, state):
    """The board behind a State record."""
    snakes = []
    for a in range(env.num_agents):
        length = int(state["length"][a])
        ring = [int(state["body"][a][(state["tail"][a] + i) % env.max_length]) for i in range(length)]
        cells = [divmod(cell, env.width) for cell in reversed(ring)]
        heading = HEADINGS[state["heading"][a]]
        snakes.append(PlainSnake(cells, heading, int(state["full_length"][a])) if length else None)
    food = {(int(y), int(x)) for y, x in np.argwhere(state["grid"] == FOOD)}
    return Board(snakes, food, state["delay"].tolist())


def write_board(env, state, board):
    """Put a board into a State record; the inverse of read_board."""
    state["grid"] = EMPTY
    for y, x in board.food:
        state["grid"][y, x] = FOOD
    state["food"] = len(board.food)
    state["delay"] = board.delays
    state["length"] = 0
    for a, snake in enumerate(board.snakes):
        if snake is None:
            continue
        numbers = [y * env.width + x for y, x in snake.cells]
        state["tail"][a] = tail = a % env.max_length  # anywhere in the ring
        for i, number in enumerate(reversed(numbers)):
            state["body"][a][(tail + i) % env.max_length] = number
        state["head"][a] = numbers[0]
        state["length"][a] = len(numbers)
        state["full_length"][a] = snake.full_length
        state["heading"][a] = HEADINGS.index(snake.heading)
        for y, x in snake.cells:
            state["grid"][y, x] = a + 1


def turn(heading, action):
    return HEADINGS[(HEADINGS.index(heading) + {TURN_LEFT: -1, STRAIGHT: 0, TURN_RIGHT: 1}[action]) % 4]


def plain_step(env, board, actions):
    """The rules, without what is random: where new snakes and new food appear.

    Returns:
        The board after the step, rewards, deaths, and the slots that now get a new snake if there is room.
    """
    moving = {a: snake for a, snake in enumerate(board.snakes) if snake is not None}
    headings = {a: turn(snake.heading, actions[a]) for a, snake in moving.items()}
    heads = {a: (s.cells[0][0] + headings[a][0], s.cells[0][1] + headings[a][1]) for a, s in moving.items()}
    bodies = {a: s.cells if len(s.cells) < s.full_length else s.cells[:-1] for a, s in moving.items()}
    occupied = [cell for body in bodies.values() for cell in body]

    snakes, food, delays = [None] * env.num_agents, set(board.food), list(board.delays)
    rewards, died, due = np.zeros(env.num_agents), np.zeros(env.num_agents, bool), []
    for a, snake in moving.items():
        y, x = head = heads[a]
        outside = not (0 <= y < env.height and 0 <= x < env.width)
        if outside or head in occupied or list(heads.values()).count(head) > 1:
            died[a], rewards[a] = True, env.reward_death
            delays[a] = env.respawn_delay if env.respawn else 0
            continue
        full_length = snake.full_length
        if head in food:
            food.remove(head)
            rewards[a] = env.reward_food
            full_length = min(full_length + 1, env.max_length)
        snakes[a] = PlainSnake([head, *bodies[a]], headings[a], full_length)
    for a, snake in enumerate(board.snakes):
        if snake is None and delays[a] > 0:
            delays[a] -= 1
            if delays[a] == 0:
                due.append(a)
    return Board(snakes, food, delays), rewards, died, due


def plain_observation(env, board, a):
    """What snake a sees: whole planes, padded with wall, turned by rot90, and cut out around the head."""
    planes = np.zeros((env.height, env.width, 5), np.uint8)
    for y, x in board.food:
        planes[y, x, 1] = 1
    for other, snake in enumerate(board.snakes):
        if snake is not None:
            for y, x in snake.cells:
                planes[y, x, 2 if other == a else 3] = 1
            if other != a:
                planes[*snake.cells[0], 4] = 1
    v = env.vision
    padded = np.zeros((env.height + 2 * v, env.width + 2 * v, 5), np.uint8)
    padded[..., 0] = 1
    padded[v : v + env.height, v : v + env.width] = planes
    y, x = board.snakes[a].cells[0]
    window = padded[y : y + 2 * v + 1, x : x + 2 * v + 1]
    return np.rot90(window, HEADINGS.index(board.snakes[a].heading))


# Checks --------------------------------------------------------------------------------------------------------------


def check_invariants(env, state):
    board = read_board(env, state)
    cells = [cell for snake in board.snakes if snake for cell in snake.cells]
    assert len(cells) == len(set(cells)), "two bodies overlap"
    expected = np.full((env.height, env.width), EMPTY)
    for y, x in board.food:
        expected[y, x] = FOOD
    for a, snake in enumerate(board.snakes):
        if snake is None:
            assert env.respawn == (board.delays[a] > 0)
            continue
        assert board.delays[a] == 0
        assert 1 <= len(snake.cells) <= snake.full_length <= env.max_length
        assert snake.full_length >= env.start_length
        assert divmod(int(state["head"][a]), env.width) == snake.cells[0]
        for (y0, x0), (y1, x1) in zip(snake.cells, snake.cells[1:], strict=False):
            assert abs(y0 - y1) + abs(x0 - x1) == 1, "a body has a gap"
        for y, x in snake.cells:
            assert expected[y, x] == EMPTY, "food on a body"
            expected[y, x] = a + 1
    np.testing.assert_array_equal(state["grid"], expected)
    assert len(board.food) == state["food"] <= env.num_food
    assert len(board.food) == env.num_food or (expected != EMPTY).all()


def check_step(env, before, actions, after, rewards, terminated):
    """One transition: the board after it follows from the one before, up to new food and new snakes."""
    expected, expected_rewards, died, due = plain_step(env, before, actions)
    np.testing.assert_allclose(rewards, expected_rewards)
    np.testing.assert_array_equal(terminated, died)
    occupied = {cell for snake in expected.snakes if snake for cell in snake.cells} | expected.food
    newborn = set()
    for a in range(env.num_agents):
        snake = after.snakes[a]
        if a in due and snake is not None:
            (cell,) = snake.cells
            assert cell not in occupied
            assert snake.full_length == env.start_length
            newborn.add(cell)
        elif a in due:
            assert len(occupied | newborn) == env.height * env.width, "there was room for a new snake"
            assert after.delays[a] == env.respawn_delay
        else:
            assert snake == expected.snakes[a]
            assert after.delays[a] == expected.delays[a]
    assert expected.food <= after.food


def careful_policy(env, obs, rng, carelessness=0.02):
    """Avoid what is in the way, go for food that is in sight: lives long enough to fill the grid."""
    v = env.vision
    left, ahead, right = obs[..., v, v - 1, :], obs[..., v - 1, v, :], obs[..., v, v + 1, :]
    adjacent = np.stack([left, ahead, right], axis=-2)
    blocked = adjacent[..., [0, 2, 3]].any(-1)
    food = obs[..., 1].astype(float)
    sides = food[..., :v], food[..., :v, :], food[..., v + 1 :]
    in_sight = np.stack([side.sum((-2, -1)) for side in sides], axis=-1)
    score = 10.0 * adjacent[..., 1] + in_sight + 2.0 * rng.random(blocked.shape) - 100.0 * blocked
    careless = rng.random(blocked.shape[:-1]) < carelessness
    return np.where(careless, rng.integers(3, size=careless.shape), score.argmax(-1))


# Long play -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "parameters",
    [pytest.param(each, marks=[pytest.mark.slow] * (n > 0)) for n, each in enumerate([*PARAMETERS, {"respawn": False}])],
)
def test_play_agrees_with_the_plain_rules(parameters):
    env = Snake(**parameters)
    num_envs, steps = 4 if env.respawn else 16, 80
    vec = hurtle.make_vec("snake", num_envs=num_envs, **parameters)
    rng = np.random.default_rng(0)
    obs, infos = vec.reset(seed=0)
    deaths = meals = returns = 0
    for _ in range(steps):
        boards = [read_board(env, state) for state in vec.states]
        present = np.array([[snake is not None for snake in board.snakes] for board in boards])
        np.testing.assert_array_equal(infos["agent_mask"], present)
        for i, board in enumerate(boards):
            check_invariants(env, vec.states[i])
            for a in range(env.num_agents):
                expected = plain_observation(env, board, a) if present[i, a] else 0
                np.testing.assert_array_equal(obs[i, a], expected)
        actions = careful_policy(env, obs, rng)
        obs, rewards, terminated, truncated, infos = vec.step(actions)
        assert not truncated.any()
        assert not (terminated & ~present).any()
        for i, board in enumerate(boards):
            over = not env.respawn and not (present[i] & ~terminated[i]).any()
            if over:  # the record holds the next episode already
                assert infos["agent_mask"][i].all()
            else:
                check_step(env, board, actions[i], read_board(env, vec.states[i]), rewards[i], terminated[i])
        deaths += terminated.sum()
        meals += (rewards == env.reward_food).sum()
        returns += (infos["agent_mask"] & ~present).sum()
    assert deaths > 10
    assert meals > 10
    assert returns > 10
    vec.close()


@pytest.mark.parametrize(
    "parameters", [pytest.param(each, marks=[pytest.mark.slow] * (n > 0)) for n, each in enumerate(PARAMETERS)]
)
def test_injected_boards_agree_with_the_plain_rules(parameters):
    """Boards crowded at random, with every combination of heading and action, far from what play leads to."""
    env = Snake(**parameters)
    num_envs = 100 if parameters else 50
    vec = hurtle.make_vec("snake", num_envs=num_envs, **parameters)
    vec.reset(seed=0)
    rng = np.random.default_rng(1)
    deaths = 0
    for _ in range(3):
        boards = [random_board(env, rng) for _ in range(num_envs)]
        for state, board in zip(vec.states, boards, strict=True):
            write_board(env, state, board)
            assert read_board(env, state) == board
        actions = rng.integers(3, size=(num_envs, env.num_agents))
        _, rewards, terminated, _, _ = vec.step(actions)
        for i, board in enumerate(boards):
            check_invariants(env, vec.states[i])
            check_step(env, board, actions[i], read_board(env, vec.states[i]), rewards[i], terminated[i])
        deaths += terminated.sum()
    assert deaths > num_envs
    vec.close()


def random_board(env, rng):
    """Snakes grown by random walks, packed close together, and food in what is left."""
    free = {(y, x) for y in range(env.height) for x in range(env.width)}
    snakes, delays = [], []
    corner = rng.integers(env.height), rng.integers(env.width)
    for _ in range(env.num_agents):
        near = sorted(free, key=lambda cell: abs(cell[0] - corner[0]) + abs(cell[1] - corner[1]) + 3 * rng.random())
        if not near or rng.random() < 0.15:
            snakes.append(None)
            delays.append(int(rng.integers(1, env.respawn_delay + 1)))
            continue
        cells = [near[0]]
        free.remove(near[0])
        while len(cells) < rng.integers(1, env.max_length + 1):
            y, x = cells[-1]
            steps = [cell for cell in ((y + dy, x + dx) for dy, dx in HEADINGS) if cell in free]
            if not steps:
                break
            cells.append(steps[rng.integers(len(steps))])
            free.remove(cells[-1])
        full_length = max(len(cells) + int(rng.integers(2)), env.start_length)
        snakes.append(PlainSnake(cells, HEADINGS[rng.integers(4)], min(full_length, env.max_length)))
        delays.append(0)
    food = sorted(free)
    rng.shuffle(food)
    return Board(snakes, {tuple(cell) for cell in food[: env.num_food]}, delays)


# The rules, case by case ---------------------------------------------------------------------------------------------


def draw(*rows):
    """A board from a drawing: head A, then its body a1, a2, …; B, b1, …; * is food. Headings follow from the necks."""
    cells = {text: (y, x) for y, row in enumerate(rows) for x, text in enumerate(row.split()) if text not in ".*"}
    food = {(y, x) for y, row in enumerate(rows) for x, text in enumerate(row.split()) if text == "*"}
    snakes = []
    for name in "ABC":
        if name not in cells:
            snakes.append(None)
            continue
        body = [cells[name]]
        while f"{name.lower()}{len(body)}" in cells:
            body.append(cells[f"{name.lower()}{len(body)}"])
        heading = (body[0][0] - body[1][0], body[0][1] - body[1][1])
        snakes.append(PlainSnake(body, heading, len(body)))
    return Board(snakes, food, [0 if snake else 9 for snake in snakes])


def play_one(board, actions, height, width, **parameters):
    """The board after one step, rewards and deaths."""
    size = {"num_agents": 3, "height": height, "width": width, "num_food": len(board.food), "start_length": 2}
    parameters = {**size, **parameters}
    env = Snake(**parameters)
    vec = hurtle.make_vec("snake", num_envs=1, debug=True, **parameters)
    vec.reset(seed=0)
    write_board(env, vec.states[0], board)
    _, rewards, terminated, _, _ = vec.step(np.array([actions]))
    check_invariants(env, vec.states[0])
    after = read_board(env, vec.states[0])
    vec.close()
    return after, rewards[0].tolist(), terminated[0].tolist()


def test_heads_that_meet_in_a_cell_all_die():
    board = draw(
        ". . b1 .",
        ". . B .",
        "a1 A . *",
    )
    after, rewards, died = play_one(board, [STRAIGHT, STRAIGHT, STRAIGHT], 3, 4)
    assert died == [True, True, False]
    assert rewards == [-1.0, -1.0, 0.0]
    assert after.snakes == [None, None, None]
    assert after.delays == [10, 10, 8]


def test_three_heads_meet_over_food_and_none_eats():
    board = draw(
        ". . b1 . .",
        ". . B . .",
        "a1 A * C c1",
    )
    after, rewards, died = play_one(board, [STRAIGHT] * 3, 3, 5)
    assert died == [True] * 3
    assert rewards == [-1.0] * 3
    assert after.food == {(2, 2)}


def test_heads_cannot_change_places():
    board = draw("a1 A B b1 .")
    _, _, died = play_one(board, [STRAIGHT] * 3, 1, 5)
    assert died == [True, True, False]


def test_a_tail_makes_room_in_the_same_step():
    board = draw(
        "a1 A b2 .",
        ". . b1 .",
        ". . B .",
        ". . . .",
    )
    after, _, died = play_one(board, [STRAIGHT] * 3, 4, 4)
    assert died == [False] * 3
    assert after.snakes[0].cells == [(0, 2), (0, 1)]
    assert after.snakes[1].cells == [(3, 2), (2, 2), (1, 2)]


def test_the_tail_of_a_growing_snake_stays():
    board = draw(
        "a1 A b2 .",
        ". . b1 .",
        ". . B .",
        ". . . .",
    )
    board.snakes[1].full_length = 4
    after, _, died = play_one(board, [STRAIGHT] * 3, 4, 4)
    assert died == [True, False, False]
    assert after.snakes[1].cells == [(3, 2), (2, 2), (1, 2), (0, 2)]


def test_a_snake_can_follow_its_own_tail():
    board = draw(
        "A a1",
        "a3 a2",
    )
    after, _, died = play_one(board, [TURN_LEFT, STRAIGHT, STRAIGHT], 2, 2)
    assert died == [False] * 3
    assert after.snakes[0].cells == [(1, 0), (0, 0), (0, 1), (1, 1)]


def test_a_snake_dies_in_its_own_body():
    board = draw(
        ". a4 a5 .",
        ". a3 A .",
        ". a2 a1 .",
    )
    for action, dies in ((TURN_LEFT, True), (STRAIGHT, False), (TURN_RIGHT, False)):  # its tail moves out of (0, 2)
        assert play_one(board, [action, STRAIGHT, STRAIGHT], 3, 4)[2][0] == dies
    board.snakes[0].full_length = 7
    assert play_one(board, [STRAIGHT] * 3, 3, 4)[2][0]


def test_a_dying_snake_is_in_the_way_until_the_step_is_over():
    board = draw(
        ". . B .",
        ". A b1 .",
        ". a1 b2 .",
    )
    _, _, died = play_one(board, [TURN_RIGHT, STRAIGHT, STRAIGHT], 3, 4)  # B runs into the wall, A into B
    assert died == [True, True, False]


@pytest.mark.parametrize("slot_order", [(0, 1), (1, 0)])
def test_the_outcome_does_not_depend_on_the_order_of_slots(slot_order):
    board = draw(
        "a2 a1 A *",
        ". . b1 B",
    )
    board.snakes[:2] = [board.snakes[a] for a in slot_order]
    actions = [[STRAIGHT, TURN_LEFT][a] for a in slot_order] + [STRAIGHT]
    after, _, died = play_one(board, actions, 2, 4)
    assert died == [True, True, False]
    assert after.food == {(0, 3)}


def test_eating_pays_and_grows_with_the_next_move():
    board = draw(
        "a2 a1 A * .",
        ". . . . .",
    )
    after, rewards, _ = play_one(board, [STRAIGHT] * 3, 2, 5)
    assert rewards == [1.0, 0.0, 0.0]
    assert after.snakes[0] == PlainSnake([(0, 3), (0, 2), (0, 1)], RIGHT, 4)
    assert len(after.food) == 1
    after, _, _ = play_one(after, [STRAIGHT] * 3, 2, 5)
    assert after.snakes[0].cells == [(0, 4), (0, 3), (0, 2), (0, 1)]


def test_a_snake_of_full_length_eats_without_growing():
    board = draw(
        "a3 a2 a1 A * .",
        ". . . . . .",
    )
    after, rewards, _ = play_one(board, [STRAIGHT] * 3, 2, 6, max_length=4)
    assert rewards[0] == 1.0
    assert after.snakes[0].full_length == 4
    assert after.snakes[0].cells == [(0, 4), (0, 3), (0, 2), (0, 1)]


# Population and episodes ---------------------------------------------------------------------------------------------


def test_a_dead_snake_is_absent_for_the_delay_and_then_a_new_one_appears():
    vec = hurtle.make_vec("snake", num_envs=16)
    delay = Snake().respawn_delay
    _, infos = vec.reset(seed=0)
    rng = np.random.default_rng(0)
    gone = np.zeros((16, 4), int)
    seen = 0
    for _ in range(250):
        before = infos["agent_mask"].copy()
        _, rewards, terminated, _, infos = vec.step(rng.integers(3, size=(16, 4)))
        present = infos["agent_mask"]
        assert not (terminated & present).any()
        assert not rewards[~before].any()
        returned = present & ~before
        assert (gone[returned] == delay).all()
        seen += returned.sum()
        gone = np.where(present, 0, gone + 1)
        assert gone.max() <= delay
    assert seen > 100
    vec.close()


def test_without_room_a_snake_does_not_come_back():
    parameters = {"num_agents": 2, "height": 2, "width": 3, "num_food": 2, "respawn_delay": 2, "max_length": 4}
    env = Snake(**parameters)
    vec = hurtle.make_vec("snake", num_envs=1, debug=True, **parameters)
    vec.reset(seed=0)
    circle = [(0, 0), (0, 1), (1, 1), (1, 0)]
    write_board(env, vec.states[0], Board([PlainSnake(circle, LEFT, 4), None], {(0, 2), (1, 2)}, [0, 2]))
    for _ in range(9):  # the snake follows its own tail, and food fills the rest
        _, _, terminated, _, infos = vec.step(np.array([[TURN_LEFT, STRAIGHT]]))
        assert not terminated.any()
        assert infos["agent_mask"].tolist() == [[True, False]]
        check_invariants(env, vec.states[0])
    vec.close()


def test_without_respawn_the_episode_ends_with_the_last_snake():
    vec = hurtle.make_vec("snake", num_envs=5, respawn=False, debug=True)
    _, infos = vec.reset(seed=0)
    present = infos["agent_mask"].copy()
    ends = 0
    for _ in range(60):
        _, _, terminated, truncated, infos = vec.step(np.full((5, 4), STRAIGHT))
        assert not truncated.any()
        alive = present & ~terminated
        over = ~alive.any(1)
        assert infos["agent_mask"][over].all()
        np.testing.assert_array_equal(infos["agent_mask"][~over], alive[~over])
        ends += over.sum()
        present = infos["agent_mask"].copy()
    assert ends > 10  # straight on, everybody is at a wall within 16 steps
    vec.close()


def test_episode_statistics():
    env = Snake()
    num_envs, max_steps = 4, env.max_steps
    vec = hurtle.make_vec("snake", num_envs=num_envs)
    obs, infos = vec.reset(seed=0)
    rng = np.random.default_rng(0)
    returns, lengths = np.zeros((num_envs, 4)), np.zeros((num_envs, 4), int)
    meals, deaths, longest = np.zeros(num_envs), np.zeros(num_envs), np.zeros(num_envs)
    for time in range(max_steps):
        present = infos["agent_mask"].copy()
        longest = np.maximum(longest, vec.states["length"].max(1))
        obs, rewards, terminated, truncated, infos = vec.step(careful_policy(env, obs, rng))
        returns += rewards
        lengths += present
        meals += (rewards == 1.0).sum(1)
        deaths += terminated.sum(1)
        np.testing.assert_array_equal(truncated, present & (time == max_steps - 1))
        ended = terminated | truncated
        if ended.any():
            np.testing.assert_array_equal(infos["_episode"], ended)
            np.testing.assert_allclose(infos["episode"]["r"][ended], returns[ended])
            np.testing.assert_array_equal(infos["episode"]["l"][ended], lengths[ended])
        returns[ended], lengths[ended] = 0.0, 0
    np.testing.assert_array_equal(infos["episode"]["food_eaten"], meals)
    np.testing.assert_array_equal(infos["episode"]["deaths"], deaths)
    assert (infos["episode"]["longest"] >= longest).all()
    assert meals.sum() > 20
    vec.close()


def test_start_positions_are_spread_evenly():
    env = Snake()
    vec = hurtle.make_vec("snake", num_envs=4000)
    vec.reset(seed=0)
    for occupied in (vec.states["grid"] > 0, vec.states["grid"] == FOOD):
        counts = occupied.sum(0).ravel()
        expected = counts.mean()
        assert ((counts - expected) ** 2 / expected).sum() < 330.5  # chi-square, 255 degrees of freedom, p = 0.001
    y, x = np.divmod(vec.states["head"], env.width)
    dy, dx = np.moveaxis(np.array(HEADINGS)[vec.states["heading"]], -1, 0)
    assert ((y + dy >= 0) & (y + dy < env.height) & (x + dx >= 0) & (x + dx < env.width)).all()  # nobody faces a wall
    vec.close()


def test_same_seed_same_play():
    def play():
        vec = hurtle.make_vec("snake", num_envs=4)
        obs, _ = vec.reset(seed=7)
        rng = np.random.default_rng(0)
        for _ in range(50):
            obs, *_ = vec.step(rng.integers(3, size=(4, 4)))
        vec.close()
        return obs.copy()

    np.testing.assert_array_equal(play(), play())


@pytest.mark.parametrize(
    "parameters",
    [
        {"start_length": 1},
        {"start_length": 5, "max_length": 4},
        {"respawn_delay": 0},
        {"num_agents": 1},
        {"num_agents": 128},
        {"height": 2048},
    ],
)
def test_impossible_parameters_are_refused(parameters):
    with pytest.raises(EnvDefinitionError, match=next(iter(parameters))):
        Snake(**parameters)


def test_render_draws_snakes_food_and_walls():
    parameters = {"num_agents": 2, "height": 5, "width": 5, "num_food": 1}
    vec = hurtle.make_vec("snake", num_envs=1, debug=True, render_mode="rgb_array", **parameters)
    vec.reset(seed=0)
    board = Board([PlainSnake([(1, 1), (1, 2)], LEFT, 3), None], {(4, 4)}, [0, 3])
    write_board(Snake(**parameters), vec.states[0], board)
    (image,) = vec.render()
    assert image.dtype == np.uint8
    assert image.shape == (7 * 16, 7 * 16, 3)
    colours = image[::16, ::16]
    wall, floor, head, neck, food = colours[0, 0], colours[1, 1], colours[2, 2], colours[2, 3], colours[5, 5]
    assert (colours[[0, -1]] == wall).all()
    assert (colours[1:-1, 1:-1] != floor).any(-1).sum() == 3
    assert len({tuple(colour) for colour in (wall, floor, head, neck, food)}) == 5
    vec.close()
