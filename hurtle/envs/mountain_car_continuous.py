"""MountainCar with a continuous throttle (the dynamics of Gymnasium's MountainCarContinuous-v0).

Example:
    >>> import hurtle
    >>> env = hurtle.make("mountain_car_continuous")
    >>> obs, info = env.reset(seed=0)
    >>> obs, reward, terminated, truncated, info = env.step([0.5])
    >>> round(reward, 3)
    -0.025
"""

from hurtle.envs.mountain_car import MountainCar, draw, roll
from hurtle.native import Box, Env, float32


class MountainCarContinuous(Env):
    """Rock a car out of a valley with as little throttle as possible: +100 at the goal, minus the squared effort."""

    observation_space = MountainCar.observation_space
    action_space = Box(-1.0, 1.0, (1,))
    max_steps = 999

    power: float = 0.0015
    gravity: float = 0.0025
    goal: float = 0.45
    goal_velocity: float = 0.0

    class State:
        position: float32
        velocity: float32

    def reset(self, state, rng):
        state.position = rng.uniform(-0.6, -0.4)

    def step(self, state, action, rng):
        throttle = min(max(action[0], -1.0), 1.0)
        roll(state, self.power * throttle, self.gravity)
        arrived = state.position >= self.goal and state.velocity >= self.goal_velocity
        effort = 0.1 * action[0] * action[0]
        return (100.0 if arrived else 0.0) - effort, arrived

    def observe(self, state, obs):
        obs[0] = state.position
        obs[1] = state.velocity

    def render(self, state):
        return draw(state.position, self.goal)
