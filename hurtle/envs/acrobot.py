"""Acrobot: swing a two-link arm above the bar (the dynamics of Gymnasium's Acrobot-v1, "book" version).

Example:
    >>> import hurtle
    >>> env = hurtle.make("acrobot")
    >>> obs, info = env.reset(seed=0)
    >>> obs, reward, terminated, truncated, info = env.step(0)
    >>> reward
    -1.0
"""

import math

import numpy as np

from hurtle.native import Box, Discrete, Env, float32
from hurtle.native.render import Canvas

MAX_SPEED_1 = 4.0 * math.pi
MAX_SPEED_2 = 9.0 * math.pi
HIGH = np.array([1.0, 1.0, 1.0, 1.0, MAX_SPEED_1, MAX_SPEED_2], np.float32)


class Acrobot(Env):
    """Swing the tip of a two-link arm above the bar with a motor in its elbow."""

    observation_space = Box(-HIGH, HIGH)
    action_space = Discrete(3)
    max_steps = 500

    gravity: float = 9.8
    length: float = 1.0  # length of the upper link
    mass_1: float = 1.0
    mass_2: float = 1.0
    centre_1: float = 0.5  # distance of a link's centre of mass from its joint
    centre_2: float = 0.5
    inertia: float = 1.0
    torque: float = 1.0
    dt: float = 0.2

    class State:
        theta_1: float32  # 0: hanging down
        theta_2: float32  # relative to the upper link
        speed_1: float32
        speed_2: float32

    def reset(self, state, rng):
        state.theta_1 = rng.uniform(-0.1, 0.1)
        state.theta_2 = rng.uniform(-0.1, 0.1)
        state.speed_1 = rng.uniform(-0.1, 0.1)
        state.speed_2 = rng.uniform(-0.1, 0.1)

    def step(self, state, action, rng):
        torque = self.torque * float(action - 1)
        p1, p2, v1, v2 = state.theta_1, state.theta_2, state.speed_1, state.speed_2
        h = 0.5 * self.dt

        # Runge-Kutta 4: the slope of a position is a speed, the slope of a speed an acceleration
        a1, a2 = self.accelerations(p1, p2, v1, v2, torque)
        v1b, v2b = v1 + h * a1, v2 + h * a2
        a1b, a2b = self.accelerations(p1 + h * v1, p2 + h * v2, v1b, v2b, torque)
        v1c, v2c = v1 + h * a1b, v2 + h * a2b
        a1c, a2c = self.accelerations(p1 + h * v1b, p2 + h * v2b, v1c, v2c, torque)
        v1d, v2d = v1 + self.dt * a1c, v2 + self.dt * a2c
        a1d, a2d = self.accelerations(p1 + self.dt * v1c, p2 + self.dt * v2c, v1d, v2d, torque)

        sixth = self.dt / 6.0
        state.theta_1 = wrap(p1 + sixth * (v1 + 2.0 * v1b + 2.0 * v1c + v1d))
        state.theta_2 = wrap(p2 + sixth * (v2 + 2.0 * v2b + 2.0 * v2c + v2d))
        speed_1 = v1 + sixth * (a1 + 2.0 * a1b + 2.0 * a1c + a1d)
        speed_2 = v2 + sixth * (a2 + 2.0 * a2b + 2.0 * a2c + a2d)
        state.speed_1 = min(max(speed_1, -MAX_SPEED_1), MAX_SPEED_1)
        state.speed_2 = min(max(speed_2, -MAX_SPEED_2), MAX_SPEED_2)

        above = -math.cos(state.theta_1) - math.cos(state.theta_2 + state.theta_1) > 1.0
        return 0.0 if above else -1.0, above

    def accelerations(self, theta_1, theta_2, speed_1, speed_2, torque):
        """Angular accelerations of both links (Sutton and Barto's equations of motion)."""
        cos_2, sin_2 = math.cos(theta_2), math.sin(theta_2)
        coupling = self.mass_2 * self.length * self.centre_2
        lower = self.mass_2 * self.centre_2 * self.centre_2 + self.inertia
        d1 = (
            self.mass_1 * self.centre_1 * self.centre_1
            + self.mass_2 * self.length * self.length
            + 2.0 * coupling * cos_2
            + self.inertia
            + lower
        )
        d2 = lower + coupling * cos_2
        phi_2 = self.mass_2 * self.centre_2 * self.gravity * math.sin(theta_1 + theta_2)
        phi_1 = (
            -coupling * speed_2 * (speed_2 + 2.0 * speed_1) * sin_2
            + (self.mass_1 * self.centre_1 + self.mass_2 * self.length) * self.gravity * math.sin(theta_1)
            + phi_2
        )
        acc_2 = (torque + d2 / d1 * phi_1 - coupling * speed_1 * speed_1 * sin_2 - phi_2) / (lower - d2 * d2 / d1)
        return -(d2 * acc_2 + phi_1) / d1, acc_2

    def observe(self, state, obs):
        obs[0] = math.cos(state.theta_1)
        obs[1] = math.sin(state.theta_1)
        obs[2] = math.cos(state.theta_2)
        obs[3] = math.sin(state.theta_2)
        obs[4] = state.speed_1
        obs[5] = state.speed_2

    def render(self, state):
        canvas = Canvas((-2.2, 2.2), (-2.2, 2.2), width=240)
        x1, y1 = self.length * math.sin(state.theta_1), -self.length * math.cos(state.theta_1)
        angle = state.theta_1 + state.theta_2
        canvas.line(-2.2, 1.0, 2.2, 1.0, 0.04, (170, 170, 170))
        canvas.line(0.0, 0.0, x1, y1, 0.2, (0, 150, 150))
        canvas.line(x1, y1, x1 + self.length * math.sin(angle), y1 - self.length * math.cos(angle), 0.2, (0, 110, 190))
        canvas.circle(0.0, 0.0, 0.1, (200, 190, 60))
        canvas.circle(x1, y1, 0.1, (200, 190, 60))
        return canvas.image


def wrap(angle):
    """The same angle between -pi and pi."""
    while angle > math.pi:
        angle -= 2.0 * math.pi
    while angle < -math.pi:
        angle += 2.0 * math.pi
    return angle
