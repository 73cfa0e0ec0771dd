"""Pendulum: swing up and hold a pendulum with a weak motor (the dynamics of Gymnasium's Pendulum-v1).

Example:
    >>> import hurtle
    >>> env = hurtle.make("pendulum")
    >>> obs, info = env.reset(seed=0)
    >>> obs, reward, terminated, truncated, info = env.step([1.0])
    >>> reward < 0.0
    True
"""

import math

import numpy as np

from hurtle.native import Box, Env, float32
from hurtle.native.render import Canvas

HIGH = np.array([1.0, 1.0, 8.0], np.float32)


class Pendulum(Env):
    """Swing up a pendulum and hold it upright with little torque."""

    observation_space = Box(-HIGH, HIGH)
    action_space = Box(-2.0, 2.0, (1,))
    max_steps = 200

    g: float = 10.0
    mass: float = 1.0
    length: float = 1.0
    dt: float = 0.05
    max_speed: float = 8.0
    max_torque: float = 2.0

    class State:
        theta: float32
        theta_dot: float32

    def reset(self, state, rng):
        state.theta = rng.uniform(-math.pi, math.pi)
        state.theta_dot = rng.uniform(-1.0, 1.0)

    def step(self, state, action, rng):
        torque = min(max(action[0], -self.max_torque), self.max_torque)
        turns = float(math.floor((state.theta + math.pi) / (2.0 * math.pi)))
        angle = state.theta - 2.0 * math.pi * turns
        cost = angle * angle + 0.1 * state.theta_dot * state.theta_dot + 0.001 * torque * torque

        gravity_acc = 1.5 * self.g / self.length * math.sin(state.theta)
        motor_acc = 3.0 * torque / (self.mass * self.length * self.length)
        speed = state.theta_dot + (gravity_acc + motor_acc) * self.dt
        state.theta_dot = min(max(speed, -self.max_speed), self.max_speed)
        state.theta += state.theta_dot * self.dt
        return -cost, False

    def observe(self, state, obs):
        obs[0] = math.cos(state.theta)
        obs[1] = math.sin(state.theta)
        obs[2] = state.theta_dot

    def render(self, state):
        canvas = Canvas((-1.3, 1.3), (-1.3, 1.3), width=240)
        canvas.line(0.0, 0.0, math.sin(state.theta), math.cos(state.theta), 0.2, (200, 80, 80))
        canvas.circle(0.0, 0.0, 0.05, (40, 40, 40))
        return canvas.image
