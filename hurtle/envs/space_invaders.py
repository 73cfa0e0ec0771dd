"""Space Invaders: shoot the aliens before they land (the rules of MinAtar's space_invaders).

Twenty-four aliens march sideways and come one row closer each time they reach the border; the fewer are left, the
faster they march. Every ten frames the alien nearest to the cannon's column drops a bomb. Shooting an alien gives a
reward of 1. A new wave replaces the last alien of the old one, faster than it with `difficulty_ramping`. The episode
ends when a bomb or an alien hits the cannon, or when the aliens would have to leave the screen at the bottom.

Example:
    >>> import hurtle
    >>> env = hurtle.make("space_invaders")
    >>> obs, info = env.reset(seed=0)
    >>> obs.shape
    (10, 10, 6)
"""

import numpy as np

from hurtle.envs.minatar_render import render_channels
from hurtle.native import Box, Discrete, Env, int8, int32, uint8

LEFT, RIGHT, FIRE = 1, 3, 5  # the other actions do nothing
CANNON, ALIEN, ALIEN_LEFT, ALIEN_RIGHT, BULLET, BOMB = range(6)
COLOURS = ((90, 170, 255), (90, 200, 90), (60, 150, 60), (150, 220, 90), (255, 255, 255), (230, 60, 60))

SIZE = 10
GROUND = SIZE - 1  # the cannon's row
WAVE_ROWS = 4
WAVE_COLUMNS = 6
WAVE_X = 2  # x of the upper left alien of a new wave; its y is 0
WAVE_ROW = (1 << WAVE_COLUMNS) - 1  # one bit per alien, row by row
WAVE_COLUMN = sum(1 << (row * WAVE_COLUMNS) for row in range(WAVE_ROWS))
WAVE = WAVE_ROW * WAVE_COLUMN

FIRE_INTERVAL = 5
BOMB_INTERVAL = 10
SLOWEST_MARCH = 12  # frames per move of the first wave
FASTEST_MARCH = 6  # frames per move of the last waves

# A bullet is on the screen for 9 frames, from row 8 to row 0, and the cannon fires every 5th frame at most.
MAX_BULLETS = 2


class SpaceInvaders(Env):
    """Shoot the aliens before they land (MinAtar)."""

    observation_space = Box(0, 1, (SIZE, SIZE, 6), uint8)
    action_space = Discrete(6)
    max_steps = None
    sticky_action_prob: float = 0.1
    difficulty_ramping: bool = True

    class State:
        aliens: int32  # bits of WAVE
        wave_x: int8  # the cell of the wave's first row and column, even if no alien is left there
        wave_y: int8
        wave_direction: int8  # -1 or 1
        march_interval: int8
        march_timer: int8
        bomb_timer: int8
        fire_timer: int8
        cannon_x: int8
        bullet_x: int8[MAX_BULLETS]
        bullet_y: int8[MAX_BULLETS]  # -1: none, or gone over the top
        bomb_x: int8  # one is enough: a bomb leaves the screen after 10 frames, before the next is dropped
        bomb_y: int8  # SIZE: none, or gone
        last_action: int8 = 0  # kept across episodes: a sticky action can carry over into the next one

    def reset(self, state, rng):
        self.start_wave(state)
        state.wave_direction = -1
        state.march_interval = SLOWEST_MARCH
        state.march_timer = SLOWEST_MARCH
        state.bomb_timer = BOMB_INTERVAL
        state.cannon_x = 5
        state.bomb_y = SIZE
        for i in range(MAX_BULLETS):
            state.bullet_y[i] = -1

    def start_wave(self, state):
        state.aliens = WAVE
        state.wave_x = WAVE_X
        state.wave_y = 0

    def step(self, state, action, rng):
        if rng.random() < self.sticky_action_prob:
            action = state.last_action
        state.last_action = action
        self.control(state, action)

        for i in range(MAX_BULLETS):
            state.bullet_y[i] = max(-1, state.bullet_y[i] - 1)
        state.bomb_y = min(SIZE, state.bomb_y + 1)
        terminated = state.bomb_x == state.cannon_x and state.bomb_y == GROUND
        terminated = terminated or self.alien_at(state, state.cannon_x, GROUND) != 0

        if state.march_timer == 0:
            state.march_timer = min(self.count_aliens(state), state.march_interval)
            landed = self.march(state)
            terminated = terminated or landed or self.alien_at(state, state.cannon_x, GROUND) != 0
        state.march_timer -= 1

        if state.bomb_timer == 0:
            state.bomb_timer = BOMB_INTERVAL
            self.drop_bomb(state)
        state.bomb_timer -= 1

        reward = 0.0
        for i in range(MAX_BULLETS):
            alien = self.alien_at(state, state.bullet_x[i], state.bullet_y[i])
            if alien != 0:
                state.aliens -= alien
                state.bullet_y[i] = -1
                reward += 1.0
        if state.aliens == 0:
            self.start_wave(state)
            if self.difficulty_ramping and state.march_interval > FASTEST_MARCH:
                state.march_interval -= 1
        return reward, terminated

    def control(self, state, action):
        if action == LEFT:
            state.cannon_x = max(0, state.cannon_x - 1)
        elif action == RIGHT:
            state.cannon_x = min(SIZE - 1, state.cannon_x + 1)
        elif action == FIRE and state.fire_timer == 0:
            state.fire_timer = FIRE_INTERVAL
            free = 0
            while state.bullet_y[free] >= 0:
                free += 1
            state.bullet_x[free] = state.cannon_x
            state.bullet_y[free] = GROUND
        state.fire_timer = max(0, state.fire_timer - 1)

    def march(self, state):
        """Move the wave by one cell, downwards at the border; returns whether it moved out of the bottom row."""
        front = 0 if state.wave_direction < 0 else SIZE - 1
        column = front - state.wave_x
        if column < 0 or column >= WAVE_COLUMNS or state.aliens & (WAVE_COLUMN << column) == 0:
            state.wave_x += state.wave_direction
            return False
        row = GROUND - state.wave_y
        landed = row < WAVE_ROWS and state.aliens & (WAVE_ROW << (row * WAVE_COLUMNS)) != 0
        state.wave_direction = -state.wave_direction
        state.wave_y += 1
        return landed

    def drop_bomb(self, state):
        """Drop a bomb from the lowest alien of the column that is nearest to the cannon, the left one of two."""
        nearest = SIZE
        for column in range(WAVE_COLUMNS):
            distance = abs(state.wave_x + column - state.cannon_x)
            if distance < nearest and state.aliens & (WAVE_COLUMN << column) != 0:
                nearest = distance
                state.bomb_x = state.wave_x + column
        state.bomb_y = GROUND
        while self.alien_at(state, state.bomb_x, state.bomb_y) == 0:
            state.bomb_y -= 1

    def alien_at(self, state, x, y):
        """The bit of the alien in a cell; 0 if there is none. Rows that leave at the bottom reappear at the top."""
        column = x - state.wave_x
        if y < 0 or column < 0 or column >= WAVE_COLUMNS:
            return 0
        row = (y - state.wave_y) % SIZE
        if row >= WAVE_ROWS:
            return 0
        return state.aliens & (1 << (row * WAVE_COLUMNS + column))

    def count_aliens(self, state):
        count = 0
        aliens = state.aliens
        while aliens != 0:
            aliens &= aliens - 1  # clears the lowest bit
            count += 1
        return count

    def observe(self, state, obs):
        obs[GROUND, state.cannon_x, CANNON] = 1
        heading = ALIEN_LEFT if state.wave_direction < 0 else ALIEN_RIGHT
        aliens = state.aliens
        for row in range(WAVE_ROWS):
            y = (state.wave_y + row) % SIZE
            for column in range(WAVE_COLUMNS):
                if aliens & 1 != 0:
                    obs[y, state.wave_x + column, ALIEN] = 1
                    obs[y, state.wave_x + column, heading] = 1
                aliens >>= 1
        for i in range(MAX_BULLETS):
            if state.bullet_y[i] >= 0:
                obs[state.bullet_y[i], state.bullet_x[i], BULLET] = 1
        if state.bomb_y < SIZE:
            obs[state.bomb_y, state.bomb_x, BOMB] = 1

    def render(self, state):
        obs = np.zeros(self.observation_space.shape, np.uint8)
        self.observe(state, obs)
        return render_channels(obs, COLOURS)
