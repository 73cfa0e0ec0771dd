"""MountainCar: swing an underpowered car out of a valley (the dynamics of Gymnasium's MountainCar-v0).

Example:
    >>> import hurtle
    >>> env = hurtle.make("mountain_car")
    >>> obs, info = env.reset(seed=0)
    >>> obs, reward, terminated, truncated, info = env.step(2)
    >>> reward
    -1.0
"""

import math

import numpy as np

from hurtle.native import Box, Discrete, Env, float32
from hurtle.native.render import Canvas

LEFT_WALL, RIGHT_EDGE, MAX_SPEED = -1.2, 0.6, 0.07


class MountainCar(Env):
    """Rock an underpowered car out of a valley with full left, coast or full right."""

    observation_space = Box(
        np.array([LEFT_WALL, -MAX_SPEED], np.float32),
        np.array([RIGHT_EDGE, MAX_SPEED], np.float32),
    )
    action_space = Discrete(3)
    max_steps = 200

    power: float = 0.001
    gravity: float = 0.0025
    goal: float = 0.5
    goal_velocity: float = 0.0

    class State:
        position: float32
        velocity: float32

    def reset(self, state, rng):
        state.position = rng.uniform(-0.6, -0.4)

    def step(self, state, action, rng):
        roll(state, self.power * float(action - 1), self.gravity)
        return -1.0, state.position >= self.goal and state.velocity >= self.goal_velocity

    def observe(self, state, obs):
        obs[0] = state.position
        obs[1] = state.velocity

    def render(self, state):
        return draw(state.position, self.goal)


def roll(state, push, gravity):
    """Move the car one step through the valley; the left wall stops it."""
    velocity = state.velocity + push - gravity * math.cos(3.0 * state.position)
    velocity = min(max(velocity, -MAX_SPEED), MAX_SPEED)
    position = min(max(state.position + velocity, LEFT_WALL), RIGHT_EDGE)
    if position == LEFT_WALL and velocity < 0.0:
        velocity = 0.0
    state.position = position
    state.velocity = velocity


def draw(position, goal):
    """Draw the valley, the car and the flag."""
    canvas = Canvas((LEFT_WALL, RIGHT_EDGE), (-0.1, 1.25))

    def height(x):
        return 0.45 * np.sin(3 * x) + 0.55

    canvas.below(height(canvas.columns), (150, 180, 140))
    canvas.line(goal, height(goal), goal, height(goal) + 0.2, 0.02, (90, 90, 90))
    canvas.rectangle(goal, height(goal) + 0.13, goal + 0.08, height(goal) + 0.2, (220, 180, 40))
    canvas.circle(position, height(position) + 0.05, 0.05, (50, 70, 160))
    return canvas.image
