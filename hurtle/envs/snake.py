"""Snake: several snakes compete for food on one grid.

Example:
    >>> import hurtle
    >>> vec = hurtle.make_vec("snake", num_envs=2, num_agents=4)
    >>> obs, infos = vec.reset(seed=0)
    >>> obs.shape
    (2, 4, 9, 9, 5)
    >>> infos["agent_mask"].sum()  # all snakes are alive
    np.int64(8)
"""

import colorsys

import numpy as np

from hurtle.errors import EnvDefinitionError
from hurtle.native import Box, Discrete, Env, int8, int16, int32, uint8

# Content of a cell of the grid; the body of snake a is a + 1.
EMPTY, FOOD = 0, -1

# Headings clockwise, from up.
MOVE_Y = (-1, 0, 1, 0)
MOVE_X = (0, 1, 0, -1)

WALL_PLANE, FOOD_PLANE, OWN_PLANE, OTHER_PLANE, OTHER_HEAD_PLANE = 0, 1, 2, 3, 4

NOWHERE = -1  # in place of a cell
TRIES = 16  # random cells to try before a search of the whole grid

CELL = 16  # pixels
WALL_COLOUR, EMPTY_COLOUR, FOOD_COLOUR = (70, 70, 70), (16, 16, 16), (235, 235, 235)


class Snake(Env):
    """Several snakes compete for food on one grid, grow, die and come back.

    Actions are relative to the snake's heading: 0 turns left, 1 goes straight on, 2 turns right. The observation is
    the grid up to `vision` cells around the snake's head, turned so that its heading is up, in five binary planes:
    wall, food, its own body, other bodies, other heads. With both relative, a lesson learnt in one direction holds in
    all four, and every action is legal: a snake cannot reverse into itself, so no mask is needed.

    All snakes move at once. First every tail moves up, unless its snake is still growing, so that the cell it leaves is
    free to enter. Then a snake dies if its head enters a wall or a body (its own, or another's, even one that dies in
    the same step), or if another head enters the same cell: all that meet head-on die, whatever their slots. The bodies
    of the dead vanish. The others move and eat the food they find, for `reward_food` and one cell of growth with the
    next move, up to `max_length`. Dying costs `reward_death`. Eaten food reappears elsewhere.

    A snake starts as a single cell and unrolls to `start_length`. The slot of a dead snake is absent for
    `respawn_delay` steps; then a new snake takes it, at a random free cell, or after another delay if there is none.
    Without `respawn` the dead stay dead, and the episode ends with the last of them.
    """

    action_space = Discrete(3)
    max_steps = 500

    num_agents: int = 4
    height: int = 16
    width: int = 16
    num_food: int = 8
    vision: int = 4
    start_length: int = 3
    max_length: int = 64
    respawn: bool = True
    respawn_delay: int = 10
    reward_food: float = 1.0
    reward_death: float = -1.0

    metrics = ("food_eaten", "deaths", "longest")

    def __init__(self, **parameters):
        super().__init__(**parameters)
        if not 2 <= self.num_agents <= 127:
            raise EnvDefinitionError(f"num_agents must be between 2 and 127, got {self.num_agents}.")
        if self.height * self.width > 32767:
            raise EnvDefinitionError(f"height * width must be at most 32767, got {self.height * self.width}.")
        if not 2 <= self.start_length <= self.max_length:  # single cells could slip past each other by changing places
            raise EnvDefinitionError(f"start_length must be between 2 and max_length, got {self.start_length}.")
        if self.respawn_delay < 1:
            raise EnvDefinitionError(f"respawn_delay must be at least 1, got {self.respawn_delay}.")

    @property
    def observation_space(self):
        return Box(0, 1, (2 * self.vision + 1, 2 * self.vision + 1, 5), uint8)

    class State:
        grid: int8["height", "width"]
        # Cells are numbered row by row. Each body is a ring buffer, from its tail onwards.
        body: int16["num_agents", "max_length"]
        tail: int16["num_agents"]
        length: int16["num_agents"]  # 0 while absent
        full_length: int16["num_agents"]  # the length that the snake is growing to
        head: int16["num_agents"]  # the cell of the head
        ahead: int16["num_agents"]  # the cell that the head is about to enter
        heading: int8["num_agents"]
        delay: int16["num_agents"]  # steps until a new snake takes the slot; 0: none will
        food: int16  # items on the grid
        food_eaten: int32
        deaths: int32
        longest: int16

    def reset(self, state, rng):
        for a in range(self.num_agents):
            self.spawn(state, a, rng)
        self.add_food(state, rng)

    def step(self, state, action, reward, terminated, rng):
        for a in range(self.num_agents):
            if state.length[a] > 0:
                state.heading[a] = (state.heading[a] + action[a] + 3) % 4
                state.ahead[a] = self.neighbour(state.head[a], state.heading[a])
                if state.length[a] == state.full_length[a]:
                    self.drop_tail(state, a)

        # Check all snakes before any moves, or the order of the slots would decide which ones die.
        for a in range(self.num_agents):
            if state.length[a] > 0:
                terminated[a] = self.collides(state, a)

        for a in range(self.num_agents):
            if terminated[a]:
                reward[a] = self.reward_death
                self.die(state, a)
            elif state.length[a] > 0:
                reward[a] = self.move(state, a)

        # New snakes and food come last, after all snakes have moved.
        alive = 0
        for a in range(self.num_agents):
            if state.delay[a] > 0 and not terminated[a]:
                state.delay[a] -= 1
                if state.delay[a] == 0:
                    self.spawn(state, a, rng)
            if state.length[a] > 0:
                alive += 1
        self.add_food(state, rng)
        return alive == 0 and not self.respawn

    def present(self, state, present):
        for a in range(self.num_agents):
            present[a] = state.length[a] > 0

    def observe(self, state, obs):
        for a in range(self.num_agents):
            if state.length[a] > 0:
                self.look_around(state, a, obs)

    def look_around(self, state, a, obs):
        """Write the observation of snake a, with its heading up."""
        ahead, right = state.heading[a], (state.heading[a] + 1) % 4
        ahead_y, ahead_x, right_y, right_x = MOVE_Y[ahead], MOVE_X[ahead], MOVE_Y[right], MOVE_X[right]
        head_y, head_x = state.head[a] // self.width, state.head[a] % self.width
        for row in range(2 * self.vision + 1):
            for column in range(2 * self.vision + 1):
                forwards, sideways = self.vision - row, column - self.vision
                y = head_y + forwards * ahead_y + sideways * right_y
                x = head_x + forwards * ahead_x + sideways * right_x
                if y < 0 or y >= self.height or x < 0 or x >= self.width:
                    obs[a, row, column, WALL_PLANE] = 1
                    continue
                content = state.grid[y, x]
                if content == FOOD:
                    obs[a, row, column, FOOD_PLANE] = 1
                elif content == a + 1:
                    obs[a, row, column, OWN_PLANE] = 1
                elif content != EMPTY:
                    obs[a, row, column, OTHER_PLANE] = 1
                    if state.head[content - 1] == y * self.width + x:
                        obs[a, row, column, OTHER_HEAD_PLANE] = 1

    def neighbour(self, cell, heading):
        """The next cell in a direction, or NOWHERE if there is a wall."""
        y = cell // self.width + MOVE_Y[heading]
        x = cell % self.width + MOVE_X[heading]
        if y < 0 or y >= self.height or x < 0 or x >= self.width:
            return NOWHERE
        return y * self.width + x

    def content(self, state, cell):
        return state.grid[cell // self.width, cell % self.width]

    def fill(self, state, cell, content):
        state.grid[cell // self.width, cell % self.width] = content

    def collides(self, state, a):
        """Whether the move of snake a ends in a wall, a body or another head."""
        cell = state.ahead[a]
        if cell == NOWHERE or self.content(state, cell) > 0:
            return True
        for other in range(self.num_agents):
            if other != a and state.length[other] > 0 and state.ahead[other] == cell:
                return True
        return False

    def move(self, state, a):
        """Move the head of snake a one cell ahead, eat any food there, and return the reward."""
        reward = 0.0
        cell = state.ahead[a]
        if self.content(state, cell) == FOOD:
            reward = self.reward_food
            state.food -= 1
            state.food_eaten += 1
            state.full_length[a] = min(state.full_length[a] + 1, self.max_length)
        self.add_head(state, a, cell)
        return reward

    def add_head(self, state, a, cell):
        state.body[a, (state.tail[a] + state.length[a]) % self.max_length] = cell
        state.length[a] += 1
        state.head[a] = cell
        state.longest = max(state.longest, state.length[a])
        self.fill(state, cell, a + 1)

    def drop_tail(self, state, a):
        self.fill(state, state.body[a, state.tail[a]], EMPTY)
        state.tail[a] = (state.tail[a] + 1) % self.max_length
        state.length[a] -= 1

    def die(self, state, a):
        while state.length[a] > 0:
            self.drop_tail(state, a)
        state.deaths += 1
        if self.respawn:
            state.delay[a] = self.respawn_delay

    def spawn(self, state, a, rng):
        """Put a new snake into slot a, facing an open cell if possible; try again later if the grid is full."""
        cell = self.empty_cell(state, rng)
        if cell == NOWHERE:
            if self.respawn:
                state.delay[a] = self.respawn_delay
            return
        heading = rng.integers(4)
        for turn in range(4):
            ahead = self.neighbour(cell, (heading + turn) % 4)
            if ahead != NOWHERE and self.content(state, ahead) <= 0:
                heading = (heading + turn) % 4
                break
        state.heading[a] = heading
        state.full_length[a] = self.start_length
        self.add_head(state, a, cell)

    def add_food(self, state, rng):
        """Add food up to `num_food` items, as far as there is room."""
        while state.food < self.num_food:
            cell = self.empty_cell(state, rng)
            if cell == NOWHERE:
                return
            self.fill(state, cell, FOOD)
            state.food += 1

    def empty_cell(self, state, rng):
        """A random empty cell, or NOWHERE if there is none."""
        cells = self.height * self.width
        cell = NOWHERE
        for _ in range(TRIES):
            cell = rng.integers(cells)
            if self.content(state, cell) == EMPTY:
                return cell
        for _ in range(cells):  # the grid is crowded: take the next one from the last try onwards
            cell = (cell + 1) % cells
            if self.content(state, cell) == EMPTY:
                return cell
        return NOWHERE

    def render(self, state):
        """The grid with its walls, each snake in its own colour with a lighter head."""
        image = np.full((self.height + 2, self.width + 2, 3), WALL_COLOUR, np.uint8)
        for y in range(self.height):
            for x in range(self.width):
                image[y + 1, x + 1] = self.colour(state, y, x)
        return image.repeat(CELL, 0).repeat(CELL, 1)

    def colour(self, state, y, x):
        content = state.grid[y, x]
        if content <= 0:
            return FOOD_COLOUR if content == FOOD else EMPTY_COLOUR
        is_head = state.head[content - 1] == y * self.width + x
        hue, saturation, value = (content - 1) / self.num_agents, 0.5 if is_head else 0.9, 1.0 if is_head else 0.7
        return tuple(int(255 * channel) for channel in colorsys.hsv_to_rgb(hue, saturation, value))
