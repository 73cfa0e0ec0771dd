"""Breakout: keep the ball in play and clear the wall (the rules of MinAtar's breakout).

The ball moves diagonally, one cell per frame. When it hits a brick, the brick is removed for a reward of 1 and the ball
bounces back; after a hit it passes through further bricks until it is in the open. The paddle returns the ball from the
bottom row: mirrored if the ball was above the paddle, back where it came from if it hits the edge. Once the wall is
gone, a new one appears when the ball comes down. The episode ends when the ball gets past the paddle.

Example:
    >>> import hurtle
    >>> env = hurtle.make("breakout")
    >>> obs, info = env.reset(seed=0)
    >>> obs.shape
    (10, 10, 4)
"""

import numpy as np

from hurtle.envs.minatar_render import render_channels
from hurtle.native import Box, Discrete, Env, bool_, int8, int32, uint8

LEFT, RIGHT = 1, 3  # the other actions do nothing
PADDLE, BALL, TRAIL, BRICK = 0, 1, 2, 3
COLOURS = ((90, 170, 255), (255, 255, 255), (120, 120, 120), (230, 120, 60))

SIZE = 10
WALL_TOP = 1  # the wall fills rows 1 to 3
WALL_ROWS = 3
WALL = (1 << (WALL_ROWS * SIZE)) - 1  # one bit per brick, row by row


class Breakout(Env):
    """Keep the ball in play and clear the wall (MinAtar)."""

    observation_space = Box(0, 1, (SIZE, SIZE, 4), uint8)
    action_space = Discrete(6)
    max_steps = None
    sticky_action_prob: float = 0.1

    class State:
        bricks: int32  # bits of WALL
        ball_x: int8
        ball_y: int8
        ball_dx: int8
        ball_dy: int8
        trail_x: int8
        trail_y: int8
        paddle_x: int8
        in_wall: bool_  # the last move ran into a brick
        last_action: int8 = 0  # kept across episodes: a sticky action can carry over into the next one

    def reset(self, state, rng):
        state.bricks = WALL
        state.paddle_x = 4
        state.ball_y = 3
        state.ball_dy = 1
        if rng.integers(2) == 0:
            state.ball_x = 0
            state.ball_dx = 1
        else:
            state.ball_x = SIZE - 1
            state.ball_dx = -1
        state.trail_x = state.ball_x
        state.trail_y = state.ball_y

    def step(self, state, action, rng):
        if rng.random() < self.sticky_action_prob:
            action = state.last_action
        state.last_action = action
        if action == LEFT:
            state.paddle_x = max(0, state.paddle_x - 1)
        elif action == RIGHT:
            state.paddle_x = min(SIZE - 1, state.paddle_x + 1)

        old_x = state.ball_x
        old_y = state.ball_y
        x = old_x + state.ball_dx
        if x < 0 or x >= SIZE:
            x = old_x
            state.ball_dx = -state.ball_dx
        y = old_y + state.ball_dy

        reward = 0.0
        terminated = False
        brick = self.brick_bit(x, y) & state.bricks
        if brick != 0:
            if not state.in_wall:
                state.bricks -= brick
                state.ball_dy = -state.ball_dy
                y = old_y
                reward = 1.0
        elif y < 0:
            state.ball_dy = 1
            y = old_y
        elif y == SIZE - 1:
            if state.bricks == 0:
                state.bricks = WALL
            if old_x == state.paddle_x:
                state.ball_dy = -1
                y = old_y
            elif x == state.paddle_x:
                state.ball_dx = -state.ball_dx
                state.ball_dy = -1
                y = old_y
            else:
                terminated = True

        state.in_wall = brick != 0
        state.ball_x = x
        state.ball_y = y
        state.trail_x = old_x
        state.trail_y = old_y
        return reward, terminated

    def brick_bit(self, x, y):
        """The bit of the brick at a cell; 0 outside the wall's rows."""
        row = y - WALL_TOP
        if row < 0 or row >= WALL_ROWS:
            return 0
        return 1 << (row * SIZE + x)

    def observe(self, state, obs):
        obs[SIZE - 1, state.paddle_x, PADDLE] = 1
        obs[state.ball_y, state.ball_x, BALL] = 1
        obs[state.trail_y, state.trail_x, TRAIL] = 1
        for row in range(WALL_ROWS):
            for x in range(SIZE):
                obs[WALL_TOP + row, x, BRICK] = (state.bricks >> (row * SIZE + x)) & 1

    def render(self, state):
        obs = np.zeros(self.observation_space.shape, np.uint8)
        self.observe(state, obs)
        return render_channels(obs, COLOURS)
