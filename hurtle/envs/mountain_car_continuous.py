"""MountainCar with a continuous throttle (the dynamics of Gymnasium's MountainCarContinuous-v0).

Example:
    >>> import hurtle
    >>> env = hurtle.make("mountain_car_continuous")
    >>> obs, info = env.reset(seed=0)
    >>> obs, reward, terminated, truncated, info = env.step([0.5])
    >>> round(reward, 3)
    -0.025
"""

from hurtle.envs.mountain_car import MountainCar, roll
from hurtle.native import Box


class MountainCarContinuous(MountainCar):
    """Rock a car out of a valley with as little throttle as possible: +100 at the goal, minus the squared effort."""

    action_space = Box(-1.0, 1.0, (1,))
    max_steps = 999

    power: float = 0.0015
    goal: float = 0.45

    def step(self, state, action, rng):
        throttle = min(max(action[0], -1.0), 1.0)
        roll(state, self.power * throttle, self.gravity)
        arrived = state.position >= self.goal and state.velocity >= self.goal_velocity
        effort = 0.1 * action[0] * action[0]
        return (100.0 if arrived else 0.0) - effort, arrived
