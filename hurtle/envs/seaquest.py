"""Seaquest: fight fish and submarines, rescue divers, do not run out of air (the rules of MinAtar's seaquest).

Fish and enemy submarines cross the water from either side; submarines shoot torpedoes. Shooting one of them gives a
reward of 1; touching one of them or a torpedo ends the episode. So does running out of oxygen, or surfacing without a
diver on board. Surfacing refills the oxygen and costs one diver, but with six divers the whole crew goes ashore for a
reward of up to 10, in proportion to the remaining oxygen. With `difficulty_ramping`, each time the player surfaces
makes enemies more frequent and, every second time, faster.

Example:
    >>> import hurtle
    >>> env = hurtle.make("seaquest")
    >>> obs, info = env.reset(seed=0)
    >>> obs.shape
    (10, 10, 10)
"""

import numpy as np

from hurtle.envs.minatar_render import render_channels
from hurtle.native import Box, Discrete, Env, bool_, int8, int16, int32, uint8

LEFT, UP, RIGHT, DOWN, FIRE = 1, 2, 3, 4, 5
PLAYER, PLAYER_BACK, BULLET, TRAIL, TORPEDO, FISH, SUBMARINE, OXYGEN_GAUGE, DIVER_GAUGE, DIVER = range(10)
COLOURS = (
    *((90, 170, 255), (50, 100, 190), (255, 255, 255), (90, 90, 90), (255, 140, 60)),
    *((230, 60, 60), (180, 70, 200), (120, 220, 255), (170, 210, 60), (255, 205, 60)),
)

SIZE = 10
SEABED = SIZE - 2  # the deepest row; the gauges are below
FULL_TANK = 200  # frames under water
CREW = 6  # divers that fit on board
FIRE_INTERVAL = 5
DIVER_INTERVAL = 30
DIVER_MOVE_INTERVAL = 5
TORPEDO_INTERVAL = 10
SPAWN_INTERVAL = 20  # frames, at level 0; one less per level
MOVE_INTERVAL = 5  # frames between two moves of an enemy, at level 0; one less every second level
FASTEST_MOVE_INTERVAL = 2
LAST_LEVEL = 19

# Columns of the tables below. A swimmer moves in the frame in which its move timer is 0.
X, Y, DIRECTION, MOVE_TIMER, GUN_TIMER = range(5)
NO_GUN = -1  # a fish

# No table can overflow. A swimmer with a move interval m leaves 10 * m + 9 frames after it entered, if m stays the same.
# Enemies: one per frame from level 19 on, when m is 2: 30 in the frame in which the oldest leaves. The slower ones of
# levels 0 to 5 come 15 frames apart or more, and are gone before enemies are that frequent.
MAX_ENEMIES = 30
# Divers: m is 5 and they come 30 frames apart, the third in the frame after the first has left.
MAX_DIVERS = 2
# Bullets: 9 frames at most to the border, fired 5 frames apart or more.
MAX_BULLETS = 2
# Torpedoes: a submarine fires at the age of 10, 21, ... frames and has one in the water at a time. With m = 2 the first
# takes 7 frames to the border, the second 3: submarines of 10 ages, one per frame, and at most 4 of the slower ones.
MAX_TORPEDOES = 14


class Seaquest(Env):
    """Fight fish and submarines, rescue divers, do not run out of air (MinAtar)."""

    observation_space = Box(0, 1, (SIZE, SIZE, 10), uint8)
    action_space = Discrete(6)
    max_steps = None
    sticky_action_prob: float = 0.1
    difficulty_ramping: bool = True

    class State:
        divers_on_board: int32  # negative after a full crew went ashore, since surfacing then still costs a diver
        oxygen: int16
        player_x: int8
        player_y: int8
        player_direction: int8  # -1 or 1
        at_surface: bool_
        fire_timer: int8
        level: int8
        spawn_timer: int8
        diver_timer: int8
        num_enemies: int8
        num_divers: int8
        num_bullets: int8
        num_torpedoes: int8
        enemies: int8[MAX_ENEMIES, 5]  # oldest first, as are the divers
        divers: int8[MAX_DIVERS, 4]
        bullets: int8[MAX_BULLETS, 3]
        torpedoes: int8[MAX_TORPEDOES, 3]
        last_action: int8 = 0  # kept across episodes: a sticky action can carry over into the next one

    def reset(self, state, rng):
        state.oxygen = FULL_TANK
        state.player_x = 5
        state.player_direction = -1
        state.at_surface = True
        state.spawn_timer = SPAWN_INTERVAL
        state.diver_timer = DIVER_INTERVAL

    def step(self, state, action, rng):
        if rng.random() < self.sticky_action_prob:
            action = state.last_action
        state.last_action = action

        if state.spawn_timer == 0:
            self.spawn_enemy(state, rng)
            state.spawn_timer = SPAWN_INTERVAL - state.level
        state.spawn_timer -= 1
        if state.diver_timer == 0:
            self.spawn_diver(state, rng)
            state.diver_timer = DIVER_INTERVAL
        state.diver_timer -= 1

        self.control(state, action)
        reward = self.move_bullets(state)
        self.move_divers(state)
        sunk, rammed = self.move_enemies(state)
        torpedoed = self.move_torpedoes(state)
        reward += sunk
        terminated = rammed or torpedoed or state.oxygen <= 0

        if state.player_y > 0:
            state.oxygen -= 1
            state.at_surface = False
        elif not state.at_surface:
            if state.divers_on_board == 0:
                terminated = True
            else:
                reward += self.come_up(state)
        return reward, terminated

    def spawn_enemy(self, state, rng):
        """Let a fish or, one time in three, a submarine enter a random row, unless others come the opposite way there."""
        y = rng.integers(1, SEABED + 1)
        direction = 2 * rng.integers(2) - 1
        has_gun = rng.integers(3) == 0
        for i in range(state.num_enemies):
            if state.enemies[i, Y] == y and state.enemies[i, DIRECTION] != direction:
                return
        put(state.enemies, state.num_enemies, 0 if direction > 0 else SIZE - 1, y, direction)
        state.enemies[state.num_enemies, MOVE_TIMER] = self.move_interval(state)
        state.enemies[state.num_enemies, GUN_TIMER] = TORPEDO_INTERVAL if has_gun else NO_GUN
        state.num_enemies += 1

    def spawn_diver(self, state, rng):
        """Let a diver enter a random row."""
        y = rng.integers(1, SEABED + 1)
        direction = 2 * rng.integers(2) - 1
        put(state.divers, state.num_divers, 0 if direction > 0 else SIZE - 1, y, direction)
        state.divers[state.num_divers, MOVE_TIMER] = DIVER_MOVE_INTERVAL
        state.num_divers += 1

    def move_interval(self, state):
        return max(FASTEST_MOVE_INTERVAL, MOVE_INTERVAL - state.level // 2)

    def control(self, state, action):
        if action == LEFT:
            state.player_x = max(0, state.player_x - 1)
            state.player_direction = -1
        elif action == RIGHT:
            state.player_x = min(SIZE - 1, state.player_x + 1)
            state.player_direction = 1
        elif action == UP:
            state.player_y = max(0, state.player_y - 1)
        elif action == DOWN:
            state.player_y = min(SEABED, state.player_y + 1)
        elif action == FIRE and state.fire_timer == 0:
            put(state.bullets, state.num_bullets, state.player_x, state.player_y, state.player_direction)
            state.num_bullets += 1
            state.fire_timer = FIRE_INTERVAL
        state.fire_timer = max(0, state.fire_timer - 1)

    def move_bullets(self, state):
        """Move the player's bullets and remove the enemies they hit; returns the reward."""
        reward = 0.0
        for i in range(state.num_bullets - 1, -1, -1):
            state.bullets[i, X] += state.bullets[i, DIRECTION]
            target = self.find_target(state, state.bullets[i, X], state.bullets[i, Y])
            if target >= 0:
                state.num_enemies -= 1
                delete_row(state.enemies, target, state.num_enemies)
                reward += 1.0
            if target >= 0 or is_outside(state.bullets, i):
                state.num_bullets -= 1
                delete_row(state.bullets, i, state.num_bullets)
        return reward

    def find_target(self, state, x, y):
        """The enemy that a bullet hits in a cell: the oldest fish, else the oldest submarine; -1 if there is none."""
        target = -1
        for i in range(state.num_enemies):
            if state.enemies[i, X] == x and state.enemies[i, Y] == y:
                if state.enemies[i, GUN_TIMER] == NO_GUN:
                    return i
                if target < 0:
                    target = i
        return target

    def move_divers(self, state):
        """Move the divers; one that meets the player, before or after its move, comes on board if there is room."""
        for i in range(state.num_divers - 1, -1, -1):  # the newest gets the last place on board
            rescued = state.divers_on_board < CREW and self.meets_player(state, state.divers, i)
            if not rescued and swim(state.divers, i, DIVER_MOVE_INTERVAL):
                rescued = state.divers_on_board < CREW and self.meets_player(state, state.divers, i)
            if rescued:
                state.divers_on_board += 1
            if rescued or is_outside(state.divers, i):
                state.num_divers -= 1
                delete_row(state.divers, i, state.num_divers)

    def move_enemies(self, state):
        """Move fish and submarines, let submarines fire; returns the reward and whether one meets the player."""
        reward = 0.0
        rammed = False
        for i in range(state.num_enemies - 1, -1, -1):
            sunk = False
            rammed = rammed or self.meets_player(state, state.enemies, i)
            if swim(state.enemies, i, self.move_interval(state)):
                rammed = rammed or self.meets_player(state, state.enemies, i)
                sunk = self.runs_into_bullet(state, i)
            self.aim(state, i)  # a submarine that is sunk in this frame still fires
            if sunk:
                reward += 1.0
            if sunk or is_outside(state.enemies, i):
                state.num_enemies -= 1
                delete_row(state.enemies, i, state.num_enemies)
        return reward, rammed

    def runs_into_bullet(self, state, enemy):
        """Remove a bullet of the player from the cell of an enemy; returns whether there was one."""
        for i in range(state.num_bullets):
            if state.bullets[i, X] == state.enemies[enemy, X] and state.bullets[i, Y] == state.enemies[enemy, Y]:
                state.num_bullets -= 1
                delete_row(state.bullets, i, state.num_bullets)
                return True
        return False

    def aim(self, state, enemy):
        """Count down a submarine's gun timer and fire a torpedo at 0."""
        if state.enemies[enemy, GUN_TIMER] > 0:
            state.enemies[enemy, GUN_TIMER] -= 1
        elif state.enemies[enemy, GUN_TIMER] == 0:
            state.enemies[enemy, GUN_TIMER] = TORPEDO_INTERVAL
            x = state.enemies[enemy, X]
            put(state.torpedoes, state.num_torpedoes, x, state.enemies[enemy, Y], state.enemies[enemy, DIRECTION])
            state.num_torpedoes += 1

    def move_torpedoes(self, state):
        """Move the torpedoes; returns whether one meets the player, before or after its move."""
        hit = False
        for i in range(state.num_torpedoes - 1, -1, -1):
            hit = hit or self.meets_player(state, state.torpedoes, i)
            state.torpedoes[i, X] += state.torpedoes[i, DIRECTION]
            hit = hit or self.meets_player(state, state.torpedoes, i)
            if is_outside(state.torpedoes, i):
                state.num_torpedoes -= 1
                delete_row(state.torpedoes, i, state.num_torpedoes)
        return hit

    def meets_player(self, state, table, row):
        return table[row, X] == state.player_x and table[row, Y] == state.player_y

    def come_up(self, state):
        """Refill the oxygen and put ashore one diver or the whole crew; returns the reward."""
        reward = 0.0
        if state.divers_on_board == CREW:
            reward = float(state.oxygen * 10 // FULL_TANK)
            state.divers_on_board = 0
        state.divers_on_board -= 1
        state.oxygen = FULL_TANK
        state.at_surface = True
        if self.difficulty_ramping and state.level < LAST_LEVEL:
            state.level += 1
        return reward

    def observe(self, state, obs):
        obs[state.player_y, state.player_x, PLAYER] = 1
        obs[state.player_y, state.player_x - state.player_direction, PLAYER_BACK] = 1
        for x in range(state.oxygen * SIZE // FULL_TANK):
            obs[SIZE - 1, x, OXYGEN_GAUGE] = 1
        for i in range(state.divers_on_board):
            obs[SIZE - 1, SIZE - 2 - i, DIVER_GAUGE] = 1
        for i in range(state.num_bullets):
            obs[state.bullets[i, Y], state.bullets[i, X], BULLET] = 1
        for i in range(state.num_torpedoes):
            obs[state.torpedoes[i, Y], state.torpedoes[i, X], TORPEDO] = 1
        for i in range(state.num_divers):
            draw(obs, state.divers, i, DIVER)
        for i in range(state.num_enemies):
            draw(obs, state.enemies, i, FISH if state.enemies[i, GUN_TIMER] == NO_GUN else SUBMARINE)

    def render(self, state):
        obs = np.zeros(self.observation_space.shape, np.uint8)
        self.observe(state, obs)
        return render_channels(obs, COLOURS)


def put(table, row, x, y, direction):
    """Write a position and a direction into a row."""
    table[row, X] = x
    table[row, Y] = y
    table[row, DIRECTION] = direction


def swim(table, row, interval):
    """Count down the move timer and move at 0; returns whether it moved."""
    if table[row, MOVE_TIMER] > 0:
        table[row, MOVE_TIMER] -= 1
        return False
    table[row, MOVE_TIMER] = interval
    table[row, X] += table[row, DIRECTION]
    return True


def is_outside(table, row):
    """Whether something has left the screen, on the left or on the right."""
    return table[row, X] < 0 or table[row, X] >= SIZE


def delete_row(table, row, last):
    """Delete a row of a table, up to the last row in use, and keep the order of the others."""
    for i in range(row, last):
        for column in range(table.shape[1]):
            table[i, column] = table[i + 1, column]


def draw(obs, table, row, channel):
    """Draw a swimmer and its trail."""
    x = int(table[row, X])
    y = int(table[row, Y])
    behind = x - table[row, DIRECTION]
    obs[y, x, channel] = 1
    if behind >= 0 and behind < SIZE:
        obs[y, behind, TRAIL] = 1
