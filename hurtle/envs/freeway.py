"""Freeway: lead a chicken across eight lanes of traffic, again and again (the rules of MinAtar's freeway).

The chicken stays in one column and can take a step every third frame. Reaching the top row gives a reward of 1, moves it
back to the bottom and draws new speeds for the cars; being hit by a car moves it back to the bottom too. Each car drives
in its own lane and re-enters on the other side. The episode ends after 2501 frames.

Example:
    >>> import hurtle
    >>> env = hurtle.make("freeway")
    >>> obs, info = env.reset(seed=0)
    >>> obs.shape
    (10, 10, 7)
"""

import numpy as np

from hurtle.envs.minatar_render import render_channels
from hurtle.native import Box, Discrete, Env, int8, int16, uint8

UP, DOWN = 2, 4  # the other actions do nothing
CHICKEN, CAR, SPEED = 0, 1, 2  # SPEED is the first of five channels: a car's trail, one channel per speed
COLOURS = (
    (255, 220, 80),
    (230, 60, 60),
    (150, 110, 220),
    (125, 95, 190),
    (100, 80, 160),
    (75, 65, 130),
    (50, 50, 100),
)

SIZE = 10
LANES = 8  # lane i is row i + 1
START = SIZE - 1  # the chicken's first row
COLUMN = 4  # the chicken's column
STEP_INTERVAL = 3  # frames from one step of the chicken to the next
SLOWEST = 5
EPISODE_FRAMES = 2501


class Freeway(Env):
    """Lead a chicken across eight lanes of traffic (MinAtar)."""

    observation_space = Box(0, 1, (SIZE, SIZE, 7), uint8)
    action_space = Discrete(6)
    max_steps = None
    sticky_action_prob: float = 0.1

    class State:
        frames_left: int16
        chicken_y: int8
        step_timer: int8  # the chicken can take a step at 0
        car_x: int8[LANES]
        car_speed: int8[LANES]  # sign: direction; magnitude: frames of rest between two moves, so 1 is the fastest
        car_timer: int8[LANES]  # the car moves at 0
        last_action: int8 = 0  # kept across episodes: a sticky action can carry over into the next one

    def reset(self, state, rng):
        state.frames_left = EPISODE_FRAMES
        state.chicken_y = START
        state.step_timer = STEP_INTERVAL
        self.draw_speeds(state, rng)

    def draw_speeds(self, state, rng):
        for lane in range(LANES):
            rest = rng.integers(1, SLOWEST + 1)
            state.car_timer[lane] = rest
            if rng.integers(2) == 0:
                state.car_speed[lane] = rest
            else:
                state.car_speed[lane] = -rest

    def step(self, state, action, rng):
        if rng.random() < self.sticky_action_prob:
            action = state.last_action
        state.last_action = action

        if state.step_timer > 0:
            state.step_timer -= 1
        elif action == UP:
            state.chicken_y -= 1
            state.step_timer = STEP_INTERVAL - 1
        elif action == DOWN:
            state.chicken_y = min(START, state.chicken_y + 1)
            state.step_timer = STEP_INTERVAL - 1

        reward = 0.0
        if state.chicken_y == 0:
            reward = 1.0
            state.chicken_y = START
            self.draw_speeds(state, rng)

        self.hit(state)  # before and after the cars move: the chicken may walk into a car, or a car hit the chicken
        self.drive(state)
        self.hit(state)

        state.frames_left -= 1
        return reward, state.frames_left == 0

    def hit(self, state):
        """Send a chicken that shares its cell with a car back to the start."""
        if state.chicken_y != START and state.car_x[state.chicken_y - 1] == COLUMN:
            state.chicken_y = START

    def drive(self, state):
        for lane in range(LANES):
            if state.car_timer[lane] > 0:
                state.car_timer[lane] -= 1
            else:
                state.car_timer[lane] = abs(state.car_speed[lane])
                state.car_x[lane] = self.next_cell(state.car_x[lane], state.car_speed[lane] > 0)

    def next_cell(self, x, to_right):
        """The next cell of a lane, which wraps around."""
        if to_right:
            return x + 1 if x < SIZE - 1 else 0
        return x - 1 if x > 0 else SIZE - 1

    def observe(self, state, obs):
        obs[state.chicken_y, COLUMN, CHICKEN] = 1
        for lane in range(LANES):
            speed = state.car_speed[lane]
            behind = self.next_cell(state.car_x[lane], speed < 0)
            obs[lane + 1, state.car_x[lane], CAR] = 1
            obs[lane + 1, behind, SPEED + abs(speed) - 1] = 1

    def render(self, state):
        obs = np.zeros(self.observation_space.shape, np.uint8)
        self.observe(state, obs)
        return render_channels(obs, COLOURS)
