"""CartPole: balance a pole on a cart (the dynamics of Gymnasium's CartPole-v1).

Example:
    >>> import hurtle
    >>> env = hurtle.make("cartpole")
    >>> obs, info = env.reset(seed=0)
    >>> obs, reward, terminated, truncated, info = env.step(1)
    >>> reward
    1.0
"""

import math

import numpy as np

from hurtle.native import Box, Discrete, Env, float32, inf
from hurtle.native.render import Canvas

BOUNDS = np.array([4.8, inf, 24 * math.pi / 180, inf], np.float32)


class CartPole(Env):
    """Balance a pole on a cart by pushing left or right."""

    observation_space = Box(-BOUNDS, BOUNDS)
    action_space = Discrete(2)
    max_steps = 500

    gravity: float = 9.8
    cart_mass: float = 1.0
    pole_mass: float = 0.1
    half_length: float = 0.5
    force: float = 10.0
    dt: float = 0.02
    x_limit: float = 2.4
    theta_limit: float = 12 * math.pi / 180

    class State:
        x: float32
        x_dot: float32
        theta: float32
        theta_dot: float32

    def reset(self, state, rng):
        state.x = rng.uniform(-0.05, 0.05)
        state.x_dot = rng.uniform(-0.05, 0.05)
        state.theta = rng.uniform(-0.05, 0.05)
        state.theta_dot = rng.uniform(-0.05, 0.05)

    def step(self, state, action, rng):
        push = self.force if action == 1 else -self.force
        cos, sin = math.cos(state.theta), math.sin(state.theta)
        total_mass = self.cart_mass + self.pole_mass
        pole_moment = self.pole_mass * self.half_length

        pull = (push + pole_moment * state.theta_dot * state.theta_dot * sin) / total_mass
        theta_acc = (self.gravity * sin - cos * pull) / (
            self.half_length * (4.0 / 3.0 - self.pole_mass * cos * cos / total_mass)
        )
        x_acc = pull - pole_moment * theta_acc * cos / total_mass

        state.x += self.dt * state.x_dot
        state.x_dot += self.dt * x_acc
        state.theta += self.dt * state.theta_dot
        state.theta_dot += self.dt * theta_acc
        fallen = abs(state.x) > self.x_limit or abs(state.theta) > self.theta_limit
        return 1.0, fallen

    def observe(self, state, obs):
        obs[0] = state.x
        obs[1] = state.x_dot
        obs[2] = state.theta
        obs[3] = state.theta_dot

    def render(self, state):
        canvas = Canvas((-self.x_limit, self.x_limit), (-0.6, 1.8))
        tip_x = state.x + 2 * self.half_length * math.sin(state.theta)
        tip_y = 2 * self.half_length * math.cos(state.theta)
        canvas.line(-self.x_limit, -0.2, self.x_limit, -0.2, 0.03, (120, 120, 120))
        canvas.rectangle(state.x - 0.3, -0.2, state.x + 0.3, 0.05, (40, 60, 90))
        canvas.line(state.x, 0.0, tip_x, tip_y, 0.12, (205, 130, 60))
        canvas.circle(state.x, 0.0, 0.06, (130, 130, 200))
        return canvas.image
